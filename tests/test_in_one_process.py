"""In one process with TVM, TileLang or PyTorch, imported in any order."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import tvm_ffi

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).parents[1]
ARTIFACTS = ROOT / "build" / "artifacts"

pytestmark = pytest.mark.cpu

# What works before the other package comes, and after.
OURS = f"""
import mlx.core as mx
import mlx_tvm_ffi as mtf

mx.set_default_device(mx.cpu)
x = mx.ones((4, 64))
for host in ("c", "llvm"):
    double_rows = mtf.load_module(f"{ARTIFACTS}/tvm/cpu_{{host}}.so").double_rows
    y = mx.zeros((4, 64))
    mx.eval(x, y)
    double_rows(x, y)
    assert y[1].tolist() == [2.0] * 64
    assert mtf.op(double_rows, outputs=lambda x: x)(x)[1].tolist() == [2.0] * 64
    assert mtf.load_module(f"{ARTIFACTS}/tvm/metal_{{host}}.so").implements_function("matmul")
"""

# What works with both. TVM's kernel is compiled right here.
BOTH = {
    "tvm": f"""
import runpy
example = runpy.run_path("{ROOT}/examples/tvm_kernel/compile.py")
module = example["schedule"](example["gelu"](), "cpu")
tvm.compile(module, target=tvm.target.Target("llvm")).export_library("gelu.so")
gelu = mtf.op(mtf.load_module("gelu.so").gelu, outputs=lambda x: x)
assert abs(gelu(mx.ones((1, 2, 3)))[0, 1, 2].item() - 0.8413447) < 1e-6
""",
    "torch": """
theirs = torch.zeros(4, 64)
double_rows(torch.ones(4, 64), theirs)
assert theirs[1].tolist() == [2.0] * 64
double_rows(x, theirs)
assert theirs[1].tolist() == [2.0] * 64
""",
    "tilelang": f"""
sys.path.insert(0, "{ROOT}/tests/artifacts")
import make_tilelang as made
from tilelang import tvm
with tvm.transform.PassContext(), tvm.target.Target("metal"):
    artifact = tilelang.lower(made.center_rows, target="metal")
mean, centred = mtf.metal.from_tilelang(artifact)(mx.zeros((5, 7)))
assert (mean.shape, centred.shape, centred.dtype) == ((5,), (5, 7), mx.float32)
""",
}
ORDERS = {
    "first": "import {other}, tvm_ffi, mlx.core, mlx_tvm_ffi",
    "after-mlx": "import mlx.core, {other}, tvm_ffi, mlx_tvm_ffi",
    "after-tvm_ffi": "import tvm_ffi, {other}, mlx_tvm_ffi, mlx.core",
    "last": OURS + "\nimport {other}",
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("other", BOTH)
def test_order_of_imports(run_with: Callable[..., None], other: str, order: str) -> None:
    if other == "tvm" and tvm_ffi.__version__ < "0.1.14":
        pytest.skip("TVM 0.27 needs a newer tvm-ffi")
    imports = ORDERS[order].replace("{other}", other)
    run_with(other, f"{imports}\n{OURS}\n{BOTH[other]}")


def test_tilelang_beside_a_newer_tvm_ffi_than_it_takes(run_with: Callable[..., None]) -> None:
    # Nothing that pip would install. Its import fails, and all of ours goes on.
    code = """
try:
    import tilelang
except (ImportError, OSError, ValueError):
    pass
"""
    run_with("tilelang", OURS + code + OURS, theirs_first=False)
