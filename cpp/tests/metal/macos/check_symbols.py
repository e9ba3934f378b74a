"""Compile the Metal sources for macOS, and check that MLX's real library exports what they need.

For every supported version of MLX, against its macOS package.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

import lief
import tvm_ffi

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from toolchain import ROOT, macos_cxx, mlx_metal  # noqa: E402

VERSIONS = ("0.32.1", "0.32.2", "0.32.3", "0.32.4")
USES_METAL = re.compile(r'#include [<"](Metal/|mlx/backend/metal/|backend/metal_)')
OF_MLX = re.compile(r"^__Z(?!NK?11mlx_tvm_ffi).*(3mlx4core|N2NS|N3MTL|N2CA)")
EXTERNAL, TYPE, UNDEFINED = 0x01, 0x0E, 0x00  # bits of a Mach-O symbol's type


def metal_sources() -> list[Path]:
    """Return the package's sources that use Metal or MLX's Metal headers."""
    sources = sorted((ROOT / "cpp" / "src").rglob("*.cc"))
    return [source for source in sources if USES_METAL.search(source.read_text())]


@cache
def exported(version: str) -> frozenset[str]:
    """Return what MLX's macOS library exports."""
    library = lief.MachO.parse(str(mlx_metal(version) / "lib" / "libmlx.dylib"))
    return frozenset(symbol.name for symbol in library.at(0).exported_symbols)


def needed(objects: list[Path]) -> set[str]:
    """Return the symbols of MLX and metal-cpp that objects use and do not define."""
    defined, undefined = set(), set()
    for file in objects:
        binary = lief.MachO.parse(str(file))
        for symbol in binary.at(0).symbols:
            if symbol.raw_type & EXTERNAL:
                known = undefined if symbol.raw_type & TYPE == UNDEFINED else defined
                known.add(symbol.name)
    return {name for name in undefined - defined if OF_MLX.match(name)}


def check(sources: list[Path], version: str) -> list[str]:
    """Return what is wrong with the sources on macOS with an MLX version."""
    mlx = mlx_metal(version) / "include"
    tvm = Path(tvm_ffi.__file__).parent / "include"
    folders = [HERE / "include", mlx / "metal_cpp", mlx, tvm]
    command = [*macos_cxx(), "-D_METAL_", "-DMLX_TVM_FFI_METAL"]
    command += ["-Wall", "-Wextra", "-Wconversion", "-Werror", "-Wno-unused-command-line-argument"]
    command += [f"-I{ROOT}/cpp/include", f"-I{ROOT}/cpp/src"]
    command += [option for folder in folders for option in ("-isystem", str(folder))]
    environment = {**os.environ, "LD_PRELOAD": ""}
    with tempfile.TemporaryDirectory() as folder:
        objects = []
        for source in sources:
            objects.append(Path(folder) / f"{source.stem}.o")
            result = subprocess.run(
                [*command, "-c", source, "-o", objects[-1]],
                env=environment,
                capture_output=True,
                text=True,
                check=False,
            )
            if result.returncode:
                return [f"{source.name} does not compile:\n{result.stderr}"]
        symbols = needed(objects)
    missing = sorted(symbols - exported(version))
    found = f"{len(sources)} sources, {len(symbols)} symbols, {len(missing)} missing"
    sys.stdout.write(f"MLX {version}: {found}\n")
    return [f"libmlx.dylib does not export {name}" for name in missing]


if __name__ == "__main__":
    problems = [
        f"MLX {version}: {problem}"
        for version in VERSIONS
        for problem in check(metal_sources(), version)
    ]
    sys.exit("\n".join(problems) or None)
