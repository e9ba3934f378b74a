"""examples/cpp_kernel on Metal: its metal-cpp source, encoding into MLX's encoder."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
from pathlib import Path

import mlx.core as mx
import pytest
import tvm_ffi

import mlx_tvm_ffi as mtf

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "examples" / "cpp_kernel"
TOOLS = ROOT / "cpp" / "tests" / "metal"


@pytest.fixture(scope="module")
def scale(simulator, tmp_path_factory):
    """Build the example as a Mac would, but for the simulated Metal."""
    folder = tmp_path_factory.mktemp("cpp_kernel")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(TOOLS)
        from toolchain import SIM_INCLUDE, host_cxx, mlx_metal

    tvm = Path(tvm_ffi.__file__).parent
    metal_cpp = mlx_metal(importlib.metadata.version("mlx")) / "include" / "metal_cpp"
    options = ["-fvisibility=hidden", "-DSCALE_METAL", "-I", ROOT / "cpp" / "include"]
    for include in SIM_INCLUDE, tvm / "include", metal_cpp:
        options += ["-isystem", include]
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    objects = []
    for source in sorted(SOURCE.glob("*.cc")):
        objects.append(folder / f"{source.stem}.o")
        command = [*host_cxx(), *options, "-c", source, "-o", objects[-1]]
        subprocess.run(command, check=True, env=environment)
    library = folder / "libscale.so"
    link = ["g++", "-shared", *objects, "-o", library, "-L", tvm / "lib", "-ltvm_ffi"]
    subprocess.run(link, check=True, env=environment)
    return tvm_ffi.load_module(library).scale


def test_called_directly(scale):
    x, y = mx.array([1.0, 2.0, 3.0]), mx.array([0.0, 0.0, 0.0])
    scale(x, y, 2.0)
    assert y.tolist() == [2, 4, 6]


def test_as_an_op_between_ops_of_mlx(scale):
    op = mtf.op(scale, outputs=lambda x, **_: x)
    x = mx.array([1.0, 2.0, 3.0])
    assert (op(x + x, factor=-1.0) + x).tolist() == [-1, -2, -3]


def test_a_slice_starts_at_its_byte_offset(scale):
    op = mtf.op(scale, outputs=lambda x, **_: x)
    x = mx.array([float(i) for i in range(8)])
    assert op(x[3:6], factor=2.0).tolist() == [6, 8, 10]


def test_a_chain_in_one_encoder(scale):
    op = mtf.op(scale, outputs=lambda x, **_: x)
    x = mx.array([1.0, 2.0])
    for _ in range(10):
        x = op(x, factor=2.0)
    assert x.tolist() == [1024, 2048]
