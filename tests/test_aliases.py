"""Outputs in the memory of inputs: donated where MLX may, else copied."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

import mlx_tvm_ffi as mtf

MB = 1 << 20


def like(x, *_, **__):
    return x


@pytest.fixture
def kernels(library):
    return library("transform_kernels")


@pytest.fixture
def increment(kernels):
    return mtf.op(kernels.increment, outputs=like, name="increment", aliases={0: 0})


def values(n=3):
    """Give an array that nothing else holds."""
    x = mx.arange(n, dtype=mx.float32) + 1
    mx.eval(x)
    return x


@pytest.mark.cpu  # asks for addresses
def test_a_donated_input_is_the_output(kernels, increment):
    x = values()
    address = kernels.address(x)
    y = increment(x)
    del x
    mx.eval(y)
    assert kernels.address(y) == address
    assert y.tolist() == [2, 3, 4]


@pytest.mark.cpu
def test_one_buffer_for_both(kernels):
    addresses = []

    def kernel(x, y):
        addresses.append((kernels.address(x), kernels.address(y)))
        kernels.increment(x, y)

    op = mtf.op(kernel, outputs=like, aliases={0: 0})
    y = op(values() * 2)  # apart from the assert, which would hold the input
    assert y.tolist() == [3, 5, 7]
    assert addresses[0][0] == addresses[0][1]


def test_an_input_that_is_still_held_is_copied(increment):
    x = values()
    y = increment(x)
    mx.eval(y)
    assert y.tolist() == [2, 3, 4]
    assert x.tolist() == [1, 2, 3]


def test_an_input_that_another_node_reads_is_copied(increment):
    x = values()
    y, z = increment(x), x * 10
    del x
    mx.eval(y, z)
    assert y.tolist() == [2, 3, 4]
    assert z.tolist() == [10, 20, 30]


@pytest.mark.parametrize("order", [0, 1])
def test_two_ops_on_one_input(increment, order):
    x = values()
    pair = [increment(x), increment(x)]
    del x
    mx.eval(pair[order], pair[1 - order])
    assert [y.tolist() for y in pair] == [[2, 3, 4]] * 2


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x[1:],
        lambda x: x[::2],
        lambda x: x[::-1],
        lambda x: x.reshape(2, 3),
        lambda x: x.reshape(2, 3).T,
        lambda x: mx.broadcast_to(x, (2, 6)),
    ],
    ids=["slice", "strided", "reversed", "reshaped", "transposed", "broadcast"],
)
@pytest.mark.parametrize("contiguous", [True, False])
def test_a_view_does_not_write_to_its_base(kernels, view, contiguous):
    op = mtf.op(kernels.increment, outputs=like, aliases={0: 0}, contiguous=contiguous)
    x = values(6)
    got = op(view(x))
    np.testing.assert_array_equal(got, np.array(view(x)) + 1)
    assert x.tolist() == [1, 2, 3, 4, 5, 6]
    # And when only the view holds the base.
    expected = np.array(view(x)) + 1
    v = view(x)
    del x
    np.testing.assert_array_equal(op(v), expected)
    np.testing.assert_array_equal(v, expected - 1)


def test_memory_of_numpy_is_not_written_to(increment):
    source = np.array([1.0, 2.0, 3.0], dtype=np.float32)
    assert increment(mx.array(source)).tolist() == [2, 3, 4]
    assert increment(mx.array(memoryview(source))).tolist() == [2, 3, 4]
    assert source.tolist() == [1, 2, 3]


@pytest.mark.parametrize("hold", [False, True])
def test_one_input_for_two_outputs(kernels, hold):
    op = mtf.op(kernels.increment_both, outputs=lambda x: (x, x), aliases={0: 0, 1: 0})
    x = values()
    first, second = op(x)
    if not hold:
        del x
    mx.eval(first, second)
    assert first.tolist() == [2, 3, 4]
    assert second.tolist() == [3, 4, 5]
    if hold:
        assert x.tolist() == [1, 2, 3]


def test_one_array_as_both_inputs(kernels):
    op = mtf.op(
        lambda a, b, x, y: (kernels.increment(a, x), kernels.increment(b, y))[0],
        outputs=lambda a, b: (a, b),
        aliases={0: 0, 1: 1},
    )
    x = values()
    pair = op(x, x)
    del x
    assert [y.tolist() for y in pair] == [[2, 3, 4]] * 2


def test_outputs_that_swap_inputs(kernels):
    op = mtf.op(
        lambda a, b, x, y: (kernels.increment(a, x), kernels.increment(b, y))[0],
        outputs=lambda a, b: (a, b),
        aliases={0: 1, 1: 0},
    )
    x, y = values(), values() * 10
    first, second = op(x, y)
    del x, y
    assert first.tolist() == [11, 21, 31]
    assert second.tolist() == [2, 3, 4]


def test_beside_an_output_of_its_own(kernels):
    op = mtf.op(
        lambda x, y, z: (kernels.add_one(x, y), kernels.increment(x, z))[0],
        outputs=lambda x: (x, x),
        aliases={1: 0},
    )
    first, second = op(values())
    assert first.tolist() == [2, 3, 4]
    assert second.tolist() == [2, 3, 4]


def test_compiled_inputs_and_constants_do_not_change(increment):
    constant = values()
    function = mx.compile(lambda x: increment(x) + increment(constant))
    x = values()
    for _ in range(3):
        assert function(x).tolist() == [4, 6, 8]
    assert x.tolist() == constant.tolist() == [1, 2, 3]


def test_what_a_gradient_needs_does_not_change(kernels):
    op = mtf.op(
        kernels.increment,
        outputs=like,
        aliases={0: 0},
        vjp=lambda primals, g, outputs: g * primals[0] * outputs,
    )
    gradient = mx.grad(lambda x: (op(x * 2) ** 2).sum())(values())
    expected = [2 * 2 * (2 * x + 1) * (2 * x) * (2 * x + 1) for x in (1, 2, 3)]
    assert gradient.tolist() == expected


def test_an_evaluated_graph_may_be_evaluated_on(increment):
    y = increment(values())
    mx.eval(y)
    z = increment(y)
    assert z.tolist() == [3, 4, 5]
    assert y.tolist() == [2, 3, 4]


def test_mapped(kernels):
    for form in ("sequential", "broadcast"):
        op = mtf.op(kernels.increment, outputs=like, aliases={0: 0}, vmap=form)
        x = values(6).reshape(2, 3)
        mx.eval(x)
        assert mx.vmap(op)(x).tolist() == [[2, 3, 4], [5, 6, 7]]
        assert mx.vmap(op, in_axes=1)(x).tolist() == [[2, 5], [3, 6], [4, 7]]
        assert x.tolist() == [[1, 2, 3], [4, 5, 6]]


@pytest.mark.parametrize(
    ("outputs", "got"),
    [
        (mtf.ShapeDtype((4,), mx.float32), r"float32\(4\)"),
        (mtf.ShapeDtype((1, 3), mx.float32), r"float32\(1,3\)"),
        (mtf.ShapeDtype((3,), mx.int32), r"int32\(3\)"),
    ],
    ids=["size", "shape", "dtype"],
)
def test_an_output_unlike_its_input(kernels, outputs, got):
    op = mtf.op(kernels.increment, outputs=outputs, name="increment", aliases={0: 0})
    text = (
        rf"op increment\] aliases: expected output 0 to be like its input, float32\(3\), got {got}"
    )
    with pytest.raises(ValueError, match=text):
        op(values())


def test_an_output_unlike_its_input_when_shapes_change(kernels):
    op = mtf.op(
        kernels.increment,
        outputs=lambda x: mtf.ShapeDtype((min(x.shape[0], 4),), x.dtype),
        aliases={0: 0},
    )
    function = mx.compile(op, shapeless=True)
    assert function(values()).tolist() == [2, 3, 4]
    with pytest.raises(Exception, match="aliases: expected output 0 to be like its input"):
        mx.eval(function(values(8)))
    assert function(values()).tolist() == [2, 3, 4]


@pytest.fixture
def append(kernels):
    """Write one row into a cache."""
    return mtf.op(kernels.append, outputs=lambda cache, *_, **__: cache, aliases={0: 0})


def cache_and_rows():
    cache = mx.zeros((16 * 1024, 1024))  # 64 MB
    rows = mx.arange(1000)[:, None] + mx.zeros((1, 1024))
    mx.eval(cache, rows)
    return cache, rows


@pytest.mark.cpu
@pytest.mark.parametrize("evaluate_every", [1, 10, 1000])
def test_a_chain_allocates_nothing(kernels, append, evaluate_every):
    cache, rows = cache_and_rows()
    tokens = [rows[i] for i in range(1000)]
    mx.eval(tokens)
    address = kernels.address(cache)
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    for i in range(1000):
        cache = append(cache, tokens[i], position=i)
        if (i + 1) % evaluate_every == 0:
            mx.eval(cache)
    assert mx.get_peak_memory() == 0  # not one allocation since the reset
    assert mx.get_active_memory() == before
    assert kernels.address(cache) == address
    np.testing.assert_array_equal(cache[:1000, 0], np.arange(1000))


@pytest.mark.cpu
def test_a_chain_amid_mlx_allocates_nothing_large(kernels, append):
    cache, rows = cache_and_rows()
    address = kernels.address(cache)
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    for i in range(100):
        cache = append(cache, rows[i] * 2, position=i)
        mx.eval(cache[i])  # what it writes is read in the same step
    assert mx.get_peak_memory() - before < MB
    assert kernels.address(cache) == address
    np.testing.assert_array_equal(cache[:100, 0], 2 * np.arange(100))
