"""Measure the C++ SDK: a call against MLX's own op, the libraries' sizes, what headers cost.

    python benchmarks/sdk.py

Needs cmake, ninja and a C++20 compiler. What is compared runs in turn; figures are medians.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import mlx.core as mx
import pybind11
import tvm_ffi

from mlx_tvm_ffi import _core

LIB = Path(__file__).parent / "lib" / "sdk"
PACKAGE = Path(_core.__file__).parent
TVM_FFI = [tvm_ffi.libinfo.find_include_path(), tvm_ffi.libinfo.find_dlpack_include_path()]
MLX = [*TVM_FFI, str(Path(mx.__file__).parent / "include")]
PYTHON = [*MLX, pybind11.get_include(), sysconfig.get_path("include")]
HEADERS = {
    "nothing": ("17", "", []),
    "tvm/ffi/function.h": ("17", "#include <tvm/ffi/function.h>", TVM_FFI),
    "mlx_tvm_ffi/stream.h": ("17", "#include <mlx_tvm_ffi/stream.h>", TVM_FFI),
    "mlx/array.h": ("20", "#include <mlx/array.h>\n#include <mlx/primitives.h>", MLX),
    "mlx_tvm_ffi/op.h": ("20", "#include <mlx_tvm_ffi/op.h>", MLX),
    "pybind11/pybind11.h": ("20", "#include <pybind11/pybind11.h>", PYTHON),
    "mlx_tvm_ffi/pybind11.h": ("20", "#include <mlx_tvm_ffi/pybind11.h>", PYTHON),
}


def run(*command: str) -> str:
    """Run a command, and give what it prints."""
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def calls(folder: str) -> None:
    """Print what a call costs."""
    cmake_dir = run(sys.executable, "-m", "mlx_tvm_ffi", "--cmake-dir").strip()
    options = [f"-Dmlx_tvm_ffi_ROOT={cmake_dir}", f"-DPython_EXECUTABLE={sys.executable}"]
    run("cmake", "-S", str(LIB), "-B", folder, "-G", "Ninja", *options)
    run("cmake", "--build", folder)
    lines = run(f"{folder}/call").splitlines()
    times = {name: float(value) for name, value in map(str.split, lines)}
    for what, text in ("build", "building one op"), ("chain", "chain of 1,000, built and run"):
        theirs = times[f"{what}_sin"]
        for name in "call", "apply":
            ours = times[f"{what}_{name}"]
            ratio = f"{ours / theirs:.2f}"
            print(f"{text:32} {name:6} {ours:8.0f} ns   MLX's sin {theirs:8.0f} ns   {ratio}")


def sizes() -> None:
    """Print what the libraries weigh."""
    for path in sorted([*(PACKAGE / "lib").iterdir(), Path(_core.__file__)]):
        print(f"{path.name:48} {path.stat().st_size / 1024:8.0f} KiB")


def headers(folder: str, rounds: int = 5) -> None:
    """Print what a file with nothing but one header takes of the CPU to compile."""
    source = Path(folder) / "header.cc"
    for name, (standard, text, folders) in HEADERS.items():
        source.write_text(text + "\n")
        includes = [option for path in folders for option in ("-isystem", path)]
        command = ["g++", f"-std=c++{standard}", "-O2", "-I", str(PACKAGE / "include"), *includes]
        seconds = []
        for _ in range(rounds):
            start = os.times().children_user
            run(*command, "-c", str(source), "-o", f"{folder}/header.o")
            seconds.append(os.times().children_user - start)
        print(f"{name:32} {statistics.median(seconds):8.2f} s")


if __name__ == "__main__":
    os.environ["CCACHE_DISABLE"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        calls(folder)
        sizes()
        headers(folder)
