"""Memory that kernels allocate through TVMFFIEnvTensorAlloc while they run as ops."""

from __future__ import annotations

import mlx.core as mx
import pytest

import mlx_tvm_ffi as mtf

MB = 1 << 20


@pytest.fixture
def kernels(library):
    return library("transform_kernels")


@pytest.fixture
def through_scratch(kernels):
    return mtf.op(kernels.through_scratch, outputs=lambda x, **_: x)


def sixteen_mb():
    x = mx.zeros(4 * MB)
    mx.eval(x)
    mx.synchronize()  # a GPU frees later what it took to make them
    mx.clear_cache()
    mx.reset_peak_memory()
    return x


def test_it_is_right(through_scratch):
    assert through_scratch(mx.array([1.0, 2.0, 3.0]), count=3).tolist() == [2, 3, 4]


def test_it_counts_as_memory_of_mlx(through_scratch):
    x = sixteen_mb()
    before = mx.get_active_memory()
    mx.eval(through_scratch(x, count=1))
    assert 32 * MB <= mx.get_peak_memory() - before < 33 * MB


@pytest.mark.cpu  # the kernel runs on the host, and looks
def test_it_is_active_while_the_kernel_holds_it(kernels):
    seen = []

    def kernel(x, y):
        before = mx.get_active_memory()
        scratch = kernels.returned(x)
        seen.append(mx.get_active_memory() - before)
        kernels.add_one(scratch, y)

    op = mtf.op(kernel, outputs=lambda x: x)
    x = sixteen_mb()
    assert op(x)[0].item() == 2
    assert 16 * MB <= seen[0] < 17 * MB


@pytest.mark.cpu
def test_it_is_given_back(through_scratch):
    x = sixteen_mb()
    y = through_scratch(x, count=2)
    mx.eval(y)
    del y
    before = mx.get_active_memory()
    for _ in range(10):
        mx.eval(through_scratch(x, count=2))
    mx.synchronize()
    assert mx.get_active_memory() == before


@pytest.mark.cpu
def test_it_is_given_back_after_an_error(kernels):
    def kernel(x, _):
        kernels.returned(x)
        message = "after the allocation"
        raise ValueError(message)

    op = mtf.op(kernel, outputs=lambda x: x)
    x = sixteen_mb()
    y = op(x)
    before = mx.get_active_memory()
    for _ in range(5):
        with pytest.raises(Exception, match="after the allocation"):
            mx.eval(op(x))
    del y
    mx.synchronize()
    assert mx.get_active_memory() - before < 17 * MB


@pytest.mark.cpu
def test_a_returned_output_takes_no_more_memory_than_one_that_is_filled(kernels):
    filled = mtf.op(kernels.add_one, outputs=lambda x: x)
    returned = mtf.op(kernels.returned, outputs=lambda x: x, arg_spec=["args"])
    peaks = []
    for op in (filled, returned):
        x = sixteen_mb()
        before = mx.get_active_memory()
        y = op(x)
        mx.eval(y)
        peaks.append(mx.get_peak_memory() - before)
        assert y[0].item() == 1
        del x, y
    assert peaks[0] == peaks[1]


@pytest.mark.parametrize("limit", [0, 1 << 40])
def test_it_lives_until_the_work_is_done(kernels, limit):
    through_scratch = mtf.op(kernels.through_scratch, outputs=lambda x, **_: x)
    previous = mx.set_cache_limit(limit)
    try:
        results = []
        for i in range(50):
            y = through_scratch(mx.full(10000, float(i)), count=3)
            for _ in range(3):
                y = through_scratch(y, count=2)
            mx.async_eval(y)
            results.append(y)
        for i, y in enumerate(results):
            assert mx.all(y == i + 4).item()
    finally:
        mx.set_cache_limit(previous)
