"""mtf.metal.kernel and mtf.metal.module: Metal source and metallibs as they are, as ops."""

from __future__ import annotations

import os
import subprocess
from typing import TYPE_CHECKING

import mlx.core as mx
import numpy as np
import pytest

import mlx_tvm_ffi as mtf

if TYPE_CHECKING:
    from collections.abc import Callable

    import tvm_ffi

pytestmark = pytest.mark.metal

# A whole translation unit: a helper, a scalar by value and one of another type.
SCALE = """#include <metal_stdlib>
using namespace metal;
static float apply(float x, float factor, uint shift) { return x * factor + float(shift); }
kernel void scale(const device float* x [[buffer(0)]], constant float& factor [[buffer(1)]],
                  device float* y [[buffer(2)]], constant uint& shift [[buffer(3)]],
                  uint i [[thread_position_in_grid]]) {
  y[i] = apply(x[i], factor, shift);
}
"""


def scale(source: str | bytes = SCALE, **options: object) -> mtf.Op:
    return mtf.metal.kernel(
        "scale",
        source,
        outputs=lambda x, **_: x,
        buffers=["args.0", ("attrs.factor", mx.float32), "rets.0", ("attrs.shift", mx.uint32)],
        grid=lambda x, **_: (x.size, 1, 1),
        threadgroup=(64, 1, 1),
        **options,
    )


def random(*shape: int) -> np.ndarray:
    return np.random.default_rng().integers(-9, 9, shape).astype(np.float32)


@pytest.mark.parametrize("shape", [(1,), (7, 9), (1000,)])
def test_source_with_scalars_and_sizes_that_follow_shapes(shape: tuple[int, ...]) -> None:
    a = random(*shape)
    y = scale()(mx.array(a), factor=0.5, shift=3)
    np.testing.assert_array_equal(np.array(y), a * np.float32(0.5) + 3)


def test_slices_and_strides() -> None:
    a = random(20, 30)
    op = scale()
    x = mx.array(a)
    for y, b in ((x[3:], a[3:]), (x.T, a.T), (x[:, 4:9], a[:, 4:9])):
        result = op(y, factor=2.0, shift=0)
        np.testing.assert_array_equal(np.array(result), b * 2)


def test_empty() -> None:
    assert scale()(mx.zeros((0, 4)), factor=1.0, shift=0).shape == (0, 4)


def test_same_name_other_code() -> None:
    x = mx.array(random(64))
    other = scale(SCALE.replace("x * factor", "x - factor"))
    first = scale()
    for _ in range(3):
        np.testing.assert_array_equal(
            np.array(other(x, factor=2.0, shift=0)), np.array(x) - np.float32(2)
        )
        np.testing.assert_array_equal(np.array(first(x, factor=2.0, shift=0)), np.array(x) * 2)


def elementwise(name: str, source: str, **options: object) -> mtf.Op:
    return mtf.metal.kernel(
        name,
        source,
        outputs=lambda x: x,
        buffers=["args.0", "rets.0"],
        threadgroup=(32, 1, 1),
        **{"grid": lambda x: (x.size, 1, 1), **options},
    )


def test_two_functions_of_one_source() -> None:
    source = """#include <metal_stdlib>
kernel void minus(const device float* x [[buffer(0)]], device float* y [[buffer(1)]],
                  uint i [[thread_position_in_grid]]) { y[i] = -x[i]; }
kernel void twice(const device float* x [[buffer(0)]], device float* y [[buffer(1)]],
                  uint i [[thread_position_in_grid]]) { y[i] = 2 * x[i]; }
"""
    a = random(40)
    for name, expected in (("minus", -a), ("twice", 2 * a)):
        np.testing.assert_array_equal(np.array(elementwise(name, source)(mx.array(a))), expected)


def test_same_code_is_compiled_once(sim: tvm_ffi.Module) -> None:
    a = random(40)
    sim.reset_counts()
    for _ in range(3):
        scale(SCALE + "// compiled once\n")(mx.array(a), factor=2.0, shift=0)
        y = scale(SCALE + "// compiled once\n")(mx.array(a), factor=2.0, shift=0)
        np.testing.assert_array_equal(np.array(y), a * 2)
    messages = dict(sim.messages(False))
    assert messages.get("newComputePipelineStateWithFunction:error:", 0) <= 1


def test_dropped_in_flight(sim: tvm_ffi.Module) -> None:
    a = random(256)
    sim.hold(True)
    y = scale(SCALE + "// dropped\n")(mx.array(a), factor=3.0, shift=0)
    mx.async_eval(y)
    sim.hold(False)
    np.testing.assert_array_equal(np.array(y), a * 3)


def test_compiled_and_shapeless() -> None:
    op = scale()
    f = mx.compile(lambda x: op(op(x, factor=2.0, shift=1), factor=3.0, shift=0), shapeless=True)
    for n in (10, 300, 70):
        a = random(n)
        np.testing.assert_array_equal(np.array(f(mx.array(a))), (a * 2 + 1) * 3)


def test_group_larger_than_grid() -> None:
    a = random(5)
    np.testing.assert_array_equal(np.array(scale()(mx.array(a), factor=1.0, shift=0)), a)


NUMBER = """#include <metal_stdlib>
using namespace metal;
kernel void number(device int* y [[buffer(0)]], constant int& width [[buffer(1)]],
                   constant int& height [[buffer(2)]], uint3 i [[thread_position_in_grid]]) {
  y[(int(i.z) * height + int(i.y)) * width + int(i.x)] = int(i.x + 100 * i.y + 10000 * i.z) + 1;
}
"""


@pytest.mark.parametrize(
    ("grid", "group"),
    [
        ((65, 1, 1), (64, 1, 1)),
        ((3, 5, 1), (32, 8, 1)),
        ((33, 9, 2), (32, 8, 1)),
        ((1, 1, 7), (4, 4, 4)),
        ((1, 1, 1), (1024, 1, 1)),
    ],
)
def test_groups_that_stick_out_of_the_grid(
    grid: tuple[int, int, int], group: tuple[int, int, int]
) -> None:
    width, height, depth = grid
    number = mtf.metal.kernel(
        "number",
        NUMBER,
        outputs=mtf.ShapeDtype((depth, height, width), mx.int32),
        buffers=["rets.0", ("attrs.width", mx.int32), ("attrs.height", mx.int32)],
        grid=grid,
        threadgroup=group,
    )
    z, y, x = np.indices((depth, height, width))
    np.testing.assert_array_equal(
        np.array(number(width=width, height=height)), x + 100 * y + 10000 * z + 1
    )


def test_wrong_scalar() -> None:
    x = mx.ones(4)
    with pytest.raises(RuntimeError, match=r"TypeError: .*argument 3: expected an int, got float"):
        mx.eval(scale()(x, factor=1.0, shift=2.5))
    with pytest.raises(RuntimeError, match=r"ValueError: .*from 0 to 4294967295, got -1"):
        mx.eval(scale()(x, factor=1.0, shift=-1))


def test_source_that_does_not_compile() -> None:
    with pytest.raises(RuntimeError, match=r"kernel 'scale': expected source that Metal compiles"):
        mx.eval(scale("kernel void scale( nonsense")(mx.ones(4), factor=1.0, shift=0))
    np.testing.assert_array_equal(np.array(mx.ones(4) + 1.0), np.full(4, 2.0))


def test_function_that_is_not_there() -> None:
    source = SCALE.replace("void scale", "void other")
    with pytest.raises(RuntimeError, match="expected a function of this name in the library"):
        mx.eval(scale(source)(mx.ones(4), factor=1.0, shift=0))


def test_threadgroup_too_large() -> None:
    op = mtf.metal.kernel(
        "scale",
        SCALE,
        outputs=lambda x, **_: x,
        buffers=["args.0", ("attrs.factor", mx.float32), "rets.0", ("attrs.shift", mx.uint32)],
        grid=(4096, 1, 1),
        threadgroup=(4096, 1, 1),
    )
    with pytest.raises(RuntimeError, match=r"threadgroup of at most \d+ threads, got 4096 x 1"):
        mx.eval(op(mx.ones(4096), factor=1.0, shift=0))


INCREMENT = """#include <metal_stdlib>
using namespace metal;
kernel void increment(device float* x [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  x[i] = x[i] + 1;
}
"""


def increment_in_place(grid: object) -> mtf.Op:
    return mtf.metal.kernel(
        "increment",
        INCREMENT,
        outputs=lambda x: x,
        buffers=["rets.0"],
        aliases={0: 0},
        grid=grid,
        threadgroup=(32, 1, 1),
    )


def test_buffer_updated_in_place() -> None:
    increment = increment_in_place(lambda x: (x.size, 1, 1))
    a = random(100)
    x = mx.array(a)
    y = increment(increment(x))
    np.testing.assert_array_equal(np.array(y), a + 2)
    np.testing.assert_array_equal(np.array(x), a)


def test_nothing_to_launch() -> None:
    increment = increment_in_place((4, 0, 1))
    a = random(4)
    np.testing.assert_array_equal(np.array(increment(mx.array(a))), a)


SUM = """#include <metal_stdlib>
using namespace metal;
kernel void total(const device float* x [[buffer(0)]], device float* y [[buffer(1)]],
                  threadgroup float* s [[threadgroup(0)]],
                  uint i [[thread_position_in_threadgroup]],
                  uint g [[threadgroup_position_in_grid]]) {
  s[i] = x[g * 32 + i];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (i == 0) {
    float sum = 0;
    for (uint j = 0; j < 32; ++j) sum += s[j];
    y[g] = sum;
  }
}
"""


def test_threadgroup_memory() -> None:
    total = mtf.metal.kernel(
        "total",
        SUM,
        outputs=lambda x: mtf.ShapeDtype((x.shape[0],), x.dtype),
        buffers=["args.0", "rets.0"],
        grid=lambda x: (x.size, 1, 1),
        threadgroup=(32, 1, 1),
        threadgroup_memory=[128],
    )
    a = random(6, 32)
    np.testing.assert_array_equal(np.array(total(mx.array(a))), a.sum(1))


@pytest.mark.parametrize("sizes", [[32768 + 16], [32768, 32768], [2**31, 2**31]])
def test_too_much_threadgroup_memory(sizes: list[int]) -> None:
    op = elementwise("total", SUM, threadgroup_memory=sizes)
    with pytest.raises(RuntimeError, match=rf"at most \d+ bytes of thread.*got {sum(sizes)}"):
        mx.eval(op(mx.ones(32)))


def test_too_many_scalars() -> None:
    module = mtf.metal.module(
        {"fill": (INCREMENT.replace("increment", "fill"), "metal")},
        {"fill": {"arg_types": ["handle"] + ["int64"] * 513, "launch_param_tags": []}},
    )
    x = mx.ones(4)
    mx.eval(x)
    with pytest.raises(ValueError, match="at most 4096 bytes of scalars, got 4104"):
        module.fill(x, *range(513))


CONSTANTS = """#include <metal_stdlib>
using namespace metal;
constant int offset [[function_constant(0)]];
constant bool negate [[function_constant(1)]];
constant float factor [[function_constant(2)]];
kernel void adjust(const device float* x [[buffer(0)]], device float* y [[buffer(1)]],
                   uint i [[thread_position_in_grid]]) {
  float v = x[i] * factor + float(offset);
  y[i] = negate ? -v : v;
}
"""


@pytest.mark.parametrize(
    "constants",
    [
        {0: 5, 1: True, 2: 0.5},
        {"offset": 5, "negate": True, "factor": (0.5, mx.float32)},
        {0: (5, mx.int32), "negate": True, 2: 0.5},
    ],
)
def test_function_constants(constants: dict) -> None:
    a = random(40)
    adjust = elementwise("adjust", CONSTANTS, constants=constants)
    np.testing.assert_array_equal(np.array(adjust(mx.array(a))), -(a * np.float32(0.5) + 5))
    other = elementwise("adjust", CONSTANTS, constants={0: 1, 1: False, 2: 2.0})
    np.testing.assert_array_equal(np.array(other(mx.array(a))), a * 2 + 1)


def test_equal_values_of_other_function_constants() -> None:
    source = """#include <metal_stdlib>
using namespace metal;
constant float factor [[function_constant(0)]];
constant float offset [[function_constant(1)]];
kernel void adjust(const device float* x [[buffer(0)]], device float* y [[buffer(1)]],
                   uint i [[thread_position_in_grid]]) { y[i] = x[i] * factor + offset; }
"""
    a = random(40)
    for constants, expected in (({0: 2.0, 1: 5.0}, a * 2 + 5), ({1: 2.0, 0: 5.0}, a * 5 + 2)):
        adjust = elementwise("adjust", source, constants=constants)
        np.testing.assert_array_equal(np.array(adjust(mx.array(a))), expected)


@pytest.fixture(scope="module")
def compile_metallib(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], bytes]:
    """Compile Metal source to a metallib."""

    def compile_metallib(text: str) -> bytes:
        source = tmp_path_factory.mktemp("metallib") / "source.metal"
        library = source.with_suffix(".metallib")
        source.write_text(text)
        simulated = os.environ.get("METAL_SIM_MSLC")
        if simulated is not None:
            subprocess.run(f"{simulated} {source} {library}", shell=True, check=True)
            return b"MTLB" + library.read_bytes()
        subprocess.run(["xcrun", "metal", source, "-o", library], check=True)
        return library.read_bytes()

    return compile_metallib


def test_metallib(compile_metallib: Callable[[str], bytes]) -> None:
    a = random(50)
    y = scale(compile_metallib(SCALE))(mx.array(a), factor=2.0, shift=1)
    np.testing.assert_array_equal(np.array(y), a * 2 + 1)


def test_damaged_metallib() -> None:
    with pytest.raises(RuntimeError, match="expected a library that Metal loads"):
        mx.eval(scale(b"MTLB" + b"\0" * 100)(mx.ones(4), factor=1.0, shift=0))


@pytest.fixture(params=["metal", "metallib"])
def fill(request: pytest.FixtureRequest, compile_metallib: Callable[[str], bytes]) -> mtf.Op:
    """A kernel called as TVM calls its own."""
    source = """#include <metal_stdlib>
using namespace metal;
struct fill_args_t { float value[2]; int n[2]; };
kernel void fill(device float* x [[buffer(0)]], constant fill_args_t& arg [[buffer(1)]],
                 uint b [[threadgroup_position_in_grid]],
                 uint t [[thread_position_in_threadgroup]]) {
  if (int(b * 32 + t) < arg.n[0]) x[b * 32 + t] = arg.value[0];
}
"""
    payload = source if request.param == "metal" else compile_metallib(source)
    module = mtf.metal.module(
        {"fill": (payload, request.param)},
        {
            "fill": {
                "arg_types": ["handle", "float32", "int32"],
                "launch_param_tags": ["blockIdx.x", "threadIdx.x"],
            }
        },
    )
    return mtf.op(
        module.fill,
        outputs=mtf.ShapeDtype((50,), mx.float32),
        arg_spec=["rets", "attrs.value", "attrs.n", "attrs.blocks", "attrs.threads"],
    )


def test_module_from_payloads(fill: mtf.Op) -> None:
    y = fill(value=2.5, n=50, blocks=2, threads=32)
    np.testing.assert_array_equal(np.array(y), np.full(50, 2.5))


def test_module_launches_no_empty_grid(fill: mtf.Op) -> None:
    # As TVM: a shape with a zero is launched as one with a one, and kernels check their bounds.
    mx.eval(fill(value=2.5, n=0, blocks=0, threads=32))


def test_module_takes_launch_arguments_in_the_order_of_its_tags() -> None:
    source = """#include <metal_stdlib>
using namespace metal;
kernel void sizes(device int* x [[buffer(0)]], uint3 grid [[threadgroups_per_grid]],
                  uint3 group [[threads_per_threadgroup]],
                  uint3 b [[threadgroup_position_in_grid]],
                  uint3 t [[thread_position_in_threadgroup]]) {
  if (b.x + b.y + b.z + t.x + t.y + t.z == 0) {
    x[0] = grid.x; x[1] = grid.y; x[2] = grid.z; x[3] = group.x; x[4] = group.y; x[5] = group.z;
  }
}
"""
    given = {"threadIdx.z": 2, "blockIdx.y": 3, "threadIdx.x": 4, "blockIdx.x": 5, "blockIdx.z": 6}
    module = mtf.metal.module(
        {"sizes": (source, "metal")},
        {"sizes": {"arg_types": ["handle"], "launch_param_tags": list(given)}},
    )
    x = mx.zeros(6, mx.int32)
    mx.eval(x)
    module.sizes(x, *given.values())
    assert x.tolist() == [5, 3, 6, 4, 1, 2]
