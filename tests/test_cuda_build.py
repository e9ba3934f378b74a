"""The CUDA backend where there is no GPU: what it asks of MLX, and that it stays out of the way."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import mlx
import mlx.core as mx
import pytest

ROOT = Path(__file__).parents[1]

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="CUDA is for Linux")


def test_symbol_check_names_what_a_build_of_mlx_lacks():
    spec = importlib.util.spec_from_file_location(
        "cuda_symbols", ROOT / "cpp" / "cmake" / "cuda_symbols.py"
    )
    check = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(check)
    if not (check.PACKAGE / "lib" / "libmlx_tvm_ffi_cuda.so").exists():
        pytest.skip("MLX before 0.32.4 exports nothing to build the CUDA backend on")
    problems = check.missing(Path(next(iter(mlx.__path__))) / "lib" / "libmlx.so")
    if mx.cuda.is_available():
        assert not problems
    else:
        assert "libmlx_tvm_ffi_cuda.so needs mlx::core::cu::CommandEncoder::commit()" in problems
        assert {line.split()[0] for line in problems} == {"libmlx_tvm_ffi_cuda.so"}


@pytest.mark.cpu
def test_without_cuda_in_mlx_nothing_looks_for_it(run_python):
    if mx.cuda.is_available():
        pytest.skip("this MLX has CUDA")
    code = """
import mlx.core as mx, mlx_tvm_ffi as mtf
mx.eval(mx.ones(3))
print(mtf.current_stream(mx.cpu))
maps = open("/proc/self/maps").read()
assert "libmlx_tvm_ffi.so" in maps
assert "libmlx_tvm_ffi_cuda" not in maps and "libcuda" not in maps, maps
try:
    mtf.current_stream(mx.gpu)
except (RuntimeError, ValueError) as error:
    print(error)
"""
    run_python(code)
