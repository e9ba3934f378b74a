"""Gradients of ops: rules as callables and as other ops, in each of MLX's transformations."""

from __future__ import annotations

import mlx.core as mx
import pytest
from mlx import nn

import mlx_tvm_ffi as mtf

A = mx.array([1.0, 2.0, 3.0])
B = mx.array([4.0, -5.0, 0.5])


@pytest.fixture
def kernels(library):
    return library("transform_kernels")


def backward_of_backward(primals, cotangents, _):
    a, b, g, _ = primals
    da, db = cotangents
    return g * db, g * da, da * b + db * a, None


@pytest.fixture(params=["callable", "op"])
def multiply(kernels, request):
    """Give a * b with each form of a gradient."""
    rules = {
        "callable": lambda primals, g, _: (g * primals[1], g * primals[0]),
        "op": mtf.op(
            kernels.multiply_backward,
            outputs=lambda a, b, *_: (a, b),
            name="multiply_backward",
            vjp=backward_of_backward,
        ),
    }
    return mtf.op(
        kernels.multiply,
        outputs=lambda a, _: a,
        name="multiply",
        vjp=rules[request.param],
        jvp=lambda primals, tangents, _: primals[0] * tangents[1] + primals[1] * tangents[0],
    )


def plain_multiply(a, b):
    return a * b


def loss(product):
    return lambda a, b: (mx.sin(product(2 * a, b)) * mx.array([1.0, 2.0, 3.0])).sum()


def assert_close(got, expected):
    got = [got] if isinstance(got, mx.array) else got
    expected = [expected] if isinstance(expected, mx.array) else expected
    for g, e in zip(got, expected, strict=True):
        assert g.dtype == e.dtype
        assert mx.allclose(g, e, rtol=1e-5, atol=1e-5), (g, e)


@pytest.mark.parametrize("argnums", [0, 1, (0, 1)], ids=str)
def test_grad(multiply, argnums):
    gradient = mx.grad(loss(multiply), argnums)(A, B)
    assert_close(gradient, mx.grad(loss(plain_multiply), argnums)(A, B))


def test_value_and_grad(multiply):
    value, gradients = mx.value_and_grad(loss(multiply), (0, 1))(A, B)
    expected_value, expected = mx.value_and_grad(loss(plain_multiply), (0, 1))(A, B)
    assert_close(value, expected_value)
    assert_close(gradients, expected)


def test_vjp(multiply):
    outputs, gradients = mx.vjp(multiply, [A, B], [mx.array([1.0, 10.0, 100.0])])
    assert_close(outputs, [A * B])
    assert_close(gradients, [B * mx.array([1.0, 10, 100]), A * mx.array([1.0, 10, 100])])


@pytest.mark.parametrize("which", [0, 1])
def test_jvp(multiply, which):
    tangents = [mx.zeros(3), mx.zeros(3)]
    tangents[which] = mx.array([1.0, 10.0, 100.0])
    outputs, got = mx.jvp(loss(multiply), [A, B], tangents)
    expected_outputs, expected = mx.jvp(loss(plain_multiply), [A, B], tangents)
    assert_close(outputs, expected_outputs)
    assert_close(got, expected)


def test_jvp_of_one_input(multiply):
    (got,) = mx.jvp(lambda a: multiply(a, B), [A], [mx.ones(3)])[1]
    assert_close(got, B)


def test_grad_of_grad(multiply):
    def second(product):
        return mx.grad(lambda a, b: mx.grad(loss(product))(a, b).sum(), (0, 1))(A, B)

    assert_close(second(multiply), second(plain_multiply))


def test_grad_of_a_jvp(multiply):
    def directional(product):
        return lambda a: mx.jvp(lambda x: product(x, x * B), [a], [mx.ones(3)])[1][0].sum()

    assert_close(mx.grad(directional(multiply))(A), mx.grad(directional(plain_multiply))(A))


@pytest.mark.cpu  # counts kernel calls
def test_checkpoint_runs_the_kernel_again(kernels, multiply):
    kernels.calls()
    function = mx.checkpoint(lambda a, b: multiply(mx.exp(a), b))
    gradients = mx.grad(lambda a, b: function(a, b).sum(), (0, 1))(A, B)
    assert_close(gradients, [mx.exp(A) * B, mx.exp(A)])
    calls = kernels.calls()
    mx.eval(mx.grad(lambda a, b: multiply(mx.exp(a), b).sum(), (0, 1))(A, B))
    assert calls >= kernels.calls()


@pytest.mark.parametrize("shapeless", [False, True])
def test_inside_compile(multiply, shapeless):
    step = mx.compile(mx.value_and_grad(loss(multiply), (0, 1)), shapeless=shapeless)
    expected = mx.value_and_grad(loss(plain_multiply), (0, 1))
    for a in (A, A * A):
        value, gradients = step(a, B)
        expected_value, expected_gradients = expected(a, B)
        assert_close(value, expected_value)
        assert_close(gradients, expected_gradients)


def test_grad_of_grad_inside_compile(multiply):
    def second(product):
        return lambda a, b: mx.grad(lambda x: mx.grad(loss(product))(x, b).sum())(a)

    assert_close(mx.compile(second(multiply))(A, B), second(plain_multiply)(A, B))


@pytest.fixture
def both(kernels):
    return mtf.op(
        kernels.sum_and_difference,
        outputs=lambda a, _: (a, a),
        name="both",
        vjp=lambda _, cotangents, __: (
            cotangents[0] + cotangents[1],
            cotangents[0] - cotangents[1],
        ),
        jvp=lambda _, tangents, __: (tangents[0] + tangents[1], tangents[0] - tangents[1]),
    )


@pytest.mark.parametrize(("output", "signs"), [(0, (1, 1)), (1, (1, -1))])
def test_one_of_several_outputs(both, output, signs):
    gradients = mx.grad(lambda a, b: (both(a, b)[output] * B).sum(), (0, 1))(A, B)
    assert_close(gradients, [signs[0] * B, signs[1] * B])


def test_all_of_several_outputs(both):
    def function(a, b):
        total, difference = both(a, b)
        return (total * difference).sum()

    assert_close(mx.grad(function, (0, 1))(A, B), [2 * A, -2 * B])
    assert_close(mx.jvp(both, [A, B], [mx.ones(3), mx.zeros(3)])[1], [mx.ones(3), mx.ones(3)])


def test_outputs_of_the_call_reach_the_rule(kernels):
    seen = []

    def rule(_, cotangent, output):
        seen.append(output)
        return cotangent

    op = mtf.op(kernels.add_one, outputs=lambda x: x, vjp=rule)
    mx.eval(mx.grad(lambda x: op(x).sum())(A))
    assert seen[0].tolist() == [2, 3, 4]


def test_none_is_a_gradient_of_zeros(kernels):
    op = mtf.op(
        kernels.multiply, outputs=lambda a, _: a, vjp=lambda primals, g, _: (g * primals[1], None)
    )
    gradients = mx.grad(lambda a, b: op(a, b).sum(), (0, 1))(A, B)
    assert_close(gradients, [B, mx.zeros(3)])


def test_attributes_reach_the_rule(kernels):
    def rule(primals, cotangent, _, factor):
        return mx.broadcast_to(factor * cotangent[..., None], primals[0].shape)

    backward = mtf.op(kernels.row_sum_backward, outputs=lambda x, *_, **__: x)
    for vjp in (rule, backward):
        op = mtf.op(
            kernels.row_sum,
            outputs=lambda x, **_: mtf.ShapeDtype(x.shape[:-1], x.dtype),
            vjp=vjp,
        )
        gradient = mx.grad(lambda x, op=op: op(x, factor=3.0).sum())(mx.ones((2, 5)))
        assert_close(gradient, mx.full((2, 5), 3.0))


def test_attributes_of_any_name_reach_an_op_as_a_rule(kernels):
    backward = mtf.op(
        lambda _, dy, __, dx, *___: kernels.add_one(dy, dx), outputs=lambda x, *_, **__: x
    )
    op = mtf.op(lambda x, y, _: kernels.add_one(x, y), outputs=lambda x, **_: x, vjp=backward)
    for name in ("primals", "others", "outputs", "attributes"):
        assert mx.grad(lambda x, name=name: op(x, **{name: 3.0}).sum())(A).tolist() == [2, 2, 2]


def test_an_op_as_forward_rule(kernels):
    tangent = mtf.op(lambda _, t, __, dy: kernels.multiply(t, t, dy), outputs=lambda x, *_: x)
    op = mtf.op(kernels.add_one, outputs=lambda x: x, jvp=tangent)
    assert mx.jvp(op, [A], [A])[1][0].tolist() == [1, 4, 9]


def test_gradients_have_the_dtype_of_their_primals(kernels):
    # A rule in float32, as its kernels are, amid a graph in float16.
    def double(x, y):
        kernels.add_one(x, y)

    def rule(_, cotangent, __):
        assert cotangent.dtype == mx.float32
        return cotangent.astype(mx.float16)

    op = mtf.op(double, outputs=lambda x: x, vjp=rule)
    gradient = mx.grad(lambda x: op(x).astype(mx.float16).sum())(A)
    assert gradient.dtype == mx.float32


@pytest.mark.cpu  # has more than one stream
def test_rules_run_on_the_stream_of_the_op(kernels, device):
    stream, default = mx.new_stream(device), mx.default_stream(device)
    seen = []

    def rule(_, cotangent, __):
        seen.append(mx.default_stream(device))
        return cotangent

    op = mtf.op(kernels.add_one, outputs=lambda x: x, vjp=rule)
    mx.eval(mx.grad(lambda x: op(x, stream=stream).sum())(A))
    assert seen == [stream]
    assert mx.default_stream(device) == default


@pytest.mark.cpu
def test_a_rule_that_fails_leaves_the_stream_as_it_was(kernels, device):
    def rule(*_):
        message = "no gradient today"
        raise ValueError(message)

    op = mtf.op(kernels.add_one, outputs=lambda x: x, vjp=rule, name="add_one")
    stream, default = mx.new_stream(device), mx.default_stream(device)
    with pytest.raises(Exception, match=r"op add_one\] vjp: ValueError: no gradient today"):
        mx.grad(lambda x: op(x, stream=stream).sum())(A)
    assert mx.default_stream(device) == default
    assert op(A).tolist() == [2, 3, 4]


@pytest.mark.parametrize("transform", ["vjp", "jvp"])
def test_without_a_rule(kernels, transform):
    op = mtf.op(kernels.add_one, outputs=lambda x: x, name="add_one")
    with pytest.raises(Exception, match=rf"op add_one\] {transform}: .*Pass {transform}= to"):
        getattr(mx, transform)(op, [A], [A])
    assert op(A).tolist() == [2, 3, 4]


@pytest.mark.parametrize(
    ("result", "text"),
    [
        (mx.ones(3), "expected a rule that returns 2 arrays, got 1"),
        ((mx.ones(3),) * 3, "expected a rule that returns 2 arrays, got 3"),
        ((mx.ones(3), 1.0), "expected a rule that returns arrays, got float"),
        (None, "expected a rule that returns arrays, got NoneType"),
        ((mx.ones(3), mx.ones(4)), r"expected an array of shape float32\(3\), got float32\(4\)"),
    ],
    ids=["one", "three", "number", "none", "shape"],
)
def test_a_rule_that_returns_something_else(kernels, result, text):
    op = mtf.op(kernels.multiply, outputs=lambda a, _: a, name="multiply", vjp=lambda *_: result)
    with pytest.raises(Exception, match=r"op multiply\] vjp: " + text):
        mx.grad(lambda a, b: op(a, b).sum(), (0, 1))(A, B)


def test_layers_of_mlx_nn(multiply):
    class Gate(nn.Module):
        def __init__(self, product):
            super().__init__()
            self.linear = nn.Linear(3, 3)
            self.scale = mx.full((4, 3), 0.5)
            self.product = product

        def __call__(self, x):
            return self.product(self.linear(x), self.scale)

    def gradients(product):
        mx.random.seed(0)
        model = Gate(product)
        x = mx.random.normal((4, 3))
        return nn.value_and_grad(model, lambda x: (model(x) ** 2).mean())(x)

    (value, tree), (expected_value, expected) = gradients(multiply), gradients(plain_multiply)
    assert_close(value, expected_value)
    assert_close(tree["scale"], expected["scale"])
    assert_close(tree["linear"]["weight"], expected["linear"]["weight"])
    assert_close(tree["linear"]["bias"], expected["linear"]["bias"])
