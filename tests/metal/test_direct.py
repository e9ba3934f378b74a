"""Direct calls on Metal: submitted when they return, or when their scope is left."""

from __future__ import annotations

import contextlib
import gc
import threading
from typing import TYPE_CHECKING

import mlx.core as mx
import numpy as np
import pytest

import mlx_tvm_ffi as mtf

if TYPE_CHECKING:
    from collections.abc import Callable

    import tvm_ffi

    Data = Callable[..., mx.array]

pytestmark = pytest.mark.metal

MANY = 120  # more than fit into one command buffer of MLX's


@pytest.fixture(params=[False, True], ids=["no scope", "scope"])
def scope(request: pytest.FixtureRequest) -> Callable[[], object]:
    """Give what a call is made in."""
    return mtf.stream if request.param else contextlib.nullcontext


def check(actual: mx.array, expected: np.ndarray) -> None:
    np.testing.assert_array_equal(np.array(actual.tolist(), np.float32), expected)


def values(array: mx.array) -> np.ndarray:
    return np.array(array.tolist(), np.float32)


def test_call(kernels: tvm_ffi.Module, data: Data) -> None:
    x, y = data(), data()
    expected = values(x) + 1
    kernels.add_one(x, y)
    check(y, expected)
    check(x, expected - 1)


def test_call_does_not_wait(sim: tvm_ffi.Module, kernels: tvm_ffi.Module, data: Data) -> None:
    x, y = data(), data()
    expected = values(x) + 1
    sim.reset_counts()
    sim.hold(True)
    kernels.add_one(x, y)
    counts = dict(sim.counts())
    assert counts["commits"] == 1
    assert counts["waits"] == counts["event_host_waits"] == 0
    sim.hold(False)
    check(y, expected)


def test_calls_in_a_row(scope: Callable, kernels: tvm_ffi.Module, data: Data) -> None:
    x, y = data(), data()
    expected = values(x) + MANY
    with scope():
        for _ in range(MANY):
            kernels.add_one(x, y)
            x, y = y, x
    check(x, expected)


def test_calls_in_place(scope: Callable, kernels: tvm_ffi.Module, data: Data) -> None:
    x = data()
    expected = values(x) + 30
    with scope():
        for _ in range(30):
            kernels.increment(x)
    check(x, expected)


def test_scope_shares_encoders_and_commits_once(
    sim: tvm_ffi.Module, kernels: tvm_ffi.Module, data: Data
) -> None:
    x, y = data(), data()
    mx.synchronize()
    sim.reset_counts()
    with mtf.stream():
        kernels.add_one(x, y)
        assert dict(sim.counts())["commits"] == 0
        before = dict(sim.counts())
    after = dict(sim.counts())
    assert before["compute_encoders"] == after["compute_encoders"] == 1
    assert after["commits"] == 1
    assert after["waits"] == after["event_host_waits"] == 0
    y.tolist()


def test_scope_that_waits(sim: tvm_ffi.Module, kernels: tvm_ffi.Module, data: Data) -> None:
    x, y = data(), data()
    with mtf.stream(wait=True):
        kernels.add_one(x, y)
    counts = dict(sim.counts())
    assert counts["waits"] + counts["event_host_waits"] >= 1
    check(y, values(x) + 1)


def test_empty_scope_costs_nothing(sim: tvm_ffi.Module) -> None:
    mx.synchronize()
    sim.reset_counts()
    with mtf.stream():
        pass
    assert not any(dict(sim.counts()).values())


def test_read_by_the_host_in_a_scope(kernels: tvm_ffi.Module, data: Data) -> None:
    x, y = data(), data()
    expected = values(x)
    with mtf.stream():
        for i in range(6):
            kernels.add_one(x, y)
            kernels.increment(y)
            check(y, expected + 2 * (i + 1))
            np.testing.assert_array_equal(np.array(y), expected + 2 * (i + 1))
            x, y = y, x


@pytest.mark.parametrize("reader", ["same stream", "other stream", "cpu", "op", "inner scope"])
def test_read_by_later_work(
    reader: str, scope: Callable, kernels: tvm_ffi.Module, data: Data
) -> None:
    add_one = mtf.op(kernels.add_one, outputs=lambda x: x)
    other = mx.new_stream(mx.gpu)
    x, y = data(), data()
    expected = values(x) + 1
    with scope():
        kernels.add_one(x, y)
        match reader:
            case "same stream":
                z = y + 1
            case "other stream":
                z = mx.add(y, 1, stream=other)
            case "cpu":
                z = mx.add(y, 1, stream=mx.cpu)
            case "op":
                z = add_one(y)
            case "inner scope":
                z = data()
                with mtf.stream(other):
                    kernels.add_one(y, z)
        mx.async_eval(z)
        kernels.add_one(x, data())
    check(z, expected + 1)
    check(y, expected)


def test_lazy_arguments(scope: Callable, kernels: tvm_ffi.Module, data: Data) -> None:
    x, y = data(), data()
    expected = values(x) + 3
    with scope():
        kernels.add_one(x + 2, y)
    check(y, expected)


@pytest.mark.parametrize("where", ["other stream", "cpu"])
def test_arguments_in_flight_elsewhere(
    where: str, sim: tvm_ffi.Module, scope: Callable, kernels: tvm_ffi.Module, data: Data
) -> None:
    stream = mx.new_stream(mx.gpu) if where == "other stream" else mx.default_stream(mx.cpu)
    x, y = data(), data()
    expected = values(x) + 3
    sim.hold(True)
    z = mx.add(x, 2, stream=stream)
    mx.async_eval(z)
    with scope():
        kernels.add_one(z, y)
        sim.hold(False)
    check(y, expected)


def test_write_after_read_by_mlx(scope: Callable, kernels: tvm_ffi.Module, data: Data) -> None:
    for evaluated in (False, True):
        x, y = data(), data()
        before, after = values(x), values(y) + 1
        read = x * 2
        if evaluated:
            mx.async_eval(read)
        else:
            mx.eval(read + 0)
        with scope():
            kernels.add_one(y, x)
        check(read, before * 2)
        check(x, after)


def test_write_after_read_by_kernels(scope: Callable, kernels: tvm_ffi.Module, data: Data) -> None:
    x, y, z = data(), data(), data()
    first, second = values(x) + 1, values(z) + 1
    with scope():
        kernels.add_one(x, y)
        kernels.add_one(z, x)
    check(y, first)
    check(x, second)


def test_write_after_write(scope: Callable, kernels: tvm_ffi.Module, data: Data) -> None:
    y = data()
    with scope():
        for value in range(20):
            kernels.fill(y, float(value))
    check(y, np.full(32, 19, np.float32))


def test_encoder_that_is_split_in_one_command_buffer(
    sim: tvm_ffi.Module, kernels: tvm_ffi.Module, data: Data
) -> None:
    """A wait for another stream ends the encoder: writes after reads before it stay ordered."""
    other = mx.new_stream(mx.gpu)
    x, y, z = data(), data(), data()
    expected = values(x) + 1
    w = mx.add(data(), 1, stream=other)
    later = values(w) + 1
    with mtf.stream():
        kernels.add_one(x, y)
        w = mx.add(w, 0, stream=other)
        sim.hold(True)
        mx.async_eval(w)
        kernels.add_one(w, x)
        kernels.add_one(x, z)
        sim.hold(False)
    check(y, expected)
    check(x, later)
    check(z, later + 1)


def test_ops_and_calls_in_a_scope(kernels: tvm_ffi.Module, data: Data) -> None:
    add_one = mtf.op(kernels.add_one, outputs=lambda x: x)
    x, y = data(), data()
    expected = values(x)
    with mtf.stream():
        for i in range(12):
            z = add_one(x) + 1
            kernels.add_one(z, y)
            kernels.increment(y)
            expected = expected + 4
            x, y = y, x
            if i % 4 == 3:
                mx.eval(x + 1)
    check(x, expected)


@pytest.mark.parametrize("kernel", ["make_one_more", "make_one_more_late"])
def test_allocated_results(
    scope: Callable, kernels: tvm_ffi.Module, data: Data, kernel: str
) -> None:
    x = data()
    y = x
    with scope():
        for _ in range(10):
            y = kernels[kernel](y)
            assert isinstance(y, mx.array)
        z = y + 1
    check(y, values(x) + 10)
    check(z, values(x) + 11)


def test_scratch_and_dependent_dispatches(
    scope: Callable, kernels: tvm_ffi.Module, data: Data
) -> None:
    x, y = data(), data()
    with scope():
        for _ in range(5):
            kernels.add_two(x, y, True)
            kernels.add_two_serially(y, x)
            kernels.blit(x, y)
    check(y, values(x))


def test_kernels_with_encoders_of_their_own(
    scope: Callable, kernels: tvm_ffi.Module, data: Data
) -> None:
    x, y = data(), data()
    expected = values(x)
    with scope():
        for _ in range(5):
            kernels.increment(x)
            kernels.blit(x, y)
            kernels.add_two_serially(y, x)
            expected = expected + 3
            z = x + 1
            mx.async_eval(z)
    check(x, expected)
    check(z, expected + 1)


def test_slices_share_what_a_call_writes(
    scope: Callable, kernels: tvm_ffi.Module, data: Data
) -> None:
    whole = data(64)
    part = whole[16:48]
    mx.eval(part)
    expected = values(whole)
    expected[16:48] += 1
    with scope():
        kernels.increment(part)
    check(part, expected[16:48])
    check(whole, expected)


@pytest.mark.parametrize("name", ["add_one_unreleased", "blit_unreleased"])
def test_kernel_that_releases_nothing(
    name: str, scope: Callable, kernels: tvm_ffi.Module, data: Data
) -> None:
    x, y = data(), data()
    with scope():
        kernels[name](x, y)
        kernels.increment(y)
    check(y, values(x) + (2 if "add" in name else 1))


def test_error_in_a_kernel(scope: Callable, kernels: tvm_ffi.Module, data: Data) -> None:
    for after in (False, True):
        x, y = data(), data()
        with scope():
            with pytest.raises(ValueError, match="always fails"):
                kernels.fail(x, y, after)
            kernels.add_one(x, y)
            kernels.increment(y)
        check(y, values(x) + 2)


def test_call_inside_a_kernel_that_encodes(kernels: tvm_ffi.Module, data: Data) -> None:
    x, y, z = data(), data(), data()
    expected = values(x) + 2

    def inside() -> None:
        kernels.add_one(x, y)
        kernels.add_one(y, z)

    kernels.call_inside(x, inside)
    check(z, expected)


def test_lazy_argument_inside_a_kernel_that_encodes_is_an_error(
    kernels: tvm_ffi.Module, data: Data
) -> None:
    x, y = data(), data()
    errors = []

    def inside() -> None:
        try:
            kernels.add_one(x + 1, y)
        except RuntimeError as error:
            errors.append(str(error))

    kernels.call_inside(x, inside)
    assert "Evaluate it before" in errors[0]
    kernels.add_one(x, y)
    check(y, values(x) + 1)


def test_tensors_made_before_need_a_scope(kernels: tvm_ffi.Module, data: Data) -> None:
    x, y = data(), data()
    expected = values(x) + 4
    a, b = (kernels.tensor_at(kernels.where(array)[0], array.size) for array in (x, y))
    with mtf.stream(wait=True):
        z = x + 0
        mx.async_eval(z)
        for _ in range(2):
            kernels.add_one(a, b)
            kernels.add_one(b, a)
        z = x + 0
        mx.async_eval(z)
        kernels.add_one(a, b)
        kernels.fill(a, 0.0)
    check(z, expected)
    check(y, expected + 1)
    check(x, np.zeros(32, np.float32))


def test_leaving_a_scope_commits_what_it_did_for_tensors_made_before(
    sim: tvm_ffi.Module, kernels: tvm_ffi.Module, data: Data
) -> None:
    x, y = data(), data()
    a, b = (kernels.tensor_at(kernels.where(array)[0], array.size) for array in (x, y))
    mx.synchronize()
    sim.reset_counts()
    with mtf.stream():
        kernels.add_one(a, b)
        assert dict(sim.counts())["commits"] == 0
    assert dict(sim.counts())["commits"] == 1
    mx.synchronize()
    check(y, values(x) + 1)


def test_arrays_dropped_in_flight(
    sim: tvm_ffi.Module, scope: Callable, kernels: tvm_ffi.Module, data: Data
) -> None:
    old_limit = mx.set_cache_limit(0)
    x, y, z = data(), data(), data()
    expected = values(x) + 3
    sim.hold(True)
    with scope():
        kernels.add_one(x, y)
        del x
        kernels.add_two(y, z, True)
        del y
        gc.collect()
    sim.hold(False)
    check(z, expected)
    del z
    mx.set_cache_limit(old_limit)


def test_scope_holds_no_more_than_a_chain_of_ops(kernels: tvm_ffi.Module, data: Data) -> None:
    x = data(1 << 16)
    op = mtf.op(kernels.add_one, outputs=lambda x: x)

    def peak(step: Callable[[mx.array], mx.array]) -> int:
        mx.synchronize()
        mx.clear_cache()
        mx.reset_peak_memory()
        start = mx.get_active_memory()
        with mtf.stream():
            y = x
            for _ in range(1000):
                y = step(y)
        check(y, values(x) + 1000)
        return mx.get_peak_memory() - start

    # The least of a few, and some room: how far the device lags behind is up to the machine.
    assert min(peak(kernels.make_one_more) for _ in range(3)) < 1.5 * peak(op)


def test_object_kept_until_the_device_is_done(
    sim: tvm_ffi.Module, scope: Callable, kernels: tvm_ffi.Module, data: Data
) -> None:
    dropped = threading.Event()
    x = data()
    sim.hold(True)
    with scope():
        kernels.call_when_done(x, dropped.set)
        kernels.increment(x)
        gc.collect()
        assert not dropped.is_set()
    assert not dropped.is_set()
    sim.hold(False)
    mx.synchronize()
    assert dropped.wait(10)


def test_two_threads(scope: Callable, kernels: tvm_ffi.Module, data: Data) -> None:
    failures: list[BaseException] = []

    def work() -> None:
        try:
            x, y = data(), data()
            expected = values(x) + 40
            with scope():
                for _ in range(40):
                    kernels.add_one(x, y)
                    x, y = y, x
            check(x, expected)
        except BaseException as error:
            failures.append(error)  # raised below
        finally:
            mx.clear_streams()

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures


def test_array_written_by_another_threads_call(kernels: tvm_ffi.Module, data: Data) -> None:
    x, y = data(), data()
    expected = values(x) + 2

    def work() -> None:
        kernels.add_one(x, y)
        mx.synchronize()
        mx.clear_streams()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    kernels.increment(y)
    check(y, expected)


def test_stream_of_another_thread_is_an_error(kernels: tvm_ffi.Module, data: Data) -> None:
    stream = mx.new_stream(mx.gpu)
    x, y = data(), data()
    errors: list[str] = []

    def work() -> None:
        try:
            with mtf.stream(stream):
                kernels.add_one(x, y)
        except RuntimeError as error:
            errors.append(str(error))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert "There is no Stream(gpu" in errors[0]
    assert "thread that made it" in errors[0]


@pytest.mark.parametrize("count", [10, 100])
def test_failed_command_buffer_is_raised_by_whoever_reads(
    count: int, sim: tvm_ffi.Module, kernels: tvm_ffi.Module, data: Data
) -> None:
    x, y = data(), data()
    mx.synchronize()
    sim.configure("encoded", "encoded", True, 0, 1)
    kernels.add_one(x, y)
    with pytest.raises(RuntimeError, match=r"[Cc]ommand buffer"):
        y.tolist()
    for _ in range(count):
        kernels.add_one(x, y)
    check(y, values(x) + 1)


def test_empty_arrays(scope: Callable, kernels: tvm_ffi.Module) -> None:
    x, y = mx.zeros((0,)), mx.zeros((0, 3))
    mx.eval(x, y)
    with scope():
        kernels.add_one(x, y)
    assert y.tolist() == []
