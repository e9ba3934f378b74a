"""The reason and a way out where MLX cannot export a graph with kernels."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import mlx.core as mx

if TYPE_CHECKING:
    from collections.abc import Callable

_MARK = "__explained_by_mlx_tvm_ffi__"
_REFUSAL = "[export_function] Unable to "
_HINT = (
    ". MLX's file format holds MLX's own primitives, and no op made by mlx_tvm_ffi.op. Export the "
    "parts of the function around it, or save the arrays and build the graph again from code."
)


def _explained(export: Callable[..., Any]) -> Callable[..., Any]:
    if hasattr(export, _MARK):  # this package was loaded before
        return export

    @functools.wraps(export)
    def explained(*args: Any, **kwargs: Any) -> Any:
        try:
            return export(*args, **kwargs)
        except ValueError as error:
            if not str(error).startswith(_REFUSAL):
                raise
            raise ValueError(str(error) + _HINT) from error

    setattr(explained, _MARK, True)
    return explained


def explain_refusals() -> None:
    """Let MLX's message, which only names the op, go on with the reason.

    MLX has no hook for primitives from outside, so this wraps its two ways to export.
    """
    mx.export_function = _explained(mx.export_function)
    mx.FunctionExporter.__call__ = _explained(mx.FunctionExporter.__call__)  # type: ignore[method-assign]
