"""Libraries that the real TVM made (``make artifacts``), in processes without TVM."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import mlx.core as mx
import numpy as np
import pytest
import tvm_ffi

import mlx_tvm_ffi as mtf

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).parents[1]
ARTIFACTS = ROOT / "build" / "artifacts"
HOSTS = ("c", "llvm")

pytestmark = [
    pytest.mark.cpu,
    pytest.mark.skipif(
        not (ARTIFACTS / "tvm" / ".made").exists(), reason="needs artifacts; run make artifacts"
    ),
]


def expected_rows(x: mx.array) -> np.ndarray:
    rows = np.array(x) * 2
    rows[0] += np.arange(64)
    return rows


@pytest.mark.parametrize("host", HOSTS)
def test_cpu_function_as_op(host: str) -> None:
    double_rows = mtf.op(
        mtf.load_module(ARTIFACTS / "tvm" / f"cpu_{host}.so").double_rows, outputs=lambda x: x
    )
    # Slices start anywhere, the second one also at addresses that no vector load takes.
    base = mx.random.normal((9, 64))
    for x in (base, base[1:5], mx.random.normal((4, 65))[:, 1:]):
        np.testing.assert_allclose(np.array(double_rows(x)), expected_rows(x), rtol=1e-5)


@pytest.mark.parametrize("host", HOSTS)
def test_cpu_function_called_directly(host: str) -> None:
    double_rows = mtf.load_module(ARTIFACTS / "tvm" / f"cpu_{host}.so").double_rows
    x, y = mx.random.normal((4, 64)), mx.zeros((4, 64))
    mx.eval(x, y)
    before = np.array(x)
    double_rows(x, y)
    np.testing.assert_allclose(np.array(y), expected_rows(x), rtol=1e-5)
    np.testing.assert_array_equal(np.array(x), before)


def test_cpu_function_in_place() -> None:
    double_rows = mtf.load_module(ARTIFACTS / "tvm" / "cpu_llvm.so").double_rows
    x = mx.ones((2, 64))
    mx.eval(x)
    double_rows(x, x)
    np.testing.assert_array_equal(np.array(x), expected_rows(mx.ones((2, 64))))


@pytest.mark.parametrize("host", HOSTS)
def test_metal_library_loads_and_says_what_it_wants(host: str) -> None:
    module = mtf.load_module(ARTIFACTS / "tvm" / f"metal_{host}.so")
    x = mx.ones(4)
    mx.eval(x)
    with pytest.raises(ValueError, match="device_type"):
        module.add_scaled(x, x, x, 1.0)
    assert not module.implements_function("nothing")


def test_nothing_stays_registered() -> None:
    mtf.load_module(ARTIFACTS / "tvm" / "metal_c.so")
    name = "ffi.Module.load_from_bytes.metal"
    assert tvm_ffi.get_global_func(name, allow_missing=True) is None
    assert tvm_ffi.get_global_func("__tvm_set_device", allow_missing=True) is None


def test_loader_of_others_is_restored() -> None:
    name = "ffi.Module.load_from_bytes.metal"
    tvm_ffi.register_global_func(name, lambda _: 42)
    try:
        mtf.load_module(ARTIFACTS / "tvm" / "metal_c.so")
        assert tvm_ffi.get_global_func(name)(b"") == 42
    finally:
        tvm_ffi.registry.remove_global_func(name)


def test_damaged_metal_module_is_refused_when_loaded(tmp_path: Path) -> None:
    data = (ARTIFACTS / "tvm" / "metal_c.so").read_bytes()
    library = tmp_path / "damaged.so"
    library.write_bytes(data.replace(b"blockIdx.x", b"blockIdx.w"))
    with pytest.raises(ValueError, match=r"kernel '\w+': .*got 'blockIdx.w'"):
        mtf.load_module(library)


def test_library_with_a_missing_symbol(tmp_path: Path) -> None:
    data = (ARTIFACTS / "tvm" / "metal_c.so").read_bytes()
    library = tmp_path / "missing.so"
    library.write_bytes(data.replace(b"TVMFFIFunctionCall\0", b"TVMFFIFunctionXall\0"))
    with pytest.raises(RuntimeError, match="undefined symbol: TVMFFIFunctionXall"):
        mtf.load_module(library)


def test_no_such_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="path: expected a file"):
        mtf.load_module(tmp_path / "nothing.so")


def test_library_without_tvm(library_path: Callable[[str], Path]) -> None:
    module = mtf.load_module(library_path("kernel_folder"))
    x, y = mx.ones(2), mx.zeros(2)
    mx.eval(x, y)
    module.double_it(x, y)
    assert y.tolist() == [2.0, 2.0]


USE = """
m = mtf.load_module({library!r})
x, y = mx.ones((4, 64)), mx.zeros((4, 64)); mx.eval(x, y)
m.double_rows(x, y)
assert y[1].tolist() == [2.0] * 64
assert mtf.load_module({metal!r}).implements_function("matmul")
"""


@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("other", ["tvm", "torch"])
@pytest.mark.parametrize("host", HOSTS)
def test_in_one_process_with_others(
    run_python: Callable[..., object], order: str, other: str, host: str
) -> None:
    environment = {"tvm": ".venv-tvm", "torch": ".venv-tilelang"}[other]
    python = f"python{sys.version_info.major}.{sys.version_info.minor}"
    packages = ROOT / environment / "lib" / python / "site-packages"
    if not packages.is_dir():
        pytest.skip(f"needs {environment} with {python}")
    if other == "tvm" and tvm_ffi.__version__ < "0.1.14":
        pytest.skip("TVM 0.27 needs a newer tvm-ffi")
    use = USE.format(
        library=str(ARTIFACTS / "tvm" / f"cpu_{host}.so"),
        metal=str(ARTIFACTS / "tvm" / f"metal_{host}.so"),
    )
    paths = f"import sys; sys.path.append({str(packages)!r})"
    ours, theirs = "import mlx.core as mx, mlx_tvm_ffi as mtf", f"import {other}"
    first = [theirs, ours, use] if order == "before" else [ours, use, theirs, use]
    run_python("\n".join([paths, *first]), limit=300)
