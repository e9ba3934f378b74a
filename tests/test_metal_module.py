"""Metal modules are read, and refused with a reason, before a launch. Needs no Metal."""

from __future__ import annotations

import struct

import mlx.core as mx
import pytest
import tvm_ffi

import mlx_tvm_ffi as mtf

SOURCE = """#include <metal_stdlib>
using namespace metal;
kernel void fill(device float* x [[buffer(0)]], uint i [[thread_position_in_grid]]) { x[i] = 1; }
"""
# TVM's types of arguments: code, bits, lanes.
HANDLE, INT32, FLOAT32, FLOAT64 = (3, 64, 1), (0, 32, 1), (2, 32, 1), (2, 64, 1)


def u64(value: int) -> bytes:
    return struct.pack("<Q", value)


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return u64(len(raw)) + raw


def function(
    key: str,
    arg_types: tuple[tuple[int, int, int], ...] = (HANDLE,),
    tags: tuple[str, ...] = ("blockIdx.x", "threadIdx.x"),
    extra: tuple[int, ...] | None = (),
) -> bytes:
    """Give an entry of the function table; `extra` None is the older layout."""
    entry = text(key) + text(key)
    entry += u64(len(arg_types)) + b"".join(struct.pack("<BBH", *t) for t in arg_types)
    entry += u64(len(tags)) + b"".join(map(text, tags))
    if extra is not None:
        entry += u64(len(extra)) + b"".join(struct.pack("<i", tag) for tag in extra)
    return entry


def serialize(fmt: str, functions: list[bytes], payloads: dict[str, bytes]) -> bytes:
    table = u64(len(functions)) + b"".join(functions)
    codes = u64(len(payloads)) + b"".join(
        text(name) + text(code) for name, code in payloads.items()
    )
    return text(fmt) + table + codes


METALLIB = b"MTLB" + bytes(range(256))


def load(data: bytes) -> tvm_ffi.Module:
    return tvm_ffi.get_global_func("mlx_tvm_ffi.metal.load_from_bytes")(data)


def one(fmt: str = "metal", payload: bytes = SOURCE.encode(), **what: object) -> bytes:
    return serialize(fmt, [function("fill", **what)], {"fill": payload})


def test_module_has_its_kernels_and_nothing_else() -> None:
    module = load(one())
    assert module.kind == "metal"
    assert module.implements_function("fill")
    assert not module.implements_function("other")
    with pytest.raises(AttributeError):
        _ = module.other


def test_module_answers_what_host_code_asks_first() -> None:
    set_device = load(one()).get_function("__tvm_set_device")
    set_device(8, 0)
    with pytest.raises(ValueError, match=r"expected Metal's device 0, got type 2, id 1"):
        set_device(2, 1)


def test_several_kernels() -> None:
    functions = [function("a"), function("b", arg_types=(HANDLE, HANDLE, INT32))]
    module = load(serialize("metal", functions, {"b": SOURCE.encode(), "a": SOURCE.encode()}))
    assert module.implements_function("a")
    assert module.implements_function("b")


@pytest.mark.parametrize("tag", ["tirx.use_dyn_shared_memory", "tir.use_dyn_shared_memory"])
def test_older_layout_and_older_tags(tag: str) -> None:
    module = load(one(extra=None, tags=("blockIdx.x", "threadIdx.x", tag)))
    with pytest.raises(TypeError, match="expected 4, got 1"):
        module.fill(1)


def test_metallib() -> None:
    assert load(one("metallib", METALLIB)).implements_function("fill")


def test_kernels_of_one_module_have_one_format() -> None:
    payloads = {"a": SOURCE.encode(), "b": METALLIB}
    with pytest.raises(ValueError, match="kernel 'b': expected format 'metal' as declared"):
        load(serialize("metal", [function("a"), function("b")], payloads))


@pytest.mark.skipif(mx.metal.is_available(), reason="Metal is there")
def test_launch_without_metal_says_where_it_runs() -> None:
    with pytest.raises(RuntimeError, match=r"kernel 'fill': expected a Mac with Metal"):
        load(one()).fill(None, 1, 1)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "format: expected a number of 8 bytes at byte 0, got 0 bytes"),
        (one()[:100], "at byte"),
        (one() + b"x", "end: expected no bytes after the payloads"),
        (u64(2**63), "format: expected a number that the remaining bytes can hold"),
        (one("opencl"), "kernel 'fill': expected format 'metal' or 'metallib', got 'opencl'"),
        (one("metal", METALLIB), r"expected format 'metal' as declared, got a compiled library"),
        (one("metallib"), r"expected format 'metallib' as declared, got source text"),
        (one("metal", b"\0\1\2"), "got neither source text nor a compiled library, 3 bytes"),
        (one("metal", b""), "got nothing, 0 bytes"),
        (one("metal", b"\xc3("), "got neither source text"),
        (one(arg_types=(INT32, HANDLE)), "expected buffers before scalars, got argument 1"),
        (one(arg_types=(HANDLE, FLOAT64)), "got type code 2 of 64 bits"),
        (one(arg_types=(HANDLE, (2, 32, 4))), "4 lanes"),
        (one(arg_types=(HANDLE,) * 31 + (FLOAT32,)), "at most 31 buffer slots, got 32"),
        (one(tags=("clusterCtaIdx.x",)), "got 'clusterCtaIdx.x'"),
        (one(tags=("blockIdx.x", "blockIdx.x")), "got 'blockIdx.x' twice"),
        (one(extra=(1,)), "Metal has no tensor maps"),
        (serialize("metal", [function("")], {"": b"x"}), "expected a name"),
        (serialize("metal", [function("f")] * 2, {"f": b"x"}), "expected each name once"),
        (serialize("metal", [function("f")], {"g": b"x"}), "expected a function's name"),
        (serialize("metal", [function("f")], {}), "one payload for each"),
        (serialize("metal", [], {}), "one payload for each"),
        (text("metal") + u64(1) + function("f") + u64(2) + (text("f") + text("x")) * 2, "once"),
    ],
)
def test_damaged_module_is_refused(data: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load(data)


def test_message_shows_hostile_names_as_text() -> None:
    with pytest.raises(ValueError, match=r"kernel 'a\?\?b': expected format") as error:
        load(serialize("x" * 1000, [function("a\n\x07b")], {}))
    assert len(str(error.value)) < 400


TABLE = {"arg_types": ["handle", "int32"], "launch_param_tags": ["blockIdx.x", "threadIdx.x"]}


def test_module_from_payloads() -> None:
    module = mtf.metal.module({"fill": (SOURCE, "metal")}, {"fill": TABLE})
    assert module.kind == "metal"
    assert mtf.metal.module({"fill": METALLIB}, {"fill": TABLE}).implements_function("fill")


@pytest.mark.parametrize(
    ("payloads", "kind", "message"),
    [
        ({"fill": SOURCE}, ValueError, "'metallib' as declared, got source text"),
        ({"fill": (SOURCE, "metallib")}, ValueError, "'metallib' as declared, got source text"),
        ({"fill": (METALLIB, "metal")}, ValueError, "'metal' as declared, got a compiled library"),
        ({"fill": (SOURCE, "spirv")}, ValueError, "expected format 'metal' or 'metallib'"),
        ({"fill": (SOURCE, "metal", 1)}, ValueError, "kernel 'fill'.*got 3 items"),
        ({"fill": (SOURCE,)}, ValueError, "kernel 'fill'.*got 1 items"),
        ({"fill": (1, "metal")}, TypeError, "kernel 'fill'.*got int and str"),
        ({"fill": (SOURCE, 1)}, TypeError, "kernel 'fill'.*got str and int"),
        (
            {"fill": (SOURCE, "metal"), "b": METALLIB},
            ValueError,
            "one format for all kernels of a module, got fill: 'metal', b: 'metallib'",
        ),
        ({}, ValueError, "expected an entry for each of one or more kernels"),
        ({"other": METALLIB}, ValueError, r"got \['fill'\] for \['other'\]"),
    ],
)
def test_payload_rules(payloads: dict, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        mtf.metal.module(payloads, {"fill": TABLE})


@pytest.mark.parametrize(
    ("payloads", "functions", "kind", "message"),
    [
        ([SOURCE], {"fill": TABLE}, TypeError, "payloads: expected a dict by kernel name"),
        ({5: SOURCE}, {5: TABLE}, TypeError, "payloads: expected a dict by kernel name"),
        ({"fill": SOURCE}, [TABLE], TypeError, "functions: expected a dict by kernel name"),
        *(
            ({"fill": METALLIB}, {"fill": table}, ValueError, "functions: expected 'fill' with arg")
            for table in (None, {"arg_types": []}, TABLE | {"arg_types": ["x"]})
        ),
    ],
)
def test_tables_that_are_none(
    payloads: dict, functions: dict, kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=r"\[mlx_tvm_ffi.metal.module\] " + message):
        mtf.metal.module(payloads, functions)


def kernel(**changes: object) -> mtf.Op:
    options = {
        "name": "fill",
        "source": SOURCE,
        "outputs": lambda x: x,
        "buffers": ["rets.0"],
        "grid": (1, 1, 1),
        "threadgroup": (1, 1, 1),
    }
    return mtf.metal.kernel(**options | changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": 5}, "got int and str"),
        ({"source": None}, "got str and NoneType"),
        ({"fmt": "spirv"}, "fmt: expected 'metal', 'metallib' or None, got 'spirv'"),
        ({"source": METALLIB, "fmt": "metal"}, "'metal' as declared, got a compiled library"),
        ({"fmt": "metallib"}, "'metallib' as declared, got source text"),
        *(
            ({"buffers": buffers}, "buffers: expected 'args.N', 'rets.N' or")
            for buffers in (None, [5], ["args.x"], [("args.0", mx.int32)], [("attrs.", mx.int32)])
        ),
        ({"buffers": ["attrs.n"]}, "with a dtype of int32, .*got 'attrs.n'"),
        ({"buffers": [("attrs.n", mx.float16)]}, "with a dtype of int32"),
        ({"buffers": ["rets.0"] * 32}, "buffers: expected at most 31, got 32"),
        ({"grid": (1, 1)}, "grid: expected three numbers"),
        ({"threadgroup": (1, 1, -1)}, "threadgroup: expected three numbers"),
        *(
            ({"constants": constants}, "constants: expected an index below 65536 or a name")
            for constants in ({-1: 1}, {2**16: 1}, {"": 1}, {0: "x"}, {0: (1,)}, {0: (1, "int32")})
        ),
        ({"constants": [1]}, "constants: expected a dict by index or name"),
        ({"constants": {0: 2**40}}, "constants: expected 0 to fit mlx.core.int32"),
        ({"constants": {0: (300, mx.uint8)}}, "constants: expected 0 to fit mlx.core.uint8"),
        *(
            ({"threadgroup_memory": memory}, "threadgroup_memory: expected at most 31 sizes")
            for memory in (5, [8], [16.0], [0], [2**40], [16] * 32)
        ),
    ],
)
def test_kernel_that_says_nothing_to_launch(changes: dict, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=r"\[mlx_tvm_ffi.metal.*" + message):
        kernel(**changes)
