"""Metal kernels as they are: TVM's payloads, Metal source, metallib bytes, TileLang artifacts."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import tvm_ffi

from mlx_tvm_ffi._op import ShapeDtype, op
from mlx_tvm_ffi._tilelang import from_tilelang

if TYPE_CHECKING:
    from mlx_tvm_ffi._core import Op
    from mlx_tvm_ffi._op import Outputs, Rule

__all__ = ["from_tilelang", "kernel", "module"]

Size = Sequence[int] | Callable[..., Sequence[int]]
Payload = str | bytes | tuple[str | bytes, str]
Constant = bool | int | float | tuple[bool | float, mx.Dtype]

# MTLDataType and struct's letter of what a function constant may be.
_CONSTANTS = {
    mx.bool_: (53, "?"),
    mx.int8: (45, "b"),
    mx.uint8: (49, "B"),
    mx.int16: (37, "h"),
    mx.uint16: (41, "H"),
    mx.int32: (29, "i"),
    mx.uint32: (33, "I"),
    mx.int64: (81, "q"),
    mx.uint64: (85, "Q"),
    mx.float16: (16, "e"),
    mx.float32: (3, "f"),
}
_SCALARS = {mx.int32: 4, mx.uint32: 4, mx.int64: 8, mx.uint64: 8, mx.float32: 4}


def _error(kind: type[Exception], where: str, text: str) -> Exception:
    return kind(f"[mlx_tvm_ffi.metal.{where}] {text}")


def _to_bytes(payload: str | bytes) -> bytes:
    return payload.encode() if isinstance(payload, str) else bytes(payload)


def _to_tvm_dtype(dtype: mx.Dtype) -> tvm_ffi.dtype:
    return tvm_ffi.dtype(str(dtype).removeprefix("mlx.core.").removesuffix("_"))


def _to_mlx_dtype(name: str, where: str) -> mx.Dtype:
    dtype = getattr(mx, "bool_" if name == "bool" else name, None)
    if isinstance(dtype, mx.Dtype):
        return dtype
    raise _error(NotImplementedError, where, f"dtype: expected one of MLX's, got {name!r}.")


def module(
    payloads: Mapping[str, Payload], functions: Mapping[str, Mapping[str, Any]]
) -> tvm_ffi.Module:
    """Make a module from compiled kernels, by the rules of TVM's compile callback.

    Parameters
    ----------
    payloads
        By kernel name: a pair of the payload and its format, ``"metal"`` for source (a whole
        translation unit with a function of that name) or ``"metallib"`` for a compiled library. A
        bare payload means ``"metallib"``. All kernels of a module have one format.
    functions
        By kernel name, what TVM's function table has: ``{"arg_types": ["handle", "int32"],
        "launch_param_tags": ["blockIdx.x", "threadIdx.x"]}``. A call passes the buffers (arrays),
        the scalars, then one int for each tag.

    Returns
    -------
    module
        A module of kind ``"metal"``.

    Raises
    ------
    ValueError, TypeError
        A rule is broken. Nothing was launched by then.

    Examples
    --------
    .. code-block:: python

        module = mtf.metal.module(
            {"fill": (source, "metal")},
            {"fill": {"arg_types": ["handle", "float32"], "launch_param_tags": ["blockIdx.x"]}},
        )
        fill = mtf.op(
            module.fill, outputs=mtf.ShapeDtype((64,), mx.float32),
            arg_spec=["rets", "attrs.value", "attrs.blocks"],
        )
        y = fill(value=2.0, blocks=64)

    """
    for what, given in (("payloads", payloads), ("functions", functions)):
        if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
            text = f"{what}: expected a dict by kernel name, got {given!r:.200}."
            raise _error(TypeError, "module", text)
    formats: dict[str, str] = {}
    codes: dict[str, bytes] = {}
    for name, payload in payloads.items():
        pair = payload if isinstance(payload, tuple) else (payload, "metallib")
        if len(pair) != 2:
            text = (
                f"kernel {name!r}: expected a payload or a pair of payload and format, "
                f"got {len(pair)} items."
            )
            raise _error(ValueError, "module", text)
        code, fmt = pair
        if not isinstance(code, (str, bytes)) or not isinstance(fmt, str):
            text = (
                f"kernel {name!r}: expected a payload of str or bytes and a format of str, "
                f"got {type(code).__name__} and {type(fmt).__name__}."
            )
            raise _error(TypeError, "module", text)
        codes[name], formats[name] = _to_bytes(code), fmt
    if len(set(formats.values())) > 1:
        found = ", ".join(f"{name}: {fmt!r}" for name, fmt in formats.items())
        text = f"payloads: expected one format for all kernels of a module, got {found}."
        raise _error(ValueError, "module", text)
    if not codes or codes.keys() != functions.keys():
        text = (
            "functions: expected an entry for each of one or more kernels, "
            f"got {sorted(functions)} for {sorted(codes)}."
        )
        raise _error(ValueError, "module", text)
    names = list(codes)
    tables = [_to_table(name, functions[name]) for name in names]
    make = tvm_ffi.get_global_func("mlx_tvm_ffi.metal.module")
    made: tvm_ffi.Module = make(
        names,
        list(codes.values()),
        formats[names[0]],
        [arg_types for arg_types, _ in tables],
        [tags for _, tags in tables],
    )
    return made


def _to_table(name: str, table: Mapping[str, Any]) -> tuple[list[tvm_ffi.dtype], list[str]]:
    try:
        dtypes = [tvm_ffi.dtype(dtype) for dtype in table["arg_types"]]
        return dtypes, [str(tag) for tag in table["launch_param_tags"]]
    except (LookupError, TypeError, ValueError) as error:
        text = (
            f"functions: expected {name!r} with arg_types and launch_param_tags, "
            f"got {table!r:.200}: {error}."
        )
        raise _error(ValueError, "module", text) from error


def kernel(
    name: str,
    source: str | bytes,
    *,
    outputs: Outputs,
    buffers: Sequence[str | tuple[str, mx.Dtype]],
    grid: Size,
    threadgroup: Size,
    fmt: str | None = None,
    constants: Mapping[int | str, Constant] | None = None,
    threadgroup_memory: Sequence[int] = (),
    contiguous: bool | Sequence[bool] = True,
    aliases: Mapping[int, int] | None = None,
    vjp: Rule | Op | None = None,
    jvp: Rule | Op | None = None,
    vmap: str | Rule | None = None,
) -> Op:
    """Make a function of Metal source or of a metallib an op.

    Unlike ``mx.fast.metal_kernel`` it takes whole translation units and compiled libraries, says
    which slot is what, and has function constants, threadgroup memory and buffers updated in place.
    Pipelines are cached by content.

    Parameters
    ----------
    name
        The function's name in the source.
    source
        Metal source, or the bytes of a metallib.
    outputs, contiguous, aliases, vjp, jvp, vmap
        As for :func:`mlx_tvm_ffi.op`. For a buffer that is updated in place, name the output in
        `buffers` and alias it to the input.
    buffers
        What each slot binds, from ``[[buffer(0)]]`` on: ``"args.0"``, ``"rets.0"``, or a scalar
        attribute with its type: ``("attrs.count", mx.uint32)``. Types of scalars are int32, uint32,
        int64, uint64 and float32.
    grid
        x, y, z in threads, as for ``mx.fast.metal_kernel``, or a callable ``(*arrays,
        **attributes)`` that gives them. It sees shapes and dtypes, and is asked once for each.
    threadgroup
        Threads of a threadgroup, in the same form.
    fmt
        ``"metal"`` or ``"metallib"``. None: by the type of `source`.
    constants
        Values of function constants, by index or name: bool, int (as int32), float (as float32), or
        a pair of value and dtype.
    threadgroup_memory
        Bytes of each ``[[threadgroup(i)]]`` argument, multiples of 16.

    Returns
    -------
    op
        Called as ``op(*arrays, stream=None, **attributes)``.

    Raises
    ------
    ValueError, TypeError
        An argument is not what it should be, or the source is not of its format.

    Examples
    --------
    .. code-block:: python

        scale = mtf.metal.kernel(
            "scale", source, outputs=lambda x, **_: x,
            buffers=["args.0", "rets.0", ("attrs.factor", mx.float32)],
            grid=lambda x, **_: (x.size, 1, 1), threadgroup=(256, 1, 1),
        )
        y = scale(x, factor=2.0)

    """
    if not isinstance(name, str) or not isinstance(source, (str, bytes)):
        text = (
            f"expected a name of str and a source of str or bytes, got {type(name).__name__} and "
            f"{type(source).__name__}."
        )
        raise _error(TypeError, "kernel", text)
    if fmt not in (None, "metal", "metallib"):
        text = f"fmt: expected 'metal', 'metallib' or None, got {fmt!r}."
        raise _error(ValueError, f"kernel {name}", text)
    if fmt is None:
        fmt = "metal" if isinstance(source, str) else "metallib"
    parameters, slots = _bind_slots(name, buffers)
    hidden = [
        f"args.{input_}"
        for input_ in sorted(set(aliases.values() if isinstance(aliases, Mapping) else ()))
        if f"args.{input_}" not in parameters
    ]
    order = [*parameters, *hidden]
    memory = list(threadgroup_memory) if isinstance(threadgroup_memory, Sequence) else [None]
    if len(memory) > 31 or not all(
        isinstance(size, int) and size % 16 == 0 and 0 < size < 2**32 for size in memory
    ):
        text = (
            "threadgroup_memory: expected at most 31 sizes, multiples of 16 bytes, "
            f"got {threadgroup_memory!r:.200}."
        )
        raise _error(ValueError, f"kernel {name}", text)
    program = tvm_ffi.get_global_func("mlx_tvm_ffi.metal.program")(
        name,
        [
            *([dtype is None, dtype or _ANY] for dtype in parameters.values()),
            *([True, _ANY] for _ in hidden),
        ],
        [[name, fmt, _to_bytes(source), False, _to_constants(name, constants or {}), memory]],
        [[0, slots, True, [0, 1, 2, 3, 4, 5]]],
        _sizes(name, order, grid, threadgroup),
    )
    return op(
        program,
        outputs=outputs,
        arg_spec=order,
        name=name,
        contiguous=contiguous,
        aliases=aliases,
        vjp=vjp,
        jvp=jvp,
        vmap=vmap,
    )


# The dtype of a tensor that may have any.
_ANY = tvm_ffi.dtype("handle")


def _bind_slots(
    name: str, buffers: Sequence[str | tuple[str, mx.Dtype]]
) -> tuple[dict[str, tvm_ffi.dtype | None], list[list[Any]]]:
    """Give the parameters (with the type of a scalar), and what each slot binds of them."""
    parameters: dict[str, tvm_ffi.dtype | None] = {}
    slots: list[list[Any]] = []
    items: list[Any] = list(buffers) if isinstance(buffers, Sequence) else [buffers]
    for item in items:
        spec, dtype = item if isinstance(item, tuple) and len(item) == 2 else (item, None)
        kind, _, rest = spec.partition(".") if isinstance(spec, str) else ("", "", "")
        is_scalar = kind == "attrs" and bool(rest)
        is_array = kind in ("args", "rets") and rest.isdecimal() and dtype is None
        if not is_scalar and not is_array:
            text = f"buffers: expected 'args.N', 'rets.N' or ('attrs.NAME', dtype), got {item!r}."
            raise _error(ValueError, f"kernel {name}", text)
        if is_scalar and dtype not in _SCALARS:
            text = (
                f"buffers: expected {spec!r} with a dtype of int32, uint32, int64, uint64 or "
                f"float32, got {item!r}. Write it as ({spec!r}, mx.int32)."
            )
            raise _error(ValueError, f"kernel {name}", text)
        parameters.setdefault(spec, _to_tvm_dtype(dtype) if dtype is not None else None)
        index = list(parameters).index(spec)
        if dtype is None:
            slots.append([index, 0, []])
        else:
            slots.append([0, _SCALARS[dtype], [[False, index, _to_tvm_dtype(dtype)]]])
    return parameters, slots


def _to_constants(name: str, constants: Mapping[int | str, Constant]) -> list[list[Any]]:
    if not isinstance(constants, Mapping):
        text = f"constants: expected a dict by index or name, got {constants!r:.200}."
        raise _error(TypeError, f"kernel {name}", text)
    records = []
    for key, constant in constants.items():
        pair = constant if isinstance(constant, tuple) else (constant, None)
        value, dtype = pair if len(pair) == 2 else (constant, None)
        if dtype is None:
            kinds = ((bool, mx.bool_), (int, mx.int32), (float, mx.float32))
            dtype = next((dtype for kind, dtype in kinds if isinstance(value, kind)), None)
        is_key = key != "" if isinstance(key, str) else isinstance(key, int) and 0 <= key < 2**16
        if dtype not in _CONSTANTS or not is_key:
            text = (
                f"constants: expected an index below 65536 or a name with a bool, int, float or a "
                f"pair of value and dtype, got {key!r}: {constant!r}."
            )
            raise _error(ValueError, f"kernel {name}", text)
        number, letter = _CONSTANTS[dtype]
        try:
            code = struct.pack("<" + letter, value)
        except (struct.error, OverflowError) as error:
            text = f"constants: expected {key!r} to fit {dtype}, got {value!r}: {error}."
            raise _error(ValueError, f"kernel {name}", text) from None
        is_name = isinstance(key, str)
        records.append([key if is_name else "", 0 if is_name else key, number, code])
    return records


def _sizes(name: str, order: list[str], grid: Size, threadgroup: Size) -> Any:
    """Give grid and threadgroup as six numbers, or as a function of the arguments' shapes."""
    if not callable(grid) and not callable(threadgroup):
        return [*_to_three(name, "grid", grid), *_to_three(name, "threadgroup", threadgroup)]
    count = sum(spec.startswith("args.") for spec in order)

    def geometry(*values: Any) -> list[int]:
        rest = iter(values)
        arrays: dict[str, ShapeDtype] = {}
        attributes: dict[str, Any] = {}
        for spec in order:
            if spec.startswith("attrs."):
                attributes[spec.removeprefix("attrs.")] = next(rest)
            else:
                shape = tuple(next(rest))
                arrays[spec] = ShapeDtype(shape, _to_mlx_dtype(str(next(rest)), f"kernel {name}"))
        inputs = [arrays[f"args.{i}"] for i in range(count)]
        return [
            size
            for what, sizes in (("grid", grid), ("threadgroup", threadgroup))
            for size in _to_three(
                name, what, sizes(*inputs, **attributes) if callable(sizes) else sizes
            )
        ]

    return tvm_ffi.convert(geometry)


def _to_three(name: str, what: str, sizes: object) -> list[int]:
    numbers = list(sizes) if isinstance(sizes, Sequence) else []
    if len(numbers) != 3 or not all(isinstance(size, int) and size >= 0 for size in numbers):
        text = f"{what}: expected three numbers for x, y and z, got {sizes!r}."
        raise _error(ValueError, f"kernel {name}", text)
    return numbers
