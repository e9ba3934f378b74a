"""Compile the examples' C++ or CUDA kernels and load them."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import mlx.core as mx
import tvm_ffi.cpp

try:
    import ninja
except ImportError as error:
    sys.exit(f"{error}. Install what is missing: pip install ninja")


def load_kernels(name: str) -> tvm_ffi.Module:
    """Compile ``NAME.cc`` beside this file, or find it compiled in tvm-ffi's cache.

    Where MLX's default device is a GPU: ``NAME.cu``, which needs CUDA's nvcc.
    """
    if shutil.which("ninja") is None:  # an environment that is used without being activated
        os.environ["PATH"] = os.pathsep.join([ninja.BIN_DIR, os.environ.get("PATH", os.defpath)])
    if mx.default_device() == mx.gpu:
        return tvm_ffi.cpp.load(
            f"{name}_cuda", sources=str(Path(__file__).with_name(f"{name}.cu")), backend="cuda"
        )
    return tvm_ffi.cpp.load(
        name,
        sources=str(Path(__file__).with_name(f"{name}.cc")),
        # The last two let compilers use vector code: nobody reads errno or traps.
        extra_cflags=["-O3", "-fopenmp-simd", "-fno-math-errno", "-fno-trapping-math"],
    )
