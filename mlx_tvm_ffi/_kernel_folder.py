"""Load kernels from Hugging Face kernel folders. Local folders only, and without torch."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import platform
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import tvm_ffi

from mlx_tvm_ffi._load import load_module

_VARIANT = re.compile(
    r"tvm-ffi(?P<version>\d+)-(?P<backend>[a-z]+)(?P<backend_version>\d*)-(?P<cpu>[^-]+)-(?P<os>[^-]+)"
)
_NOARCH = re.compile(r"tvm-ffi-(?P<backend>[a-z]+)")
_LIBRARY = {"darwin": ".dylib", "windows": ".dll"}
# kernel-builder compiles them as Metal 4.
_METAL_NEEDS_MACOS = 26


def load_kernel(
    folder: str | os.PathLike[str], name: str | None = None
) -> tvm_ffi.Module | tvm_ffi.Function:
    """Load a kernel from a Hugging Face kernel folder on this machine.

    Takes the variant under ``build/`` that fits MLX's device, this system and the installed
    tvm-ffi: for example ``tvm-ffi01-metal-aarch64-darwin``. Where ``metadata.json`` has digests,
    every file of the variant must match. Nothing is fetched, and nothing of the folder's Python
    code is run.

    Parameters
    ----------
    folder
        The folder that has ``build/`` in it.
    name
        A function of the kernel. None: all of them.

    Returns
    -------
    kernel
        The function, or with None the module that has them all: to be called directly, or wrapped
        with :func:`mlx_tvm_ffi.op`.

    Raises
    ------
    FileNotFoundError
        There is no such folder, or no variant of it fits: the error says why for each.
    ValueError
        A file does not match its digest, or there is no such function: the error lists those that
        there are.
    RuntimeError
        The system cannot load the library.

    Examples
    --------
    .. code-block:: python

        relu = mtf.op(mtf.load_kernel("relu", name="relu"), outputs=lambda x: x)

    """
    if not isinstance(folder, (str, os.PathLike)) or not isinstance(name, (str, type(None))):
        message = (
            "[mlx_tvm_ffi.load_kernel] expected a folder of str or Path and a name of str or None, "
            f"got {folder!r:.100} and {name!r:.100}."
        )
        raise TypeError(message)
    variant = _choose(Path(folder))
    metadata = _read_metadata(variant)
    _check_digest(variant, metadata)
    library = _find_library(variant, metadata)
    module = load_module(library)
    if name is None:
        return module
    if not module.implements_function(name):
        message = (
            f"[mlx_tvm_ffi.load_kernel] name: expected a function of {library.name}, got {name!r}. "
            f"It has: {', '.join(_functions(library)) or 'none'}."
        )
        raise ValueError(message)
    return module.get_function(name)


@dataclass(frozen=True)
class _System:
    """What a variant has to fit."""

    cpu: str
    os: str
    macos: int
    tvm_ffi: str
    backends: tuple[str, ...]


def _system() -> _System:
    machine = platform.machine().lower()
    backends = ["cpu"]
    if mx.is_available(mx.Device(mx.gpu)):
        backends.insert(0, "metal" if mx.metal.is_available() else "cu")
    major, minor = tvm_ffi.__version__.split(".")[:2]
    return _System(
        cpu={"arm64": "aarch64", "amd64": "x86_64"}.get(machine, machine),
        os=platform.system().lower(),
        macos=int(platform.mac_ver()[0].split(".")[0] or 0),
        tvm_ffi=major + minor,
        backends=tuple(backends),
    )


def _rank(variant: str, system: _System) -> tuple[int, ...] | str:
    """Give an order among the variants that fit (lowest is best), or why this one does not."""
    if noarch := _NOARCH.fullmatch(variant):
        backend = noarch["backend"].replace("cuda", "cu")
        if backend == "universal":
            return (len(system.backends), 1, 0)
        if backend not in system.backends:
            return f"is for {noarch['backend']}"
        return (system.backends.index(backend), 1, 0)
    match = _VARIANT.fullmatch(variant)
    if match is None:
        return "is not for tvm-ffi" if variant.startswith("torch") else "is no variant's name"
    if match["version"] != system.tvm_ffi:
        return f"is for another tvm-ffi than {tvm_ffi.__version__}"
    if match["os"] != system.os:
        return f"is for {match['os']}, not {system.os}"
    if match["cpu"] != system.cpu:
        return f"is for {match['cpu']}, not {system.cpu}"
    backend = match["backend"]
    if backend not in system.backends:
        return f"is for {backend}, which MLX does not have here"
    if backend == "metal" and system.macos < _METAL_NEEDS_MACOS:
        return f"needs macOS {_METAL_NEEDS_MACOS}, not {system.macos}"
    version = int(match["backend_version"] or 0)
    if backend == "cu" and version // 10 != _cuda_major():
        return f"is for CUDA {version // 10}, not {_cuda_major()}"
    # Of CUDA's minor versions the lowest: any driver for MLX's own runs it.
    return (system.backends.index(backend), 0, version)


def _cuda_major() -> int:
    """Give the CUDA major version of the installed MLX."""
    from importlib.metadata import PackageNotFoundError, distribution  # noqa: PLC0415

    for major in (13, 12):
        try:
            distribution(f"mlx-cuda-{major}")
        except PackageNotFoundError:
            continue
        return major
    return 0


def _choose(folder: Path) -> Path:
    build = folder / "build"
    if not build.is_dir():
        message = (
            f"[mlx_tvm_ffi.load_kernel] folder: expected one with build/ in it, "
            f"got {str(folder)!r}. Nothing is fetched: download the kernel first."
        )
        raise FileNotFoundError(message)
    system = _system()
    ranks = {
        entry: _rank(entry.name, system) for entry in sorted(build.iterdir()) if entry.is_dir()
    }
    fitting = {entry: rank for entry, rank in ranks.items() if not isinstance(rank, str)}
    if not fitting:
        found = "; ".join(f"{entry.name} {reason}" for entry, reason in ranks.items()) or "nothing"
        message = (
            f"[mlx_tvm_ffi.load_kernel] folder: expected a variant for this machine "
            f"in {str(build)!r}, got: {found}."
        )
        raise FileNotFoundError(message)
    return min(fitting, key=lambda entry: fitting[entry])


def _read_metadata(variant: Path) -> dict[str, Any]:
    file = variant / "metadata.json"
    if not file.is_file():
        return {}
    try:
        metadata = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        metadata = error
    if not isinstance(metadata, dict):
        message = (
            f"[mlx_tvm_ffi.load_kernel] metadata.json: expected a JSON object in {str(file)!r}, "
            f"got {metadata!r:.200}. Download the kernel again."
        )
        raise ValueError(message)
    return metadata


def _check_digest(variant: Path, metadata: dict[str, Any]) -> None:
    """Compare what lies in the variant with the digests that its metadata gives."""
    digest = metadata.get("digest")
    if digest is None:
        return
    expected = digest.get("files") if isinstance(digest, dict) else None
    if not isinstance(expected, dict):
        message = (
            f"[mlx_tvm_ffi.load_kernel] metadata.json: expected a digest with an algorithm and "
            f"files, got {digest!r:.200} in {str(variant)!r}. Download the kernel again."
        )
        raise ValueError(message)
    algorithm = str(digest.get("algorithm")).lower()
    if algorithm not in ("sha256", "sha512"):
        message = (
            f"[mlx_tvm_ffi.load_kernel] metadata.json: expected a digest by sha256 or sha512, "
            f"got {algorithm!r}. Update mlx-tvm-ffi, or download the kernel again."
        )
        raise ValueError(message)
    found = {
        file.relative_to(variant).as_posix(): base64.b64encode(
            hashlib.new(algorithm, file.read_bytes()).digest()
        ).decode()
        for file in variant.rglob("*")
        if file.is_file() and not _beside_digest(file.relative_to(variant))
    }
    damaged = sorted(
        path for path in expected.keys() | found.keys() if expected.get(path) != found.get(path)
    )
    if damaged:
        path = damaged[0]
        state = (
            "a file that is not listed"
            if path not in expected
            else "no file"
            if path not in found
            else f"one with {found[path]}"
        )
        message = (
            f"[mlx_tvm_ffi.load_kernel] {path}: expected a file with the {algorithm} digest "
            f"{expected.get(path, 'of metadata.json')}, got {state} in {str(variant)!r}. "
            "Download the kernel again."
        )
        raise ValueError(message)


def _beside_digest(path: Path) -> bool:
    """Tell what no digest covers: the metadata that holds it, and what Python writes."""
    return path.name in ("metadata.json", "metadata.json.sigstore") or "__pycache__" in path.parts


def _find_library(variant: Path, metadata: dict[str, Any]) -> Path:
    suffix = _LIBRARY.get(platform.system().lower(), ".so")
    libraries = sorted(path for path in variant.glob(f"*{suffix}") if path.is_file())
    named = [path for path in libraries if path.stem == metadata.get("id")]
    if len(named or libraries) == 1:
        return (named or libraries)[0]
    found = ", ".join(sorted(path.name for path in variant.iterdir())) or "nothing"
    message = (
        f"[mlx_tvm_ffi.load_kernel] folder: expected one library (*{suffix}) in {str(variant)!r}, "
        f"got: {found}."
    )
    raise FileNotFoundError(message)


def _functions(library: Path) -> list[str]:
    """List the functions of a library, by the names in its symbol table."""
    names = re.findall(rb"\0_?__tvm_ffi_(?!_)(\w+)(?=\0)", library.read_bytes())
    return sorted({name.decode() for name in names})
