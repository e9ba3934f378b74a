"""What all tests share: the device they run on, the kernel libraries, and fresh interpreters.

``DEVICE=cpu`` (the default) or ``DEVICE=gpu`` says which device MLX's default is. Tests that need a
certain one carry a marker: ``cpu``, ``gpu``, ``metal`` or ``cuda``.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import pytest
import tvm_ffi

import mlx_tvm_ffi as mtf

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from mlx_tvm_ffi._core import Op

ROOT = Path(__file__).parents[1]
DEVICE = os.environ.get("DEVICE", "cpu")


def pytest_configure() -> None:
    """Make DEVICE MLX's default device; let builds find this environment's tools and stay here."""
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    os.environ["TVM_FFI_CACHE_DIR"] = str(ROOT / "build" / "tvm_ffi" / Path(sys.prefix).name)
    if DEVICE not in ("cpu", "gpu"):
        message = f"DEVICE: expected cpu or gpu, got {DEVICE!r}."
        raise pytest.UsageError(message)
    device = mx.Device(mx.DeviceType.cpu if DEVICE == "cpu" else mx.DeviceType.gpu, 0)
    if not mx.is_available(device):
        message = "DEVICE=gpu: this MLX has no GPU here. Run with DEVICE=cpu."
        raise pytest.UsageError(message)
    mx.set_default_device(device)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what this device or machine cannot run, and say why."""
    reasons = {
        "cpu": DEVICE != "cpu" and "is about the CPU; run with DEVICE=cpu",
        "gpu": DEVICE != "gpu" and "needs a GPU; run with DEVICE=gpu",
        "metal": (DEVICE != "gpu" or not mx.metal.is_available()) and "needs Metal and DEVICE=gpu",
        "cuda": (DEVICE != "gpu" or not mx.cuda.is_available()) and "needs CUDA and DEVICE=gpu",
    }
    for item in items:
        for marker, reason in reasons.items():
            if reason and item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture
def device() -> mx.Device:
    """MLX's default device, as DEVICE chose it."""
    return mx.default_device()


@pytest.fixture(scope="session")
def library_path() -> Callable[[str], Path]:
    """Give the path of the kernel library made from cpp/tests/NAME.cc. Built once a session.

    With DEVICE=gpu on CUDA also from NAME.cu, and what loops with device.h runs on the GPU.
    """
    build = ROOT / "build" / "cpp_tests" / f"{Path(sys.prefix).name}-{DEVICE}"
    configure = [
        *("cmake", "-S", str(ROOT / "cpp" / "tests"), "-B", str(build), "-G", "Ninja"),
        f"-DPython_EXECUTABLE={sys.executable}",
        f"-Dtvm_ffi_ROOT={tvm_ffi.libinfo.find_cmake_path()}",
        f"-DMLX_TVM_FFI_TESTS_CUDA={DEVICE == 'gpu' and mx.cuda.is_available()}",
    ]
    for command in (configure, ["cmake", "--build", str(build)]):
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode:
            pytest.fail(f"cpp/tests does not build:\n{result.stdout}{result.stderr}", pytrace=False)
    return lambda name: build / "lib" / f"lib{name}.so"


@pytest.fixture(scope="session")
def library(library_path: Callable[[str], Path]) -> Callable[[str], tvm_ffi.Module]:
    """Load the kernel library made from cpp/tests/NAME.cc."""
    return lambda name: tvm_ffi.load_module(library_path(name))


@pytest.fixture
def kernels(library: Callable[[str], tvm_ffi.Module]) -> Iterator[tvm_ffi.Module]:
    """Load the kernels that most tests use. Afterwards nothing waits at their gate."""
    module = library("kernels")
    yield module
    module.open_gate()
    mx.synchronize()


@pytest.fixture
def add_one(kernels: tvm_ffi.Module) -> Op:
    """Give a kernel as an op."""
    return mtf.op(kernels.add_one, outputs=lambda x: x, name="add_one")


@pytest.fixture
def python_kernel(kernels: tvm_ffi.Module) -> Callable[[tvm_ffi.Tensor, tvm_ffi.Tensor], None]:
    """Give add_one as a Python function."""

    def function(x: tvm_ffi.Tensor, y: tvm_ffi.Tensor) -> None:
        kernels.add_one(x, y)

    return function


@pytest.fixture
def run_python(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run code, or an interpreter's arguments, in a fresh process outside the checkout.

    ``env`` adds variables, ``limit`` is in seconds. Fails the test unless the exit status is
    ``expected``.
    """

    def run(
        code: str | list[str],
        *,
        env: dict[str, str] | None = None,
        limit: float = 60,
        expected: int = 0,
    ) -> subprocess.CompletedProcess[str]:
        result = subprocess.run(
            [sys.executable, *(["-c", code] if isinstance(code, str) else code)],
            cwd=tmp_path,
            env={**os.environ, **(env or {})},
            timeout=limit,
            capture_output=True,
            text=True,
            check=False,
        )
        assert result.returncode == expected, f"{result.stdout}{result.stderr}"
        return result

    return run


@pytest.fixture
def run_with(run_python: Callable[..., object]) -> Callable[..., None]:
    """Run code beside ``tvm``, ``torch`` or ``tilelang``, from what ``make artifacts`` installed.

    The process finds this environment's packages and theirs. TileLang's come first, since it takes
    an older tvm-ffi than what is here mostly.
    """

    def run(other: str, code: str, *, theirs_first: bool | None = None, **options: Any) -> None:
        environment = ROOT / (".venv-tvm" if other == "tvm" else ".venv-tilelang")
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        theirs = environment / "lib" / version / "site-packages"
        if not theirs.is_dir() or not (ROOT / "build" / "artifacts" / "tvm" / ".made").exists():
            pytest.skip(f"needs {environment.name} with {version}; run make artifacts")
        paths = [sysconfig.get_path("purelib"), str(theirs)]
        if other == "tilelang" if theirs_first is None else theirs_first:
            paths.reverse()
        find = "".join(f"site.addsitedir({path!r}); " for path in paths)
        run_python(["-S", "-c", f"import site, sys; {find}\n{code}"], limit=300, **options)

    return run
