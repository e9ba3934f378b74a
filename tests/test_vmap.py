"""Ops under mx.vmap: element by element, as one call for the batch, or by a rule."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

import mlx_tvm_ffi as mtf

A = mx.array(np.arange(12, dtype=np.float32).reshape(3, 4))
B = 10 - 2 * A


@pytest.fixture
def kernels(library):
    return library("transform_kernels")


def move(array, axis):
    return array if axis is None else mx.moveaxis(array, axis, 0)


@pytest.fixture(params=["sequential", "broadcast", "callable"])
def multiply(kernels, request):
    """Give a * b of equal shapes with each form of vmap."""

    def rule(inputs, axes):
        a, b = mx.broadcast_arrays(*(move(x, axis) for x, axis in zip(inputs, axes, strict=True)))
        return op(a, b), 0

    op = mtf.op(
        kernels.multiply,
        outputs=lambda a, _: a,
        name="multiply",
        vmap=rule if request.param == "callable" else request.param,
        vjp=lambda primals, g, _: (g * primals[1], g * primals[0]),
        jvp=lambda primals, t, _: primals[0] * t[1] + primals[1] * t[0],
    )
    return op


@pytest.fixture(params=["sequential", "broadcast"])
def row_sum(kernels, request):
    return mtf.op(
        kernels.row_sum,
        outputs=lambda x, **_: mtf.ShapeDtype(x.shape[:-1], x.dtype),
        name="row_sum",
        vmap=request.param,
        vjp=lambda primals, g, _, factor: mx.broadcast_to(
            factor * mx.expand_dims(g, 1), primals[0].shape
        ),
    )


def assert_equal(got, expected):
    np.testing.assert_allclose(np.array(got), np.array(expected), rtol=1e-6)


@pytest.mark.parametrize("out_axis", [0, 1])
@pytest.mark.parametrize(
    "axes", [(0, 0), (1, 1), (0, 1), (1, 0), (0, None), (None, 0), (None, 1), (1, None)], ids=str
)
def test_any_axis_of_some_inputs(multiply, axes, out_axis):
    a, b = (
        mx.random.normal((4,) if axis is None else (5, 4) if axis == 0 else (4, 5)) for axis in axes
    )
    got = mx.vmap(multiply, in_axes=axes, out_axes=out_axis)(a, b)
    assert_equal(got, mx.vmap(lambda a, b: a * b, in_axes=axes, out_axes=out_axis)(a, b))


def test_negative_axes(multiply):
    got = mx.vmap(multiply, in_axes=(-1, 0), out_axes=-1)(A, B.T)
    assert_equal(got, A * B)


def test_nested(multiply):
    got = mx.vmap(mx.vmap(multiply, in_axes=(0, None)), in_axes=(None, 0))(A, B)
    assert_equal(got, A[None] * B[:, None])


def test_nested_over_other_axes(multiply):
    x, y = mx.random.normal((2, 3, 4)), mx.random.normal((4, 2, 3))

    def function(product):
        return mx.vmap(mx.vmap(product, in_axes=(1, 0), out_axes=1), in_axes=(0, 1))

    assert_equal(function(multiply)(x, y), function(mx.multiply)(x, y))


def test_amid_mlx(multiply):
    def function(product):
        return lambda a, b: mx.sin(product(mx.exp(a), b + 1)).sum()

    got = mx.vmap(function(multiply))(A / 10, B)
    assert_equal(got, mx.vmap(function(mx.multiply))(A / 10, B))


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_outputs_of_other_shapes_and_attributes(row_sum, axis):
    x = mx.random.normal((2, 3, 4))
    got = mx.vmap(lambda x: row_sum(x, factor=2.0), in_axes=axis)(x)
    np.testing.assert_allclose(got, 2 * mx.moveaxis(x, axis, 0).sum(-1), rtol=1e-5)


@pytest.mark.parametrize("form", ["sequential", "broadcast"])
def test_several_outputs(kernels, form):
    op = mtf.op(kernels.sum_and_difference, outputs=lambda a, _: (a, a), vmap=form)
    total, difference = mx.vmap(op, in_axes=(0, None), out_axes=(0, 1))(A, B[0])
    assert_equal(total, A + B[0])
    assert_equal(difference, (A - B[0]).T)


@pytest.mark.parametrize("shape", [(0, 4), (3, 0)])
@pytest.mark.parametrize("form", ["sequential", "broadcast"])
def test_an_empty_batch_and_empty_elements(kernels, form, shape):
    op = mtf.op(kernels.multiply, outputs=lambda a, _: a, vmap=form)
    got = mx.vmap(op)(mx.zeros(shape), mx.zeros(shape))
    assert got.shape == shape
    mx.eval(got)


@pytest.mark.cpu  # counts kernel calls
@pytest.mark.parametrize(("form", "calls"), [("sequential", 3), ("broadcast", 1)])
def test_number_of_kernel_calls(kernels, form, calls):
    op = mtf.op(kernels.multiply, outputs=lambda a, _: a, vmap=form)
    kernels.calls()
    mx.eval(mx.vmap(op)(A, B))
    assert kernels.calls() == calls


@pytest.mark.cpu
def test_impure_calls_are_one_for_each_element(kernels):
    op = mtf.op(kernels.multiply, outputs=lambda a, _: a, vmap="sequential", pure=False)
    kernels.calls()
    mx.eval(mx.compile(mx.vmap(op, in_axes=(0, None)))(mx.ones((3, 4)), mx.ones(4)))
    assert kernels.calls() == 3


def test_grad_of_vmap(multiply):
    def function(product):
        return lambda a, b: mx.sin(mx.vmap(product, in_axes=(0, None))(a, b)).sum()

    got = mx.grad(function(multiply), (0, 1))(A, B[0])
    for g, e in zip(got, mx.grad(function(mx.multiply), (0, 1))(A, B[0]), strict=True):
        np.testing.assert_allclose(g, e, rtol=1e-4, atol=1e-5)


def test_vmap_of_grad(multiply):
    def gradient(product):
        return mx.vmap(mx.grad(lambda a, b: mx.sin(product(a, b)).sum()), in_axes=(0, None))

    np.testing.assert_allclose(
        gradient(multiply)(A, B[0]), gradient(mx.multiply)(A, B[0]), rtol=1e-4, atol=1e-5
    )


def test_jvp_of_vmap(multiply):
    def function(product):
        return lambda a: mx.vmap(product, in_axes=(0, None))(a, B[0])

    got = mx.jvp(function(multiply), [A], [mx.ones_like(A)])[1][0]
    assert_equal(got, mx.jvp(function(mx.multiply), [A], [mx.ones_like(A)])[1][0])


def test_a_gradient_rule_sees_one_element(row_sum):
    # Written for two dimensions, as the op is called: it must not be given the batch.
    x = mx.random.normal((3, 3, 3))
    gradient = mx.grad(lambda x: (mx.vmap(lambda x: row_sum(x, factor=2.0))(x) * A[:, :3]).sum())(x)
    assert_equal(gradient, mx.broadcast_to(2 * A[:, :3, None], (3, 3, 3)))


def test_a_gradient_rule_sees_one_element_of_nested_batches(row_sum):
    x = mx.random.normal((2, 3, 3, 3))
    function = mx.vmap(mx.vmap(lambda x: row_sum(x, factor=2.0)))
    gradient = mx.grad(lambda x: (function(x) * A[:, :3]).sum())(x)
    assert_equal(gradient, mx.broadcast_to(2 * A[:, :3, None], (2, 3, 3, 3)))


def test_inside_compile(multiply):
    function = mx.compile(mx.vmap(multiply, in_axes=(0, None)))
    assert_equal(function(A, B[0]), A * B[0])


@pytest.mark.parametrize("multiply", ["broadcast", "callable"], indirect=True)
def test_inside_shapeless_compile(multiply):
    function = mx.compile(mx.vmap(multiply), shapeless=True)
    for a, b in ((A, B), (A[:2], B[:2]), (A.T, B.T)):
        assert_equal(function(a, b), a * b)


@pytest.mark.parametrize("row_sum", ["broadcast"], indirect=True)
def test_shapeless_compile_asks_for_the_outputs_of_one_element(row_sum):
    op = mx.vmap(lambda x: row_sum(x, factor=1.0))
    function = mx.compile(op, shapeless=True)
    for shape in ((2, 3, 4), (5, 2, 7)):
        assert_equal(function(mx.ones(shape)), mx.full(shape[:2], shape[2]))


@pytest.mark.parametrize(
    ("axis", "output"),
    [(0, A), (1, A.T), (-1, A.T), (-2, A), (None, A[0])],
    ids=str,
)
def test_a_rule_may_give_the_batch_any_axis(kernels, axis, output):
    op = mtf.op(kernels.add_one, outputs=lambda x: x, vmap=lambda *_: (output, axis))
    expected = mx.broadcast_to(A[0], A.shape) if axis is None else A
    assert_equal(mx.vmap(op)(A), expected)
    assert_equal(mx.vmap(lambda x: op(x) * 2, out_axes=1)(A), 2 * expected.T)


def test_a_rule_is_given_axes_and_attributes(kernels):
    seen = []

    def rule(inputs, axes, **attributes):
        seen.append(([x.shape for x in inputs], axes, attributes))
        return inputs[0], 1

    op = mtf.op(kernels.multiply, outputs=lambda a, *_, **__: a, vmap=rule)
    mx.vmap(lambda a, b: op(a, b, factor=2.0), in_axes=(1, None))(A, A[:, 0])
    assert seen == [([(3, 4), (3,)], (1, None), {"factor": 2.0})]


@pytest.mark.parametrize(
    ("result", "text"),
    [
        (A, r"expected a rule that returns \(outputs, axes\), got"),
        ((A, 0, 0), r"expected a rule that returns \(outputs, axes\), got tuple"),
        (([A, A], [0, 0]), "expected an axis for each of 1 outputs, got 2"),
        (([A, A], 0), "expected a rule that returns 1 arrays, got 2"),
        ((1.0, 0), "expected a rule that returns arrays, got float"),
        ((A, 2), "expected an axis of an output with 2 dimensions, got 2"),
        ((A, "0"), "expected an axis that is an integer or None, got str"),
        ((A, 1), r"expected an array of shape float32\(4,3\), got float32\(3,4\)"),
        ((A, None), r"expected an array of shape float32\(4\), got float32\(3,4\)"),
    ],
    ids=["array", "three", "axes", "arrays", "number", "range", "type", "shape", "batch"],
)
def test_a_rule_that_returns_something_else(kernels, result, text):
    op = mtf.op(kernels.add_one, outputs=lambda x: x, name="add_one", vmap=lambda *_: result)
    with pytest.raises(Exception, match=r"op add_one\] vmap: " + text):
        mx.vmap(op)(A)


def test_without_a_rule(kernels):
    op = mtf.op(kernels.add_one, outputs=lambda x: x, name="add_one")
    with pytest.raises(Exception, match=r"op add_one\] vmap: .*Pass vmap= to"):
        mx.vmap(op)(A)
    assert_equal(op(A), A + 1)
