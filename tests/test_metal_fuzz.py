"""Damaged Metal modules under sanitizers: see cpp/tests/fuzz/metal_serialized.cc."""

from __future__ import annotations

import os
import re
import shutil
import struct
import subprocess
from pathlib import Path

import pytest
import tvm_ffi

ROOT = Path(__file__).parents[1]
ARTIFACTS = ROOT / "build" / "artifacts" / "tvm"


def metal_modules() -> list[bytes]:
    """Give the Metal modules in TVM's libraries, or else one made by hand."""
    metal = struct.pack("<Q", 5) + b"metal"
    modules = []
    for library in sorted(ARTIFACTS.glob("metal_*.so")):
        data = library.read_bytes()
        for match in re.finditer(metal + b"(.{8})(?=" + metal + b")", data, re.DOTALL):
            (size,) = struct.unpack("<Q", match[1])
            modules.append(data[match.end() : match.end() + size])
    if modules:
        return modules

    def text(value: bytes) -> bytes:
        return struct.pack("<Q", len(value)) + value

    types = struct.pack("<QBBHBBH", 2, 3, 64, 1, 2, 32, 1)
    tags = struct.pack("<Q", 2) + text(b"blockIdx.x") + text(b"threadIdx.x")
    extra = struct.pack("<Qii", 2, 0, 0)
    table = struct.pack("<Q", 1) + text(b"fill") * 2 + types + tags + extra
    return [
        text(b"metal") + table + struct.pack("<Q", 1) + text(b"fill") + text(b"kernel void fill()")
    ]


def test_parser_survives_damaged_modules(tmp_path: Path) -> None:
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None:
        pytest.skip("needs a C++ compiler with sanitizers")
    library = Path(tvm_ffi.libinfo.find_libtvm_ffi())
    program = tmp_path / "fuzz"
    sources = [
        "cpp/tests/fuzz/metal_serialized.cc",
        *(f"cpp/src/metal/{name}.cc" for name in ("serialized", "kernel_info")),
    ]
    subprocess.run(
        [
            *(compiler, "-std=c++20", "-O1", "-g", "-fsanitize=address,undefined"),
            *("-fno-sanitize-recover=all", "-Wall", "-Wextra", "-Werror"),
            *("-I", "cpp/src", "-isystem", tvm_ffi.libinfo.find_include_path()),
            *("-isystem", tvm_ffi.libinfo.find_dlpack_include_path()),
            *(*sources, library, f"-Wl,-rpath,{library.parent}", "-o", program),
        ],
        cwd=ROOT,
        check=True,
    )
    seeds = []
    for i, module in enumerate(metal_modules()[:1]):
        seeds.append(tmp_path / f"{i}.bin")
        seeds[-1].write_bytes(module)
    result = subprocess.run(
        [program, *seeds],
        env={**os.environ, "ASAN_OPTIONS": "max_allocation_size_mb=16"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert result.returncode == 0, f"{result.stdout}{result.stderr}"
    assert int(result.stdout.split()[0]) > 100_000
