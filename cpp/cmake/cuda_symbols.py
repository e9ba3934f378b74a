"""Check that what the package needs of MLX is exported by MLX's CUDA build.

The package is built with MLX's CPU build, which leaves the symbols of the CUDA backend open: only
loading it on a machine with a GPU would tell. This reads symbol tables: it needs nm and no GPU.

    python cpp/cmake/cuda_symbols.py LIBMLX
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import tvm_ffi.libinfo

from mlx_tvm_ffi import _built

PACKAGE = Path(_built.__file__).parent
# Whatever is MLX's, tvm-ffi's or ours has one of these in its name. The rest is of the compiler,
# Python and the system, and of libcuda, which only the driver brings.
CHECKED = re.compile("3mlx4core|mlx_tvm_ffi|TVMFFI")


def symbols(library: Path, option: str) -> dict[str, str]:
    """Read names and their kinds from a library's dynamic table, without versions."""
    command = ["nm", "-D", "-P", option, str(library)]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    fields = map(str.split, listing.splitlines())
    return {name.split("@")[0]: kind for name, kind, *_ in fields}


def plain(name: str) -> str:
    """Give the name as C++ has it."""
    command = ["c++filt", name]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def missing(libmlx: Path) -> list[str]:
    """Say which library of the package needs what, that nothing it is loaded with exports."""
    libraries = sorted([*PACKAGE.glob("lib/*.so"), *PACKAGE.glob("_core*.so")])
    exported: set[str] = set()
    for library in [libmlx, Path(tvm_ffi.libinfo.find_libtvm_ffi()), *libraries]:
        exported |= symbols(library, "--defined-only").keys()
    return [
        f"{library.name} needs {plain(name)}"
        for library in libraries
        for name, kind in sorted(symbols(library, "--undefined-only").items())
        if kind == "U" and CHECKED.search(name) and name not in exported
    ]


def main() -> None:
    """Fail with what is missing, if anything is."""
    (libmlx,) = map(Path, sys.argv[1:])
    if not (PACKAGE / "lib" / "libmlx_tvm_ffi_cuda.so").exists():
        sys.exit(f"{PACKAGE}: expected the CUDA backend in it, got none. Build with MLX 0.32.4.")
    if problems := missing(libmlx):
        sys.exit("\n".join([f"{libmlx} does not export all that it should:", *problems]))


if __name__ == "__main__":
    main()
