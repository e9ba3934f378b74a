"""Libraries that the real TVM made (``make artifacts``), in processes without TVM."""

from __future__ import annotations

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


def test_no_path() -> None:
    with pytest.raises(TypeError, match="path: expected a str or a Path, got None"):
        mtf.load_module(None)


def test_bare_file_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ARTIFACTS / "tvm")
    assert mtf.load_module("cpu_llvm.so").implements_function("double_rows")


def test_library_without_tvm(library_path: Callable[[str], Path]) -> None:
    module = mtf.load_module(library_path("kernel_folder"))
    x, y = mx.ones(2), mx.zeros(2)
    mx.eval(x, y)
    module.double_it(x, y)
    assert y.tolist() == [2.0, 2.0]
