"""What the Metal tests share: a kernel library, and, where Metal is simulated, orders of work.

On a Mac they run as they are; elsewhere `make metal` puts the simulated Metal of cpp/tests/metal
in place.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import mlx.core as mx
import numpy as np
import pytest
import tvm_ffi

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROOT = Path(__file__).parents[2]
SIMULATOR = os.environ.get("METAL_SIM_LIBRARY")
MAX_MB = 50
# Orders that Metal allows: of dispatches between two barriers, of encoders that nothing orders; and
# how many dispatches MLX puts into one command buffer.
ORDERS = (
    [
        ("encoded", "encoded", 50),
        ("reverse", "reverse", 50),
        ("random", "random", 3),
        ("reverse", "random", 1),
    ]
    if SIMULATOR
    else [None]
)


@pytest.fixture(scope="session")
def simulator() -> tvm_ffi.Module:
    """Give the simulated Metal's functions."""
    if SIMULATOR is None:
        pytest.skip("needs the simulated Metal; run make metal")
    return tvm_ffi.load_module(SIMULATOR)


@pytest.fixture(params=ORDERS, ids=lambda order: "-".join(map(str, order)) if order else "device")
def order(request: pytest.FixtureRequest) -> tuple[str, str, int] | None:
    """Say in which order the simulated Metal runs work."""
    return request.param


@pytest.fixture(autouse=True)
def metal(order: tuple[str, str, int] | None, request: pytest.FixtureRequest) -> Iterator[None]:
    """Set the order, and fail on whatever the simulated Metal reports.

    A test that breaks a rule on purpose takes the reports with ``sim.take_errors()``.
    """
    if order is None:
        yield
        return
    sim = request.getfixturevalue("simulator")
    dispatches, encoders, max_ops = order
    sim.configure(dispatches, encoders, True, 0, 0)
    sim.set_limits(max_ops, MAX_MB)
    sim.take_errors()
    sim.take_log()
    sim.reset_counts()
    yield
    sim.hold(False)
    sim.configure("encoded", "encoded", True, 0, 0)
    mx.synchronize()
    assert list(sim.take_errors()) == []


@pytest.fixture
def sim(simulator: tvm_ffi.Module) -> tvm_ffi.Module:
    """Give the simulated Metal's functions to a test that cannot do without."""
    return simulator


@pytest.fixture(scope="session")
def kernels_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give the path of the kernel library made from cpp/tests/metal/kernels.cc."""
    if "METAL_KERNELS" in os.environ:
        return Path(os.environ["METAL_KERNELS"])
    if sys.platform != "darwin":
        pytest.skip("needs Metal; run make metal")
    library = tmp_path_factory.mktemp("kernels") / "libmetal_kernels.so"
    folders = (tvm_ffi.libinfo.find_include_path(), tvm_ffi.libinfo.find_dlpack_include_path())
    includes = [f"-I{folder}" for folder in (ROOT / "cpp" / "include", *folders)]
    metal_cpp = Path(mx.__file__).parent / "include" / "metal_cpp"
    options = ["-std=c++20", "-shared", "-undefined", "dynamic_lookup", f"-I{metal_cpp}", *includes]
    source = ROOT / "cpp" / "tests" / "metal" / "kernels.cc"
    subprocess.run(["clang++", *options, source, "-o", library], check=True)
    return library


@pytest.fixture
def kernels(kernels_path: Path) -> tvm_ffi.Module:
    """Load the kernels."""
    return tvm_ffi.load_module(kernels_path)


@pytest.fixture
def load_kernels(kernels_path: Path, tmp_path: Path) -> Callable[[], tvm_ffi.Module]:
    """Load a copy of the kernels that goes when nobody holds it."""
    path = shutil.copy(kernels_path, tmp_path / "libdroppable.so")
    return lambda: tvm_ffi.load_module(path, keep_module_alive=False)


@pytest.fixture
def data() -> Callable[..., mx.array]:
    """Make an array of fresh random whole numbers."""
    rng = np.random.default_rng()
    return lambda n=32: mx.array(rng.integers(-50, 50, n).astype(np.float32))
