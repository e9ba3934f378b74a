"""Compile the TileLang kernels that tests/test_artifacts.py loads. Run by ``make artifacts``."""

from __future__ import annotations

import sys
from pathlib import Path

import tilelang
import tilelang.language as T
from tilelang import tvm

sys.path.insert(0, str(Path(__file__).parents[2] / "mlx_tvm_ffi"))
import tilelang_artifact

n = T.dynamic("n")
m = T.dynamic("m")


@T.prim_func
def scale_add(
    A: T.Tensor((n,), "float32"),
    alpha: T.float32,
    B: T.Tensor((n,), "float32"),
    shift: T.int32,
):
    with T.Kernel(T.ceildiv(n, 128), threads=128) as bx:
        for j in T.Parallel(128):
            if bx * 128 + j < n:
                B[bx * 128 + j] = A[bx * 128 + j] * alpha + shift


@T.prim_func
def center_rows(
    A: T.Tensor((n, m), "float32"), mean: T.Tensor((n,), "float32"), C: T.Tensor((n, m), "float32")
):
    with T.Kernel(T.ceildiv(n, 32), threads=32) as bx:
        for i in T.Parallel(32):
            if bx * 32 + i < n:
                total = T.alloc_var("float32")
                total = 0.0
                for j in T.serial(m):
                    total += A[bx * 32 + i, j]
                mean[bx * 32 + i] = total / T.cast(m, "float32")
    with T.Kernel(n, T.ceildiv(m, 64), threads=64) as (bx, by):
        for j in T.Parallel(64):
            if by * 64 + j < m:
                C[bx, by * 64 + j] = A[bx, by * 64 + j] - mean[bx]


@T.prim_func
def update_cache(
    cache: T.Tensor((n, 64), "float32"), row: T.Tensor((64,), "float32"), position: T.int32
):
    with T.Kernel(n, threads=64) as bx:
        for j in T.Parallel(64):
            cache[bx, j] = T.if_then_else(bx == position, row[j], cache[bx, j])


@T.prim_func
def matmul(
    A: T.Tensor((64, 64), "float16"),
    B: T.Tensor((64, 64), "float16"),
    C: T.Tensor((64, 64), "float32"),
):
    with T.Kernel(2, 2, threads=128) as (bx, by):
        left = T.alloc_shared((32, 32), "float16")
        right = T.alloc_shared((32, 32), "float16")
        sums = T.alloc_fragment((32, 32), "float32")
        T.clear(sums)
        for k in T.Pipelined(2, num_stages=1):
            T.copy(A[by * 32, k * 32], left)
            T.copy(B[k * 32, bx * 32], right)
            T.gemm(left, right, sums)
        T.copy(sums, C[by * 32, bx * 32])


def main(folder: Path) -> None:
    """Write one file for each kernel."""
    folder.mkdir(parents=True, exist_ok=True)
    for function in (scale_add, center_rows, update_cache, matmul):
        with tvm.transform.PassContext(), tvm.target.Target("metal"):
            artifact = tilelang.lower(function, target="metal")
        name = function.attrs["global_symbol"]
        tilelang_artifact.save(artifact, folder / f"{name}.json")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
