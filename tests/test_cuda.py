"""The CUDA backend on a GPU: ``DEVICE=gpu python -m pytest tests/test_cuda.py``.

Kernels are those of cpp/tests/cuda_kernels.cu; most compute ``y = x + 1``, each its own way.
"""

from __future__ import annotations

import gc
import threading

import mlx.core as mx
import numpy as np
import pytest
import tvm_ffi

import mlx_tvm_ffi as mtf

pytestmark = pytest.mark.cuda

SIZE = 1000
MICROSECONDS = 300  # of a slow kernel: long enough to be overtaken where nothing orders


@pytest.fixture(scope="module")
def kernels(library):
    return library("cuda_kernels")


def ramp(size=SIZE, *, stream=None):
    x = mx.arange(size, dtype=mx.float32, stream=stream)
    mx.eval(x)
    return x


def same(x, **options):
    return mtf.op(x, outputs=lambda first, *_, **__: first, **options)


def check(actual, expected):
    np.testing.assert_array_equal(np.array(actual), np.array(expected))


# --- Kernels in MLX's graph.

PLAIN = ["add_one", "through_interface"]
SEVERAL = ["two_kernels", "fork_and_join", "clear_and_accumulate", "cooperative", "cluster"]
UNCAPTURABLE = [
    "synchronises",
    "synchronises_unchecked",
    "allocates",
    "allocates_on_stream",
    "uses_default_stream",
    "copies_from_host",
    "copies_on_device",
]


@pytest.mark.parametrize("name", PLAIN + SEVERAL)
def test_kernel_in_turn_with_mlx_ops(kernels, name):
    op = same(kernels[name])
    x = y = ramp()
    for _ in range(150):  # more than MLX puts into a graph
        y = op(y) * 1.0
    check(y, np.arange(SIZE) + 150)
    check(x, np.arange(SIZE))


@pytest.mark.parametrize("name", PLAIN + SEVERAL)
def test_chain_is_captured_but_for_the_first_of_each_graph(kernels, name):
    op = same(kernels[name])
    y = ramp()
    mx.eval(op(y))
    kernels.take_counts()
    for _ in range(50):
        y = op(y)
    mx.eval(y)
    runs, captures = kernels.take_counts()
    assert runs == 50
    assert captures in (0, 49)  # 0: MLX_USE_CUDA_GRAPHS=0
    check(y, np.arange(SIZE) + 50)


def test_stream_as_a_parameter(kernels):
    op = same(kernels.add_one_on, arg_spec=["args", "rets", "ctx.stream"])
    y = ramp()
    for _ in range(20):
        y = op(y) + 1
    check(y, np.arange(SIZE) + 40)


def test_read_after_write(kernels):
    slow = same(kernels.slow_add_one)
    x = ramp()
    y = x
    for _ in range(5):
        y = slow(y, microseconds=MICROSECONDS)
        y = y * 1.0
    check(y, np.arange(SIZE) + 5)


def test_write_after_read(kernels):
    slow, in_place = same(kernels.slow_add_one), same(kernels.add_one, aliases={0: 0})
    for _ in range(10):
        x = ramp() * 1.0
        read = [slow(x, microseconds=MICROSECONDS) for _ in range(3)]
        written = in_place(x)  # may take the memory of x, which the slow ones still read
        del x
        mx.eval(*read, written)
        for y in read:
            check(y, np.arange(SIZE) + 1)
        check(written, np.arange(SIZE) + 1)


def test_independent_ops_of_one_eval(kernels):
    slow, op = same(kernels.slow_add_one), same(kernels.add_one)
    x = ramp()
    ys = [slow(x + i, microseconds=50) * 2 + op(x) for i in range(60)]
    mx.eval(*ys)
    for i, y in enumerate(ys):
        check(y, (np.arange(SIZE) + i + 1) * 2 + np.arange(SIZE) + 1)


def test_other_streams(kernels):
    slow, op = same(kernels.slow_add_one), same(kernels.add_one)
    first, second = mx.new_stream(mx.gpu), mx.new_stream(mx.gpu)
    y = ramp()
    for _ in range(10):
        y = slow(y, microseconds=MICROSECONDS, stream=first)
        y = op(y, stream=second)
        y = mx.add(y, 1.0, stream=mx.cpu)
    check(y, np.arange(SIZE) + 30)


def test_views_are_handed_over_where_they_start(kernels):
    op = same(kernels.add_one)
    x = ramp()
    check(op(x[10:]), np.arange(10, SIZE) + 1)
    check(op(mx.broadcast_to(x[3], (7,))), np.full(7, 4))
    check(op(x[::3]), np.arange(0, SIZE, 3) + 1)
    check(op(ramp(12).reshape(3, 4).T), np.arange(12).reshape(3, 4).T + 1)


def test_compiled(kernels):
    op = same(kernels.add_one)
    function = mx.compile(lambda x: op(op(x) * 2) + 1)
    for _ in range(3):
        check(function(ramp()), (np.arange(SIZE) + 1) * 2 + 2)


def test_every_thread_has_its_own(kernels):
    op, several = same(kernels.add_one), same(kernels.two_kernels)
    failures = []

    def work():
        try:
            stream = mx.new_stream(mx.gpu)
            with mx.stream(stream):
                for _ in range(5):
                    y = ramp()
                    for _ in range(60):
                        y = several(op(y)) * 1.0
                    check(y, np.arange(SIZE) + 120)
                    kernels.add_one(y, y)
                    check(y, np.arange(SIZE) + 121)
            del y
            mx.clear_streams()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


# --- Kernels that no graph can hold.


@pytest.mark.parametrize("name", UNCAPTURABLE)
def test_uncapturable_runs_straight_and_says_so_once(kernels, name, capfd):
    op = same(kernels[name], name=name)
    y = ramp()
    for _ in range(20):
        y = op(y) * 1.0
        y = mx.negative(mx.negative(y))
    check(y, np.arange(SIZE) + 20)
    assert np.array_equal(np.array(op(ramp())), np.arange(SIZE) + 1)
    said = capfd.readouterr().err
    assert said.count(f"[mlx_tvm_ffi.op {name}]") == 1
    assert "capture=False" in said
    kernels.take_counts()
    for _ in range(10):
        y = op(y)
    mx.eval(y)
    assert kernels.take_counts() == (10, 0)


@pytest.mark.parametrize("name", UNCAPTURABLE)
def test_capture_false_says_it_beforehand(kernels, name, capfd):
    op = same(kernels[name], name=name, capture=False)
    kernels.take_counts()
    y = ramp()
    for _ in range(10):
        y = op(y * 1.0)
    check(y, np.arange(SIZE) + 10)
    assert kernels.take_counts() == (10, 0)
    assert not capfd.readouterr().err


@pytest.mark.parametrize("name", UNCAPTURABLE)
def test_uncapturable_with_aliases_is_not_run_twice(kernels, name):
    options = {"outputs": lambda x: x, "aliases": {0: 0}, "name": name}
    op = mtf.op(kernels[name], **options)
    x = ramp()
    kernels.take_counts()
    with pytest.raises(RuntimeError, match=rf"op {name}\].*capture=False"):
        mx.eval(op(x * 1.0))
    assert kernels.take_counts()[0] == 1
    check(same(kernels.add_one)(x) * 2, (np.arange(SIZE) + 1) * 2)
    check(mtf.op(kernels[name], capture=False, **options)(x * 1.0), np.arange(SIZE) + 1)


def test_failing_kernel_leaves_all_else_as_it_was(kernels):
    fail, op = same(kernels.fail_after_launch, name="failing"), same(kernels.add_one)
    x = ramp()
    for before in (0, 1, 5):
        y = x
        for _ in range(before):
            y = op(y)
        with pytest.raises(RuntimeError, match=r"op failing\] ValueError: .*does not like this"):
            mx.eval(fail(y))
        other, bad = op(x), fail(x)
        with pytest.raises(RuntimeError, match="does not like this"):
            mx.eval(other, bad)
        check(other, np.arange(SIZE) + 1)
        check(op(y), np.arange(SIZE) + before + 1)


def test_arrays_destroyed_by_a_kernel_in_a_capture(kernels):
    held = []

    def destroy(x, y):
        held.clear()
        gc.collect()
        kernels.add_one(x, y)

    op = same(tvm_ffi.convert(destroy))
    add_one = same(kernels.add_one)
    y = ramp()
    for _ in range(5):
        held.extend(mx.zeros(1 << 20) for _ in range(4))
        mx.eval(held)
        y = add_one(op(add_one(y)))
        mx.eval(y)
    check(y, np.arange(SIZE) + 15)


# --- Memory.


def test_outputs_and_scratch_are_device_memory(kernels):
    device = 2  # cudaMemoryTypeDevice
    mx.clear_cache()
    op = same(kernels.record_memory)
    y = op(ramp(1 << 16))
    mx.eval(y)
    output, scratch, address = kernels.recorded_memory()
    assert (output, scratch) == (device, device)
    assert kernels.address(y) == address
    assert kernels.memory_type(y) == device


def test_memory_is_counted_and_freed(kernels):
    op = same(kernels.through_scratch)
    x = ramp(1 << 20)
    mx.eval(op(x, buffers=1, elements=x.size))
    mx.synchronize()
    before = mx.get_active_memory()
    y = op(x, buffers=3, elements=x.size)
    mx.eval(y)
    mx.synchronize()
    assert mx.get_active_memory() - before == y.nbytes
    del y
    assert mx.get_active_memory() == before


def test_outputs_can_be_donated(kernels):
    op = same(kernels.record_memory)
    x = ramp(1 << 20)
    mx.eval(op(x))
    y = op(x)
    z = mx.negative(y)
    del y
    mx.eval(z)
    assert kernels.address(z) == kernels.recorded_memory()[2]
    check(z[:5], -(np.arange(5) + 1))


def test_long_chain_does_not_hold_its_intermediates(kernels):
    op = same(kernels.add_one)
    y = ramp(1 << 22)
    mx.synchronize()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    for _ in range(600):
        y = op(y)
    mx.eval(y)
    check(y[:5], np.arange(5) + 600)
    # What MLX has committed but not seen the end of: some graphs of at most 1,000 MB.
    assert mx.get_peak_memory() - before < 450 * y.nbytes


@pytest.mark.parametrize("name", ["add_one", "synchronises"])
def test_straight_kernels_count_towards_the_limits(kernels, name):
    op = same(kernels[name], capture=False)
    y = ramp(1 << 22)
    mx.synchronize()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    for _ in range(600):
        y = op(y)
    mx.eval(y)
    check(y[:5], np.arange(5) + 600)
    assert mx.get_peak_memory() - before < 450 * y.nbytes


@pytest.mark.parametrize(("buffers", "elements"), [(1, SIZE), (4, SIZE), (3, 3_000_001)])
def test_scratch(kernels, buffers, elements):
    mx.clear_cache()  # scratch that MLX has not in its cache is allocated during the capture
    op = same(kernels.through_scratch)
    y = ramp()
    for i in range(20):
        y = op(y, buffers=buffers, elements=elements + i) * 1.0
    check(y, np.arange(SIZE) + 20)


def test_host_reads(kernels):
    op = same(kernels.slow_add_one)
    x = ramp()
    check(memoryview(op(x, microseconds=MICROSECONDS)), np.arange(SIZE) + 1)
    assert op(x, microseconds=MICROSECONDS)[7].item() == 8
    assert op(x[:3], microseconds=MICROSECONDS).tolist() == [1, 2, 3]
    y = op(x, microseconds=MICROSECONDS)
    check(y, np.arange(SIZE) + 1)  # moves it to managed memory, at another address
    check(op(y, microseconds=MICROSECONDS), np.arange(SIZE) + 2)
    kernels.add_one(y, y)
    check(y, np.arange(SIZE) + 2)


def test_empty_arrays(kernels):
    op = same(kernels.add_one)
    assert op(mx.zeros((0, 4))).shape == (0, 4)
    two = mtf.op(kernels.add_one, outputs=mtf.ShapeDtype((3,), mx.float32))
    mx.eval(two(mx.zeros((0,))))  # launches nothing, which says nothing about the kernel
    check(two(mx.zeros((3,))), [1, 1, 1])
    mx.eval(kernels.add_one(mx.zeros((0,)), mx.zeros((0,))) or [])


# --- Direct calls.


def test_host_reads_wait_for_direct_calls(kernels):
    x, y = ramp(), mx.zeros(SIZE)
    mx.eval(y)
    for i in range(5):
        kernels.slow_add_one(x, y, 2000)
        check(y, np.arange(SIZE) + 2 * i + 1)
        kernels.slow_add_one(y, x, 2000)
        assert x[3].item() == 3 + 2 * i + 2


def test_direct_calls_in_turn_with_ops(kernels):
    slow, op = kernels.slow_add_one, same(kernels.slow_add_one)
    x, y, z = ramp(), mx.zeros(SIZE), mx.zeros(SIZE)
    for _ in range(10):
        slow(x * 1.0, y, MICROSECONDS)  # an argument that is not evaluated
        slow(y, z, MICROSECONDS)
        x = op(z + 0.0, microseconds=MICROSECONDS)
    check(x, np.arange(SIZE) + 30)


def test_direct_call_and_other_streams(kernels):
    other = mx.new_stream(mx.gpu)
    x, y = ramp(), mx.zeros(SIZE)
    for i in range(5):
        kernels.slow_add_one(x, y, MICROSECONDS)
        z = mx.multiply(y, 2.0, stream=other)
        mx.async_eval(z)
        kernels.slow_add_one(
            z, x, MICROSECONDS
        )  # of a stream that is not this thread's current one
        w = mx.multiply(x, 1.0, stream=mx.cpu)
        kernels.add_one(w, x)
        check(x, (np.arange(SIZE) + 1) * 2 + 2)
        x = ramp()
        del i


def test_arrays_dropped_after_a_direct_call_stay_until_it_is_done(kernels):
    x = ramp(1 << 20)
    y = mx.zeros(1 << 20)
    for _ in range(20):
        kernels.slow_add_one(x * 2.0, y, 1000)  # its argument dies as the call returns
        junk = [mx.full(1 << 20, -1.0) for _ in range(3)]  # would get the memory
        mx.eval(junk)
        check(y[:7], np.arange(7) * 2 + 1)


def test_direct_results(kernels):
    x = ramp()
    y = kernels.return_new(x)
    assert isinstance(y, mx.array)
    check(y, np.arange(SIZE) + 1)
    z = kernels.return_new(kernels.return_new(y)) * 2
    check(z, (np.arange(SIZE) + 3) * 2)


@pytest.mark.parametrize("wait", [False, True])
def test_direct_calls_in_a_scope(kernels, wait):
    stream = mx.new_stream(mx.gpu)
    op = same(kernels.slow_add_one)
    x, y = ramp(), mx.zeros(SIZE)
    mx.eval(y)
    with mtf.stream(stream, wait=wait):
        handle = kernels.environment_stream(x)
        for _ in range(10):
            kernels.slow_add_one(x, y, 100)
            kernels.slow_add_one(y, x, 100)
            x = op(x, microseconds=100)
    with mtf.stream(stream):
        assert kernels.environment_stream(x) == handle
    check(x, np.arange(SIZE) + 30)
    check(y, np.arange(SIZE) + 28)


def test_long_scope_does_not_hold_all_that_it_was_handed(kernels):
    x = ramp(1 << 20)
    mx.synchronize()
    before = mx.get_active_memory()
    with mtf.stream(mx.gpu):
        for _ in range(2000):
            kernels.add_one(x, mx.zeros(1 << 20))
        mx.synchronize()
        assert mx.get_active_memory() - before < 600 * x.nbytes
    mx.synchronize()
    assert mx.get_active_memory() == before


def test_memory_after_direct_calls(kernels):
    x = ramp(1 << 20)
    kernels.return_new(x)
    mx.synchronize()
    before = mx.get_active_memory()
    for _ in range(50):
        kernels.return_new(kernels.return_new(x))
    mx.synchronize()
    assert mx.get_active_memory() == before


def test_interface():
    with mtf.stream(mx.gpu):
        current = mtf.current_stream(mx.gpu)
        assert current.device == tvm_ffi.device("cuda", 0)
        assert current.get_device() in (0, None)  # the first CUdevice is 0
        encoder = current.acquire_encoder()
        assert encoder
        assert current.acquire_encoder() == encoder
        current.release_encoder()
        current.release_encoder()


# --- Processes.

PROGRAM = """
import mlx.core as mx, mlx_tvm_ffi as mtf, numpy as np, tvm_ffi
mx.set_default_device(mx.gpu)
kernels = tvm_ffi.load_module({path!r})
op = mtf.op(kernels.{name}, outputs=lambda x: x)
y = mx.arange(1000, dtype=mx.float32)
for _ in range(250):
    y = op(y) * 1.0
assert np.array_equal(np.array(y), np.arange(1000) + 250), y
kernels.add_one(y, y)
kernels.add_one(y, y)
assert y[5].item() == 257, y
mx.async_eval(op(y))
"""


@pytest.mark.parametrize("name", ["add_one", "two_kernels", "synchronises"])
@pytest.mark.parametrize(
    "env",
    [
        {"MLX_USE_CUDA_GRAPHS": "0"},
        {"MLX_MAX_OPS_PER_BUFFER": "1"},
        {"MLX_MAX_OPS_PER_BUFFER": "7"},
        {"MLX_MAX_MB_PER_BUFFER": "0"},
        {"CUDA_LAUNCH_BLOCKING": "1"},
    ],
    ids=lambda env: "-".join(f"{k}={v}" for k, v in env.items()),
)
def test_settings(run_python, library_path, name, env):
    run_python(PROGRAM.format(path=str(library_path("cuda_kernels")), name=name), env=env)


TORCH = """
kernels = tvm_ffi.load_module({path!r})
mx.set_default_device(mx.gpu)
x = mx.arange(1000, dtype=mx.float32)
op = mtf.op(kernels.add_one, outputs=lambda x: x)
y = op(x * 1.0)
mx.eval(y)

# Into PyTorch without a copy.
t = torch.from_dlpack(tvm_ffi.from_dlpack(y))
assert t.is_cuda and t.data_ptr() == kernels.address(y)
assert torch.equal(t.cpu(), torch.arange(1000.0) + 1)
t += 1
torch.cuda.synchronize()
assert np.array_equal(np.array(y * 1.0), np.arange(1000) + 2)

# The framework of the first tensor decides the stream.
other = torch.cuda.Stream()
with torch.cuda.stream(other):
    assert kernels.environment_stream(torch.zeros(3, device="cuda")) == other.cuda_stream
    mlx_stream = kernels.environment_stream(x)
    assert mlx_stream not in (0, other.cuda_stream)
with mtf.stream(mx.new_stream(mx.gpu)):
    assert kernels.environment_stream(x) not in (0, other.cuda_stream, mlx_stream)
    assert kernels.environment_stream(torch.zeros(3, device="cuda")) == 0

# Tensors of both in one call, each ready.
u = torch.zeros(1000, device="cuda")
torch.cuda.synchronize()
kernels.add_one(x, u)
mx.synchronize()
assert torch.equal(u.cpu(), torch.arange(1000.0) + 1)
mx.eval(x)
z = mx.zeros(1000)
mx.eval(z)
kernels.add_one(u, z)
torch.cuda.synchronize()
assert np.array_equal(np.array(z), np.arange(1000) + 2)

# Both go on working.
for _ in range(150):
    y = op(y) * 1.0
    u = u * 1.0 + 1
assert np.array_equal(np.array(y), np.arange(1000) + 152)
assert torch.equal(u.cpu(), torch.arange(1000.0) + 151)
print("done")
"""


@pytest.mark.parametrize(
    "imports",
    [
        "import torch\nimport mlx.core as mx, mlx_tvm_ffi as mtf, numpy as np, tvm_ffi\n",
        "import mlx.core as mx, mlx_tvm_ffi as mtf, numpy as np, tvm_ffi\nimport torch\n",
    ],
    ids=["torch first", "mlx first"],
)
def test_torch_in_one_process(run_python, library_path, imports):
    pytest.importorskip("torch", reason="needs PyTorch")
    code = imports + TORCH.format(path=str(library_path("cuda_kernels")))
    assert "done" in run_python(code, limit=120).stdout
