"""MLX and another framework, with a dispatch queue, in one program: kernels on the right side."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import mlx.core as mx
import pytest
import tvm_ffi

import mlx_tvm_ffi as mtf

TOY = tvm_ffi.device("ext_dev", 0)


@pytest.fixture(scope="module")
def toy(library):
    """The other framework, set up as its import would do."""
    toy = library("toy_framework")
    assert toy.offer_default()
    yield toy
    mtf.set_default_stream(TOY, None)


@pytest.fixture(scope="module")
def kernels(library):
    return library("two_frameworks")


@pytest.fixture
def make_stream(toy):
    def make():
        pointer = toy.new_stream()
        stream = mtf.StreamInterface(pointer.value)
        toy.release_stream(pointer)
        return stream

    return make


@pytest.fixture(autouse=True)
def on_cpu():
    """The kernel knows the CPU and the other framework's device."""
    before = mx.default_device()
    mx.set_default_device(mx.cpu)
    yield
    mx.set_default_device(before)


def test_each_has_its_default(toy, kernels):
    x, y = toy.full(4, 2.0), toy.full(4, 0.0)
    kernels.scale(x, y, 3.0)
    assert toy.first(y) == 6
    assert kernels.last_stream() == mtf.current_stream(TOY).handle

    a, b = mx.full(4, 2.0), mx.zeros(4)
    kernels.scale(a, b, 3.0)
    assert b.tolist() == [6, 6, 6, 6]
    assert kernels.last_stream() == mtf.current_stream(mx.cpu).handle


def test_an_offer_comes_too_late_where_there_is_a_default(toy):
    before = mtf.current_stream(TOY)
    assert not toy.offer_default()
    assert mtf.current_stream(TOY) == before


def test_scopes_of_both_are_open_at_once(toy, kernels, make_stream):
    x, y = toy.full(4, 2.0), toy.full(4, 0.0)
    a, b = mx.full(4, 2.0), mx.zeros(4)
    with mtf.stream(make_stream()) as theirs, mtf.stream(mx.new_stream(mx.cpu)) as ours:
        kernels.scale(x, y, 3.0)
        assert kernels.last_stream() == theirs.handle
        kernels.scale(a, b, 3.0)
        assert kernels.last_stream() == ours.handle
    assert toy.first(y) == 6
    assert b.tolist() == [6, 6, 6, 6]


def test_a_scope_commits_once_and_a_call_outside_at_once(toy, kernels, make_stream):
    x, y = toy.full(4, 2.0), toy.full(4, 0.0)
    before = toy.commits()
    with mtf.stream(make_stream()):
        for _ in range(10):
            kernels.scale(x, y, 3.0)
        assert toy.first(y) == 0
        assert toy.commits() == before
    assert toy.first(y) == 6
    assert toy.commits() == before + 1
    kernels.scale(x, y, 4.0)
    assert toy.first(y) == 8
    assert toy.commits() == before + 2


def test_what_a_kernel_needs_is_kept_until_the_device_is_done(toy, kernels, make_stream):
    x, y = toy.full(4, 2.0), toy.full(4, 0.0)
    with mtf.stream(make_stream()):
        kernels.scale(x, y, 3.0)
        assert kernels.alive() == 1
    assert kernels.alive() == 0


def test_ops_of_mlx_run_on_mlx_while_the_other_scope_is_open(toy, kernels, make_stream):
    scale = mtf.op(kernels.scale, outputs=lambda x, **_: x)
    x, y = toy.full(4, 2.0), toy.full(4, 0.0)
    with mtf.stream(make_stream()) as theirs:
        z = mx.sin(scale(mx.full(4, 0.5), factor=2.0))
        kernels.scale(x, y, 3.0)
        mx.eval(z)
        assert kernels.last_stream() not in (0, theirs.handle)
    assert toy.first(y) == 6
    assert mx.allclose(z, mx.sin(mx.ones(4)))


def test_threads_with_streams_of_both(toy, kernels, make_stream):
    scale = mtf.op(kernels.scale, outputs=lambda x, **_: x)
    together = threading.Barrier(4, timeout=60)

    def work(n):
        together.wait()
        x, y = toy.full(64, n), toy.full(64, 0.0)
        for i in range(100):
            with mtf.stream(make_stream()), mtf.stream(mx.new_stream(mx.cpu)):
                kernels.scale(x, y, float(i))
                z = scale(mx.full(64, float(n)), factor=float(i)) + 1
                a, b = mx.full(64, float(n)), mx.zeros(64)
                kernels.scale(a, b, float(i))
                mx.eval(z)
            assert toy.first(y) == b[0].item() == n * i
            assert z[0].item() == n * i + 1
        mx.clear_streams()

    with ThreadPoolExecutor(4) as pool:
        for result in [pool.submit(work, n) for n in range(4)]:
            result.result()


def test_errors_come_back_from_the_queue(toy, kernels):
    with pytest.raises(KeyError, match="on the queue"):
        kernels.raise_on_queue(toy.full(4, 1.0))


def test_encoding_elsewhere_than_on_the_queue_is_the_frameworks_error(toy, kernels):
    x = toy.full(4, 1.0)
    with pytest.raises(RuntimeError, match=r"\[toy\] encoder: expected the dispatch queue"):
        kernels.scale_off_queue(x, x, 1.0)
