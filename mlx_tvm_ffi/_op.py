"""Kernels as ops of MLX's graph."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import mlx.core as mx
import tvm_ffi

from mlx_tvm_ffi import _core

if TYPE_CHECKING:
    from mlx_tvm_ffi._core import Op

__all__ = ["ShapeDtype", "op"]


class ShapeDtype(NamedTuple):
    """What an output is.

    Attributes
    ----------
    shape
        The dimensions, in elements.
    dtype
        A dtype of ``mlx.core``.
    """

    shape: tuple[int, ...]
    dtype: mx.Dtype

    @property
    def size(self) -> int:
        """The number of elements, as of an array."""
        return math.prod(self.shape)


class Spec(Protocol):
    """Whatever has a shape and a dtype: a ShapeDtype, an array."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> mx.Dtype: ...


Outputs = Spec | Sequence[Spec] | Callable[..., Spec | Sequence[Spec]]
Rule = Callable[..., Any]


def _fail(kind: type[Exception], name: str, text: str) -> Exception:
    return kind(f"[mlx_tvm_ffi.op {name}] {text}")


def _runs_when_called(fn: Callable[..., Any]) -> bool:
    kinds = (inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction)
    return not any(is_kind(f) for f in (fn, type(fn).__call__) for is_kind in kinds)


def _to_function(fn: object, name: str) -> tvm_ffi.Function:
    if isinstance(fn, tvm_ffi.Function):
        return fn
    if callable(fn) and not _runs_when_called(fn):
        text = (
            "fn: expected a function that runs when it is called, got one that makes a generator "
            "or a coroutine. Use one without yield and async."
        )
        raise _fail(TypeError, name, text)
    if callable(fn) and not isinstance(fn, (type, _core.Op)):
        function = tvm_ffi.convert(fn)  # of what tvm-ffi knows, like a Module, something else
        if isinstance(function, tvm_ffi.Function):
            return function
    text = (
        "fn: expected a tvm_ffi.Function or a Python function, "
        f"got {type(fn).__name__}. Load the kernel first, and take it by its name."
    )
    raise _fail(TypeError, name, text)


def _name_of(fn: object) -> str:
    name = getattr(fn, "__name__", None)
    if not isinstance(name, str):
        return "kernel"
    return "".join(c if c.isalnum() or c in "_." else "_" for c in name)


def _is_sequence_of(kind: type, items: object) -> bool:
    return (
        isinstance(items, Sequence)
        and not isinstance(items, (str, bytes))
        and all(isinstance(item, kind) for item in items)
    )


def _to_arg_spec(arg_spec: Sequence[str] | None, name: str) -> list[str]:
    if arg_spec is None:
        return []
    if not _is_sequence_of(str, arg_spec):
        text = (
            f"arg_spec: expected a sequence of strings, got {arg_spec!r}. "
            "Use a list like ['args', 'rets']."
        )
        raise _fail(TypeError, name, text)
    if not arg_spec:
        text = 'arg_spec: expected at least one name, got none. Leave it out for ["args", "rets"].'
        raise _fail(ValueError, name, text)
    if not all(part.isprintable() for part in arg_spec):
        text = f"arg_spec: expected names that can be printed, got {arg_spec!r}. Correct the name."
        raise _fail(ValueError, name, text)
    return list(arg_spec)


def _to_flags(contiguous: bool | Sequence[bool], name: str) -> list[bool]:
    flags = [contiguous] if isinstance(contiguous, bool) else contiguous
    if not _is_sequence_of(bool, flags):
        text = (
            f"contiguous: expected a bool or one for each input, got {contiguous!r}. "
            "Use True or False."
        )
        raise _fail(TypeError, name, text)
    if not flags:
        text = "contiguous: expected at least one bool, got none. Leave it out for True."
        raise _fail(ValueError, name, text)
    return list(flags)


def _to_pairs(aliases: Mapping[int, int] | None, name: str) -> list[tuple[int, int]]:
    if aliases is None:
        return []
    numbers = [*aliases, *aliases.values()] if isinstance(aliases, Mapping) else [None]
    if not all(isinstance(n, int) and not isinstance(n, bool) for n in numbers):
        text = (
            f"aliases: expected a dict of output number to input number, got {aliases!r}. "
            "Use one like {0: 0}."
        )
        raise _fail(TypeError, name, text)
    if not all(0 <= n < 2**31 for n in numbers):
        text = f"aliases: expected numbers of outputs and inputs, got {aliases!r}. Count from 0."
        raise _fail(ValueError, name, text)
    return list(aliases.items())


def _as_tuple(arrays: mx.array | tuple[mx.array, ...]) -> tuple[mx.array, ...]:
    return (arrays,) if isinstance(arrays, mx.array) else tuple(arrays)


def _to_rule(rule: object, option: str, name: str) -> Rule | None:
    """Give a rule as a callable (primals, cotangents or tangents, outputs, **attributes)."""
    if isinstance(rule, _core.Op):
        backward = rule

        def call_op(primals: Any, others: Any, outputs: Any, /, **attributes: Any) -> Any:
            return backward(*primals, *_as_tuple(others), *_as_tuple(outputs), **attributes)

        return call_op
    if rule is None or callable(rule):
        return rule
    text = (
        f"{option}: expected a callable or an op, got {type(rule).__name__}. "
        f"See the documentation of {option}."
    )
    raise _fail(TypeError, name, text)


def op(
    fn: Callable[..., Any],
    *,
    outputs: Outputs,
    arg_spec: Sequence[str] | None = None,
    name: str | None = None,
    contiguous: bool | Sequence[bool] = True,
    offsets: bool = True,
    aliases: Mapping[int, int] | None = None,
    vjp: Rule | Op | None = None,
    jvp: Rule | Op | None = None,
    vmap: str | Rule | None = None,
    pure: bool = True,
    capture: bool = True,
) -> Op:
    """Make a kernel an op of MLX's graph.

    ``op(fn, outputs=...)`` gives a callable ``(*arrays, stream=None, **attributes)`` that returns
    lazy arrays: one array for one output, a tuple for several. It may be called on any thread,
    and takes part in ``mx.eval``, ``mx.compile`` and, with rules, ``mx.grad`` and ``mx.vmap``.
    Attributes are what they were at the call, for the kernel and for every rule; to rules lists
    are tuples.

    Parameters
    ----------
    fn
        The kernel: a ``tvm_ffi.Function``, held strongly, or a Python function. Its tensor
        parameters may be ``TensorView``, ``DLTensor*`` or ``Tensor``. It runs on the thread that
        evaluates (CPU: on the stream's own thread) and must not keep a tensor it was handed after
        it returns. ``mx.async_eval`` returns when the Python functions in its graph have run, on
        the calling thread, and raises their errors. An object may hold an op of its own methods,
        as kernel and as rules: Python's collector frees both, unless the object also holds a
        result that is not evaluated, or a ``tvm_ffi.Function`` of its method.
    outputs
        What the kernel writes: something with ``.shape`` (elements) and ``.dtype`` (of
        ``mlx.core``) such as :class:`ShapeDtype` or an array, a sequence of those, or a callable
        ``(*arrays, **attributes)`` that returns one or a sequence. ``mx.compile(shapeless=True)``
        needs the callable.
    arg_spec
        The order of the kernel's parameters: ``"args"`` (all inputs), ``"args.0"``, ``"rets"``
        (all outputs), ``"rets.0"``, ``"attrs.NAME"``, ``"ctx.stream"`` (the environment stream as
        a pointer). By default the inputs, the outputs, then the attributes in the order of the
        call. Without ``"rets"`` the kernel returns its outputs instead of filling them; their
        shapes and dtypes are checked against `outputs`.
    name
        Name in messages and in the graph, without spaces. By default the function's own, else
        ``"kernel"``.
    contiguous
        Whether the kernel needs its inputs row-contiguous, for each, or for all where it is one.
        What is not row-contiguous is copied when the op is evaluated; False hands strides
        (elements) through.
    offsets
        Whether the kernel honours ``byte_offset``. False for kernels that take memory from the
        start of a buffer, as TVM's do on Metal: slices are copied.
    aliases
        ``{output: input}``: the output is written into the input's memory, where MLX may donate
        it, else into a copy of it, so that no array that is still in use changes.
    vjp
        Gradient rule: a callable ``(primals, cotangents, outputs, **attributes)`` that returns
        one array for each primal, or None for one without a gradient. `primals` is a tuple;
        `cotangents` and `outputs` are as the op returns: one array, or a tuple of several. Or
        another op, called with the primals, the cotangents and the outputs, one after another.
        Gradients get the dtypes of their primals. Under vmap a rule is still called for one
        element, and mapped: what it calls needs vmap too.
    jvp
        Forward rule: a callable ``(primals, tangents, outputs, **attributes)`` that returns one
        tangent for each output, or another op; `tangents` is a tuple like `primals`. `outputs` are
        those of a call of its own, which is only made if the rule uses them.
    vmap
        ``"sequential"``: one kernel call for each element of the batch. ``"broadcast"``: one call
        with the batch as leading dimension of every input and output. Or a callable ``(inputs,
        axes, **attributes)`` that returns ``(outputs, axes)``, with None as axis of what has no
        batch.
    pure
        False for kernels that mutate state or draw random numbers: equal calls are then never
        merged.
    capture
        False for kernels that cannot be captured into a CUDA graph: they synchronise, allocate,
        or use a stream of their own.

    Raises
    ------
    TypeError, ValueError
        Where an argument is not what it should be. The call raises them for inputs, attributes
        and outputs.
    RuntimeError
        From a transformation without a rule, or whose rule fails, and from the evaluation of a
        kernel that fails: the message names the op, and the kind of the error. KeyboardInterrupt
        and SystemExit in a rule stay what they are.

    Examples
    --------
    >>> import mlx.core as mx
    >>> import mlx_tvm_ffi as mtf
    >>> scale = mtf.op(kernels.scale, outputs=lambda x, **_: x)  # doctest: +SKIP
    >>> y = scale(mx.ones(4), factor=2.0)  # doctest: +SKIP
    """
    if name is not None and not isinstance(name, str):
        got = type(name).__name__
        text = f"name: expected a string, got {got}. Leave it out for the function's own."
        raise _fail(TypeError, _name_of(fn), text)
    if name is not None and not name.isprintable():
        text = (
            f"name: expected a name without spaces, got {name!r}. Use letters, digits, '_' and '.'."
        )
        raise _fail(ValueError, _name_of(fn), text)
    label = _name_of(fn) if name is None else name
    function = _to_function(fn, label)
    for option, flag in (("offsets", offsets), ("pure", pure), ("capture", capture)):
        if not isinstance(flag, bool):
            text = f"{option}: expected a bool, got {type(flag).__name__}. Use True or False."
            raise _fail(TypeError, label, text)
    rules = 'expected "sequential", "broadcast" or a callable'
    if isinstance(vmap, str) and vmap not in ("sequential", "broadcast"):
        raise _fail(ValueError, label, f"vmap: {rules}, got {vmap!r}. Use one of these.")
    if not (vmap is None or isinstance(vmap, str) or callable(vmap)):
        got = type(vmap).__name__
        raise _fail(TypeError, label, f"vmap: {rules}, got {got}. Use one of these.")
    return _core.make_op(
        function.__chandle__(),
        None if function is fn else fn,
        name=label,
        arg_spec=_to_arg_spec(arg_spec, label),
        contiguous=_to_flags(contiguous, label),
        offsets=offsets,
        aliases=_to_pairs(aliases, label),
        pure=pure,
        capture=capture,
        batching=vmap if isinstance(vmap, str) else "",
        outputs=outputs,
        vjp=_to_rule(vjp, "vjp", label),
        jvp=_to_rule(jvp, "jvp", label),
        vmap=None if isinstance(vmap, str) else vmap,
    )
