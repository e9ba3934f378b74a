"""Kernels of the real TVM and TileLang (``make artifacts``) on MLX's encoder, against numpy."""

from __future__ import annotations

import math
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import mlx.core as mx
import numpy as np
import pytest

import mlx_tvm_ffi as mtf

if TYPE_CHECKING:
    from collections.abc import Callable

    import tvm_ffi

ARTIFACTS = Path(__file__).parents[2] / "build" / "artifacts"
pytestmark = [
    pytest.mark.metal,
    pytest.mark.skipif(
        not (ARTIFACTS / "tilelang" / ".made").exists(),
        reason="needs artifacts; run make artifacts",
    ),
]


@pytest.fixture(params=["c", "llvm"])
def tvm(request: pytest.FixtureRequest) -> tvm_ffi.Module:
    """TVM's kernels, with each kind of host code."""
    return mtf.load_module(ARTIFACTS / "tvm" / f"metal_{request.param}.so")


def random(*shape: int, dtype: str = "float32") -> np.ndarray:
    return np.random.default_rng().integers(-9, 9, shape).astype(dtype)


def like_first(array: mx.array, *_: mx.array, **__: float) -> mx.array:
    return array


@pytest.mark.parametrize("n", [1, 64, 1000])
def test_elementwise_with_scalar(tvm: tvm_ffi.Module, n: int) -> None:
    add_scaled = mtf.op(tvm.add_scaled, outputs=like_first)
    a, b = random(n), random(n)
    y = add_scaled(mx.array(a), mx.array(b), alpha=0.5)
    np.testing.assert_array_equal(np.array(y), a + np.float32(0.5) * b)


def test_reduction_with_threadgroup_memory(tvm: tvm_ffi.Module) -> None:
    row_sum = mtf.op(tvm.row_sum, outputs=lambda a: mtf.ShapeDtype(a.shape[:1], a.dtype))
    a = random(5, 150)
    np.testing.assert_array_equal(np.array(row_sum(mx.array(a))), a.sum(1))


def test_matrix_product(tvm: tvm_ffi.Module) -> None:
    matmul = mtf.op(
        tvm.matmul, outputs=lambda a, b: mtf.ShapeDtype((a.shape[0], b.shape[1]), a.dtype)
    )
    a, b = random(9, 17), random(17, 20)
    np.testing.assert_array_equal(np.array(matmul(mx.array(a), mx.array(b))), a @ b)


def test_two_kernels_in_one_function_run_in_order(tvm: tvm_ffi.Module) -> None:
    center = mtf.op(
        tvm.center, outputs=lambda a: [mtf.ShapeDtype(a.shape[:1], a.dtype), a], name="center"
    )
    a = random(40, 32)
    sums, c = center(mx.array(a))
    np.testing.assert_array_equal(np.array(sums), a.sum(1))
    np.testing.assert_allclose(np.array(c), a - a.mean(1, keepdims=True), rtol=1e-5, atol=1e-5)


def test_memory_between_two_kernels(tvm: tvm_ffi.Module) -> None:
    reversed_squares = mtf.op(tvm.reversed_squares, outputs=lambda a: a)
    a = random(1024)
    y = mx.array(a)
    for _ in range(2):
        y = reversed_squares(y)
    np.testing.assert_array_equal(np.array(y), a**4)


def test_scalars_of_mixed_width(tvm: tvm_ffi.Module) -> None:
    mixed = mtf.op(
        tvm.mixed_scalars,
        outputs=lambda a, **_: a,
        arg_spec=["args", "attrs.big", "attrs.half", "attrs.small", "rets"],
    )
    a = random(64)
    y = mixed(mx.array(a), big=5 * 1000000007 + 1, half=0.5, small=-3)
    np.testing.assert_array_equal(np.array(y), a * np.float32(0.5) + 2)


def test_chain_with_ops_of_mlx(tvm: tvm_ffi.Module) -> None:
    add_scaled = mtf.op(tvm.add_scaled, outputs=like_first)
    a = random(300)
    x = y = mx.array(a)
    for _ in range(6):
        y = add_scaled(y + 1.0, x, alpha=2.0)
    expected = a
    for _ in range(6):
        expected = expected + 1 + 2 * a
    np.testing.assert_array_equal(np.array(y), expected)


def test_a_kernel_costs_what_one_of_mlx_costs(tvm: tvm_ffi.Module, sim: tvm_ffi.Module) -> None:
    add_scaled = mtf.op(tvm.add_scaled, outputs=like_first)
    x = mx.array(random(64))
    mx.eval(x)
    counts = []
    for step in (lambda y: add_scaled(y, x, alpha=1.0), lambda y: y + x):
        sim.reset_counts()
        y = x
        for _ in range(20):
            y = step(y)
        mx.eval(y)
        found = dict(sim.counts())
        counts.append([found[what] for what in ("compute_encoders", "barriers", "commits")])
    assert counts[0] == counts[1]


def test_slices_are_copied_with_offsets_false(tvm: tvm_ffi.Module) -> None:
    add_scaled = mtf.op(tvm.add_scaled, outputs=like_first, offsets=False)
    a = random(100)
    x = mx.array(a)
    y = add_scaled(x[10:90], x[:80], alpha=1.0)
    np.testing.assert_array_equal(np.array(y), a[10:90] + a[:80])


def test_slices_are_refused_otherwise(tvm: tvm_ffi.Module) -> None:
    add_scaled = mtf.op(tvm.add_scaled, outputs=like_first)
    x = mx.ones(100)
    mx.eval(x)
    with pytest.raises(
        RuntimeError, match=r"got byte 40 of one. Use mlx_tvm_ffi.op\(..., offsets=F"
    ):
        mx.eval(add_scaled(x[10:90], x[:80], alpha=1.0))
    np.testing.assert_array_equal(np.array(add_scaled(x, x, alpha=1.0)), np.full(100, 2.0))


def test_called_directly(tvm: tvm_ffi.Module) -> None:
    a, b = random(200), random(200)
    x, y, z = mx.array(a), mx.array(b), mx.zeros(200)
    mx.eval(x, y, z)
    tvm.add_scaled(x, y, z, 2.0)
    np.testing.assert_array_equal(np.array(z), a + 2 * b)


def test_two_kernels_called_directly_in_a_scope(tvm: tvm_ffi.Module) -> None:
    a = random(40, 32)
    x, sums, c = mx.array(a), mx.zeros(40), mx.zeros((40, 32))
    mx.eval(x, sums, c)
    with mtf.stream():
        tvm.center(x, sums, c)
    np.testing.assert_array_equal(np.array(sums), a.sum(1))
    np.testing.assert_allclose(np.array(c), a - a.mean(1, keepdims=True), rtol=1e-5, atol=1e-5)


def test_wrong_argument_raises_and_all_goes_on(tvm: tvm_ffi.Module) -> None:
    add_scaled = mtf.op(tvm.add_scaled, outputs=like_first)
    x = mx.ones(64)
    with pytest.raises(Exception, match="add_scaled"):
        mx.eval(add_scaled(x, mx.ones((2, 32)), alpha=1.0))
    np.testing.assert_array_equal(np.array(add_scaled(x, x, alpha=1.0)), np.full(64, 2.0))


@pytest.fixture(scope="module")
def gelu(tmp_path_factory: pytest.TempPathFactory) -> mtf.Op:
    """The kernel of examples/tvm_kernel."""
    library = tmp_path_factory.mktemp("gelu") / "gelu.so"
    root = ARTIFACTS.parents[1]
    command = [root / ".venv-tvm/bin/python", root / "examples/tvm_kernel/compile.py"]
    subprocess.run([*command, "metal", library], check=True, timeout=120)
    return mtf.op(mtf.load_module(library).gelu, outputs=like_first, offsets=False)


def test_kernel_of_the_example(gelu: mtf.Op) -> None:
    x = np.random.default_rng().normal(size=(3, 7, 50)).astype(np.float32)
    expected = x * (1 + np.vectorize(math.erf)(x / math.sqrt(2))) / 2
    np.testing.assert_allclose(np.array(gelu(mx.array(x))), expected, atol=1e-5)
    np.testing.assert_allclose(np.array(gelu(mx.array(x)[1:])), expected[1:], atol=1e-5)


def test_kernel_folder(kernels_path: Path, tmp_path: Path) -> None:
    variant = tmp_path / "build" / "tvm-ffi-metal"
    variant.mkdir(parents=True)
    suffix = ".dylib" if sys.platform == "darwin" else ".so"
    shutil.copy(kernels_path, variant / f"kernels{suffix}")
    a, b = random(100), random(100)
    add = mtf.load_kernel(tmp_path, name="add")
    y = mtf.op(add, outputs=like_first)(mx.array(a), mx.array(b))
    np.testing.assert_array_equal(np.array(y), a + b)
    x, z = mx.array(a), mx.zeros(100)
    mx.eval(x, z)
    add(x, x, z)
    np.testing.assert_array_equal(np.array(z), a + a)


def tilelang(name: str) -> object:
    return mtf.metal.from_tilelang(ARTIFACTS / "tilelang" / f"{name}.json")


def test_tilelang_dynamic_shape_and_scalars() -> None:
    scale_add = tilelang("scale_add")
    for n in (1, 128, 1000):
        a = random(n)
        y = scale_add(mx.array(a), alpha=0.5, shift=-3)
        np.testing.assert_array_equal(np.array(y), a * np.float32(0.5) - 3)


def test_tilelang_two_kernels() -> None:
    a = random(40, 64)
    mean, c = tilelang("center_rows")(mx.array(a))
    np.testing.assert_allclose(np.array(mean), a.mean(1), rtol=1e-6)
    np.testing.assert_allclose(np.array(c), a - a.mean(1, keepdims=True), rtol=1e-5, atol=1e-5)


def test_tilelang_in_place() -> None:
    update = tilelang("update_cache")
    a, row = random(10, 64), random(64)
    cache = mx.array(a)
    y = update(cache, mx.array(row), position=4)
    expected = a.copy()
    expected[4] = row
    np.testing.assert_array_equal(np.array(y), expected)
    np.testing.assert_array_equal(np.array(cache), a)


def test_tilelang_in_place_takes_the_memory_that_is_donated(sim: tvm_ffi.Module) -> None:
    update = tilelang("update_cache")
    a, row = random(10, 64), random(64)
    cache, new = mx.array(a), mx.array(row)
    mx.eval(cache, new)
    counts = []
    for given in (lambda: cache + 1.0, lambda: cache):
        sim.reset_counts()
        y = update(given(), new, position=4)
        mx.eval(y)
        counts.append(dict(sim.counts())["dispatches"])
    assert counts == [2, 2]  # the sum or a copy, and the kernel
    np.testing.assert_array_equal(np.array(y)[4], row)


def test_tilelang_slices_are_copied() -> None:
    a = random(300)
    y = tilelang("scale_add")(mx.array(a)[7:], alpha=2.0, shift=0)
    np.testing.assert_array_equal(np.array(y), a[7:] * 2)


def test_tilelang_matrix_product_with_simdgroups() -> None:
    a, b = random(64, 64, dtype="float16"), random(64, 64, dtype="float16")
    y = tilelang("matmul")(mx.array(a), mx.array(b))
    np.testing.assert_array_equal(np.array(y), a.astype("float32") @ b.astype("float32"))


def test_tilelang_empty() -> None:
    assert tilelang("scale_add")(mx.zeros(0), alpha=1.0, shift=0).shape == (0,)


# As on a Mac, where importing TileLang sets the variable, and ops need no exchange of arrays.
LIVE = f"""
import os
os.environ["TVM_FFI_SKIP_DLPACK_C_EXCHANGE_API"] = "1"
import tilelang
from tilelang import tvm
import mlx.core as mx
import mlx_tvm_ffi as mtf
import numpy as np

sys.path.insert(0, "{ARTIFACTS.parents[1]}/tests/artifacts")
import make_tilelang as made

mx.set_default_device(mx.gpu)

def op(function):
    with tvm.transform.PassContext(), tvm.target.Target("metal"):
        return mtf.metal.from_tilelang(tilelang.lower(function, target="metal"))

a = np.random.default_rng().integers(-9, 9, (40, 64)).astype(np.float32)
x = mx.array(a)
row = mx.array(a[0])
mean, centred = op(made.center_rows)(x)
np.testing.assert_allclose(np.array(mean), a.mean(1), rtol=1e-6)
np.testing.assert_allclose(np.array(centred), a - a.mean(1, keepdims=True), rtol=1e-5, atol=1e-5)
y = op(made.update_cache)(x, row, position=4)
np.testing.assert_array_equal(np.array(y)[4], a[0])
np.testing.assert_array_equal(np.array(op(made.scale_add)(row, alpha=2.0, shift=1)), a[0] * 2 + 1)
"""


@pytest.mark.parametrize("order", [None], ids=["once"])
def test_tilelang_in_one_process(run_with: Callable[..., None], order: None) -> None:
    run_with("tilelang", LIVE)
