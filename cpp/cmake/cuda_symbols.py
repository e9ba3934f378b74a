"""Check that what the package needs of MLX is exported by MLX's CUDA build.

The package is built with MLX's CPU build, which leaves the symbols of the CUDA backend open: only loading it on a
machine with a GPU would tell. This reads symbol tables instead; it needs ``nm`` and no GPU.

    python cmake/cuda_symbols.py LIBMLX PACKAGE_FOLDER
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import tvm_ffi.libinfo

# Everything of MLX, tvm-ffi and this package has one of these in its name. The rest is of the compiler, Python and the
# system; and of libcuda, which only the driver brings.
OURS = re.compile("3mlx4core|mlx_tvm_ffi|TVMFFI")


def symbols(library: Path, *options: str) -> set[str]:
    """Names in a library's dynamic table, without versions."""
    command = ["nm", "-D", "-P", *options, library]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {line.split()[0].split("@")[0] for line in listing.splitlines()}


def needed(library: Path) -> set[str]:
    """Names that must come from elsewhere; weak ones may stay open."""
    command = ["nm", "-D", "-P", "--undefined-only", library]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {
        name.split("@")[0] for name, kind, *_ in map(str.split, listing.splitlines()) if kind == "U"
    }


def missing(libmlx: Path, package: Path) -> dict[str, set[str]]:
    """For each library of the package, what nothing it is loaded with exports."""
    libraries = sorted([*package.glob("lib/*.so"), *package.glob("_core*.so")])
    exported = symbols(libmlx, "--defined-only")
    exported |= symbols(Path(tvm_ffi.libinfo.find_libtvm_ffi()), "--defined-only")
    for library in libraries:
        exported |= symbols(library, "--defined-only")
    open_names = {}
    for library in libraries:
        names = {name for name in needed(library) - exported if OURS.search(name)}
        if names:
            open_names[library.name] = names
    return open_names


def main() -> None:
    """Print what is missing, and fail if anything is."""
    libmlx, package = map(Path, sys.argv[1:])
    cuda = package / "lib" / "libmlx_tvm_ffi_cuda.so"
    if not cuda.exists():
        sys.exit(
            f"{cuda}: expected the CUDA backend, got no such file. Build the package with MLX 0.32.4."
        )
    problems = missing(libmlx, package)
    for library, names in problems.items():
        for name in sorted(names):
            plain = subprocess.run(
                ["c++filt", name], capture_output=True, text=True, check=True
            ).stdout.strip()
            print(f"{library} needs {plain}, which {libmlx} does not export.")
    if problems:
        sys.exit(1)
    print(f"{package}: all that it needs of MLX is exported by {libmlx}.")


if __name__ == "__main__":
    main()
