"""Compile GELU with TVM: ``python compile.py cpu gelu.so`` or ``python compile.py metal gelu.so``.

This step needs TVM, and neither MLX nor mlx_tvm_ffi.
"""

from __future__ import annotations

import argparse
import math

import tvm
from tvm import te


def gelu() -> tvm.IRModule:
    """Define it: three dimensions of any size, one formula."""
    shape = tuple(te.var(name) for name in ("batch", "tokens", "features"))
    x = te.placeholder(shape, "float32", name="x")

    def formula(*i: tvm.tirx.Var) -> tvm.tirx.PrimExpr:
        return x[i] * (1 + tvm.tirx.erf(x[i] * math.sqrt(0.5))) * 0.5

    function = te.create_prim_func([x, te.compute(shape, formula, name="y")])
    return tvm.IRModule({"gelu": function.with_attr("global_symbol", "gelu")})


def schedule(module: tvm.IRModule, target: str) -> tvm.IRModule:
    """Say how to run it: one thread for each element, or ranges of elements one after another."""
    plan = tvm.s_tir.Schedule(module)
    elements = plan.fuse(*plan.get_loops(plan.get_sblock("y", func_name="gelu")))
    if target == "metal":
        blocks, threads = plan.split(elements, [None, 256])
        plan.bind(blocks, "blockIdx.x")
        plan.bind(threads, "threadIdx.x")
    else:
        ranges, _ = plan.split(elements, [None, 1024])
        plan.parallel(ranges)
    return plan.mod


def main() -> None:
    """Define, schedule, compile, export."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("target", choices=("cpu", "metal"))
    parser.add_argument("library", help="the file to write")
    options = parser.parse_args()
    target = {"cpu": "llvm", "metal": tvm.target.Target("metal", host="llvm")}[options.target]
    executable = tvm.compile(schedule(gelu(), options.target), target=tvm.target.Target(target))
    executable.export_library(options.library)


if __name__ == "__main__":
    main()
