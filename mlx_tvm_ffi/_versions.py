"""The versions that this build works with, checked before anything of it is loaded.

MLX promises no C++ ABI: with another version than the one built with, loading ``_core`` fails with
an undefined symbol or, worse, does not. tvm-ffi's C ABI holds over a range of versions.
"""

from __future__ import annotations

import re
import sys
from importlib.metadata import PackageNotFoundError, distribution
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import ModuleType

# 0.1.13 itself, not its post releases, has modules of another layout than all the others.
TVM_FFI_RANGE = ">=0.1.11,!=0.1.13,<0.1.16"


def _supports_tvm_ffi(version: str) -> bool:
    match = re.match(r"(\d+)\.(\d+)\.(\d+)", version)
    if match is None or version == "0.1.13":
        return False
    return (0, 1, 11) <= tuple(map(int, match.groups())) < (0, 1, 16)


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


def built() -> ModuleType:
    """Give the module that CMake wrote beside what it built; raise ImportError without one."""
    try:
        from mlx_tvm_ffi import _built  # noqa: PLC0415
    except ImportError:
        message = (
            "[mlx_tvm_ffi] expected an installed package, got its source folder, without what is "
            f"built. Start Python in another folder, or run: {sys.executable} -m pip install -e ."
        )
        raise ImportError(message) from None
    return _built


def check_mlx() -> str:
    """Give the version of the installed MLX; raise ImportError unless it is the one built with."""
    version: str = built().MLX_VERSION
    expected = f"[mlx_tvm_ffi] mlx: expected version {version}, which this package was built with"
    mend = _pip_install(_mlx_requirement(version))
    try:
        import mlx.core as mx  # noqa: PLC0415
    except ImportError as error:
        message = f"{expected}, got an import that fails: {error}. {mend}"
        raise ImportError(message) from error
    found: str = mx.__version__  # type: ignore[attr-defined]
    if found != version:
        message = f"{expected}, got {found}. {mend}"
        raise ImportError(message)
    return found


def check_tvm_ffi() -> str:
    """Give the version of the installed tvm-ffi; raise ImportError unless it is in the range."""
    # Its __version__, since TVMFFIGetVersion is off by one in several releases.
    import tvm_ffi  # noqa: PLC0415

    found: str = tvm_ffi.__version__
    if not _supports_tvm_ffi(found):
        message = (
            f"[mlx_tvm_ffi] tvm_ffi: expected version {TVM_FFI_RANGE}, got {found}. "
            f"{_pip_install('apache-tvm-ffi' + TVM_FFI_RANGE)}"
        )
        raise ImportError(message)
    return found
