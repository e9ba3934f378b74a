"""The public headers compile alone, without a warning, and stream.h without C++ and without MLX."""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import mlx.core as mx
import pybind11
import pytest
import tvm_ffi

ROOT = Path(__file__).parents[1]
INCLUDE = ROOT / "cpp" / "include"
TVM_FFI = [tvm_ffi.libinfo.find_include_path(), tvm_ffi.libinfo.find_dlpack_include_path()]
MLX = [*TVM_FFI, Path(mx.__file__).parent / "include"]
PYTHON = [*MLX, pybind11.get_include(), sysconfig.get_path("include")]
WARNINGS = ["-Wall", "-Wextra", "-Wpedantic", "-Wconversion", "-Werror"]


def zig(compiler):
    return [sys.executable, "-m", "ziglang", compiler]


def compile_alone(compiler, standard, header, folders, tmp_path):
    language = "c" if standard.startswith("c1") else "c++"
    source = tmp_path / f"alone.{language.replace('++', 'c')}"
    source.write_text(f"#include <mlx_tvm_ffi/{header}>\n")
    command = [*compiler, f"-std={standard}", "-O1", *WARNINGS, "-I", str(INCLUDE)]
    for folder in folders:
        command += ["-isystem", str(folder)]
    command += ["-c", str(source), "-o", str(tmp_path / "alone.o")]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)


@pytest.mark.parametrize(
    ("compiler", "standard", "header", "folders"),
    [
        (["gcc"], "c11", "stream.h", TVM_FFI),
        (["g++"], "c++17", "stream.h", TVM_FFI),
        (["g++"], "c++20", "op.h", MLX),
        (["g++"], "c++20", "pybind11.h", PYTHON),
    ],
)
def test_gcc(compiler, standard, header, folders, tmp_path):
    result = compile_alone(compiler, standard, header, folders, tmp_path)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    ("compiler", "standard", "header", "folders"),
    [
        ("cc", "c11", "stream.h", TVM_FFI),
        ("c++", "c++17", "stream.h", TVM_FFI),
        ("c++", "c++20", "op.h", MLX),
    ],
)
def test_clang(compiler, standard, header, folders, tmp_path):
    pytest.importorskip("ziglang", reason="ziglang brings the clang")
    result = compile_alone(zig(compiler), standard, header, folders, tmp_path)
    assert result.returncode == 0, result.stderr


def test_mlx_is_not_within_reach_of_stream_h(tmp_path):
    assert compile_alone(["g++"], "c++20", "op.h", TVM_FFI, tmp_path).returncode != 0


def test_a_warning_is_caught(tmp_path, monkeypatch):
    header = tmp_path / "mlx_tvm_ffi" / "stream.h"
    header.parent.mkdir()
    header.write_text("inline short Narrow(long wide) { return wide; }\n")
    monkeypatch.setitem(globals(), "INCLUDE", tmp_path)
    result = compile_alone(["g++"], "c++17", "stream.h", [], tmp_path)
    assert "-Werror=conversion" in result.stderr


def blocks(language):
    text = (ROOT / "docs" / "stream-interface.md").read_text()
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


@pytest.mark.parametrize(
    ("compiler", "standard", "block"),
    [
        *((["g++", "-x", "c++"], "c++17", block) for block in blocks("cpp")),
        *((["gcc", "-x", "c"], "c11", block) for block in blocks("c")),
    ],
)
def test_the_code_in_the_documentation(compiler, standard, block, tmp_path):
    source = tmp_path / "block"
    source.write_text(block)
    command = [*compiler, f"-std={standard}", *WARNINGS, "-I", str(INCLUDE), "-fsyntax-only"]
    for folder in TVM_FFI:
        command += ["-isystem", str(folder)]
    result = subprocess.run([*command, source], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
