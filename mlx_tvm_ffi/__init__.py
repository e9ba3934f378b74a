"""Any tvm-ffi kernel on mlx.core.array, called directly or as a lazy op in MLX's graph."""

from __future__ import annotations

import sys

from mlx_tvm_ffi import _versions

# Not for `python -m mlx_tvm_ffi`: the doctor must run where the rest cannot be loaded.
if not (sys.argv[:1] == ["-m"] and "mlx_tvm_ffi" in sys.orig_argv):
    _versions.check_mlx()
    _versions.check_tvm_ffi()
    __version__: str = _versions.built().VERSION

    from mlx_tvm_ffi import _exchange, _export, metal
    from mlx_tvm_ffi._kernel_folder import load_kernel
    from mlx_tvm_ffi._load import load_module
    from mlx_tvm_ffi._op import ShapeDtype, op
    from mlx_tvm_ffi._stream import (
        StreamInterface,
        StreamScope,
        current_stream,
        set_default_stream,
        stream,
    )

    __all__ = [
        "ShapeDtype",
        "StreamInterface",
        "StreamScope",
        "current_stream",
        "load_kernel",
        "load_module",
        "metal",
        "op",
        "set_default_stream",
        "stream",
    ]

    _exchange.warn_if_unused()
    _export.explain_refusals()
