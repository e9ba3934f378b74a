"""Scopes and defaults from Python: mtf.stream, current_stream, set_default_stream."""

from __future__ import annotations

import copy
import ctypes
import pickle
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import mlx.core as mx
import pytest
import tvm_ffi

import mlx_tvm_ffi as mtf

CUDA = tvm_ffi.device("cuda", 0)
ABSENT = tvm_ffi.device("cuda", 7)  # where no backend has set a default
METAL = tvm_ffi.device("metal", 0)


@pytest.fixture
def foreign(library):
    """Another framework: makes streams and records what they are asked."""
    return library("foreign_stream")


@pytest.fixture
def kernel(library):
    """A kernel library that knows stream.h only."""
    return library("stream_kernel")


@pytest.fixture
def make_stream(foreign):
    """Make streams of another framework, and check that nothing keeps one in the end."""
    alive = foreign.alive()

    def make(device=CUDA, encoder=0xE):
        pointer = foreign.make_stream(device.dlpack_device_type(), device.index, encoder)
        stream = mtf.StreamInterface(pointer.value)
        foreign.release_stream(pointer)
        return stream

    yield make
    assert foreign.alive() == alive


def pointer(stream):
    return ctypes.c_void_p(stream.handle)


def dl(device):
    return device.dlpack_device_type(), device.index


def on_other_thread(function):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


def test_importing_makes_mlx_the_default(kernel, device):
    stream = mtf.current_stream(device)
    assert kernel.current(*dl(stream.device)) == stream.handle


@pytest.mark.cpu
def test_a_kernel_finds_mlx_and_calls_it(kernel):
    assert tuple(kernel.dispatch(*dl(tvm_ffi.device("cpu", 0)))) == (0, 0, 0)


def test_a_scope_sets_mlx_default_stream_and_puts_it_back(device):
    outer, inner = mx.default_stream(device), mx.new_stream(device)
    with mtf.stream(inner):
        assert mx.default_stream(device) == inner
    assert mx.default_stream(device) == outer


def test_a_scope_leaves_the_default_device_alone(device):
    with mtf.stream(mx.new_stream(mx.cpu)):
        assert mx.default_device() == device


def test_a_scope_puts_back_whatever_was_raised(device, kernel):
    outer = mx.default_stream(device)
    with pytest.raises(KeyboardInterrupt), mtf.stream(mx.new_stream(device)):
        raise KeyboardInterrupt
    assert mx.default_stream(device) == outer
    assert kernel.innermost() == 0


def test_a_device_means_its_default_stream_on_the_entering_thread(device):
    scope = mtf.stream(device)

    def enter():
        with mx.stream(mx.new_stream(device)):
            expected = mx.default_stream(device)
            with scope:
                return expected, mx.default_stream(device)

    expected, got = on_other_thread(enter)
    assert expected == got


@pytest.mark.parametrize("make", [mx.new_thread_local_stream, lambda device: device.type])
def test_thread_local_streams_and_device_types_are_streams_too(make, device):
    with mtf.stream(make(device)) as stream:
        assert mtf.current_stream() == stream


def test_none_is_the_current_stream(device):
    with mtf.stream(mx.new_stream(device)) as outer, mtf.stream() as inner:
        assert inner == outer


def test_the_innermost_scope_of_the_device_wins(make_stream, kernel):
    first, second, other = make_stream(), make_stream(), make_stream(METAL)
    with mtf.stream(first), mtf.stream(second), mtf.stream(other):
        assert kernel.current(*dl(CUDA)) == second.handle
        assert kernel.current(*dl(METAL)) == other.handle
        assert kernel.innermost() == other.handle
        assert mtf.current_stream() == other


def test_device_3_before_device_0(make_stream, kernel):
    third, zeroth = make_stream(tvm_ffi.device("cuda", 3), 0x3), make_stream(CUDA, 0x1)
    with mtf.stream(third), mtf.stream(zeroth):
        assert kernel.environment(2, 3) == 0x3
        assert kernel.environment(2, 0) == 0x1
    assert kernel.environment(2, 3) == 0


def test_cuda_kernels_find_the_encoder_in_the_environment_stream(make_stream, kernel):
    with mtf.stream(make_stream(CUDA, 0xE)):
        assert kernel.environment(*dl(CUDA)) == 0xE
    assert kernel.environment(*dl(CUDA)) == 0


def test_metal_kernels_find_the_interface_in_the_environment_stream(make_stream, kernel):
    stream = make_stream(METAL)
    with mtf.stream(stream):
        assert kernel.environment(*dl(METAL)) == stream.handle
    assert kernel.environment(*dl(METAL)) == 0


def test_an_environment_stream_set_by_others_is_put_back(make_stream, kernel):
    kernel.set_environment(*dl(CUDA), 0x1234)
    try:
        with mtf.stream(make_stream()):
            assert kernel.environment(*dl(CUDA)) != 0x1234
        assert kernel.environment(*dl(CUDA)) == 0x1234
    finally:
        kernel.set_environment(*dl(CUDA), 0)


def test_on_metal_the_environment_stream_wins(make_stream, kernel):
    scoped, set_by_hand = make_stream(METAL), make_stream(METAL)
    with mtf.stream(scoped):
        kernel.set_environment(*dl(METAL), set_by_hand.handle)
        assert kernel.current(*dl(METAL)) == set_by_hand.handle
    assert kernel.environment(*dl(METAL)) == 0


def test_one_scope_can_be_entered_again(device):
    outer = mx.default_stream(device)
    first, second = mx.new_stream(device), mx.new_stream(device)
    scope = mtf.stream(first)
    with scope:
        with mtf.stream(second):
            with scope:
                assert mx.default_stream(device) == first
            assert mx.default_stream(device) == second
        assert mx.default_stream(device) == first
    assert mx.default_stream(device) == outer


def test_one_scope_can_be_open_on_several_threads(make_stream, kernel):
    stream = make_stream()
    scope = mtf.stream(stream)
    all_inside = threading.Barrier(4, timeout=30)

    def use():
        with scope:
            all_inside.wait()
            found = kernel.current(*dl(CUDA))
            all_inside.wait()
        return found

    with ThreadPoolExecutor(4) as pool:
        uses = [pool.submit(use) for _ in range(4)]
        assert {u.result() for u in uses} == {stream.handle}


def test_other_threads_do_not_see_a_scope(make_stream, kernel):
    with mtf.stream(make_stream()):
        assert on_other_thread(kernel.innermost) == 0


def test_as_a_decorator(device):
    stream = mx.new_stream(device)

    @mtf.stream(stream)
    def current(depth):
        return current(depth - 1) if depth else mx.default_stream(device)

    assert current(2) == stream
    assert mx.default_stream(device) != stream


def test_leaving_on_another_thread_is_an_error_and_changes_nothing(make_stream, kernel):
    stream = make_stream()
    scope = mtf.stream(stream)
    with scope:
        with pytest.raises(
            RuntimeError, match=r"\[mlx_tvm_ffi\.stream\] thread: expected one that"
        ):
            on_other_thread(lambda: scope.__exit__(None, None, None))
        assert kernel.current(*dl(CUDA)) == stream.handle


def test_leaving_twice_is_an_error(make_stream):
    scope = mtf.stream(make_stream())
    with scope:
        pass
    with pytest.raises(RuntimeError, match="as often as it was entered"):
        scope.__exit__(None, None, None)


def test_leaving_an_outer_scope_leaves_the_inner_ones_and_says_so(device, kernel):
    before = mx.default_stream(device)
    outer, inner = mtf.stream(mx.new_stream(device)), mtf.stream(mx.new_stream(device))
    outer.__enter__()
    inner.__enter__()
    with pytest.raises(RuntimeError, match="got one with 1 open inside it"):
        outer.__exit__(None, None, None)
    assert mx.default_stream(device) == before
    assert kernel.innermost() == 0
    with pytest.raises(RuntimeError, match="expected one that has this scope open"):
        inner.__exit__(None, None, None)


def test_a_scope_whose_stream_fails_is_not_open(make_stream, kernel):
    stream = make_stream(CUDA, encoder=0)
    with pytest.raises(Exception, match="encoder: expected one, got null"), mtf.stream(stream):
        pytest.fail("entered")
    assert kernel.innermost() == 0


def test_10000_scopes_keep_nothing(make_stream, foreign):
    stream = make_stream(METAL)
    alive = foreign.alive()
    for _ in range(10_000):
        with mtf.stream(stream):
            pass
    assert foreign.alive() == alive


def test_an_interrupt_leaves_no_scope_open(device):
    before = mx.default_stream(device)
    scope = mtf.stream(mx.new_stream(device))

    def use():
        with scope:
            pass

    for step in range(50):
        steps = iter(range(step))

        def interrupt(frame, *_, steps=steps):
            if frame.f_code is not use.__code__ and next(steps, None) is None:
                raise KeyboardInterrupt
            return interrupt

        sys.settrace(interrupt)
        try:
            use()
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)
        assert mx.default_stream(device) == before


def test_a_thread_may_end_with_a_scope_open(device):
    scope = mtf.stream(mx.new_stream(device))
    on_other_thread(scope.__enter__)
    with pytest.raises(RuntimeError, match="expected one that has this scope open"):
        scope.__exit__(None, None, None)


def test_wait_waits_for_work_on_the_stream(device):
    stream = mx.new_stream(device)
    x = mx.zeros(1, stream=stream)
    with mtf.stream(stream, wait=True):
        for _ in range(50):
            x = x + 1
        mx.async_eval(x)
    assert x.item() == 50


def test_set_default_stream_gives_the_previous_one(make_stream, kernel):
    first, second = make_stream(ABSENT), make_stream(ABSENT)
    assert mtf.set_default_stream(ABSENT, first) is None
    assert on_other_thread(lambda: kernel.current(*dl(ABSENT))) == first.handle
    assert mtf.set_default_stream(ABSENT, second) == first
    assert mtf.set_default_stream(ABSENT, None) == second


def test_a_default_can_be_taken_from_mlx_and_given_back(make_stream):
    mine = make_stream(tvm_ffi.device("cpu", 0))
    mlx = mtf.set_default_stream(mx.cpu, mine)
    try:
        assert mtf.current_stream(mx.cpu) == mine
    finally:
        assert mtf.set_default_stream(mx.cpu, mlx) == mine


def test_without_scope_and_default_the_error_says_what_to_do():
    with pytest.raises(RuntimeError, match=r"got cuda:7, for which this thread has no scope"):
        mtf.current_stream(tvm_ffi.device("cuda", 7))


def test_a_default_of_another_device_is_refused(make_stream):
    with pytest.raises(ValueError, match="stream: expected one of metal:0, got one of cuda:0"):
        mtf.set_default_stream(METAL, make_stream())


@pytest.mark.parametrize("wrong", ["gpu", 0, object])
def test_what_is_no_stream_is_refused(wrong):
    with pytest.raises(TypeError, match=r"\[mlx_tvm_ffi\.stream\] s: expected an mx\.Stream"):
        mtf.stream(wrong)
    with pytest.raises(TypeError, match=r"\[mlx_tvm_ffi\.set_default_stream\] stream: expected"):
        mtf.set_default_stream(mx.cpu, wrong)


def test_what_is_no_device_is_refused():
    with pytest.raises(TypeError, match=r"\[mlx_tvm_ffi\.current_stream\] device: expected"):
        mtf.current_stream("cpu")


def test_a_device_that_mlx_has_not_is_refused():
    for device in (mx.Device(mx.cpu, 1), mx.Device(mx.cpu, -1)):
        for use in (
            lambda device=device: mtf.stream(device).__enter__(),
            lambda device=device: mtf.current_stream(device),
            lambda device=device: mtf.set_default_stream(device, None),
            lambda device=device: mtf.set_default_stream(mx.cpu, device),
        ):
            with pytest.raises(ValueError, match=r"device\] index: expected one below the 1"):
                use()


@pytest.mark.parametrize("kind", [mx.Stream, mx.Device])
def test_a_stream_or_device_whose_init_has_not_run_is_refused(kind):
    with pytest.raises(TypeError, match=r"expected one whose __init__ has run, got [\w.]+ without"):
        mtf.stream(kind.__new__(kind)).__enter__()


def test_wait_is_a_bool():
    with pytest.raises(TypeError, match=r"\[mlx_tvm_ffi\.stream\] wait: expected a bool, got str"):
        mtf.stream(wait="yes")


def test_waiting_for_another_framework_is_refused(make_stream):
    with (
        pytest.raises(ValueError, match="wait: expected False"),
        mtf.stream(make_stream(), wait=True),
    ):
        pytest.fail("entered")


def test_a_null_handle_is_refused():
    with pytest.raises(ValueError, match="handle: expected the address of an mtf_stream, got 0"):
        mtf.StreamInterface(0)
    with pytest.raises(TypeError, match="handle: expected the address of an mtf_stream, got str"):
        mtf.StreamInterface("x")


def test_the_interface_of_another_framework_from_python(make_stream, foreign):
    stream = make_stream(CUDA, 0xE)
    assert stream.device == CUDA
    assert stream.acquire_encoder() == 0xE
    stream.barrier()
    stream.release_encoder()
    assert stream.get_device() == 0xD
    assert stream.get_dispatch_queue() is None
    assert foreign.calls(pointer(stream)) == "acquire barrier release"
    assert repr(stream) == f"<mlx_tvm_ffi.StreamInterface cuda:0 at {stream.handle:#x}>"


def test_an_interface_is_made_of_a_handle_only(device):
    stream = mtf.current_stream(device)
    assert mtf.StreamInterface(handle=stream.handle) == stream
    for make in (
        mtf.StreamInterface,
        lambda: mtf.StreamInterface.__new__(mtf.StreamInterface),
        lambda: type("Derived", (mtf.StreamInterface,), {}),
        lambda: copy.copy(stream),
        *(lambda protocol=p: pickle.dumps(stream, protocol) for p in range(6)),
    ):
        with pytest.raises(TypeError):
            make()
