"""Save what TileLang compiled for Metal, to be loaded where TileLang is not installed.

This file needs nothing but TileLang. Copy it to where TileLang is, and there:

.. code-block:: python

    with tvm.transform.PassContext(), tvm.target.Target("metal"):
        artifact = tilelang.lower(function, target="metal")
    tilelang_artifact.save(artifact, "function.json")

Then, where MLX is: ``mtf.metal.from_tilelang("function.json")``. In one process with both,
``mtf.metal.from_tilelang(artifact)`` does the same without a file.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

__all__ = ["describe", "save"]

FORMAT = "mlx-tvm-ffi tilelang artifact 1"

# Expressions are an int, ["name", symbol or scalar] or [operator, left, right].
_OPERATORS = {
    "Add": "+",
    "Sub": "-",
    "Mul": "*",
    "FloorDiv": "//",
    "FloorMod": "%",
    "Min": "min",
    "Max": "max",
}


def save(
    artifact: Any, path: str | os.PathLike[str], *, inplace: Sequence[str] | None = None
) -> None:
    """Write an artifact to a file.

    Parameters
    ----------
    artifact
        What ``tilelang.lower(function, target="metal")`` returns.
    path
        The file to write, JSON.
    inplace
        Names of the parameters that the kernels update in place. None: those that are read by the
        first kernel that writes them.

    """
    Path(path).write_text(json.dumps(describe(artifact, inplace=inplace)), encoding="utf-8")


def describe(artifact: Any, *, inplace: Sequence[str] | None = None) -> dict[str, Any]:
    """Say what an artifact does, in what JSON can hold.

    Parameters
    ----------
    artifact, inplace
        As for :func:`save`.

    Returns
    -------
    plan
        Its parameters, kernels and launches.

    Raises
    ------
    ValueError, NotImplementedError
        It is for another target, or its host code does more than launch kernels.

    """
    functions = {
        str(function.attrs["global_symbol"]): function
        for function in _functions(artifact, "device_mod")
    }
    hosts = _functions(artifact, "host_mod")
    if not functions or len(hosts) != 1:
        message = (
            "[mlx_tvm_ffi.metal.from_tilelang] artifact: expected one host function and its "
            f"kernels as TileLang's IR, got {len(hosts)} and {len(functions)}. Lower it with "
            "tilelang.lower(function, target='metal'), without enable_host_codegen."
        )
        raise ValueError(message)
    targets = {str(function.attrs["target"].kind.name) for function in functions.values()}
    if targets != {"metal"}:
        message = (
            "[mlx_tvm_ffi.metal.from_tilelang] artifact: expected kernels for metal, got ones for "
            f"{', '.join(sorted(targets))}. Lower it with tilelang.lower(function, target='metal')."
        )
        raise ValueError(message)
    host = _Host(hosts[0], functions)
    parameters = [
        _parameter(name, parameter) | ({"scalar": True} if name in host.scalars else {})
        for name, parameter in zip(host.names(len(artifact.params)), artifact.params, strict=True)
    ]
    _mark_written(parameters, host.launches, functions, inplace)
    launched = {launch["kernel"] for launch in host.launches}
    return {
        "format": FORMAT,
        "name": hosts[0].attrs["global_symbol"].removeprefix("__tvm_ffi_"),
        "parameters": parameters,
        "kernels": {
            name: source
            for name, source in _sources(artifact.kernel_source).items()
            if name in launched
        },
        "launches": host.launches,
    }


def _functions(artifact: Any, module: str) -> list[Any]:
    return list(getattr(getattr(artifact, module, None), "functions", {}).values())


def _parameter(name: str, parameter: Any) -> dict[str, Any]:
    return {
        "name": name,
        "dtype": str(parameter.dtype),
        "shape": [_expression(size, {}) for size in parameter.shape],
    }


def _sources(text: str) -> dict[str, str]:
    """Split what TileLang joins: one translation unit for each kernel."""
    parts = re.split(r"^// Function: (\w+)$", text, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def _refuse(what: str) -> NoReturn:
    message = (
        f"[mlx_tvm_ffi.metal.from_tilelang] artifact: expected host code that only launches "
        f"kernels, got {what}. Use one T.Kernel after the other, with sizes made of dimensions."
    )
    raise NotImplementedError(message)


def _expression(node: Any, values: dict[int, Any]) -> Any:
    """Give an expression of TileLang's IR, with variables by `values` or by their names."""
    kind = type(node).__name__
    if isinstance(node, int) or kind == "IntImm":
        return int(node)
    if kind == "Var":
        return values.get(hash(node), ["name", str(node.name)])
    if kind == "Cast":
        return _expression(node.value, values)
    if kind in _OPERATORS:
        return [_OPERATORS[kind], _expression(node.a, values), _expression(node.b, values)]
    _refuse(f"the expression {str(node)[:100]}")


def _argument_read(node: Any, arguments: Any) -> int | None:
    """Give the number of the packed argument that an expression reads, if it reads one."""
    if type(node).__name__ == "Call" and node.op.name.endswith("tvm_struct_get"):
        if node.args[0].same_as(arguments):
            return int(node.args[1])
        return None
    for field in ("value", "true_value", "a", "b"):
        child = getattr(node, field, None)
        if child is not None and (found := _argument_read(child, arguments)) is not None:
            return found
    if type(node).__name__ == "Call":
        for child in node.args:
            if (
                hasattr(child, "same_as")
                and (found := _argument_read(child, arguments)) is not None
            ):
                return found
    return None


class _Host:
    """The host function: which parameters it has, and which kernels it launches with what."""

    def __init__(self, function: Any, kernels: dict[str, Any]) -> None:
        self._arguments = function.params[1]
        self._kernels = kernels
        # By variable: its parameter's number as a handle; its parameter's name as memory or scalar.
        self._handles: dict[int, int] = {}
        self._values: dict[int, Any] = {}
        self._names: dict[int, str] = {}
        self.scalars: set[str] = set()
        self.launches: list[dict[str, Any]] = []
        self._visit(function.body)

    def names(self, count: int) -> list[str]:
        return [self._names.get(i, f"arg{i}") for i in range(count)]

    def _visit(self, statement: Any) -> None:
        kind = type(statement).__name__
        if kind == "SeqStmt":
            for child in statement.seq:
                self._visit(child)
        elif kind == "AttrStmt":
            self._visit(statement.body)
        elif kind in ("Bind", "LetStmt"):
            self._bind(statement.var, statement.value)
            if kind == "LetStmt":
                self._visit(statement.body)
        elif kind == "Evaluate":
            self._evaluate(statement.value)
        elif kind in ("AssertStmt", "DeclBuffer"):
            if getattr(statement, "body", None) is not None:
                self._visit(statement.body)
        else:
            _refuse(f"the statement {kind}")

    def _bind(self, variable: Any, value: Any) -> None:
        name = str(variable.name)
        number = _argument_read(value, self._arguments)
        if number is not None:
            if "handle" in str(variable.dtype):
                self._handles[hash(variable)] = number
            elif not name.endswith("_type_index"):
                self._names[number] = name
                self.scalars.add(name)
                self._values[hash(variable)] = ["name", name]
            return
        if type(value).__name__ == "Call" and value.op.name.endswith("tvm_struct_get"):
            number = self._handles.get(hash(value.args[0]))
            if number is not None and str(variable.dtype) == "handle" and int(value.args[2]) == 1:
                self._names[number] = name
                self._values[hash(variable)] = ["memory", name]

    def _evaluate(self, call: Any) -> None:
        operator = getattr(getattr(call, "op", None), "name", "")
        if operator.endswith("ret") or type(call).__name__ == "IntImm":
            return
        if not operator.endswith("tvm_call_packed"):
            _refuse(f"the call {str(call)[:100]}")
        name = str(call.args[0].value)
        if name == "__tvm_set_device":
            return
        if name not in self._kernels:
            _refuse(f"a call of {name}")
        self._launch(name, self._kernels[name], list(call.args[1:]))

    def _launch(self, name: str, kernel: Any, arguments: list[Any]) -> None:
        attributes = kernel.attrs
        keys = attributes.keys()
        key = next(key for key in keys if str(key).endswith("kernel_launch_params"))
        tags = [str(tag) for tag in attributes[key]]
        given = [_expression(argument, self._values) for argument in arguments]
        if len(given) != len(kernel.params) + len(tags):
            _refuse(f"{len(given)} arguments for {name}")
        buffers: list[str] = []
        scalars: list[list[Any]] = []
        for parameter, value in zip(kernel.params, given, strict=False):
            if isinstance(value, list) and value[0] == "memory":
                buffers.append(value[1])
            elif str(parameter.dtype) == "handle":
                _refuse(f"memory that is no parameter's for {name}")
            else:
                scalars.append([value, str(parameter.dtype)])
        sizes = dict(zip(tags, given[len(kernel.params) :], strict=True))
        axes = "xyz"
        self.launches.append(
            {
                "kernel": name,
                "buffers": buffers,
                "scalars": scalars,
                "grid": [sizes.get(f"blockIdx.{axis}", 1) for axis in axes],
                "threadgroup": [sizes.get(f"threadIdx.{axis}", 1) for axis in axes],
            }
        )


def _mark_written(
    parameters: list[dict[str, Any]],
    launches: list[dict[str, Any]],
    kernels: dict[str, Any],
    inplace: Sequence[str] | None,
) -> None:
    """Note which parameters are written, and which of these bring values with them."""
    names = {parameter["name"] for parameter in parameters if "scalar" not in parameter}
    if inplace is not None and not names.issuperset(inplace):
        message = (
            "[mlx_tvm_ffi.metal.from_tilelang] inplace: expected names of array parameters, got "
            f"{sorted(set(inplace) - names)}. There are: {', '.join(sorted(names))}."
        )
        raise ValueError(message)
    written: dict[str, bool] = {}
    for launch in launches:
        kernel = kernels[launch["kernel"]]
        readonly = {int(i) for i in kernel.attrs.get("tl.readonly_param_indices", ())}
        loaded = _loaded(kernel)
        for i, name in enumerate(launch["buffers"]):
            if i not in readonly:
                written.setdefault(name, i in loaded)
    for parameter in parameters:
        name = parameter["name"]
        if name in written:
            parameter["written"] = True
            if written[name] if inplace is None else name in inplace:
                parameter["inplace"] = True


def _loaded(kernel: Any) -> set[int]:
    """Give the numbers of the parameters that a kernel reads, or hands to what may read them."""
    from tvm.tirx.stmt_functor import (  # type: ignore[import-not-found]  # noqa: PLC0415
        pre_order_visit,
    )

    numbers = {hash(parameter): i for i, parameter in enumerate(kernel.params)}
    found: set[int] = set()

    def visit(node: Any) -> bool:
        kind = type(node).__name__
        if kind == "BufferLoad":
            found.add(numbers.get(hash(node.buffer.data), -1))
        elif kind == "Call":
            name = getattr(node.op, "name", "")
            if name.endswith("simdgroup_store"):  # a matrix goes to the address that follows
                return False
            if name.endswith("tvm_access_ptr") and int(node.args[4]) & 1:
                found.add(numbers.get(hash(node.args[1]), -1))
        return True

    pre_order_visit(kernel.body, visit)
    return found - {-1}
