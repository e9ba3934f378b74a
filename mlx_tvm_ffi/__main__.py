"""The doctor: versions, backends, what is missing and how to get it. Also the folders for C++."""

from __future__ import annotations

import argparse
import os
import platform
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from mlx_tvm_ffi import _versions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def _installed() -> Path:
    """Give the folder of what CMake installed: in an editable install not that of this file."""
    return Path(str(_versions.built().__file__)).parent


def _attempt(check: Callable[[], str]) -> tuple[bool, str]:
    try:
        return True, check()
    except ImportError as error:
        return False, str(error)


def _core() -> str:
    """Load the extension module, which the versions must allow."""
    from mlx_tvm_ffi import _core  # noqa: PLC0415

    return Path(_core.__file__).name


def _backends() -> Iterator[tuple[str, str]]:
    """Yield each kind of device, and what there is or how to get it."""
    import mlx.core as mx  # noqa: PLC0415

    yield "cpu", "works"
    if mx.metal.is_available():
        yield "metal", "works"
    elif sys.platform == "darwin":
        yield "metal", "missing: MLX finds no Metal device here"
    else:
        yield "metal", "missing: needs macOS on Apple silicon"
    if not mx.cuda.is_available():
        yield (
            "cuda",
            "missing: needs an NVIDIA GPU and MLX for CUDA. Run: "
            f"{sys.executable} -m pip install 'mlx[cuda13]=={_versions.check_mlx()}'",
        )
    elif not list((_installed() / "lib").glob("libmlx_tvm_ffi_cuda.*")):
        yield "cuda", "missing: needs a build with MLX 0.32.4 or later, which exports its encoder"
    else:
        yield "cuda", "works"


def _doctor() -> int:
    """Print what is here and what is not. Give 1 where mlx_tvm_ffi cannot be imported, else 0."""
    checks = {
        "mlx-tvm-ffi": lambda: str(_versions.built().VERSION),
        "mlx": _versions.check_mlx,
        "tvm-ffi": _versions.check_tvm_ffi,
        "_core": _core,
    }
    lines = [("python", platform.python_version())]
    healthy = True
    for name, check in checks.items():
        healthy, text = _attempt(check)
        lines.append((name, text))
        if not healthy:
            break
    if healthy:
        lines += _backends()
        if os.environ.get("TVM_FFI_SKIP_DLPACK_C_EXCHANGE_API") == "1":
            lines.append(
                (
                    "direct calls",
                    "slow. Unset TVM_FFI_SKIP_DLPACK_C_EXCHANGE_API in the environment",
                )
            )
    for name, text in lines:
        print(f"{name:12} {text}")
    return 0 if healthy else 1


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m mlx_tvm_ffi",
        description="Without an option: what is here, what is missing, how to get it.",
    )
    parser.add_argument(
        "--cmake-dir", action="store_true", help="print the folder for mlx_tvm_ffi_ROOT"
    )
    parser.add_argument(
        "--include-dir", action="store_true", help="print the folder of the C and C++ headers"
    )
    arguments = parser.parse_args()
    try:
        if arguments.cmake_dir:
            print(_installed() / "share" / "cmake" / "mlx_tvm_ffi")
        elif arguments.include_dir:
            print(_installed() / "include")
        else:
            return _doctor()
    except ImportError as error:
        sys.exit(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
