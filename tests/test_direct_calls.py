"""Kernels called on arrays right away: when they run, what they wait for, what they may touch."""

from __future__ import annotations

import copy
import gc
import threading
from concurrent.futures import ThreadPoolExecutor

import mlx.core as mx
import numpy as np
import pytest
import tvm_ffi

import mlx_tvm_ffi as mtf

pytestmark = pytest.mark.cpu


@pytest.fixture
def gated(kernels):
    """Give an op that reads its input only after the gate was opened, and close the gate."""
    kernels.close_gate()
    return mtf.op(kernels.add_one_behind_gate, outputs=lambda x: x)


def open_when_it_waits(kernels, returned):
    """Open the gate when the other thread's call has returned, or has had the time to return."""
    kernels.await_waiter()
    returned.wait(0.2)
    early = returned.is_set()
    kernels.open_gate()
    return early


def call_while_busy(kernels, call):
    """Call while a kernel waits behind the gate; say whether the call returned before it opened."""
    returned = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        early = pool.submit(open_when_it_waits, kernels, returned)
        call()
        returned.set()
        return early.result()


# --- When it runs.


def test_arguments_are_evaluated(kernels):
    x = mx.array([1.0, 2.0]) + 3
    y = mx.zeros(2) * 2
    kernels.add_one(x * 2, y)
    assert y.tolist() == [9, 11]


def test_it_runs_on_the_calling_thread(kernels):
    y = mx.zeros(1, mx.int64)
    kernels.write_thread_number(y)
    assert y.item() == kernels.thread_number()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(kernels.write_thread_number, y).result()
        assert y.item() == pool.submit(kernels.thread_number).result() != kernels.thread_number()


def test_its_environment_is_restored(kernels):
    before = tuple(kernels.environment())
    x = mx.zeros(2)
    kernels.fresh(x)
    with pytest.raises(ValueError, match="no"):
        kernels.fail_directly(x, "ValueError", "no")
    assert tuple(kernels.environment()) == before


# --- What it writes shows.


def test_it_shows_in_views_and_handles(kernels):
    x = mx.zeros(6)
    view, handle, reshaped = x[2:4], copy.copy(x), x.reshape(2, 3)
    mx.eval(view, handle, reshaped)
    kernels.fill(x, 7.0)
    assert x.tolist() == handle.tolist() == [7] * 6
    assert view.tolist() == [7, 7]
    assert reshaped.tolist() == [[7] * 3] * 2


def test_it_shows_in_the_base_of_a_view(kernels):
    x = mx.zeros(6)
    view = x[2:4]
    kernels.fill(view, 7.0)
    assert x.tolist() == [0, 0, 7, 7, 0, 0]


def test_it_shows_in_graphs_not_yet_evaluated(kernels):
    x = mx.zeros(3)
    later = x * 2
    kernels.fill(x, 7.0)
    assert later.tolist() == [14] * 3


def test_it_does_not_show_in_arrays_of_their_own(kernels):
    x = mx.zeros(3)
    product = x * 1
    mx.eval(product)
    kernels.fill(x, 7.0)
    assert product.tolist() == [0] * 3


def test_assignment_gives_other_handles_their_old_values(kernels):
    x = mx.zeros(3)
    handle = copy.copy(x)
    x[0] = 5
    kernels.increment(x)
    assert x.tolist() == [6, 1, 1]
    assert handle.tolist() == [0, 0, 0]


# --- What it waits for.


def test_it_waits_for_work_that_reads_the_buffer(kernels, gated):
    x = mx.zeros(3)
    mx.eval(x)
    y = gated(x)
    mx.async_eval(y)
    assert not call_while_busy(kernels, lambda: kernels.fill(x, 7.0))
    assert y.tolist() == [1, 1, 1]
    assert x.tolist() == [7, 7, 7]


def test_it_waits_for_work_that_reads_a_view_of_the_buffer(kernels, gated):
    x = mx.zeros(6)
    view = x[3:]
    mx.eval(view)
    y = gated(view)
    mx.async_eval(y)
    assert not call_while_busy(kernels, lambda: kernels.fill(x, 7.0))
    assert y.tolist() == [1, 1, 1]


def test_it_waits_when_only_a_view_is_handed_over(kernels, gated):
    x = mx.zeros(6)
    mx.eval(x)
    y = gated(x)
    mx.async_eval(y)
    assert not call_while_busy(kernels, lambda: kernels.fill(x[3:], 7.0))
    assert y.tolist() == [1] * 6


def test_it_waits_when_python_has_dropped_what_reads_the_buffer(kernels, gated):
    x = mx.zeros(3)
    mx.eval(x)
    y = gated(gated(x))
    mx.async_eval(y)
    total = y.sum()
    mx.async_eval(total)
    del y
    assert not call_while_busy(kernels, lambda: kernels.fill(x, 7.0))
    assert total.item() == 6


def test_it_waits_for_an_array_that_is_being_computed(kernels, gated):
    y = gated(mx.zeros(3))
    mx.async_eval(y)
    assert not call_while_busy(kernels, lambda: kernels.increment(y))
    assert y.tolist() == [2, 2, 2]


def test_it_waits_for_other_streams(kernels, gated):
    x = mx.zeros(3)
    mx.eval(x)
    y = gated(x, stream=mx.new_stream(mx.cpu))
    mx.async_eval(y)
    assert not call_while_busy(kernels, lambda: kernels.fill(x, 7.0))
    assert y.tolist() == [1, 1, 1]


def test_it_does_not_wait_for_work_on_other_buffers(kernels, gated):
    x = mx.zeros(3)
    mx.eval(x)
    y = gated(mx.zeros(3))
    mx.async_eval(y)
    kernels.await_waiter()
    kernels.increment(x)
    assert kernels.has_waiter()
    kernels.open_gate()
    assert x.tolist() == [1, 1, 1]


@pytest.mark.parametrize("shared", [True, False], ids=["shared buffer", "being computed"])
def test_waiting_releases_pythons_lock(kernels, gated, shared):
    # The gate is opened by Python code: with the lock held, nobody could.
    x = mx.zeros(3)
    mx.eval(x)
    y = gated(x)
    mx.async_eval(y)
    steps = []

    def run_python() -> None:
        kernels.await_waiter()
        steps.extend(range(1000))
        kernels.open_gate()

    thread = threading.Thread(target=run_python)
    thread.start()
    kernels.increment(x if shared else y)
    thread.join()
    assert len(steps) == 1000
    assert x.tolist() == [1 if shared else 0] * 3


def test_evaluating_arguments_releases_pythons_lock(kernels, python_kernel):
    # The op is a Python function: it runs on the stream's thread, and needs the lock.
    op = mtf.op(python_kernel, outputs=lambda x: x)
    y = mx.zeros(3)
    kernels.add_one(op(mx.zeros(3)), y)
    assert y.tolist() == [2, 2, 2]


def test_a_kernel_runs_without_pythons_lock(kernels):
    kernels.close_gate()
    y = mx.zeros(3)
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(kernels.add_one_behind_gate, mx.zeros(3) + 0, y)
        with pytest.raises(RuntimeError, match="There is no Stream"):
            call.result()
        x = mx.zeros(3)
        mx.eval(x, y)
        call = pool.submit(kernels.add_one_behind_gate, x, y)
        kernels.await_waiter()
        kernels.open_gate()
        call.result()
    assert y.tolist() == [1, 1, 1]


def test_waiting_leaves_errors_to_those_they_belong_to(kernels):
    kernels.close_gate()
    x = mx.zeros(3)
    mx.eval(x)
    failing = mtf.op(kernels.fail_behind_gate, outputs=x)

    with ThreadPoolExecutor(1) as pool:

        def schedule():
            bad = failing(x)
            mx.async_eval(bad)
            return bad

        bad = pool.submit(schedule).result()
        assert not call_while_busy(kernels, lambda: kernels.fill(x, 7.0))
        assert x.tolist() == [7, 7, 7]

        def finish() -> None:
            mx.eval(bad + 1)

        with pytest.raises(RuntimeError, match="failed behind the gate"):
            pool.submit(finish).result()


# --- Tracing.

TRACERS = {
    "grad": lambda f, x: mx.grad(lambda a: f(a).sum())(x),
    "value_and_grad": lambda f, x: mx.value_and_grad(lambda a: f(a).sum())(x),
    "vjp": lambda f, x: mx.vjp(f, [x], [x]),
    "jvp": lambda f, x: mx.jvp(f, [x], [x]),
    "compile": lambda f, x: mx.compile(f)(x),
    "shapeless compile": lambda f, x: mx.compile(f, shapeless=True)(x),
    "vmap": lambda f, x: mx.vmap(f)(x),
    "checkpoint under grad": lambda f, x: mx.grad(lambda a: mx.checkpoint(f)(a).sum())(x),
    "grad of grad": lambda f, x: mx.grad(lambda b: mx.grad(lambda a: f(a).sum())(b).sum())(x),
}


@pytest.mark.parametrize("tracer", TRACERS)
@pytest.mark.parametrize("kernel", ["fresh", "same"])
def test_a_tracer_is_an_error_that_names_the_way_out(kernels, tracer, kernel):
    x = mx.array([1.0, 2.0, 3.0])
    with pytest.raises(ValueError, match=r"a tracer of mx\.grad.*with mlx_tvm_ffi\.op"):
        TRACERS[tracer](kernels[kernel], x)
    assert kernels[kernel](x).tolist() == [1, 2, 3]


def test_what_depends_on_a_tracer_is_an_error(kernels):
    x = mx.array([1.0, 2.0, 3.0])
    with pytest.raises(ValueError, match=r"a tracer of mx\.grad"):
        mx.grad(lambda a: kernels.fresh(mx.exp(a) * 2).sum())(x)
    with pytest.raises(ValueError, match=r"a tracer of mx\.grad"):
        mx.grad(lambda a: kernels.count([x, a]) * a.sum())(x)


def test_constants_of_a_traced_function_are_arrays(kernels):
    x, constant = mx.array([1.0, 2.0]), mx.array([3.0, 4.0])
    for transform in (mx.compile, mx.vmap):
        assert transform(lambda a: a * kernels.fresh(constant)[0])(x).tolist() == [3, 6]
    assert mx.grad(lambda a: (a * kernels.fresh(constant)).sum())(x).tolist() == [3, 4]


# --- Threads.


def test_threads_call_at_the_same_time(kernels):
    shared = mx.arange(64, dtype=mx.float32)
    mx.eval(shared)

    def work(_number: int) -> bool:
        y = mx.zeros(64)
        mx.eval(y)
        for _ in range(300):
            kernels.increment(y)
            z = kernels.fresh(shared)
            kernels.add(shared, z, z)
            kernels.same(z)
        return y.tolist() == [300] * 64 and z.tolist() == [2 * i for i in range(64)]

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(8)))


def test_tensors_may_be_dropped_on_other_threads(kernels):
    expected = mx.arange(64, dtype=mx.float32)
    mx.eval(expected)
    for _ in range(20):
        for _ in range(200):
            kernels.keep(expected)
        thread = threading.Thread(target=kernels.kept)
        thread.start()
        thread.join()
    assert mx.array_equal(kernels.fresh(expected), expected)


def test_an_evaluated_array_of_another_thread_is_an_argument(kernels):
    with ThreadPoolExecutor(1) as pool:

        def make():
            x = mx.zeros(3) + 1
            mx.eval(x)
            return x

        y = mx.zeros(3)
        kernels.add_one(pool.submit(make).result(), y)
    assert y.tolist() == [2, 2, 2]


# --- Lifetime.


def test_a_kept_tensor_keeps_its_memory(kernels):
    kernels.keep(mx.arange(4096, dtype=mx.float32) + 1)
    gc.collect()
    others = [mx.zeros(4096) + i for i in range(16)]
    mx.eval(others)
    (kept,) = kernels.kept()
    np.testing.assert_array_equal(np.from_dlpack(kept), np.arange(4096) + 1)


def test_a_kept_tensors_memory_is_not_donated(kernels):
    x = mx.arange(4096, dtype=mx.float32) + 1
    kernels.keep(x)
    y = mx.exp(x * 0)
    del x
    mx.eval(y)
    (kept,) = kernels.kept()
    np.testing.assert_array_equal(np.from_dlpack(kept), np.arange(4096) + 1)


def test_an_error_after_some_arguments_gives_them_back(kernels):
    x = mx.zeros(1 << 16)
    mx.eval(x)
    before = mx.get_active_memory()
    for _ in range(100):
        with pytest.raises(TypeError):
            kernels.add_one(mx.zeros(1 << 16) + 1, object())
    assert mx.get_active_memory() == before


def test_calls_leave_no_memory_behind(kernels):
    x = mx.zeros(1 << 12)
    mx.eval(x)
    before = mx.get_active_memory()
    for _ in range(1000):
        kernels.list(kernels.same(kernels.fresh(x)))
    assert mx.get_active_memory() == before


# --- Python functions and processes.


def test_a_python_function_takes_arrays(kernels):
    shapes = []
    function = tvm_ffi.convert(lambda x, y: shapes.append(x.shape) or kernels.add_one(x, y))
    y = mx.zeros(3)
    function(mx.array([1.0, 2.0, 3.0]), y)
    assert y.tolist() == [2, 3, 4]
    assert shapes == [(3,)]


def test_a_kernel_called_by_a_kernel_that_runs_as_an_op(kernels):
    # On the stream's own thread, which must not wait for itself.
    shared = mx.ones(3)
    view = shared[1:]
    mx.eval(view)

    def function(_, y) -> None:
        z = mx.array([5.0, 6.0])
        kernels.increment(z)
        kernels.add(z, kernels.fresh(view), z)
        kernels.copy_view(z, y)

    op = mtf.op(function, outputs=mtf.ShapeDtype((2,), mx.float32))
    assert op(shared).tolist() == [7, 8]


def test_a_forked_child_calls_kernels(run_python, library_path):
    run_python(f"""
import os, warnings
import mlx.core as mx, tvm_ffi, mlx_tvm_ffi
warnings.simplefilter("ignore", DeprecationWarning)
kernels = tvm_ffi.load_module({str(library_path("kernels"))!r})
x = mx.zeros(3) + 1
y = mx.zeros(3)
mx.eval(x, y)
pid = os.fork()
if pid == 0:
    kernels.add_one(x, y)
    os._exit(0 if memoryview(y)[0] == 2 else 1)
_, status = os.waitpid(pid, 0)
assert os.waitstatus_to_exitcode(status) == 0
""")
