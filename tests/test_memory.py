"""Memory of graphs with ops: what MLX may donate, and what is left behind."""

from __future__ import annotations

import mlx.core as mx
import pytest

import mlx_tvm_ffi as mtf

MB = 1 << 20
PAGE = 16384
N = 4 * MB  # elements: 16 MB

pytestmark = pytest.mark.cpu  # peaks on a GPU depend on what is in flight


@pytest.fixture
def kernels(library):
    return library("transform_kernels")


def peak(function):
    """Give the peak of memory while function's result is evaluated, in bytes.

    The least of a few: how far the stream's thread lags behind is up to the machine.
    """
    x = mx.zeros(N)
    mx.eval(x)
    peaks = []
    for _ in range(5):
        mx.clear_cache()
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        y = function(x)
        mx.eval(y)
        peaks.append(mx.get_peak_memory() - before)
        del y
    return min(peaks)


# Each takes new memory for its result, as our op does; and each lets its input go.
CHAINS = {
    "one": lambda f: lambda x: f(x * 2),
    "amid": lambda f: lambda x: f(f(x * 2) + 1) * 3,
    "long": lambda f: lambda x: f(f(f(f(f(f(x * 2)))))),
    "fan": lambda f: lambda x: f(x * 2) + f(x * 3),
}


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("chain", CHAINS)
def test_peak_of_a_chain_equals_mlx(kernels, chain, compiled):
    ours = mtf.op(kernels.add_one, outputs=lambda x: x)
    functions = [CHAINS[chain](ours), CHAINS[chain](mx.cumsum)]
    if compiled:
        functions = [mx.compile(function) for function in functions]
    got, expected = (peak(function) for function in functions)
    assert got == pytest.approx(expected, abs=4 * PAGE)


@pytest.mark.parametrize("chain", CHAINS)
def test_peak_in_place_equals_mlx_in_place(kernels, chain):
    ours = mtf.op(kernels.increment, outputs=lambda x: x, aliases={0: 0})
    got, expected = peak(CHAINS[chain](ours)), peak(CHAINS[chain](mx.sin))
    assert got == pytest.approx(expected, abs=4 * PAGE)


def test_mlx_takes_the_memory_of_our_result(kernels):
    ours = mtf.op(kernels.add_one, outputs=lambda x: x)
    assert peak(ours) == pytest.approx(peak(lambda x: ours(x) * 3), abs=4 * PAGE)


def test_peak_of_a_gradient_equals_mlx(kernels):
    ours = mtf.op(
        kernels.multiply, outputs=lambda a, _: a, vjp=lambda p, g, _: (g * p[1], g * p[0])
    )

    def gradient(product):
        return mx.grad(lambda x: product(product(x * 2, x), x).sum())

    # Plain MLX may write a product into its operands; a kernel's output is new memory.
    got, expected = peak(gradient(ours)), peak(gradient(lambda a, b: mx.cumsum(a) * b))
    assert got <= expected + 2 * N * 4


def both_op(kernels):
    return mtf.op(
        kernels.sum_and_difference,
        outputs=lambda a, _: (a, a),
        vjp=lambda _, c, __: (c[0] + c[1], c[0] - c[1]),
        vmap="broadcast",
    )


def round_of(kind, both):
    x = mx.ones(8)
    gradient = mx.grad(lambda x: both(x, x)[0].sum())
    function = {
        "plain": lambda x: both(x, x)[0],
        "compile": mx.compile(lambda x: both(x, x)[1]),
        "grad": gradient,
        "compiled grad": mx.compile(gradient),
        "vmap": mx.vmap(lambda x: both(x, x)[0]),
    }[kind]
    argument = x[None] if kind == "vmap" else x
    return lambda: function(argument)


@pytest.mark.parametrize("kind", ["plain", "compile", "grad", "compiled grad", "vmap"])
def test_dropped_siblings_leave_nothing_behind(kernels, kind):
    run = round_of(kind, both_op(kernels))
    for _ in range(10):
        mx.eval(run())
    before = mx.get_active_memory()
    for _ in range(10_000):
        mx.eval(run())
    mx.synchronize()
    assert mx.get_active_memory() == before


@pytest.mark.parametrize("kind", ["plain", "compile", "grad", "vmap"])
def test_siblings_that_are_never_evaluated_leave_nothing_behind(kernels, kind):
    run = round_of(kind, both_op(kernels))
    mx.eval(run())
    before = mx.get_active_memory()
    for _ in range(1000):
        run()
    assert mx.get_active_memory() == before


# What MLX does not count: the process's own memory, for each way to a stream.
HOST = """
import gc, resource, sys
import mlx.core as mx, tvm_ffi
import mlx_tvm_ffi as mtf
kernels = tvm_ffi.load_module({path!r})
add_one = mtf.op(kernels.add_one, outputs=lambda x: x)
stream, local = mx.new_stream(mx.cpu), mx.new_thread_local_stream(mx.cpu)
x, y = mx.zeros(4), mx.zeros(4)
mx.eval(x, y)
def run(rounds):
    for _ in range(rounds):
        {body}
    mx.synchronize()
    gc.collect()
    unit = 1024 if sys.platform == "linux" else 1 << 20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit
before = run({rounds} // 5)
print(run({rounds}) - before)
"""
CALL = "kernels.add_one(x, y)"
WAYS = {
    "scope": (100_000, "with mtf.stream(stream): pass"),
    "scope of a device": (100_000, "with mtf.stream(mx.cpu): pass"),
    "scope of a thread-local stream": (100_000, "with mtf.stream(local): pass"),
    "current stream": (100_000, "mtf.current_stream(mx.cpu).acquire_encoder()"),
    "call": (100_000, CALL),
    "call in a scope": (100_000, f"with mtf.stream(stream): {CALL}"),
    "op": (25_000, "mx.eval(add_one(x))"),
    "op on a stream": (25_000, "mx.eval(add_one(x, stream=stream))"),
}


@pytest.mark.parametrize("way", WAYS)
def test_host_memory_stays_flat(run_python, library_path, way):
    rounds, body = WAYS[way]
    code = HOST.format(path=str(library_path("kernels")), rounds=rounds, body=body)
    lost = float(run_python(code).stdout) * (1 << 20) / rounds
    assert lost < 40  # bytes a round: less than the smallest object with a count of references


def test_threads_that_only_drop_tensors(run_python):
    code = """
import threading
import resource
import mlx.core as mx, tvm_ffi
import mlx_tvm_ffi
x = mx.ones(4)
tensors = []
keep = tvm_ffi.convert(lambda tensor: tensors.append(tensor))
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
def rounds(n):
    for _ in range(n):
        for _ in range(100): keep(x)
        thread = threading.Thread(target=tensors.clear)
        thread.start(); thread.join()
rounds(50)
before = peak()
rounds(300)
print(peak() - before)
"""
    assert float(run_python(code).stdout) < 4  # MB; 16 where each thread takes its records along
