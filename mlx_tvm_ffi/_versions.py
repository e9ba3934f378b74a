"""The versions that this build works with, checked before anything of it is loaded.

MLX promises no C++ ABI: with another version than the one built with, loading ``_core`` fails with an
undefined symbol or, worse, does not. tvm-ffi's C ABI holds over a range of versions.
"""

from __future__ import annotations

import re
import sys
from importlib.metadata import PackageNotFoundError, distribution

TVM_FFI_LOWEST = (0, 1, 11)
TVM_FFI_BELOW = (0, 1, 16)


def _text(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


TVM_FFI_RANGE = f">={_text(TVM_FFI_LOWEST)},<{_text(TVM_FFI_BELOW)}"


def _pip_install(requirement: str) -> str:
    return f"Run: {sys.executable} -m pip install '{requirement}'"


def _mlx_requirement(version: str) -> str:
    """Name MLX at a version, with the extra that keeps the installed backend."""
    for extra in ("cpu", "cuda12", "cuda13"):
        try:
            distribution("mlx-" + extra.replace("cuda", "cuda-"))
        except PackageNotFoundError:
            continue
        return f"mlx[{extra}]=={version}"
    return f"mlx=={version}" if sys.platform == "darwin" else f"mlx[cpu]=={version}"


def check_mlx() -> str:
    """Give the version of the installed MLX, the one this package was built with, or raise ImportError."""
    try:
        from mlx_tvm_ffi import _built  # noqa: PLC0415
    except ImportError:
        message = (
            "[mlx_tvm_ffi] expected an installed package, got its source folder, which has no built parts. "
            "Start Python in another folder, or install with: python -m pip install -e ."
        )
        raise ImportError(message) from None
    try:
        import mlx.core as mx  # noqa: PLC0415
    except ImportError as error:
        message = (
            f"[mlx_tvm_ffi] mlx: expected version {_built.MLX_VERSION}, which this package was built with, "
            f"got an import that fails: {error}. {_pip_install(_mlx_requirement(_built.MLX_VERSION))}"
        )
        raise ImportError(message) from error
    found: str = mx.__version__
    if found != _built.MLX_VERSION:
        message = (
            f"[mlx_tvm_ffi] mlx: expected version {_built.MLX_VERSION}, which this package was built with, "
            f"got {found}. {_pip_install(_mlx_requirement(_built.MLX_VERSION))}"
        )
        raise ImportError(message)
    return found


def check_tvm_ffi() -> str:
    """Give the version of the installed tvm-ffi, one in the range, or raise ImportError."""
    # Its __version__, since TVMFFIGetVersion is off by one in several releases.
    import tvm_ffi  # noqa: PLC0415

    found: str = tvm_ffi.__version__
    match = re.match(r"(\d+)\.(\d+)\.(\d+)", found)
    if match is None or not TVM_FFI_LOWEST <= tuple(map(int, match.groups())) < TVM_FFI_BELOW:
        message = (
            f"[mlx_tvm_ffi] tvm_ffi: expected version {TVM_FFI_RANGE}, got {found}. "
            f"{_pip_install('apache-tvm-ffi' + TVM_FFI_RANGE)}"
        )
        raise ImportError(message)
    return found
