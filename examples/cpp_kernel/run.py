"""Run the library on MLX arrays, on the device that MLX uses by default."""

from __future__ import annotations

import sys

import mlx.core as mx
import tvm_ffi

import mlx_tvm_ffi as mtf

kernels = tvm_ffi.load_module(sys.argv[1])

x, y = mx.arange(5, dtype=mx.float32), mx.zeros(5)
kernels.scale(x, y, 2.0)
print("called directly:", y)

scale = mtf.op(kernels.scale, outputs=lambda x, **_: x)
print("as an op:", mx.exp(scale(x + 1, factor=-1.0)))
