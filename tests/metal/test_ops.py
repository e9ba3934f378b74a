"""Ops on Metal: kernels on the encoder that MLX has open, in any order that Metal allows."""

from __future__ import annotations

import gc
import json
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import mlx.core as mx
import numpy as np
import pytest

import mlx_tvm_ffi as mtf

if TYPE_CHECKING:
    import ctypes
    from collections.abc import Callable

    import tvm_ffi

    Data = Callable[..., mx.array]

pytestmark = pytest.mark.metal

ROOT = Path(__file__).parents[2]
MAX_OPS = 50  # of MLX's in a command buffer
MANY = 120  # more than that


@pytest.fixture
def add_one(kernels: tvm_ffi.Module) -> mtf.Op:
    return mtf.op(kernels.add_one, outputs=lambda x: x)


@pytest.fixture
def increment(kernels: tvm_ffi.Module) -> mtf.Op:
    """Writes its output into its input's memory, where MLX lets it."""
    return mtf.op(kernels.increment_output, outputs=lambda x: x, aliases={0: 0})


@pytest.fixture
def add(kernels: tvm_ffi.Module) -> mtf.Op:
    return mtf.op(kernels.add, outputs=lambda a, _: a)


@pytest.fixture
def add_two(kernels: tvm_ffi.Module) -> mtf.Op:
    """Two dependent dispatches, with scratch memory."""
    return mtf.op(kernels.add_two, outputs=lambda x, **_: x)


def check(actual: mx.array, expected: np.ndarray) -> None:
    np.testing.assert_array_equal(np.array(actual.tolist(), np.float32), expected)


def test_encoder_is_mlx_own_and_never_null(kernels: tvm_ffi.Module, data: Data) -> None:
    x = data()
    for _ in range(2):
        encoder, nested, device, queue = kernels.handles(x)
        assert encoder
        assert nested == encoder
        assert device
        assert queue == 0


def test_stream_as_a_parameter(kernels: tvm_ffi.Module, add_one: mtf.Op, data: Data) -> None:
    seen = []

    def kernel(stream: ctypes.c_void_p, x: tvm_ffi.Tensor, y: tvm_ffi.Tensor) -> None:
        seen.append((stream.value, mtf.current_stream().handle))
        kernels.add_one(x, y)

    op = mtf.op(kernel, outputs=lambda x: x, arg_spec=["ctx.stream", "args", "rets"])
    x = data()
    check(add_one(op(op(x))), np.array(x) + 3)
    assert len(seen) == 2
    assert all(given == current for given, current in seen)


def test_chain_costs_what_mlx_own_chain_costs(
    sim: tvm_ffi.Module, order: tuple[str, str, int], add_one: mtf.Op, data: Data
) -> None:
    def counts(step: Callable[[mx.array], mx.array]) -> dict[str, int]:
        y = data()
        mx.synchronize()
        sim.reset_counts()
        for _ in range(MANY):
            y = step(y)
        mx.eval(y)
        names = ["compute_encoders", "dispatches", "barriers", "waits"]
        if order[2] > MANY / 10:  # with more tasks in flight MLX waits, and commits empty buffers
            names += ["command_buffers", "commits"]
        found = dict(sim.counts())
        return {name: found[name] for name in names}

    one = mx.array(1.0)
    assert counts(add_one) == counts(lambda y: y + one)


def test_kernel_sends_no_more_messages_than_mlx_own_custom_kernel(
    sim: tvm_ffi.Module, order: tuple[str, str, int], add_one: mtf.Op, data: Data
) -> None:
    if order[2] < MAX_OPS:
        pytest.skip("was counted with MLX's own limits")
    counted = json.loads((ROOT / "benchmarks" / "results" / "metal.json").read_text())
    y = data()
    mx.eval(add_one(y))
    mx.synchronize()
    sim.reset_counts()
    for _ in range(500):
        y = add_one(y)
    mx.eval(y)
    messages = sum(dict(sim.messages(False)).values()) / 500
    assert messages <= counted["rows"]["MLX's custom kernel"]["messages per kernel"]


def test_chain(add_one: mtf.Op, data: Data) -> None:
    x = data()
    y = x
    for _ in range(MANY):
        y = add_one(y)
    check(y, np.array(x) + MANY)


def test_between_mlx_ops(add_one: mtf.Op, add_two: mtf.Op, data: Data) -> None:
    x = data()
    y, expected = x, np.array(x)
    for i in range(MANY):
        match i % 4:
            case 0 | 2:
                y, expected = add_one(y), expected + 1
            case 1:
                y, expected = y - x, expected - np.array(x)
            case 3:
                y, expected = add_two(y, barrier=True) + x, expected + 2 + np.array(x)
    check(y, expected)


def test_read_after_write_with_many_readers(add_one: mtf.Op, add: mtf.Op, data: Data) -> None:
    x = data()
    y = add_one(x + 1)
    readers = [add_one(y) if i % 2 else y * 2 for i in range(8)]
    total = readers[0]
    for reader in readers[1:]:
        total = add(total, reader)
    check(total, 4 * (np.array(x) + 3) + 4 * 2 * (np.array(x) + 2))


def test_write_after_read(add_one: mtf.Op, increment: mtf.Op, data: Data) -> None:
    for writer in (increment, lambda a: a + 1):
        for reader in (add_one, lambda a: a + 1):
            x = data()
            shared = x * 2
            read = [reader(shared) for _ in range(3)]
            written = writer(shared)
            for _ in range(3):
                written = increment(written)
            del shared
            mx.eval(*read, written)
            for y in read:
                check(y, np.array(x) * 2 + 1)
            check(written, np.array(x) * 2 + 4)


def test_write_after_write(increment: mtf.Op, add_one: mtf.Op, data: Data) -> None:
    x = data()
    y = x + 0
    for i in range(MANY):
        y = increment(y) if i % 3 else add_one(y) + 0
    check(y, np.array(x) + MANY)


def test_aliased_output_takes_the_memory_of_an_input_nobody_else_has(
    kernels: tvm_ffi.Module, increment: mtf.Op, data: Data
) -> None:
    y = data() + 0
    mx.eval(y)
    mx.synchronize()  # MLX's completion handlers hold it until then
    before, _ = kernels.where(y)
    y = increment(y)
    mx.eval(y)
    assert kernels.where(y)[0] == before


def test_aliased_input_that_is_still_held_keeps_its_value(increment: mtf.Op, data: Data) -> None:
    x = data()
    held = x + 0
    y = increment(held)
    z = increment(y)
    check(z, np.array(x) + 2)
    check(y, np.array(x) + 1)
    check(held, np.array(x))


def test_two_dependent_dispatches(add_two: mtf.Op, data: Data) -> None:
    x = data()
    y = x
    for _ in range(10):
        y = add_two(add_two(y, barrier=True) + 1, barrier=True)
    check(y, np.array(x) + 50)


def test_missing_barrier_is_seen_here(sim: tvm_ffi.Module, add_two: mtf.Op, data: Data) -> None:
    mx.eval(add_two(data(), barrier=False))
    assert any("race" in error for error in sim.take_errors())


@pytest.mark.parametrize("name", ["add_two_serially", "blit"])
def test_kernel_with_encoders_of_its_own(
    name: str, kernels: tvm_ffi.Module, add_one: mtf.Op, increment: mtf.Op, data: Data
) -> None:
    own = mtf.op(kernels[name], outputs=lambda x: x)
    added = {"add_two_serially": 2, "blit": 0}[name]
    x = data()
    y, expected = x + 0, np.array(x)
    for i in range(20):
        y = own(increment(add_one(y)) if i % 2 else y + 1) * 1
        expected = expected + (2 if i % 2 else 1) + added
    check(y, expected)


def test_kernels_with_encoders_of_their_own_cost_one_each(
    sim: tvm_ffi.Module, kernels: tvm_ffi.Module, data: Data
) -> None:
    blit = mtf.op(kernels.blit, outputs=lambda x: x)
    y = data()
    mx.synchronize()
    sim.reset_counts()
    for _ in range(20):
        y = blit(y)
    mx.eval(y)
    counts = dict(sim.counts())
    assert counts["blit_encoders"] == 20
    assert counts["compute_encoders"] == 0


def test_slices_are_the_buffer_and_an_offset(
    kernels: tvm_ffi.Module, add_one: mtf.Op, data: Data
) -> None:
    whole = data(64)
    part = whole[16:48]
    mx.eval(part)
    buffer, offset = kernels.where(whole)
    assert tuple(kernels.where(part)) == (buffer, offset + 16 * 4)
    check(add_one(part), np.array(whole)[16:48] + 1)


def test_slices_of_a_buffer_that_a_kernel_wrote(add_one: mtf.Op, add: mtf.Op, data: Data) -> None:
    x = data(64)
    y = add_one(x)
    parts = [y[i : i + 16] for i in range(0, 64, 16)]
    check(
        add(add(parts[0], parts[1]), add_one(parts[3])),
        np.array(x)[:16] + np.array(x)[16:32] + np.array(x)[48:] + 4,
    )


@pytest.mark.parametrize("shape", [(0,), (3, 0), (), (1,)])
def test_empty_and_scalar(shape: tuple[int, ...], add_one: mtf.Op) -> None:
    y = add_one(add_one(mx.zeros(shape)) + 1)
    assert y.shape == shape
    check(y, np.full(shape, 3, np.float32))


def test_error_in_a_kernel_leaves_everything_else_working(
    kernels: tvm_ffi.Module, add_one: mtf.Op, data: Data
) -> None:
    fail = mtf.op(kernels.fail, outputs=lambda x, **_: x)
    for after in (False, True):
        x = data()
        good = add_one(x)
        bad = fail(add_one(x), after=after)
        with pytest.raises(RuntimeError, match="always fails"):
            mx.eval(good, bad)
        check(good, np.array(x) + 1)
        check(add_one(good + 1), np.array(x) + 3)
        with pytest.raises(RuntimeError, match="always fails"):
            mx.eval(bad)


def test_kernel_that_evaluates_is_an_error(
    kernels: tvm_ffi.Module, add_one: mtf.Op, data: Data
) -> None:
    x = data()
    nested = mtf.op(
        lambda a, b: (mx.eval(x + 1), kernels.add_one(a, b))[1], outputs=lambda a: a, name="nested"
    )
    with pytest.raises(RuntimeError, match=r"nested.*committed"):
        mx.eval(nested(x))
    check(add_one(x), np.array(x) + 1)


@pytest.mark.parametrize("name", ["add_one_unreleased", "blit_unreleased"])
def test_kernel_that_releases_nothing(
    name: str, kernels: tvm_ffi.Module, add_one: mtf.Op, data: Data
) -> None:
    op = mtf.op(kernels[name], outputs=lambda x: x)
    x = data()
    check(add_one(op(add_one(x)) + 1), np.array(x) + (4 if "add" in name else 3))


@pytest.mark.parametrize("encoder_first", [True, False])
def test_encoder_and_command_buffer_at_once_is_an_error(
    encoder_first: bool, kernels: tvm_ffi.Module, add_one: mtf.Op, data: Data
) -> None:
    both = mtf.op(
        lambda x, _: kernels.acquire_both(x, encoder_first), outputs=lambda x: x, name="both"
    )
    x = data()
    with pytest.raises(RuntimeError, match="Release it before"):
        mx.eval(both(x))
    check(add_one(x), np.array(x) + 1)


@pytest.mark.parametrize("what", ["encoder", "command buffer", "barrier"])
def test_use_of_what_was_not_acquired_is_an_error(
    what: str, kernels: tvm_ffi.Module, data: Data
) -> None:
    with pytest.raises(RuntimeError, match="expected an acquired one, got none"):
        kernels.release_unacquired(data(), what)


def test_buffers_dropped_in_flight(
    sim: tvm_ffi.Module, add_one: mtf.Op, add_two: mtf.Op, data: Data
) -> None:
    old_limit = mx.set_cache_limit(0)
    x = data()
    expected = np.array(x) + 6
    sim.hold(True)
    y = add_two(add_one(x + 1), barrier=True)
    z = add_two(y, barrier=True)
    mx.async_eval(z)
    del x, y
    gc.collect()
    sim.hold(False)
    check(z, expected)
    mx.set_cache_limit(old_limit)


def test_module_dropped_in_flight(
    sim: tvm_ffi.Module, load_kernels: Callable[[], tvm_ffi.Module], data: Data
) -> None:
    x = data()
    module = load_kernels()
    op = mtf.op(module.add_one, outputs=lambda x: x)
    sim.hold(True)
    y = op(op(x))
    mx.async_eval(y)
    del op, module
    gc.collect()
    sim.hold(False)
    check(y, np.array(x) + 2)


@pytest.mark.skipif(sys.platform != "linux", reason="reads the loaded libraries as Linux has them")
def test_module_is_let_go_once_its_work_is_done(
    load_kernels: Callable[[], tvm_ffi.Module], data: Data
) -> None:
    def is_loaded() -> bool:
        return "libdroppable.so" in Path("/proc/self/maps").read_text()

    op = mtf.op(load_kernels().add_one, outputs=lambda x: x)
    mx.eval(op(data()))
    assert is_loaded()
    del op
    mx.synchronize()
    gc.collect()
    waited = threading.Event()
    for _ in range(1000):  # a thread of its own drops it
        if not is_loaded():
            break
        waited.wait(0.01)
    assert not is_loaded()


def test_two_streams(add_one: mtf.Op, add: mtf.Op, data: Data) -> None:
    first, second = mx.new_stream(mx.gpu), mx.new_stream(mx.gpu)
    x = data()
    a = b = x
    for i in range(20):
        a = add_one(a, stream=first)
        b = add_one(b + 1, stream=second)
        if i % 5 == 4:
            a, b = add(a, b, stream=second), mx.add(a, b, stream=first)
    expected_a = expected_b = np.array(x)
    for i in range(20):
        expected_a, expected_b = expected_a + 1, expected_b + 2
        if i % 5 == 4:
            expected_a = expected_b = expected_a + expected_b
    mx.eval(a, b)
    check(a, expected_a)
    check(b, expected_b)


def test_with_mlx_on_the_cpu(add_one: mtf.Op, data: Data) -> None:
    x = data()
    y = x
    for _ in range(6):
        y = mx.add(add_one(y), 1, stream=mx.cpu)
    check(y, np.array(x) + 12)


def test_gradients(kernels: tvm_ffi.Module, add_one: mtf.Op, data: Data) -> None:
    add = mtf.op(
        kernels.add, outputs=lambda a, _: a, vjp=lambda _, cotangent, __: [add_one(cotangent), None]
    )
    a, b = data(), data()
    check(mx.grad(lambda a, b: (add(add(a, b), b) * b).sum())(a, b), np.array(b) + 2)


def test_vmap(kernels: tvm_ffi.Module, data: Data) -> None:
    add = mtf.op(kernels.add, outputs=lambda a, _: a, vmap="broadcast")
    a, b = (data().reshape(8, 4) for _ in range(2))
    check(
        mx.vmap(add, in_axes=(1, 0))(a, b.reshape(4, 8)), np.array(a).T + np.array(b).reshape(4, 8)
    )


def test_compile(add: mtf.Op, add_one: mtf.Op, data: Data) -> None:
    compiled = mx.compile(lambda a, b: add(add_one(a), add(add_one(a), b)))
    for a, b in ((data(), data()) for _ in range(3)):
        check(compiled(a, b), 2 * (np.array(a) + 1) + np.array(b))


def test_python_kernel_on_the_cpu_gets_what_the_gpu_has_not_committed(
    add_one: mtf.Op, data: Data
) -> None:
    def add_two(x: tvm_ffi.Tensor, y: tvm_ffi.Tensor) -> None:
        np.from_dlpack(y)[...] = np.from_dlpack(x) + 2

    x = data()
    y = add_one(mtf.op(add_two, outputs=lambda x: x)(add_one(x), stream=mx.cpu))
    mx.async_eval(y)
    check(y, np.array(x) + 4)


def test_across_evaluations_that_nobody_waits_for(add_one: mtf.Op, data: Data) -> None:
    x = data()
    y = x
    for _ in range(30):
        y = add_one(y)
        mx.async_eval(y)
    check(y, np.array(x) + 30)


def test_two_threads(add_one: mtf.Op, data: Data) -> None:
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            x = data()
            y, z = x, x
            for i in range(40):
                y = add_one(y) if i % 2 else y + 1
                z = add_one(z + seed)
                if i % 10 == 9:
                    mx.async_eval(y, z)
            check(y, np.array(x) + 40)
            check(z, np.array(x) + 40 * (seed + 1))
        except BaseException as error:
            failures.append(error)  # raised below
        finally:
            mx.clear_streams()

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures


def test_failed_command_buffer_is_raised_once(
    sim: tvm_ffi.Module, add_one: mtf.Op, data: Data
) -> None:
    x = data()
    mx.synchronize()
    sim.configure("encoded", "encoded", True, 0, 1)
    with pytest.raises(RuntimeError, match=r"[Cc]ommand buffer"):
        mx.eval(add_one(x))
    check(add_one(x), np.array(x) + 1)
