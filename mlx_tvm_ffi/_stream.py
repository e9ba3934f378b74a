"""Scopes and defaults: which stream kernels use."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import mlx.core as mx
import tvm_ffi

from mlx_tvm_ffi import _core
from mlx_tvm_ffi._core import StreamInterface

if TYPE_CHECKING:
    from typing import TypeAlias

    Device: TypeAlias = mx.Device | mx.DeviceType | tvm_ffi.Device
    MlxStream: TypeAlias = mx.Stream | mx.ThreadLocalStream | mx.Device | mx.DeviceType

__all__ = ["StreamInterface", "StreamScope", "current_stream", "set_default_stream", "stream"]

# A kind of error that stream.h raises, and that tvm-ffi would hand on as a RuntimeError.
tvm_ffi.register_error("NotImplementedError", NotImplementedError)


class StreamScope(contextlib.ContextDecorator):
    """A context manager and decorator, made by :func:`stream`.

    What is open is kept per thread and not in the object, so one object can be entered again while
    it is open, and from several threads.
    """

    def __init__(self, s: MlxStream | StreamInterface | None, *, wait: bool) -> None:
        self._stream = s
        self._wait = wait

    # In C++: an interrupt inside a method of Python would leave the scope open.
    __enter__ = _core.enter_scope
    __exit__ = _core.leave_scope


def stream(s: MlxStream | StreamInterface | None = None, *, wait: bool = False) -> StreamScope:
    """Make a stream the one that kernels use, inside a ``with`` block or a decorated function.

    Inside, the stream is the current one of its device for kernels called on this thread,
    tvm-ffi's environment stream of that device is set from it, and a stream of MLX is MLX's
    default for that device. Leaving puts all three back, whatever was raised. MLX's default device
    is left alone.

    Parameters
    ----------
    s
        A stream of MLX; a device, which means MLX's default stream of it on the entering thread;
        another framework's stream; or None for the stream that is current anyway.
    wait
        Whether leaving waits for the work on the stream. For streams of MLX only.

    Raises
    ------
    TypeError
        If `s` is none of these.
    RuntimeError
        On leaving, if this thread has not entered it, or has others open inside it.

    Notes
    -----
    A scope belongs to its thread. A coroutine or generator that holds one across a ``yield`` or
    ``await`` leaves it open for whoever runs next on the thread.

    Examples
    --------
    >>> import mlx.core as mx
    >>> import mlx_tvm_ffi as mtf
    >>> with mtf.stream(mx.new_stream(mx.cpu)) as current:
    ...     current == mtf.current_stream()
    True
    """
    _check_stream("stream", "s", s)
    if not isinstance(wait, bool):
        message = (
            f"[mlx_tvm_ffi.stream] wait: expected a bool, got {type(wait).__name__}. "
            "Use True or False."
        )
        raise TypeError(message)
    return StreamScope(s, wait=wait)


def current_stream(device: Device | None = None) -> StreamInterface:
    """Get the stream that a kernel called on this thread uses.

    Parameters
    ----------
    device
        The device of the kernel. None means that of the innermost scope, or MLX's default device.

    Returns
    -------
    StreamInterface
        The environment stream of tvm-ffi, if set (on Metal); else that of the innermost scope for
        the device; else the default of the process.

    Raises
    ------
    RuntimeError
        If the device has none of these.
    """
    if device is None:
        return _core.current_stream_of_thread()
    return _core.current_stream(*_dl_device("current_stream", device))


def set_default_stream(
    device: Device, stream: MlxStream | StreamInterface | None
) -> StreamInterface | None:
    """Set the stream of a device for all threads that have no scope open for it.

    Parameters
    ----------
    device
        The device.
    stream
        A stream of that device, or None for no default.

    Returns
    -------
    StreamInterface or None
        The previous default.

    Raises
    ------
    ValueError
        If the stream is of another device.
    """
    _check_stream("set_default_stream", "stream", stream)
    type_, id_ = _dl_device("set_default_stream", device)
    return _core.exchange_default_stream(type_, id_, _interface(stream))


def _interface(s: MlxStream | StreamInterface | None) -> StreamInterface | None:
    return s if s is None or isinstance(s, StreamInterface) else _core.mlx_stream_interface(s)


def _check_stream(function: str, argument: str, s: object) -> None:
    streams = (mx.Stream, mx.ThreadLocalStream, mx.Device, mx.DeviceType, StreamInterface)
    if s is not None and not isinstance(s, streams):
        message = (
            f"[mlx_tvm_ffi.{function}] {argument}: expected an mx.Stream, an mx.Device or a "
            f"StreamInterface, got {type(s).__name__}. Make one with mx.new_stream(mx.cpu)."
        )
        raise TypeError(message)


def _dl_device(function: str, device: Device) -> tuple[int, int]:
    if isinstance(device, tvm_ffi.Device):
        return device.dlpack_device_type(), device.index
    if isinstance(device, mx.DeviceType):
        device = mx.Device(device, 0)
    if isinstance(device, mx.Device):
        return _core.dl_device(device)
    message = (
        f"[mlx_tvm_ffi.{function}] device: expected an mx.Device or a tvm_ffi.Device, got "
        f"{type(device).__name__}. Use mx.cpu, mx.gpu or tvm_ffi.device('cuda', 0)."
    )
    raise TypeError(message)
