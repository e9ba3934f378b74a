"""Ops under mx.compile: what is merged, what never is, and graphs that cannot be exported."""

from __future__ import annotations

import importlib
from concurrent.futures import ThreadPoolExecutor

import mlx.core as mx
import pytest

import mlx_tvm_ffi as mtf

# Kernel calls are counted on the host.
pytestmark = pytest.mark.cpu

X = mx.array([1.0, 2.0, 3.0])


@pytest.fixture
def kernels(library):
    module = library("transform_kernels")
    module.calls()
    return module


def like(x, **_):
    return x


def first(a, *_):
    return a


def calls_of(kernels, left, right):
    """Count the kernel calls of a compiled function that needs both ops of one input."""
    kernels.calls()
    result = mx.compile(lambda x: left(x) + right(x))(X)
    assert result.tolist() == [4, 6, 8]
    return kernels.calls()


def test_equal_calls_are_one(kernels):
    op = mtf.op(kernels.add_one, outputs=like)
    assert calls_of(kernels, op, op) == 1


def test_ops_made_alike_are_one(kernels):
    one, other = (mtf.op(kernels.add_one, outputs=like) for _ in range(2))
    assert calls_of(kernels, one, other) == 1


@pytest.mark.parametrize(
    "options",
    [
        {"name": "other"},
        {"arg_spec": ["args", "rets"]},
        {"contiguous": False},
        {"aliases": {0: 0}},
        {"pure": False},
        {"capture": False},
        {"outputs": lambda x: x},
        {"outputs": mtf.ShapeDtype((3,), mx.float32)},
        {"vjp": lambda _, cotangent, __: cotangent},
        {"jvp": lambda _, tangents, __: tangents[0]},
        {"vmap": "broadcast"},
        {"vmap": lambda inputs, axes: (inputs[0], axes[0])},
    ],
    ids=lambda options: next(iter(options)),
)
def test_ops_that_differ_in_one_thing_are_two(kernels, options):
    op = mtf.op(kernels.add_one, outputs=like)
    other = mtf.op(kernels.add_one, **{"outputs": like, **options})
    assert calls_of(kernels, op, other) == 2


def test_outputs_that_differ_are_two(kernels):
    ops = [
        mtf.op(kernels.row_sum, outputs=mtf.ShapeDtype(shape, mx.float32))
        for shape in ((1,), (1, 1))
    ]
    total = mx.compile(lambda x: sum(op(x, factor=1.0).sum() for op in ops))(X)
    assert total.item() == 12
    assert kernels.calls() == 2


def test_inputs_that_differ_are_two(kernels):
    op = mtf.op(kernels.add_one, outputs=like)
    assert mx.compile(lambda x, y: op(x) + op(y))(X, X).tolist() == [4, 6, 8]
    assert kernels.calls() == 2


def test_equal_calls_of_several_outputs_are_one(kernels):
    op = mtf.op(kernels.sum_and_difference, outputs=lambda a, _: (a, a))
    assert mx.compile(lambda a, b: op(a, b)[0] + op(a, b)[1])(X, X + 1).tolist() == [2, 4, 6]
    assert kernels.calls() == 1


def test_the_kernel_of_a_gradient_is_run_once(kernels):
    op = mtf.op(
        kernels.multiply,
        outputs=first,
        vjp=lambda primals, g, _: (g * primals[1], g * primals[0]),
    )
    step = mx.compile(mx.value_and_grad(lambda a, b: (op(a, b) ** 2).sum()))
    value, gradient = step(X, X)
    assert value.item() == 1 + 16 + 81
    assert gradient.tolist() == [2, 16, 54]
    assert kernels.calls() == 1


def test_a_compiled_call_runs_the_kernel_every_time(kernels):
    op = mtf.op(kernels.add_one, outputs=like)
    function = mx.compile(op)
    for i in range(5):
        assert function(X + i).tolist() == [2 + i, 3 + i, 4 + i]
    assert kernels.calls() == 5


def test_impure_calls_are_run_for_each(kernels):
    draws = []

    def draw(x, y):
        draws.append(1)
        kernels.add_one(x, y)

    op = mtf.op(draw, outputs=like, pure=False)
    assert mx.compile(lambda x: op(x) + op(x) + op(x))(X).tolist() == [6, 9, 12]
    assert len(draws) == 3


def test_functions_of_a_library_made_and_dropped(kernels):
    # Each look-up gives a function object of its own, at an address that is used again.
    names = ("add_one", "multiply")
    for i in range(100):
        name = names[i % 2]
        kernel = kernels.get_function(name)
        if name == "add_one":
            op, expected = mtf.op(kernel, outputs=like), X + 1
            function = mx.compile(lambda x, op=op: op(x))
        else:
            op, expected = mtf.op(kernel, outputs=first), X * X
            function = mx.compile(lambda x, op=op: op(x, x))
        assert function(X).tolist() == expected.tolist()
        del kernel, op, function


def test_a_compiled_function_outlives_its_op(kernels):
    function = mx.compile(mtf.op(kernels.add_one, outputs=like))
    assert function(X).tolist() == [2, 3, 4]
    assert function(X + 1).tolist() == [3, 4, 5]


def test_states_as_inputs_and_outputs(kernels):
    op = mtf.op(kernels.multiply, outputs=first, aliases={0: 0})
    state = [mx.array([2.0, 2.0, 2.0])]

    def step(x):
        state[0] = op(state[0], x)
        return state[0] + 0

    compiled = mx.compile(step, inputs=state, outputs=state)
    assert compiled(X).tolist() == [2, 4, 6]
    assert compiled(X).tolist() == [2, 8, 18]
    assert state[0].tolist() == [2, 8, 18]


def test_shapeless(kernels):
    op = mtf.op(kernels.row_sum, outputs=lambda x, **_: mtf.ShapeDtype(x.shape[:-1], x.dtype))
    traces = []

    def function(x):
        traces.append(x.shape)
        return op(x * 2, factor=1.0) + 1

    compiled = mx.compile(function, shapeless=True)
    for shape in ((2, 3), (4, 5), (1, 1)):
        assert compiled(mx.ones(shape)).tolist() == [2 * shape[1] + 1] * shape[0]
    assert len(traces) == 1


def test_shapeless_with_several_outputs(kernels):
    op = mtf.op(kernels.sum_and_difference, outputs=lambda a, _: (a, a))
    compiled = mx.compile(op, shapeless=True)
    for n in (3, 5):
        total, difference = compiled(mx.full(n, 3.0), mx.ones(n))
        assert total.tolist() == [4] * n
        assert difference.tolist() == [2] * n


@pytest.mark.parametrize(
    ("outputs", "text"),
    [
        (lambda x: [x] * x.shape[0], r"2 outputs \(float32, float32\), as .* got {} outputs? \("),
        (
            lambda x: mtf.ShapeDtype(x.shape, mx.float32 if x.shape[0] == 2 else mx.int32),
            r"1 output \(float32\), as .* got 1 output \(int32\)",
        ),
    ],
)
@pytest.mark.parametrize("then", [1, 5])
def test_shapeless_with_other_outputs(outputs, text, then):
    op = mtf.op(lambda *_: None, outputs=outputs, name="split")
    compiled = mx.compile(lambda x: op(x), shapeless=True)
    compiled(mx.ones((2, 3)))
    text = r"\[mlx_tvm_ffi\.op split\] outputs: expected " + text.format(then)
    with pytest.raises(ValueError, match=text):
        compiled(mx.ones((then, 3)))


def test_compiled_on_several_threads(kernels):
    op = mtf.op(kernels.add_one, outputs=like)

    def work(i):
        stream = mx.new_stream(mx.cpu)
        with mx.stream(stream):
            function = mx.compile(lambda x: op(op(x) * 2))
            return [function(mx.full(3, float(i + j))).tolist() for j in range(20)]

    with ThreadPoolExecutor(4) as pool:
        for i, results in enumerate(pool.map(work, range(8))):
            assert results == [[2 * (i + j + 1) + 1] * 3 for j in range(20)]


def export_to_file(function, path, shapeless):
    mx.export_function(path, function, X, shapeless=shapeless)


def export_by_parts(function, path, shapeless):
    with mx.exporter(path, function, shapeless=shapeless) as exporter:
        exporter(X)


def export_to_a_callback(function, _, shapeless):
    mx.export_function(lambda _: None, function, X, shapeless=shapeless)


@pytest.mark.parametrize("shapeless", [False, True])
@pytest.mark.parametrize("export", [export_to_file, export_by_parts, export_to_a_callback])
def test_an_export_says_why_it_cannot_be(kernels, tmp_path, export, shapeless):
    op = mtf.op(kernels.add_one, outputs=like, name="add_one")
    text = "primitive add_one. MLX's file format .* Export the parts .* around it"
    with pytest.raises(ValueError, match=text):
        export(lambda x: op(x) * 2, str(tmp_path / "f.mlxfn"), shapeless)
    assert op(X).tolist() == [2, 3, 4]


def test_an_export_says_it_once_after_a_reload(kernels, tmp_path):
    wrapped = mx.export_function
    importlib.reload(mtf)
    assert mx.export_function is wrapped
    op = mtf.op(kernels.add_one, outputs=like)
    for export in (export_to_file, export_by_parts):
        with pytest.raises(ValueError, match="Unable to serialize") as raised:
            export(op, str(tmp_path / "f.mlxfn"), shapeless=False)
        assert str(raised.value).count("MLX's file format") == 1


@pytest.mark.parametrize("export", [export_to_file, export_by_parts])
def test_exports_of_mlx_alone_are_as_ever(tmp_path, export):
    path = str(tmp_path / "f.mlxfn")
    export(lambda x: x * 2, path, shapeless=False)
    assert mx.import_function(path)(X)[0].tolist() == [2, 4, 6]
    with pytest.raises(Exception, match="export_function") as raised:
        mx.export_function("/no/such/folder/f.mlxfn", lambda x: x, X)
    assert "mlx_tvm_ffi" not in str(raised.value)
