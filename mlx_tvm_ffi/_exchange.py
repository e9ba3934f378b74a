"""Whether tvm-ffi takes arrays through the exchange API that this package gives them."""

from __future__ import annotations

import os
import warnings

import mlx.core as mx
import tvm_ffi

from mlx_tvm_ffi import _core


def warn_if_unused() -> None:
    """Warn once, at import, where tvm-ffi passes arrays through ``__dlpack__`` instead.

    tvm-ffi decides it per thread, at the first array that a thread passes: what other threads have
    decided cannot be seen from here.
    """
    same = tvm_ffi.get_global_func("mlx_tvm_ffi.same")
    if isinstance(same(mx.array(0.0)), mx.array):
        return
    _core.offer_allocator()
    skipped = os.environ.get("TVM_FFI_SKIP_DLPACK_C_EXCHANGE_API") == "1"
    reason, remedy = (
        ("TVM_FFI_SKIP_DLPACK_C_EXCHANGE_API=1 is set", "Unset it.")
        if skipped
        else (
            "an array was passed to a tvm-ffi function on this thread before the import",
            "Import mlx_tvm_ffi first.",
        )
    )
    warnings.warn(
        f"[mlx_tvm_ffi] direct calls go through __dlpack__, since {reason}: CPU results are right, "
        "but calls are slower, results are tvm_ffi.Tensor objects, and there are no direct calls "
        f"on a GPU. {remedy}",
        RuntimeWarning,
        stacklevel=3,
    )
