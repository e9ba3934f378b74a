"""Arrays of every dtype and layout, as kernels see them and as they come back."""

from __future__ import annotations

import copy
import importlib.util
import itertools
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import tvm_ffi

import mlx_tvm_ffi as mtf

pytestmark = pytest.mark.cpu

DTYPES = {
    "bool": mx.bool_,
    "uint8": mx.uint8,
    "uint16": mx.uint16,
    "uint32": mx.uint32,
    "uint64": mx.uint64,
    "int8": mx.int8,
    "int16": mx.int16,
    "int32": mx.int32,
    "int64": mx.int64,
    "float16": mx.float16,
    "bfloat16": mx.bfloat16,
    "float32": mx.float32,
    "float64": mx.float64,
    "complex64": mx.complex64,
}

# Each takes an array of shape (2, 3, 4), MLX's or NumPy's alike.
LAYOUTS: dict[str, Any] = {
    "row-contiguous": lambda x: x,
    "transposed": lambda x: x.transpose(2, 0, 1),
    "offset": lambda x: x[1:],
    "block": lambda x: x[:, 1:, 2:],
    "strided": lambda x: x[:, ::2, 1::2],
    "negative": lambda x: x[::-1, :, ::-1],
    "broadcast": lambda x: (np if isinstance(x, np.ndarray) else mx).broadcast_to(
        x[:, 1:2], (2, 5, 4)
    ),
    "overlapping": lambda x: (
        np.lib.stride_tricks.sliding_window_view(x.reshape(-1), 5)
        if isinstance(x, np.ndarray)
        else mx.as_strided(x.reshape(-1), (20, 5), (1, 1))
    ),
    "0-d": lambda x: x[1, 2, 3],
    "one element": lambda x: x[1:, 2:, 3:],
    "empty": lambda x: x[:, 3:],
    "10-d": lambda x: x.reshape(2, 1, 3, 1, 2, 1, 1, 2, 1, 1).transpose(range(9, -1, -1)),
}


def make(dtype: mx.Dtype) -> mx.array:
    """Give values that differ, as far as the dtype can tell them apart."""
    x = (mx.arange(24) * 3 + 1).reshape(2, 3, 4)
    if dtype == mx.bool_:
        return (x % 2) == 0
    if dtype == mx.complex64:
        return x.astype(dtype) * (1 - 2j)
    return x.astype(dtype)


def make_numpy(dtype: mx.Dtype) -> np.ndarray:
    """Give the same values by NumPy alone."""
    x = (np.arange(24) * 3 + 1).reshape(2, 3, 4)
    if dtype == mx.bool_:
        return (x % 2) == 0
    return x * (1 - 2j) if dtype == mx.complex64 else x


def to_numpy(x: mx.array) -> np.ndarray:
    return np.array(x.astype(mx.float32) if x.dtype == mx.bfloat16 else x)


@pytest.fixture
def kernels(library):
    return library("kernels")


cases = pytest.mark.parametrize(
    ("dtype", "layout"), list(itertools.product(DTYPES.values(), LAYOUTS)), ids=str
)


@cases
def test_a_direct_call_sees_every_dtype_and_layout(kernels, dtype, layout):
    x = LAYOUTS[layout](make(dtype))
    y = mx.full(x.shape, 77).astype(dtype)
    kernels.copy_view(x, y)
    assert y.dtype == dtype
    np.testing.assert_array_equal(to_numpy(y), LAYOUTS[layout](make_numpy(dtype)))


@cases
@pytest.mark.parametrize("contiguous", [True, False])
def test_an_op_sees_every_dtype_and_layout(kernels, dtype, layout, contiguous):
    op = mtf.op(kernels.copy_view, outputs=lambda x: x, contiguous=contiguous)
    y = op(LAYOUTS[layout](make(dtype)))
    assert y.dtype == dtype
    np.testing.assert_array_equal(to_numpy(y), LAYOUTS[layout](make_numpy(dtype)))


@cases
def test_a_returned_input_is_the_input(kernels, dtype, layout):
    x = LAYOUTS[layout](make(dtype))
    y = kernels.same(x)
    assert type(y) is mx.array
    assert tuple(kernels.describe(y)) == tuple(kernels.describe(x))
    assert kernels.address(y) == kernels.address(x)
    np.testing.assert_array_equal(to_numpy(y), LAYOUTS[layout](make_numpy(dtype)))


@cases
@pytest.mark.parametrize("source", ["fresh", "foreign"])
def test_a_new_result_has_every_dtype_and_layout_of_its_input(kernels, dtype, layout, source):
    y = kernels[source](LAYOUTS[layout](make(dtype)))
    assert type(y) is mx.array
    assert y.dtype == dtype
    np.testing.assert_array_equal(to_numpy(y), LAYOUTS[layout](make_numpy(dtype)))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kernel", ["copy_pointer", "copy_object"])
def test_other_parameter_types_see_the_same(kernels, layout, kernel):
    x = LAYOUTS[layout](make(mx.float32))
    y = mx.full(x.shape, 77, mx.float32)
    kernels[kernel](x, y)
    np.testing.assert_array_equal(to_numpy(y), LAYOUTS[layout](make_numpy(mx.float32)))


@pytest.mark.parametrize(("name", "dtype"), list(DTYPES.items()))
def test_dtypes_are_dlpacks(kernels, name, dtype):
    kinds = ["int", "uint", "float", None, "bfloat", "complex", "bool"]
    kind = name.rstrip("0123456789")
    bits = 8 if kind == "bool" else int(name.removeprefix(kind))
    assert tuple(kernels.describe(make(dtype))[0]) == (kinds.index(kind), bits, 1)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_shapes_strides_and_device_arrive(kernels, layout):
    dtype, shape, strides, device, has_data = kernels.describe(LAYOUTS[layout](make(mx.int16)))
    expected = LAYOUTS[layout](make_numpy(mx.int16).astype(np.int16))
    assert tuple(dtype) == (0, 16, 1)
    assert tuple(shape) == expected.shape
    if expected.size > 1 and layout != "10-d":
        assert tuple(strides) == tuple(stride // 2 for stride in expected.strides)
    assert device == tvm_ffi.device("cpu", 0)
    assert has_data == (expected.size > 0)


def test_a_slice_starts_at_its_first_element(kernels):
    x = mx.arange(24, dtype=mx.float32)
    assert kernels.address(x[5:]) == kernels.address(x) + 20


# --- Results.


def test_memory_from_the_environment_becomes_the_result_itself(kernels):
    y, address = kernels.fresh_and_address(mx.arange(1000))
    assert kernels.address(y) == address


def test_memory_from_the_environment_is_counted_and_freed_by_mlx(kernels):
    x = mx.zeros((1 << 18,))
    mx.eval(x)
    before = mx.get_active_memory()
    y = kernels.fresh(x)
    assert mx.get_active_memory() - before >= y.nbytes
    del y
    assert mx.get_active_memory() == before


def test_memory_of_others_is_copied(kernels):
    y, address = kernels.foreign_and_address(mx.arange(1000))
    assert kernels.address(y) != address
    assert mx.array_equal(y, mx.arange(1000))


def test_results_live_on_when_everything_else_is_dropped(kernels):
    y = kernels.same(mx.arange(4096) + 1)
    z = kernels.fresh(mx.arange(4096) + 1)
    others = [mx.zeros(4096) + i for i in range(16)]
    mx.eval(others)
    assert mx.array_equal(y, mx.arange(4096) + 1)
    assert mx.array_equal(z, mx.arange(4096) + 1)


def test_a_result_takes_part_in_graphs(kernels):
    x = mx.arange(8, dtype=mx.float32)
    y = kernels.fresh(x)
    assert mx.array_equal(mx.exp(y) * 2, mx.exp(x) * 2)
    assert mx.grad(lambda a: (a * y).sum())(x).tolist() == x.tolist()


def test_the_shape_of_an_argument_may_be_anything(kernels):
    for shape in [(), (0,), (3, 0, 2), (1,) * 8, (1,) * 9, (2,) * 16]:
        x = mx.ones(shape)
        y = kernels.fresh(x)
        assert y.shape == shape
        assert mx.array_equal(x, y)


@pytest.mark.parametrize("kernel", ["float8", "float8_list"])
def test_a_result_that_mlx_cannot_hold_stays_a_tensor(kernels, kernel):
    for _ in range(100):
        result = kernels[kernel](mx.arange(64))
        tensor = result if kernel == "float8" else result[0]
        assert isinstance(tensor, tvm_ffi.Tensor)
        assert str(tensor.dtype) == "float8_e4m3fn"
    assert mx.array_equal(kernels.fresh(mx.arange(64)), mx.arange(64))


@pytest.mark.parametrize(
    ("kernel", "text"),
    [
        ("allocate_float8", "dtype: expected one of MLX's, got float8_e4m3fn"),
        ("allocate_elsewhere", "device: expected cpu, cuda or metal, got device type 7"),
    ],
)
def test_memory_that_mlx_cannot_give_is_an_error(kernels, kernel, text):
    with pytest.raises(NotImplementedError, match=text):
        kernels[kernel](mx.arange(4))
    assert mx.array_equal(kernels.fresh(mx.arange(64)), mx.arange(64))


def test_memory_larger_than_mlx_can_give_is_an_error(kernels):
    with pytest.raises(
        ValueError, match=r"expected dimensions from 0 to 2\^31 - 1, got 2147483648"
    ):
        kernels.allocate_shape(mx.arange(4), [1 << 31])
    with pytest.raises(ValueError, match=r"expected less than 2\^62 bytes"):
        kernels.allocate_shape(mx.arange(4), [1 << 30, 1 << 30, 1 << 30])
    with pytest.raises(MemoryError, match=r"memory: expected what the machine has, got 4611686"):
        kernels.allocate_shape(mx.arange(4), [1 << 20, 1 << 20, 1 << 20])
    assert mx.get_active_memory() < 1 << 30
    with pytest.raises(ValueError, match="expected dimensions from 0"):
        kernels.allocate_shape(mx.arange(4), [-1])
    assert kernels.allocate_shape(mx.arange(4), [2, 3]).shape == (2, 3)


# --- Containers.


@pytest.mark.parametrize("container", [list, tuple])
def test_sequences_of_arrays_are_arguments(kernels, container):
    assert kernels.count(container([mx.zeros((2, 3)), mx.zeros(4)])) == 10


def test_dicts_of_arrays_are_arguments(kernels):
    assert kernels.count_values({"a": mx.zeros((2, 3)), "b": mx.zeros(4)}) == 10


def test_nested_containers_of_arrays_are_arguments(kernels):
    assert kernels.count_nested([[mx.zeros(2)], [mx.zeros(3), mx.zeros(5)]]) == 10


def test_containers_of_arrays_are_results(kernels):
    x = mx.arange(6).reshape(2, 3)
    results = kernels.list(x)
    assert [type(y) for y in results] == [mx.array] * 3
    assert all(mx.array_equal(x, y) for y in results)
    assert kernels.address(results[0]) == kernels.address(x)
    results = kernels.dictionary(x)
    assert type(results["fresh"]) is mx.array
    assert kernels.address(results["same"]) == kernels.address(x)


def test_arrays_inside_containers_decide_results_too(kernels):
    y = kernels.first_fresh([mx.arange(5), mx.arange(6)])
    assert type(y) is mx.array
    assert mx.array_equal(y, mx.arange(5))


def test_tensors_beside_arrays_are_arguments(kernels):
    source = np.arange(6, dtype=np.float32)
    y = mx.zeros(6)
    kernels.add_one(tvm_ffi.from_dlpack(source), y)
    assert y.tolist() == [1, 2, 3, 4, 5, 6]
    assert source.tolist() == [0, 1, 2, 3, 4, 5]


def test_an_array_becomes_a_tensor_and_back(kernels):
    x = mx.arange(6, dtype=mx.bfloat16)
    tensor = tvm_ffi.from_dlpack(x)
    assert str(tensor.dtype) == "bfloat16"
    assert kernels.address(tensor) == kernels.address(x)


# --- Python's side of an array.


def test_subclasses_are_arrays(kernels):
    class Weight(mx.array):
        pass

    y = mx.zeros(3)
    kernels.add_one(Weight([1.0, 2.0, 3.0]), y)
    assert y.tolist() == [2, 3, 4]
    assert type(kernels.same(Weight([1.0]))) is mx.array


def test_a_subclass_without_init_is_an_error(kernels):
    class Bare(mx.array):
        def __init__(self) -> None:
            pass

    for _ in range(3):
        with pytest.raises(TypeError, match=r"whose __init__ has not run"):
            kernels.describe(Bare())
    assert tuple(kernels.describe(mx.zeros(3))[1]) == (3,)


def test_handles_of_an_array_share_its_memory(kernels):
    x = mx.zeros(4)
    other = copy.copy(x)
    kernels.increment(x)
    assert other.tolist() == [1, 1, 1, 1]


def test_memory_of_numpy_is_left_alone(kernels):
    source = np.arange(1 << 16, dtype=np.float32)
    expected = source.copy()
    x = mx.array(source)
    kernels.increment(kernels.same(x))
    mx.eval(mx.exp(x))
    np.testing.assert_array_equal(source, expected)


# --- Import.

CALL = """
import mlx.core as mx, tvm_ffi, mlx_tvm_ffi
kernels = tvm_ffi.load_module({path!r})
x, y = mx.array([1.0, 2.0]), mx.zeros(2)
kernels.add_one(x, y)
assert y.tolist() == [2, 3], y
assert (type(kernels.same(x)) is mx.array) == {fast}
assert (type(kernels.fresh(x)) is mx.array) == {fast}
assert [float(v) for v in __import__("numpy").from_dlpack(kernels.fresh(x))] == [1, 2]
assert mlx_tvm_ffi.op(kernels.add_one, outputs=x)(x).tolist() == [2, 3]
"""

MODULES = ["mlx.core", "tvm_ffi", "mlx_tvm_ffi"]
if importlib.util.find_spec("torch") is not None:
    MODULES.append("torch")


@pytest.mark.parametrize("order", list(itertools.permutations(MODULES)), ids=" ".join)
def test_any_order_of_imports_is_right(run_python, library_path, order):
    imports = "".join(f"import {module}\n" for module in order)
    result = run_python(imports + CALL.format(path=str(library_path("kernels")), fast=True))
    assert "RuntimeWarning" not in result.stderr


def test_tensors_of_torch_and_arrays_mix(kernels):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    source = torch.arange(4, dtype=torch.float32)
    y = mx.zeros(4)
    kernels.add_one(source, y)
    assert y.tolist() == [1, 2, 3, 4]
    kernels.add_one(y, source)
    assert source.tolist() == [2, 3, 4, 5]
    assert type(kernels.last_fresh(source, y)) is mx.array
    assert type(kernels.last_fresh(y, source)) is torch.Tensor


def test_skipping_the_exchange_warns_and_stays_right(run_python, library_path):
    result = run_python(
        CALL.format(path=str(library_path("kernels")), fast=False),
        env={"TVM_FFI_SKIP_DLPACK_C_EXCHANGE_API": "1"},
    )
    assert result.stderr.count("RuntimeWarning: [mlx_tvm_ffi] direct calls go through") == 1
    assert "since TVM_FFI_SKIP_DLPACK_C_EXCHANGE_API=1 is set" in result.stderr
    assert "Unset it." in result.stderr


# Waits for what reads the buffer, sees every layout, and takes no tracer for a constant.
SLOW = """
import gc, threading
import mlx.core as mx, numpy as np, tvm_ffi
import mlx_tvm_ffi as mtf
kernels = tvm_ffi.load_module({path!r})
x = mx.zeros(3)
mx.eval(x)
kernels.close_gate()
y = mtf.op(kernels.add_one_behind_gate, outputs=x)(x)
mx.async_eval(y)
def open_gate():
    kernels.await_waiter()
    returned.wait(0.2)
    kernels.open_gate()
returned = threading.Event()
thread = threading.Thread(target=open_gate)
thread.start()
kernels.fill(x, 7.0)
returned.set()
thread.join()
assert y.tolist() == [1] * 3 and x.tolist() == [7] * 3, (y, x)

base = mx.zeros(6)
kernels.fill(base[2:4], 7.0)
assert base.tolist() == [0, 0, 7, 7, 0, 0], base
z = mx.arange(24).reshape(4, 6)
for view in (z.T, z[::-1, ::2], mx.broadcast_to(z[:1], (3, 6)), z[1, 2], z[:0]):
    result = mx.full(view.shape, 77)
    kernels.copy_view(view, result)
    assert mx.array_equal(result, view), result

fresh = kernels.fresh(z * 1)
assert isinstance(fresh, tvm_ffi.Tensor)
gc.collect()
mx.eval([mx.zeros((4, 6)) + i for i in range(16)])
assert np.from_dlpack(fresh).tolist() == z.tolist()

for traced in (mx.compile, mx.vmap, lambda f: mx.grad(lambda a: f(a).sum())):
    try:
        traced(lambda a: (kernels.fresh(a), a)[1])(x)
    except ValueError as error:
        assert "mlx_tvm_ffi.op" in str(error), error
    else:
        raise AssertionError(traced)
"""


def test_skipping_the_exchange_changes_no_result(run_python, library_path):
    run_python(
        SLOW.format(path=str(library_path("kernels"))),
        env={"TVM_FFI_SKIP_DLPACK_C_EXCHANGE_API": "1"},
    )


BEFORE = """
import mlx.core as mx, tvm_ffi
tvm_ffi.load_module({path!r}).describe(mx.zeros(3))
"""


def test_a_call_before_the_import_warns_and_stays_right(run_python, library_path):
    path = str(library_path("kernels"))
    result = run_python(BEFORE.format(path=path) + CALL.format(path=path, fast=False))
    assert result.stderr.count("RuntimeWarning: [mlx_tvm_ffi] direct calls go through") == 1
    assert "passed to a tvm-ffi function on this thread before the import" in result.stderr
    assert "Import mlx_tvm_ffi first." in result.stderr


def test_a_call_before_the_import_on_another_thread_is_not_ours(run_python, library_path):
    path = str(library_path("kernels"))
    code = f"""
import threading
code = {BEFORE.format(path=path)!r}
thread = threading.Thread(target=exec, args=(code, {{}}))
thread.start()
thread.join()
""" + CALL.format(path=path, fast=True)
    assert "RuntimeWarning" not in run_python(code).stderr
