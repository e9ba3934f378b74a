"""Hugging Face kernel folders: the variant that fits, its digests, its functions."""

from __future__ import annotations

import base64
import hashlib
import json
import platform
import shutil
from typing import TYPE_CHECKING

import mlx.core as mx
import pytest
import tvm_ffi

import mlx_tvm_ffi as mtf
from mlx_tvm_ffi import _kernel_folder

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.cpu

CPU = {"arm64": "aarch64", "AMD64": "x86_64"}.get(platform.machine(), platform.machine())
OS = platform.system().lower()
SUFFIX = ".dylib" if OS == "darwin" else ".so"
FITTING = f"tvm-ffi01-cpu-{CPU}-{OS}"
ID = "_rows_cpu_1a2b3c"


@pytest.fixture
def folder(tmp_path: Path, library_path: Callable[[str], Path]) -> Path:
    """A kernel folder with a variant that fits, as kernel-builder makes it."""
    variant = tmp_path / "rows" / "build" / FITTING
    variant.mkdir(parents=True)
    shutil.copy(library_path("kernel_folder"), variant / (ID + SUFFIX))
    (variant / "__init__.py").write_text("import torch\n")
    write_metadata(variant)
    return tmp_path / "rows"


def write_metadata(variant: Path, **changes: object) -> None:
    """Write metadata with the digest of what is there."""
    files = {
        path.name: base64.b64encode(hashlib.sha256(path.read_bytes()).digest()).decode()
        for path in variant.iterdir()
        if path.name != "metadata.json"
    }
    metadata = {"id": ID, "digest": {"algorithm": "sha256", "files": files}, **changes}
    (variant / "metadata.json").write_text(json.dumps(metadata))


def test_function_directly_and_as_op(folder: Path) -> None:
    negate = mtf.load_kernel(folder, name="negate")
    x, y = mx.array([1.0, 2.0]), mx.zeros(2)
    mx.eval(x, y)
    negate(x, y)
    assert y.tolist() == [-1.0, -2.0]
    assert mtf.op(negate, outputs=lambda x: x)(x).tolist() == [-1.0, -2.0]


def test_module_without_a_name(folder: Path) -> None:
    assert isinstance(mtf.load_kernel(str(folder)), tvm_ffi.Module)


def test_missing_function_lists_those_that_are_there(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"got 'relu'. It has: double_it, negate\."):
        mtf.load_kernel(folder, name="relu")


def test_without_metadata(folder: Path) -> None:
    (folder / "build" / FITTING / "metadata.json").unlink()
    assert mtf.load_kernel(folder, name="negate")


def test_folder_without_build(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="expected one with build/ in it"):
        mtf.load_kernel(tmp_path)


@pytest.mark.parametrize(("given", "name"), [(None, None), (5, None), (".", 5)])
def test_no_folder_or_name(given: object, name: object) -> None:
    with pytest.raises(TypeError, match="expected a folder of str or Path and a name of str"):
        mtf.load_kernel(given, name=name)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        (f"tvm-ffi09-cpu-{CPU}-{OS}", "is for another tvm-ffi"),
        (f"tvm-ffi01-cpu-{CPU}-plan9", f"is for plan9, not {OS}"),
        (f"tvm-ffi01-cpu-riscv-{OS}", f"is for riscv, not {CPU}"),
        (f"tvm-ffi01-rocm63-{CPU}-{OS}", "is for rocm, which MLX does not have here"),
        (f"torch29-cxx11-cu130-{CPU}-{OS}", "is not for tvm-ffi"),
        ("tvm-ffi-xpu", "is for xpu"),
        ("something", "is no variant's name"),
    ],
)
def test_variants_that_do_not_fit_are_listed(folder: Path, name: str, reason: str) -> None:
    (folder / "build" / FITTING).rename(folder / "build" / name)
    with pytest.raises(FileNotFoundError, match=f"got: {name} {reason}"):
        mtf.load_kernel(folder)


@pytest.mark.parametrize("name", ["tvm-ffi-cpu", "tvm-ffi-universal"])
def test_noarch_variants(folder: Path, name: str) -> None:
    (folder / "build" / FITTING).rename(folder / "build" / name)
    assert mtf.load_kernel(folder, name="negate")


# As on a Mac, and where MLX has CUDA 13: which of the variants is taken.
CUDA = ("cu130", "cu132", "cu126")


@pytest.mark.parametrize(
    ("backend", "names", "taken"),
    [
        ("metal", ["metal-aarch64-darwin", "cpu-aarch64-darwin"], "metal-aarch64-darwin"),
        ("metal", ["cpu-aarch64-darwin", "metal-x86_64-darwin"], "cpu-aarch64-darwin"),
        ("metal", ["metal", "universal", "cpu-aarch64-darwin"], "metal"),
        ("cu", [f"{cuda}-x86_64-linux" for cuda in CUDA], "cu130-x86_64-linux"),
        ("cu", ["cuda", "cu130-x86_64-linux"], "cu130-x86_64-linux"),
        ("cu", ["cu126-x86_64-linux", "cpu-x86_64-linux", "cuda"], "cuda"),
        ("cu", ["cu130-aarch64-linux", "cpu-x86_64-linux", "metal"], "cpu-x86_64-linux"),
    ],
)
def test_variant_of_another_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str, names: list[str], taken: str
) -> None:
    cpu, os = ("aarch64", "darwin") if backend == "metal" else ("x86_64", "linux")
    system = _kernel_folder._System(cpu, os, 26, "01", (backend, "cpu"))
    monkeypatch.setattr(_kernel_folder, "_system", lambda: system)
    monkeypatch.setattr(_kernel_folder, "_cuda_major", lambda: 13)
    for name in names:
        (tmp_path / "build" / f"tvm-ffi{'01' if '-' in name else ''}-{name}").mkdir(parents=True)
    with pytest.raises(FileNotFoundError, match=rf"one library .*-{taken}', got: nothing"):
        mtf.load_kernel(tmp_path)


def test_metal_variant_needs_macos_26(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    system = _kernel_folder._System("aarch64", "darwin", 15, "01", ("metal", "cpu"))
    monkeypatch.setattr(_kernel_folder, "_system", lambda: system)
    (tmp_path / "build" / "tvm-ffi01-metal-aarch64-darwin").mkdir(parents=True)
    with pytest.raises(FileNotFoundError, match="aarch64-darwin needs macOS 26, not 15"):
        mtf.load_kernel(tmp_path)


def test_arch_variant_comes_before_noarch(folder: Path) -> None:
    (folder / "build" / "tvm-ffi-universal").mkdir()
    assert mtf.load_kernel(folder, name="negate")


def test_damaged_file(folder: Path) -> None:
    library = folder / "build" / FITTING / (ID + SUFFIX)
    library.write_bytes(library.read_bytes() + b"x")
    with pytest.raises(ValueError, match=rf"{ID}.*expected a file with the sha256 digest"):
        mtf.load_kernel(folder)


def test_missing_and_added_files(folder: Path) -> None:
    variant = folder / "build" / FITTING
    (variant / "extra.py").write_text("")
    with pytest.raises(ValueError, match=r"extra.py: .* got a file that is not listed"):
        mtf.load_kernel(folder)
    write_metadata(variant)
    (variant / "extra.py").unlink()
    with pytest.raises(ValueError, match=r"extra.py: .* got no file"):
        mtf.load_kernel(folder)


def test_unknown_digest(folder: Path) -> None:
    write_metadata(folder / "build" / FITTING, digest={"algorithm": "md5", "files": {}})
    with pytest.raises(ValueError, match="expected a digest by sha256 or sha512, got 'md5'"):
        mtf.load_kernel(folder)


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ("{", "a JSON object"),
        ("[]", "a JSON object"),
        ("[" * 100_000, "a JSON object"),
        ('{"digest": 5}', "a digest with an algorithm and files"),
        ('{"digest": {"algorithm": "sha256", "files": 5}}', "a digest with an algorithm and files"),
    ],
)
def test_damaged_metadata(folder: Path, metadata: str, expected: str) -> None:
    (folder / "build" / FITTING / "metadata.json").write_text(metadata)
    with pytest.raises(ValueError, match=f"metadata.json: expected {expected}"):
        mtf.load_kernel(folder)


def test_several_libraries(folder: Path) -> None:
    variant = folder / "build" / FITTING
    shutil.copy(variant / (ID + SUFFIX), variant / ("other" + SUFFIX))
    write_metadata(variant)
    assert mtf.load_kernel(folder, name="negate")  # metadata says which
    write_metadata(variant, id="neither")
    with pytest.raises(FileNotFoundError, match=r"expected one library .* got: .*other"):
        mtf.load_kernel(folder)


def test_library_that_does_not_load(folder: Path) -> None:
    variant = folder / "build" / FITTING
    (variant / (ID + SUFFIX)).write_bytes(b"no library")
    write_metadata(variant)
    with pytest.raises(RuntimeError, match="expected a library that loads here"):
        mtf.load_kernel(folder)


@pytest.mark.parametrize("part", [0.001, 0.1, 0.3, 0.5])
def test_library_cut_short(folder: Path, run_python: Callable[..., object], part: float) -> None:
    library = folder / "build" / FITTING / (ID + SUFFIX)
    data = library.read_bytes()
    library.write_bytes(data[: int(part * len(data))])
    (library.parent / "metadata.json").unlink()
    # Another process, since the system ends one that uses what is not there.
    run_python(
        f"import mlx_tvm_ffi as mtf\n"
        f"try: mtf.load_kernel({str(folder)!r})\n"
        f"except RuntimeError as error: assert 'path: expected' in str(error), error\n"
        f"else: raise AssertionError"
    )
