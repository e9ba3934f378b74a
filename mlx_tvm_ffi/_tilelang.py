"""TileLang's Metal kernels as ops."""

from __future__ import annotations

import json
import operator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import tvm_ffi

from mlx_tvm_ffi import tilelang_artifact
from mlx_tvm_ffi._op import ShapeDtype, op

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mlx_tvm_ffi._core import Op
    from mlx_tvm_ffi._op import Rule


def from_tilelang(
    artifact: Any,
    *,
    inplace: Sequence[str] | None = None,
    vjp: Rule | Op | None = None,
    jvp: Rule | Op | None = None,
    vmap: str | Rule | None = None,
) -> Op:
    """Make what TileLang compiled for Metal an op.

    Neither torch nor TileLang's host code takes part: kernels are launched on MLX's encoder, with
    barriers between those of one function. TileLang may be in this process, imported before or
    after: pip finds a tvm-ffi that both take (0.1.12 for TileLang 0.1.15). Where it is not, save
    the artifact to a file.

    Parameters
    ----------
    artifact
        What ``tilelang.lower(function, target="metal")`` returns, or the path of a file that
        :mod:`mlx_tvm_ffi.tilelang_artifact` saved it to. That module needs TileLang only.
    inplace
        Names of the parameters that the kernels update in place. None: those that are read by the
        first kernel that writes them.
    vjp, jvp, vmap
        As for :func:`mlx_tvm_ffi.op`.

    Returns
    -------
    op
        Its inputs are the arrays that are only read and those updated in place, its outputs those
        that are written, both in the function's order; scalars are attributes by name. What is
        updated in place is donated or copied, as ``aliases`` of :func:`mlx_tvm_ffi.op`.

    Raises
    ------
    ValueError, NotImplementedError
        The artifact is damaged, for another target, or does more than launch kernels.

    Examples
    --------
    .. code-block:: python

        gelu = mtf.metal.from_tilelang(artifact)
        y = gelu(x)

    """
    if isinstance(artifact, (str, Path)):
        plan = _read(Path(artifact), inplace)
    else:
        plan = _Plan(tilelang_artifact.describe(artifact, inplace=inplace))
    return plan.to_op(vjp=vjp, jvp=jvp, vmap=vmap)


_WHERE = "[mlx_tvm_ffi.metal.from_tilelang] "


def _error(kind: type[Exception], text: str) -> Exception:
    return kind(_WHERE + text)


def _read(path: Path, inplace: Sequence[str] | None) -> _Plan:
    if not path.is_file():
        raise _error(FileNotFoundError, f"artifact: expected a file, got {str(path)!r}.")
    if inplace is not None:
        text = "inplace: expected None for a saved artifact, got names. Give them to save()."
        raise _error(ValueError, text)
    try:
        record = json.loads(path.read_bytes())
        if record["format"] != tilelang_artifact.FORMAT:
            text = (
                f"artifact: expected the format {tilelang_artifact.FORMAT!r}, "
                f"got {record['format']!r:.100}. Save it again."
            )
            raise _error(ValueError, text)
        return _Plan(record)
    except json.JSONDecodeError as error:
        text = f"artifact: expected JSON in {str(path)!r}, got: {error}. Save it again."
        raise _error(ValueError, text) from None
    except (LookupError, TypeError, AttributeError, RecursionError, ValueError) as error:
        if str(error).startswith(_WHERE):
            raise
        text = f"artifact: expected what save() wrote, got {str(path)!r}: {error!r:.100}."
        raise _error(ValueError, text) from error


_OPERATORS: dict[str, Callable[[int, int], int]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "//": operator.floordiv,
    "%": operator.mod,
    "min": min,
    "max": max,
}


def _value(expression: Any, names: dict[str, Any]) -> int:
    """Compute an expression of :mod:`mlx_tvm_ffi.tilelang_artifact`."""
    if isinstance(expression, int):
        return expression
    if expression[0] == "name":
        return int(names[expression[1]])
    left, right = (_value(operand, names) for operand in expression[1:])
    if right == 0 and expression[0] in ("//", "%"):
        raise _error(ValueError, f"sizes: expected no division by 0, got {expression} of {names}.")
    return _OPERATORS[expression[0]](left, right)


def _names(expression: Any) -> set[str]:
    """Give the names in an expression, which is checked by the way."""
    if isinstance(expression, int):
        return set()
    kind, *rest = expression
    if kind == "name":
        (name,) = rest
        return {str(name)}
    left, right = rest
    _OPERATORS[kind]
    return _names(left) | _names(right)


class _Parameter:
    """A parameter of a TileLang function."""

    def __init__(self, record: dict[str, Any]) -> None:
        self.name = str(record["name"])
        self.is_scalar = bool(record.get("scalar"))
        self.is_output = bool(record.get("written"))
        self.is_input = not self.is_scalar and (not self.is_output or bool(record.get("inplace")))
        self.dtype = tvm_ffi.dtype(record["dtype"])
        self.shape: list[Any] = list(record["shape"])
        dtype = getattr(mx, "bool_" if record["dtype"] == "bool" else record["dtype"], None)
        if not isinstance(dtype, mx.Dtype):
            text = f"parameter {self.name}: expected a dtype that MLX has, got {record['dtype']!r}."
            raise _error(NotImplementedError, text)
        self.mlx_dtype = dtype

    def symbols(self) -> dict[str, int]:
        """Give the symbols that an axis has as its size, with the axis."""
        return {
            str(size[1]): axis
            for axis, size in reversed(list(enumerate(self.shape)))
            if isinstance(size, list) and size[0] == "name"
        }


class _Plan:
    """What a TileLang function does: its parameters, and what it launches."""

    def __init__(self, record: dict[str, Any]) -> None:
        self.name = str(record["name"])
        self.parameters = [_Parameter(parameter) for parameter in record["parameters"]]
        self.inputs = [p for p in self.parameters if p.is_input]
        self.outputs = [p for p in self.parameters if p.is_output]
        self.scalars = {p.name for p in self.parameters if p.is_scalar}
        self._kernels: dict[str, bytes] = {k: v.encode() for k, v in record["kernels"].items()}
        # Expressions that are computed for each set of shapes, and where the launches find them.
        self._values: list[Any] = []
        kernels = {name: i for i, name in enumerate(self._kernels)}
        self._launches = [
            [
                kernels[launch["kernel"]],
                self._slots(launch),
                False,
                [
                    self._add(launch[what][axis])
                    for what in ("grid", "threadgroup")
                    for axis in range(3)
                ],
            ]
            for launch in record["launches"]
        ]
        if not self.outputs or not self._launches:
            raise _error(ValueError, "artifact: expected kernels that write something, got none.")
        self._check_names()

    def _add(self, expression: Any) -> int:
        _names(expression)
        self._values.append(expression)
        return len(self._values) - 1

    def _slots(self, launch: dict[str, Any]) -> list[list[Any]]:
        numbers = {p.name: i for i, p in enumerate(self.parameters)}
        slots: list[list[Any]] = [[numbers[name], 0, []] for name in launch["buffers"]]
        scalars = []
        for expression, dtype in launch["scalars"]:
            is_argument = isinstance(expression, list) and expression[1] in self.scalars
            index = numbers[expression[1]] if is_argument else self._add(expression)
            scalars.append([not is_argument, index, tvm_ffi.dtype(dtype)])
        # As TVM packs them: 8 bytes each.
        return [*slots, [0, 8, scalars]] if scalars else slots

    def _check_names(self) -> None:
        known = self.scalars.union(*(p.symbols() for p in self.inputs))
        used = [*self._values, *(size for p in self.parameters for size in p.shape)]
        unknown = sorted(set().union(*map(_names, used)) - known)
        if unknown:
            text = (
                "artifact: expected sizes that follow from the inputs' shapes, got "
                f"{', '.join(unknown)}, which no input has as a dimension."
            )
            raise _error(ValueError, text)

    def _bind(
        self, parameters: list[_Parameter], shapes: list[tuple[int, ...]], scalars: dict[str, Any]
    ) -> dict[str, Any]:
        """Give the values of all symbols, from shapes that are checked."""
        names = dict(scalars)
        for parameter, shape in zip(parameters, shapes, strict=True):
            if len(shape) != len(parameter.shape):
                text = (
                    f"{self.name}: {parameter.name}: expected {len(parameter.shape)} dimensions, "
                    f"got shape {shape}."
                )
                raise _error(ValueError, text)
            for name, axis in parameter.symbols().items():
                names.setdefault(name, shape[axis])
        for parameter, shape in zip(parameters, shapes, strict=True):
            expected = tuple(_value(size, names) for size in parameter.shape)
            if shape != expected:
                text = f"{self.name}: {parameter.name}: expected shape {expected}, got {shape}."
                raise _error(ValueError, text)
        return names

    def _output_shapes(self, *arrays: Any, **scalars: Any) -> list[ShapeDtype]:
        if len(arrays) != len(self.inputs):
            text = (
                f"{self.name}: expected {len(self.inputs)} arrays "
                f"({', '.join(p.name for p in self.inputs)}), got {len(arrays)}."
            )
            raise _error(ValueError, text)
        names = self._bind(self.inputs, [tuple(array.shape) for array in arrays], scalars)
        return [
            ShapeDtype(tuple(_value(size, names) for size in p.shape), p.mlx_dtype)
            for p in self.outputs
        ]

    def _geometry(self, *values: Any) -> list[int]:
        """Compute what the launches need from the arguments: a shape and a dtype, or a scalar."""
        rest = iter(values)
        shapes: list[tuple[int, ...]] = []
        scalars: dict[str, Any] = {}
        for parameter in self.parameters:
            value = next(rest)
            if parameter.is_scalar:
                scalars[parameter.name] = value
            else:
                shapes.append(tuple(value))
                next(rest)
        arrays = [p for p in self.parameters if not p.is_scalar]
        names = self._bind(arrays, shapes, scalars)
        return [_value(expression, names) for expression in self._values]

    def to_op(self, **rules: Any) -> Op:
        """Make the op."""
        place = {
            **{p.name: f"args.{i}" for i, p in enumerate(self.inputs)},
            **{p.name: f"rets.{i}" for i, p in enumerate(self.outputs)},
            **{name: f"attrs.{name}" for name in self.scalars},
        }
        aliases = {self.outputs.index(p): i for i, p in enumerate(self.inputs) if p in self.outputs}
        # The memory of what is updated in place comes as output; the kernels need no input for it.
        hidden = [f"args.{i}" for i in aliases.values()]
        program = tvm_ffi.get_global_func("mlx_tvm_ffi.metal.program")(
            self.name,
            [
                *([not p.is_scalar, p.dtype] for p in self.parameters),
                *([True, tvm_ffi.dtype("handle")] for _ in hidden),
            ],
            # With fast math, as TVM's own runtime compiles what TVM generates.
            [[name, "metal", code, True, [], []] for name, code in self._kernels.items()],
            self._launches,
            tvm_ffi.convert(self._geometry),
        )
        return op(
            program,
            outputs=self._output_shapes,
            arg_spec=[*(place[p.name] for p in self.parameters), *hidden],
            name=self.name,
            aliases=aliases,
            offsets=False,
            **rules,
        )
