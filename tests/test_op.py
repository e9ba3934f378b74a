"""Kernels as ops of MLX's graph: parameters, attributes, outputs, streams, evaluation, lifetime."""

from __future__ import annotations

import gc
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import mlx.core as mx
import numpy as np
import pytest
import tvm_ffi
import tvm_ffi.cpp

import mlx_tvm_ffi as mtf

pytestmark = pytest.mark.cpu

X = mx.array([1.0, 2.0, 3.0])
VECTOR = mtf.ShapeDtype((3,), mx.float32)


# --- The order of the kernel's parameters.


def test_by_default_inputs_outputs_attributes(kernels):
    op = mtf.op(kernels.sum_and_difference, outputs=[VECTOR, VECTOR])
    total, difference = op(X, X * 10)
    assert total.tolist() == [11, 22, 33]
    assert difference.tolist() == [-9, -18, -27]
    assert mtf.op(kernels.scale, outputs=VECTOR)(X, factor=3.0).tolist() == [3, 6, 9]


def test_every_name_of_a_spec_in_any_order(kernels):
    spec = ["attrs.factor", "rets.0", "ctx.stream", "args.1", "rets.1", "args.0"]
    outputs = [VECTOR, mtf.ShapeDtype((1,), mx.float32)]
    y, factor = mtf.op(kernels.mixed, outputs=outputs, arg_spec=spec)(X, X * 10, factor=2.0)
    assert y.tolist() == [12, 24, 36]
    assert factor.tolist() == [2]


def test_numbers_reorder_inputs_and_outputs(kernels):
    spec = ["args.1", "args.0", "rets.1", "rets.0"]
    op = mtf.op(kernels.sum_and_difference, outputs=[VECTOR, VECTOR], arg_spec=spec)
    difference, total = op(X, X * 10)
    assert total.tolist() == [11, 22, 33]
    assert difference.tolist() == [9, 18, 27]


def test_outputs_may_come_first(kernels):
    op = mtf.op(lambda y, x: kernels.add_one(x, y), outputs=VECTOR, arg_spec=["rets", "args"])
    assert op(X).tolist() == [2, 3, 4]


def test_attributes_may_come_first_and_in_the_order_of_the_spec(kernels):
    seen = []
    op = mtf.op(
        lambda b, a, x, y: seen.append((a, b)) or kernels.add_one(x, y),
        outputs=VECTOR,
        arg_spec=["attrs.b", "attrs.a", "args", "rets"],
    )
    mx.eval(op(X, a=1, b=2))
    assert seen == [(1, 2)]


def test_without_inputs(kernels):
    op = mtf.op(kernels.fill, outputs=VECTOR)
    assert op(value=4.0).tolist() == [4, 4, 4]


def test_the_stream_of_a_cpu_is_null(kernels):
    op = mtf.op(kernels.record, outputs=VECTOR, arg_spec=["args", "rets", "ctx.stream"])
    assert op(X).tolist() == [2, 3, 4]
    (stream,) = kernels.recorded()
    assert stream is None or stream.value is None


# --- Kernels that return their outputs.


@pytest.mark.parametrize("kernel", ["fresh", "foreign", "same"])
def test_a_kernel_may_return_its_output(kernels, kernel):
    op = mtf.op(kernels[kernel], outputs=lambda x: x, arg_spec=["args"])
    for _ in range(3):
        assert op(X).tolist() == [1, 2, 3]
        assert op(op(X * 2)).tolist() == [2, 4, 6]


def test_a_kernel_may_return_several_outputs(kernels):
    op = mtf.op(kernels.twice, outputs=[VECTOR, VECTOR], arg_spec=["args"])
    assert [y.tolist() for y in op(X)] == [[1, 2, 3]] * 2


def test_outputs_are_what_the_kernel_returned_in_that_order(kernels):
    # It allocates x + 1 before x + 2, and returns x + 2 before x + 1.
    op = mtf.op(kernels.swapped, outputs=[VECTOR, VECTOR], arg_spec=["args"])
    assert [y.tolist() for y in op(X)] == [[3, 4, 5], [2, 3, 4]]


def test_a_view_of_its_output_is_a_copy(kernels):
    # A square matrix: only the strides tell it from its transpose.
    x = mx.arange(9, dtype=mx.float32).reshape(3, 3)
    op = mtf.op(kernels.fresh_transposed, outputs=lambda x: x, arg_spec=["args"])
    assert mx.array_equal(op(x), x.T)
    assert mx.array_equal(kernels.fresh_transposed(x), x.T)


def test_a_returned_output_from_the_environment_is_not_copied(kernels):
    op = mtf.op(kernels.fresh_and_recorded, outputs=lambda x: x, arg_spec=["args"])
    y = op(mx.arange(1000))
    mx.eval(y)
    assert list(kernels.recorded()) == [kernels.address(y)]


def test_scratch_from_the_environment(kernels):
    op = mtf.op(kernels.through_scratch, outputs=VECTOR)
    for _ in range(10):
        assert op(op(X)).tolist() == [3, 4, 5]


def test_scratch_of_a_kernel_that_returns_its_output(kernels):
    def function(x):
        scratch = kernels.fresh(x)
        kernels.increment(scratch)
        y = kernels.fresh(scratch)
        kernels.fill(scratch, -1.0)
        return y

    op = mtf.op(function, outputs=VECTOR, arg_spec=["args"])
    assert op(X).tolist() == [2, 3, 4]


def test_a_function_of_mlx_may_be_a_kernel():
    op = mtf.op(
        lambda x: mx.exp(mx.array(np.from_dlpack(x))) + 1, outputs=VECTOR, arg_spec=["args"]
    )
    np.testing.assert_allclose(np.array(op(X * 1)), np.exp([1, 2, 3]) + 1, rtol=1e-6)


# --- Attributes.

LONG = "long " * 1000
VALUES = {
    "None": None,
    "True": True,
    "False": False,
    "0": 0,
    "int": -7,
    "largest int": 2**63 - 1,
    "smallest int": -(2**63),
    "float": 0.1,
    "inf": float("inf"),
    "-0.0": -0.0,
    "empty str": "",
    "short str": "short",
    "long str": LONG,
    "str with a null": "a\0b" * 10,
    "str of Unicode": "grüße 🌍 " * 10,
    "empty bytes": b"",
    "short bytes": b"\x00\xff",
    "long bytes": bytes(range(256)) * 16,
    "empty sequence": [],
    "list": [1, 2.5, "three", None],
    "tuple": (True, b"bytes"),
    "nested": [[1, [2, [LONG, [LONG.encode()]]]], (), [None]],
}


def plain(value):
    """Turn containers of tvm-ffi into lists."""
    if isinstance(value, (list, tuple, tvm_ffi.Array)):
        return [plain(item) for item in value]
    return value


@pytest.mark.parametrize("name", VALUES)
def test_attributes_of_every_type(kernels, name):
    op = mtf.op(kernels.record, outputs=VECTOR)
    value = VALUES[name]
    y = op(X, value=value)
    del value
    gc.collect()
    assert y.tolist() == [2, 3, 4]
    (arrived,) = plain(kernels.recorded())
    assert repr(arrived) == repr(plain(VALUES[name]))
    assert type(arrived) is type(plain(VALUES[name])) or isinstance(arrived, (str, bytes))


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.bool_, mx.uint8])
def test_dtypes_are_attributes(kernels, dtype):
    op = mtf.op(kernels.record, outputs=VECTOR)
    name = str(dtype).removeprefix("mlx.core.")
    mx.eval(op(X, dtype=dtype))
    mx.eval(op(X, dtype=tvm_ffi.dtype(name)))
    assert [str(value) for value in kernels.recorded()] == [name, name]


def test_devices_are_attributes(kernels):
    op = mtf.op(kernels.record, outputs=VECTOR)
    for device in (mx.cpu, mx.Device(mx.cpu, 0), tvm_ffi.device("cpu", 0)):
        mx.eval(op(X, device=device))
    mx.eval(op(X, device=tvm_ffi.device("cuda", 3)))
    values = list(kernels.recorded())
    assert values == [tvm_ffi.device("cpu", 0)] * 3 + [tvm_ffi.device("cuda", 3)]


def test_integers_of_numpy_are_attributes(kernels):
    op = mtf.op(kernels.record, outputs=VECTOR)
    mx.eval(op(X, value=np.int32(5)))
    mx.eval(op(X, value=np.float64(0.5)))
    assert list(kernels.recorded()) == [5, 0.5]


def test_typed_parameters_take_attributes(kernels):
    op = mtf.op(kernels.typed, outputs=VECTOR)
    y = op(
        X,
        flag=True,
        integer=1,
        number=2.0,
        text=LONG,
        data=b"x" * 100,
        nothing=None,
        dtype=mx.bfloat16,
        device=mx.cpu,
        nested=[[1, 2], [], [3]],
    )
    offset = 1 + 2 + len(LONG) + 100 + 6
    assert y.tolist() == [1 + offset, 2 + offset, 3 + offset]


def test_attributes_may_be_called_like_anything_but_stream(kernels):
    names = ["args", "rets", "self", "name", "outputs", "x", "größe", "class", "0"]
    for name in names:
        assert mtf.op(kernels.scale, outputs=VECTOR)(X, **{name: 2.0}).tolist() == [2, 4, 6]


def test_attributes_are_taken_when_the_op_is_called(kernels):
    op = mtf.op(kernels.record, outputs=VECTOR)
    value = [1, 2]
    y = op(X, value=value)
    value.append(3)
    mx.eval(y)
    assert plain(kernels.recorded()) == [[1, 2]]


class Counter:
    """An integer that is another one each time."""

    def __init__(self) -> None:
        self.value = 0

    def __index__(self):
        self.value += 1
        return self.value


class Size(NamedTuple):
    rows: int
    names: list


def test_rules_see_the_attributes_that_the_kernel_sees(kernels):
    seen = []

    def outputs(x, **attributes):
        seen.append(attributes)
        return x

    def vjp(primals, cotangent, _, **attributes):
        seen.append(attributes)
        return (cotangent,)

    op = mtf.op(lambda x, y, *_: kernels.add_one(x, y), outputs=outputs, vjp=vjp)
    nested = [1, [2]]
    size = Size(1, ["a"])

    def function(x):
        y = op(x, nested=nested, counter=Counter(), size=size, named=Size(2, ()))
        nested[1].append(3)
        nested.append(4)
        return y.sum()

    mx.grad(function)(X)
    expected = {"nested": (1, (2,)), "counter": 1, "size": (1, ("a",)), "named": Size(2, ())}
    assert seen == [expected, expected]
    assert seen[0]["named"].rows == 2


# --- Outputs.


class Spec:
    """Something with a shape and a dtype."""

    def __init__(self) -> None:
        self.shape, self.dtype = [3], mx.float32


OUTPUTS = {
    "ShapeDtype": VECTOR,
    "array": X,
    "anything with both": Spec(),
    "NumPy's integers": mtf.ShapeDtype((np.int64(3),), mx.float32),
    "callable": lambda x: x,
    "callable that makes a ShapeDtype": lambda x: mtf.ShapeDtype(x.shape, x.dtype),
}


@pytest.mark.parametrize("name", OUTPUTS)
def test_one_output_is_an_array(kernels, name):
    y = mtf.op(kernels.add_one, outputs=OUTPUTS[name])(X)
    assert type(y) is mx.array
    assert y.tolist() == [2, 3, 4]


@pytest.mark.parametrize("name", OUTPUTS)
def test_several_outputs_are_a_tuple(kernels, name):
    spec = OUTPUTS[name]
    if callable(spec):
        results = mtf.op(kernels.sum_and_difference, outputs=lambda a, _: [spec(a), spec(a)])(X, X)
    else:
        results = mtf.op(kernels.sum_and_difference, outputs=[spec, spec])(X, X)
    assert type(results) is tuple
    assert [y.tolist() for y in results] == [[2, 4, 6], [0, 0, 0]]


def test_a_sequence_of_one_output_is_an_array(kernels):
    assert type(mtf.op(kernels.add_one, outputs=[VECTOR])(X)) is mx.array


class OnDemand(list):
    """Makes its items when they are asked for, and keeps none."""

    def __getitem__(self, i):
        return self.make(super().__getitem__(i))

    def __init__(self, items, make) -> None:
        super().__init__(items)
        self.make = make


def test_items_made_on_demand(kernels):
    for shape in (np.array([1000, 2]), OnDemand((500, 1), lambda i: 2 * i)):
        op = mtf.op(kernels.scale, outputs=mtf.ShapeDtype(shape, mx.float32))
        assert op(mx.ones((1000, 2)), factor=2.0).shape == (1000, 2)
    specs = OnDemand(range(3), lambda i: mtf.ShapeDtype((1000 + i,), mx.float32))
    assert [y.shape for y in mtf.op(kernels.add_one, outputs=specs)(X)] == [
        (1000,),
        (1001,),
        (1002,),
    ]
    value = OnDemand(range(3), lambda i: [float(i), "x" * 100])
    mx.eval(mtf.op(kernels.record, outputs=VECTOR)(X, value=value))
    assert plain(kernels.recorded()) == [[[float(i), "x" * 100] for i in range(3)]]


def test_a_callable_gets_arrays_and_attributes(kernels):
    seen = []

    def outputs(*arrays, **attributes):
        seen.append(([a.shape for a in arrays], attributes))
        return mtf.ShapeDtype((attributes["n"],), mx.float32)

    op = mtf.op(lambda _x, y, n: kernels.fill(y, float(n)), outputs=outputs)
    assert op(mx.zeros((2, 5)), n=4).tolist() == [4] * 4
    assert seen == [([(2, 5)], {"n": 4})]


def test_an_outputs_dtype_and_shape_are_what_was_said():
    op = mtf.op(lambda _, _y: None, outputs=lambda x: mtf.ShapeDtype((2, *x.shape), mx.bfloat16))
    y = op(X)
    assert (y.shape, y.dtype) == ((2, 3), mx.bfloat16)
    mx.eval(y)


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (1,) * 9])
def test_outputs_of_any_shape(kernels, shape):
    x = mx.ones(shape)
    assert mx.array_equal(mtf.op(kernels.add_one, outputs=x)(x), x + 1)


def test_an_empty_input_with_an_output_that_is_not(kernels):
    op = mtf.op(lambda _, y: kernels.fill(y, 5.0), outputs=VECTOR)
    assert op(mx.zeros((0,))).tolist() == [5, 5, 5]


def test_an_empty_output_beside_one_that_is_not(kernels):
    def function(x, empty, y) -> None:
        assert empty.shape == (0,)
        kernels.add_one(x, y)

    empty, y = mtf.op(function, outputs=[mtf.ShapeDtype((0,), mx.int8), VECTOR])(X)
    assert empty.tolist() == []
    assert y.tolist() == [2, 3, 4]


def test_outputs_may_be_dropped(kernels):
    op = mtf.op(kernels.sum_and_difference, outputs=[VECTOR, VECTOR])
    total, _ = op(X, X)
    del _
    assert total.tolist() == [2, 4, 6]
    _, difference = op(X, X)
    del _
    assert (difference + 1).tolist() == [1, 1, 1]


def test_dropped_siblings_leave_no_memory_behind(kernels):
    op = mtf.op(kernels.sum_and_difference, outputs=lambda a, _: [a, a])
    x = mx.zeros(1 << 12)
    mx.eval(x)

    def round_trip() -> None:
        total, difference = op(x, x)
        mx.eval(total)
        total, difference = op(x + 1, x)
        del difference
        mx.eval(total)
        op(x, x)

    round_trip()
    gc.collect()
    before = mx.get_active_memory()
    for _ in range(50):
        round_trip()
    assert mx.get_active_memory() == before


# --- Kernels from everywhere.


def test_kernels_of_an_inline_library():
    module = tvm_ffi.cpp.load_inline(
        name="test_op_inline",
        cpp_sources="""
        void add_two(tvm::ffi::TensorView x, tvm::ffi::TensorView y) {
          for (int64_t i = 0; i < x.numel(); ++i) {
            static_cast<float*>(y.data_ptr())[i] = static_cast<float*>(x.data_ptr())[i] + 2;
          }
        }
        """,
        functions=["add_two"],
    )
    assert mtf.op(module.add_two, outputs=VECTOR)(X).tolist() == [3, 4, 5]


def test_registered_global_functions(kernels):
    name = "mlx_tvm_ffi.tests.add_three"

    @tvm_ffi.register_global_func(name, override=True)
    def add_three(x, y) -> None:
        kernels.add_one(x, y)
        kernels.increment(y)
        kernels.increment(y)

    assert mtf.op(tvm_ffi.get_global_func(name), outputs=VECTOR)(X).tolist() == [4, 5, 6]


def test_python_functions(kernels):
    def half(x, y) -> None:
        kernels.scale(x, y, 0.5)

    op = mtf.op(half, outputs=VECTOR)
    assert op.name == "half"
    assert op(X).tolist() == [0.5, 1, 1.5]
    assert mtf.op(tvm_ffi.convert(half), outputs=VECTOR)(X).tolist() == [0.5, 1, 1.5]


@pytest.mark.parametrize("kernel", ["copy_view", "copy_pointer", "copy_object"])
def test_tensor_parameters_of_every_type(kernels, kernel):
    op = mtf.op(kernels[kernel], outputs=lambda x: x, contiguous=False)
    x = mx.arange(24).reshape(2, 3, 4)[:, ::-1].T
    assert mx.array_equal(op(x), x)


def test_the_name_is_in_the_graph(kernels, tmp_path):
    y = mtf.op(kernels.add_one, outputs=VECTOR, name="my.kernel_1")(X)
    mx.export_to_dot(str(tmp_path / "graph.dot"), y)
    assert "my.kernel_1" in (tmp_path / "graph.dot").read_text()


# --- Layout.


def seen_strides(op_arguments, **options):
    seen = []
    op = mtf.op(
        lambda *tensors: seen.extend(tuple(t.strides) for t in tensors[:-1]),
        outputs=mtf.ShapeDtype((1,), mx.float32),
        **options,
    )
    mx.eval(op(*op_arguments))
    return seen


def test_inputs_are_made_contiguous_one_by_one():
    x = mx.arange(6).reshape(2, 3)
    assert seen_strides([x.T, x.T]) == [(2, 1), (2, 1)]
    assert seen_strides([x.T, x.T], contiguous=False) == [(1, 3), (1, 3)]
    assert seen_strides([x.T, x.T], contiguous=[True, False]) == [(2, 1), (1, 3)]
    assert seen_strides([x.T, x.T], contiguous=[False, True]) == [(1, 3), (2, 1)]


def test_contiguous_inputs_are_not_copied(kernels):
    seen = []
    op = mtf.op(
        lambda x, _y: seen.append(kernels.address(x)), outputs=mtf.ShapeDtype((1,), mx.float32)
    )
    x = mx.arange(24).reshape(4, 6)
    view = x[1:3]
    mx.eval(op(x), op(view))
    assert sorted(seen) == [kernels.address(x), kernels.address(view)]


def test_copies_of_inputs_live_until_the_kernel_ran(kernels):
    op = mtf.op(kernels.add_one_behind_gate, outputs=lambda x: x)
    kernels.close_gate()
    x = mx.arange(1 << 14, dtype=mx.float32).reshape(128, 128)
    y = op(x.T)
    mx.async_eval(y)
    with mx.stream(mx.new_stream(mx.cpu)):
        mx.eval([mx.full((128, 128), i) for i in range(16)])
    kernels.open_gate()
    assert mx.array_equal(y, x.T + 1)


# --- Streams.


def thread_of(kernels, **options):
    op = mtf.op(kernels.write_thread_number, outputs=mtf.ShapeDtype((1,), mx.int64))
    return op(**options).item()


def test_an_op_runs_on_the_stream_it_is_given(kernels):
    default, first, second = mx.default_stream(mx.cpu), mx.new_stream(mx.cpu), mx.new_stream(mx.cpu)
    threads = [thread_of(kernels, stream=stream) for stream in (default, first, second)]
    assert len({*threads, kernels.thread_number()}) == 4
    assert thread_of(kernels, stream=first) == threads[1]
    for stream in (None, mx.cpu, mx.Device(mx.cpu, 0)):
        assert thread_of(kernels, stream=stream) == threads[0]
    assert thread_of(kernels) == threads[0]


def test_an_op_runs_on_the_stream_of_the_scope_at_the_call(kernels):
    stream = mx.new_stream(mx.cpu)
    op = mtf.op(kernels.write_thread_number, outputs=mtf.ShapeDtype((1,), mx.int64))
    for scope in (mtf.stream(stream), mx.stream(stream)):
        with scope:
            inside = op()
        assert inside.item() == thread_of(kernels, stream=stream)
    assert op().item() == thread_of(kernels)


def test_an_op_runs_on_a_thread_local_stream(kernels):
    stream = mx.new_thread_local_stream(mx.cpu)
    assert thread_of(kernels, stream=stream) == thread_of(kernels, stream=stream)
    with ThreadPoolExecutor(1) as pool:
        elsewhere = pool.submit(thread_of, kernels, stream=stream).result()
    assert elsewhere != thread_of(kernels, stream=stream)


def test_graphs_across_streams(add_one):
    streams = [mx.new_stream(mx.cpu) for _ in range(3)]
    x = mx.zeros(1000)
    y = x
    for i in range(60):
        y = add_one(y, stream=streams[i % 3])
        if i % 7 == 0:
            y = mx.abs(y, stream=streams[(i + 1) % 3])
    z = add_one(y, stream=streams[0]) + add_one(x, stream=streams[1])
    assert mx.array_equal(z, mx.full(1000, 62.0))


def test_async_graphs_across_streams(add_one):
    streams = [mx.new_stream(mx.cpu) for _ in range(3)]
    x = mx.zeros(1000)
    for _ in range(20):
        y = x
        for i in range(30):
            y = add_one(y, stream=streams[i % 3])
            mx.async_eval(y)
        assert mx.array_equal(y, mx.full(1000, 30.0))


# --- Evaluation.


def test_an_op_is_lazy(kernels):
    calls = []
    op = mtf.op(lambda x, y: calls.append(1) or kernels.add_one(x, y), outputs=lambda x: x)
    y = op(X)
    z = op(y)
    assert calls == []
    mx.eval(z)
    assert len(calls) == 2
    mx.eval(y, z)
    assert len(calls) == 2


def test_graphs_mixed_with_mlx(add_one):
    x = mx.random.normal((16, 16))
    y = mx.softmax(add_one(mx.exp(x).T) @ add_one(x), axis=-1).sum(axis=0)
    expected = mx.softmax((mx.exp(x).T + 1) @ (x + 1), axis=-1).sum(axis=0)
    assert mx.allclose(y, expected)


def test_long_chains(add_one):
    y = mx.zeros(4)
    for _ in range(5000):
        y = add_one(y)
    assert y.tolist() == [5000] * 4


def test_wide_graphs(add_one):
    x = mx.zeros(4)
    assert sum(add_one(x) for _ in range(500)).tolist() == [500] * 4


def test_one_array_as_several_inputs(kernels):
    op = mtf.op(kernels.add, outputs=lambda a, _: a)
    x = X + 0
    assert op(x, x).tolist() == [2, 4, 6]
    assert op(x, x[::-1]).tolist() == [4, 4, 4]
    assert op((X * 2)[::-1], (X * 2)[::-1]).tolist() == [12, 8, 4]


def test_an_input_is_not_changed_by_what_follows(add_one):
    # Write after read: each round overwrites, by donation, what the kernel has just read.
    x = mx.zeros(64)
    for _ in range(200):
        y = add_one(x)
        x = mx.abs(y * 1)
    assert mx.array_equal(x, mx.full(64, 200.0))


def test_intermediates_are_donated_and_freed(add_one):
    # x * 2 is written into x, which nobody else has; the op's output is the only other buffer.
    x = mx.zeros(1 << 18)
    mx.eval(x)
    mx.synchronize()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    for _ in range(20):
        x = add_one(x * 2)
        mx.eval(x)
    assert mx.get_peak_memory() - before < 1.1 * x.nbytes


@pytest.mark.parametrize("cache", [True, False])
def test_everything_may_be_dropped_once_scheduled(kernels, cache):
    def python_scale(x, y, factor) -> None:
        kernels.scale(x, y, factor)

    limit = mx.set_cache_limit(1 << 30 if cache else 0)
    try:
        for i in range(100):
            op = mtf.op(kernels.scale if i % 2 else python_scale, outputs=lambda x, **_: x)
            x = mx.full((1 << 12,), float(i))
            y = op(op(x.reshape(64, 64).T, factor=2.0), factor=0.5)
            mx.async_eval(y)
            total = y.sum()
            mx.async_eval(total)
            del op, x, y
            assert total.item() == i * 4096
            z = mtf.op(kernels.add_one, outputs=lambda x: x)(mx.zeros(1 << 12))
            mx.async_eval(z)
            del z
    finally:
        mx.set_cache_limit(limit)


def test_arrays_that_are_never_evaluated_leave_nothing_behind(kernels):
    class Canary:
        pass

    canary = Canary()
    dropped = weakref.ref(canary)
    op = mtf.op(lambda x, y, _canary=canary: kernels.add_one(x, y), outputs=VECTOR)
    y = op(op(X))
    del op, canary
    gc.collect()
    assert dropped() is not None
    del y
    gc.collect()
    assert dropped() is None


@pytest.mark.parametrize("kernel", ["library", "method"])
def test_an_op_in_a_cycle_with_its_callable_is_collected(kernels, kernel):
    class Layer:
        def __init__(self) -> None:
            fn = kernels.add_one if kernel == "library" else self.kernel
            self.op = mtf.op(fn, outputs=self.shape, vjp=self.backward)

        def kernel(self, x, y):
            kernels.add_one(x, y)

        def shape(self, x):
            return x

        def backward(self, _primals, cotangents, _outputs):
            return cotangents

    layer = Layer()
    gc.collect()
    assert layer.op(X).tolist() == [2, 3, 4]
    dropped = weakref.ref(layer)
    y = layer.op(X)
    del layer
    gc.collect()
    assert y.tolist() == [2, 3, 4]
    del y
    for _ in range(100):  # a thread of its own lets go of what Python kernels were run with
        if dropped() is not None:
            gc.collect()
    assert dropped() is None


# --- Compilation.


def test_compiled(add_one):
    function = mx.compile(lambda x: add_one(add_one(mx.exp(x)) * 2) - 1)
    for x in (X, X + 1, mx.zeros((4, 5)), mx.ones((7, 9))[::2, ::2]):
        assert mx.allclose(function(x), (mx.exp(x) + 1) * 2)


def test_compiled_with_attributes_and_several_outputs(kernels):
    scale = mtf.op(kernels.scale, outputs=lambda x, **_: x)
    both = mtf.op(kernels.sum_and_difference, outputs=lambda a, _: (a, a))

    @mx.compile
    def function(x):
        total, difference = both(scale(x, factor=2.0), scale(x, factor=3.0))
        return total, difference

    total, difference = function(X)
    assert total.tolist() == [5, 10, 15]
    assert difference.tolist() == [-1, -2, -3]


def test_compiled_without_shapes(kernels, add_one):
    pad = mtf.op(
        lambda _x, y, n: kernels.fill(y, float(n)),
        outputs=lambda x, n: mtf.ShapeDtype((x.shape[0] + n,), x.dtype),
    )
    traces = []

    def function(x):
        traces.append(x.shape)
        return pad(add_one(x), n=2) * 2

    compiled = mx.compile(function, shapeless=True)
    for n in (3, 5, 0, 7):
        y = compiled(mx.zeros(n))
        assert y.shape == (n + 2,)
        assert y.tolist() == [4] * (n + 2)
    assert traces == [(3,)]


def counting(kernels, **options):
    calls = []

    def function(x, y, *_):
        calls.append(1)
        kernels.add_one(x, y)

    return mtf.op(function, outputs=lambda x, **_: x, **options), calls


def test_equal_calls_are_merged_when_compiled(kernels):
    op, calls = counting(kernels)
    assert mx.compile(lambda x: op(x) + op(x))(X).tolist() == [4, 6, 8]
    assert len(calls) == 1


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (1, 2),
        (1, 1.0),
        (1, True),
        (0.0, -0.0),
        ("a", b"a"),
        ("a" * 100, "b" * 100),
        ([1, 2], [2, 1]),
        ([1], [[1]]),
        (None, 0),
        (mx.float32, mx.float16),
    ],
    ids=str,
)
def test_calls_with_other_attributes_are_not_merged(kernels, first, second):
    op, calls = counting(kernels)
    mx.eval(mx.compile(lambda x: op(x, a=first) + op(x, a=second))(X))
    assert len(calls) == 2


def test_calls_with_equal_attributes_are_merged(kernels):
    op, calls = counting(kernels)
    value = ["a" * 100, [1, (2.5, None)], b"b" * 100, mx.float32]
    mx.eval(mx.compile(lambda x: op(x, a=value) + op(x, a=list(value)))(X))
    assert len(calls) == 1


def test_calls_of_other_ops_are_not_merged(kernels):
    (op, calls), (other, other_calls) = counting(kernels), counting(kernels)
    mx.eval(mx.compile(lambda x: op(x) + other(x))(X))
    assert (len(calls), len(other_calls)) == (1, 1)


def test_impure_calls_are_not_merged(kernels):
    op, calls = counting(kernels, pure=False)
    mx.eval(mx.compile(lambda x: op(x) + op(x))(X))
    assert len(calls) == 2


def test_kernels_made_and_dropped_under_compile_keep_their_results(kernels):
    # A freed kernel's address is used again: it must not be taken for the new one.
    for i in range(100):
        op = mtf.op(lambda x, y, factor=float(i): kernels.scale(x, y, factor), outputs=lambda x: x)
        assert mx.compile(lambda x, op=op: op(x) + 0)(X).tolist() == [i, 2 * i, 3 * i]


def test_kernels_and_rules_dropped_while_they_are_traced_keep_their_results(kernels):
    # As above, but inside one graph, where equal calls would be merged.
    def function(x):
        total = 0
        for i in range(1, 6):
            scale = mtf.op(
                lambda x, y, factor=float(i): kernels.scale(x, y, factor),
                outputs=lambda x: x,
                vjp=lambda _, cotangent, __, factor=i: cotangent * factor,
            )
            ones = mtf.op(kernels.fill, outputs=lambda n=i, **_: mtf.ShapeDtype((n,), mx.float32))
            total = total + scale(x).sum() + ones(value=1.0).sum()
            del scale, ones
        return total

    compiled = mx.compile(mx.value_and_grad(function))
    for _ in range(3):
        value, gradient = compiled(X)
        assert value.item() == 6 * 15 + 15
        assert gradient.tolist() == [15] * 3


def test_checkpointed(kernels):
    op = mtf.op(
        kernels.add_one, outputs=lambda x: x, vjp=lambda _, cotangents, _outputs: cotangents
    )
    gradient = mx.grad(lambda x: (mx.checkpoint(lambda a: op(a * 2))(x)).sum())(X)
    assert gradient.tolist() == [2, 2, 2]


# --- Threads.


def test_threads_make_and_evaluate_ops(kernels, python_kernel):
    shared = mtf.op(kernels.scale, outputs=lambda x, **_: x)

    def work(number: int) -> bool:
        own = mtf.op(python_kernel, outputs=lambda x: x)
        x = mx.full((32,), float(number))
        compiled = mx.compile(lambda a: own(shared(a, factor=2.0)) * 2)
        right = True
        for _ in range(30):
            y = own(shared(x, factor=2.0))
            mx.async_eval(y)
            right = right and y.tolist() == [2 * number + 1] * 32
            right = right and compiled(x).tolist() == [4 * number + 2] * 32
        return right

    threads = 4
    with ThreadPoolExecutor(threads) as pool:
        assert all(pool.map(work, range(2 * threads)))


def test_an_evaluated_result_of_another_thread_is_an_input(add_one):
    with ThreadPoolExecutor(1) as pool:

        def make():
            y = add_one(mx.zeros(3))
            mx.eval(y)
            mx.clear_streams()
            return y

        assert add_one(pool.submit(make).result()).tolist() == [2, 2, 2]


def test_threads_come_and_go(run_python, library_path):
    run_python(f"""
import mlx.core as mx, tvm_ffi, mlx_tvm_ffi as mtf, threading
kernels = tvm_ffi.load_module({str(library_path("kernels"))!r})
op = mtf.op(kernels.add_one, outputs=lambda x: x)
function = mx.compile(lambda x: op(x) * 2)
right = []
def work(clear):
    y = function(op(mx.zeros((8, 8)).T))
    mx.async_eval(y)
    right.append(y.sum().item() == 256)
    if clear:
        mx.clear_streams()
for i in range(20):
    threads = [threading.Thread(target=work, args=(i % 2,)) for _ in range(4)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
assert right == [True] * 80
""")


EXIT = """
import mlx.core as mx, tvm_ffi, mlx_tvm_ffi as mtf, threading
kernels = tvm_ffi.load_module({path!r})
def python(x, y):
    for _ in range({rounds}):
        kernels.add_one(x, y)
op = mtf.op({kernel}, outputs=lambda x: x)
compiled = mx.compile(lambda x: op(op(x)) * 2)
def work():
    y = mx.zeros(1 << 16)
    for _ in range(50):
        y = op(y)
    mx.async_eval(y, compiled(mx.zeros(4)))
{main}
"""


@pytest.mark.parametrize("kernel", ["kernels.add_one", "python"])
@pytest.mark.parametrize(
    "main",
    [
        "work()",
        "work(); del op, compiled, kernels",
        # MLX's rule for threads that compile: without it MLX's own ops abort at exit, too.
        "t = threading.Thread(target=lambda: (work(), mx.clear_streams())); t.start(); t.join()",
        "work(); raise SystemExit(0)",
        "import atexit; atexit.register(work)",
    ],
)
def test_the_interpreter_ends_with_work_pending(run_python, library_path, kernel, main):
    code = EXIT.format(path=str(library_path("kernels")), kernel=kernel, main=main, rounds=8)
    for _ in range(3):
        assert run_python(code).stderr == ""
