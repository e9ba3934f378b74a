"""What TileLang saved becomes an op. Needs neither TileLang nor Metal, but for what says so."""

from __future__ import annotations

import copy
import json
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import pytest

import mlx_tvm_ffi as mtf

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).parents[1]
N, M = ["name", "n"], ["name", "m"]
PLAN: dict[str, Any] = {
    "format": "mlx-tvm-ffi tilelang artifact 1",
    "name": "f",
    "parameters": [
        {"name": "A", "dtype": "float32", "shape": [N, ["*", N, 2]]},
        {"name": "alpha", "dtype": "float32", "shape": [], "scalar": True},
        {"name": "B", "dtype": "float32", "shape": [N], "written": True},
    ],
    "kernels": {"f_kernel": "kernel void f_kernel() {}"},
    "launches": [
        {
            "kernel": "f_kernel",
            "buffers": ["A", "B"],
            "scalars": [[["name", "alpha"], "float32"], [N, "int32"]],
            "grid": [["//", ["+", N, 127], 128], 1, 1],
            "threadgroup": [128, 1, 1],
        }
    ],
}


def load(folder: Path, plan: object) -> Callable[..., mx.array]:
    file = folder / "f.json"
    file.write_text(plan if isinstance(plan, str) else json.dumps(plan))
    return mtf.metal.from_tilelang(file)


def test_shapes_follow_from_the_inputs(tmp_path: Path) -> None:
    y = load(tmp_path, PLAN)(mx.zeros((3, 6)), alpha=1.0)
    assert (y.shape, y.dtype) == ((3,), mx.float32)


@pytest.mark.parametrize("shape", [(3, 5), (3,), (3, 6, 1)])
def test_wrong_shape(tmp_path: Path, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"A: expected (shape \(3, 6\)|2 dimensions), got"):
        load(tmp_path, PLAN)(mx.zeros(shape), alpha=1.0)


def test_wrong_number_of_arrays(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"f: expected 1 arrays \(A\), got 2"):
        load(tmp_path, PLAN)(mx.zeros((3, 6)), mx.zeros(3), alpha=1.0)


def changed(*path: Any, to: object) -> dict[str, Any]:
    """Give PLAN with another value in one place; `...` removes it."""
    plan = copy.deepcopy(PLAN)
    place = plan
    for key in path[:-1]:
        place = place[key]
    if to is ...:
        del place[path[-1]]
    else:
        place[path[-1]] = to
    return plan


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ("{", "expected JSON"),
        ("[" * 100_000, "expected what save"),
        ("[]", "expected what save"),
        (changed("format", to="other"), "expected the format .*got 'other'"),
        (changed("kernels", to={}), "expected what save"),
        (changed("launches", to=[]), "expected kernels that write something"),
        (changed("parameters", 2, "written", to=False), "expected kernels that write something"),
        (changed("parameters", 2, "shape", to=[M]), "got m, which no input has"),
        (changed("parameters", 2, "shape", to=[["^", N, 2]]), "expected what save"),
        (changed("parameters", 0, "name", to="C"), "expected what save"),
        (changed("launches", 0, "buffers", to=["A"] * 40), "at most 31"),
        (changed("launches", 0, "grid", to=[1]), "expected what save"),
        (changed("launches", 0, "scalars", 0, 1, to="float64"), "expected scalars of int32"),
        (changed("kernels", "f_kernel", to=7), "expected what save"),
        (changed("parameters", 0, "dtype", to="x"), "expected what save"),
        (changed("parameters", 0, "shape", to=[N, ["*", N]]), "expected what save"),
        (changed("kernels", "f_kernel", to="\0"), "neither source text nor a compiled library"),
        *((changed(key, to=...), "expected what save") for key in PLAN if key != "format"),
    ],
)
def test_damaged_file(tmp_path: Path, plan: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load(tmp_path, plan)


def test_division_by_zero(tmp_path: Path) -> None:
    op = load(tmp_path, changed("parameters", 2, "shape", to=[["//", 8, N]]))
    with pytest.raises(ValueError, match=r"sizes: expected no division by 0, got .*'n': 0"):
        op(mx.zeros((0, 0)), alpha=1.0)


def test_dtype_that_mlx_does_not_have(tmp_path: Path) -> None:
    with pytest.raises(NotImplementedError, match=r"parameter A: .*got 'float8_e4m3'"):
        load(tmp_path, changed("parameters", 0, "dtype", to="float8_e4m3"))


def test_no_such_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="artifact: expected a file"):
        mtf.metal.from_tilelang(tmp_path / "nothing.json")


@pytest.mark.parametrize("artifact", [None, 5, object()])
def test_no_artifact(artifact: object) -> None:
    with pytest.raises(ValueError, match=r"artifact: expected one host function .* got 0 and 0"):
        mtf.metal.from_tilelang(artifact)


def test_inplace_goes_with_the_artifact(tmp_path: Path) -> None:
    (tmp_path / "f.json").write_text(json.dumps(PLAN))
    with pytest.raises(ValueError, match=r"inplace: .*Give them to save"):
        mtf.metal.from_tilelang(tmp_path / "f.json", inplace=["A"])


DESCRIBE = """
import sys
sys.path[:0] = [{artifacts!r}, {package!r}]
import make_tilelang as made, tilelang, tilelang_artifact
from tilelang import tvm

def lower(function, target="metal", **options):
    with tvm.transform.PassContext(), tvm.target.Target(target):
        return tilelang.lower(function, target=target, **options)

def refused(kind, *parts, **call):
    try:
        tilelang_artifact.describe(**call)
    except kind as error:
        assert all(part in str(error) for part in parts), error
    else:
        raise AssertionError("not refused")

artifact = lower(made.update_cache)
assert "inplace" in tilelang_artifact.describe(artifact)["parameters"][0]
assert "inplace" not in tilelang_artifact.describe(artifact, inplace=[])["parameters"][0]
refused(ValueError, "['x']", "cache, row", artifact=artifact, inplace=["x"])
host = lower(made.update_cache, target_host="c", enable_host_codegen=True)
refused(ValueError, "without enable_host_codegen", artifact=host)
refused(ValueError, "for metal, got ones for webgpu", artifact=lower(made.scale_add, "webgpu"))
"""


def test_describe_with_tilelang(tmp_path: Path) -> None:
    python = ROOT / ".venv-tilelang" / "bin" / "python"
    if not (ROOT / "build" / "artifacts" / "tilelang" / ".made").exists():
        pytest.skip("needs TileLang; run make artifacts")
    code = DESCRIBE.format(
        artifacts=str(ROOT / "tests" / "artifacts"), package=str(ROOT / "mlx_tvm_ffi")
    )
    subprocess.run([python, "-c", code], cwd=tmp_path, check=True, timeout=300)
