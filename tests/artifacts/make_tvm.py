"""Compile the TVM kernels that tests/test_artifacts.py loads. Run by ``make artifacts``.

Each module is exported with a C host and with an LLVM host, for Metal and for the CPU.
"""

from __future__ import annotations

import sys
from pathlib import Path

import tvm
from tvm.script import ir as I
from tvm.script import tirx as T


@I.ir_module
class Metal:
    """Kernels as a schedule would give them, with explicit grids and threadgroup memory."""

    @T.prim_func
    def add_scaled(a: T.handle, b: T.handle, c: T.handle, alpha: T.float32):
        n = T.int32()
        A = T.match_buffer(a, (n,), "float32")
        B = T.match_buffer(b, (n,), "float32")
        C = T.match_buffer(c, (n,), "float32")
        for bx in T.thread_binding((n + 63) // 64, thread="blockIdx.x"):
            for tx in T.thread_binding(64, thread="threadIdx.x"):
                if bx * 64 + tx < n:
                    C[bx * 64 + tx] = A[bx * 64 + tx] + alpha * B[bx * 64 + tx]

    @T.prim_func
    def row_sum(a: T.handle, b: T.handle):
        m = T.int32()
        n = T.int32()
        A = T.match_buffer(a, (m, n), "float32")
        B = T.match_buffer(b, (m,), "float32")
        for bx in T.thread_binding(m, thread="blockIdx.x"):
            for tx in T.thread_binding(64, thread="threadIdx.x"):
                S = T.alloc_buffer((64,), "float32", scope="shared")
                S[tx] = T.float32(0)
                for k in T.serial((n + 63) // 64):
                    if k * 64 + tx < n:
                        S[tx] = S[tx] + A[bx, k * 64 + tx]
                T.tvm_storage_sync("shared")
                for s in T.unroll(6):
                    if tx < (32 >> s):
                        S[tx] = S[tx] + S[tx + (32 >> s)]
                    T.tvm_storage_sync("shared")
                if tx == 0:
                    B[bx] = S[0]

    @T.prim_func
    def matmul(a: T.handle, b: T.handle, c: T.handle):
        m = T.int32()
        n = T.int32()
        k = T.int32()
        A = T.match_buffer(a, (m, k), "float32")
        B = T.match_buffer(b, (k, n), "float32")
        C = T.match_buffer(c, (m, n), "float32")
        for by in T.thread_binding((m + 7) // 8, thread="blockIdx.y"):
            for bx in T.thread_binding((n + 7) // 8, thread="blockIdx.x"):
                for ty in T.thread_binding(8, thread="threadIdx.y"):
                    for tx in T.thread_binding(8, thread="threadIdx.x"):
                        if by * 8 + ty < m and bx * 8 + tx < n:
                            C[by * 8 + ty, bx * 8 + tx] = T.float32(0)
                            for i in T.serial(k):
                                C[by * 8 + ty, bx * 8 + tx] = (
                                    C[by * 8 + ty, bx * 8 + tx]
                                    + A[by * 8 + ty, i] * B[i, bx * 8 + tx]
                                )

    @T.prim_func
    def center(a: T.handle, sums: T.handle, c: T.handle):
        # Two kernels: the second one reads what the first one wrote.
        m = T.int32()
        n = T.int32()
        A = T.match_buffer(a, (m, n), "float32")
        S = T.match_buffer(sums, (m,), "float32")
        C = T.match_buffer(c, (m, n), "float32")
        for bx in T.thread_binding((m + 31) // 32, thread="blockIdx.x"):
            for tx in T.thread_binding(32, thread="threadIdx.x"):
                if bx * 32 + tx < m:
                    S[bx * 32 + tx] = T.float32(0)
                    for i in T.serial(n):
                        S[bx * 32 + tx] = S[bx * 32 + tx] + A[bx * 32 + tx, i]
        for bx in T.thread_binding(m, thread="blockIdx.x"):
            for tx in T.thread_binding(32, thread="threadIdx.x"):
                for i in T.serial((n + 31) // 32):
                    if i * 32 + tx < n:
                        C[bx, i * 32 + tx] = A[bx, i * 32 + tx] - S[bx] / T.Cast("float32", n)

    @T.prim_func
    def reversed_squares(a: T.handle, c: T.handle):
        # Two kernels with memory of their own between them.
        A = T.match_buffer(a, (1024,), "float32")
        C = T.match_buffer(c, (1024,), "float32")
        W = T.alloc_buffer((1024,), "float32")
        for bx in T.thread_binding(16, thread="blockIdx.x"):
            for tx in T.thread_binding(64, thread="threadIdx.x"):
                W[bx * 64 + tx] = A[bx * 64 + tx] * A[bx * 64 + tx]
        for bx in T.thread_binding(16, thread="blockIdx.x"):
            for tx in T.thread_binding(64, thread="threadIdx.x"):
                C[bx * 64 + tx] = W[1023 - (bx * 64 + tx)]

    @T.prim_func
    def mixed_scalars(a: T.handle, big: T.int64, half: T.float32, small: T.int32, c: T.handle):
        A = T.match_buffer(a, (64,), "float32")
        C = T.match_buffer(c, (64,), "float32")
        for tx in T.thread_binding(64, thread="threadIdx.x"):
            C[tx] = (
                A[tx] * half
                + T.Cast("float32", big // T.int64(1000000007))
                + T.Cast("float32", small)
            )


@I.ir_module
class Cpu:
    """Kernels for the CPU, with a parallel loop and a workspace."""

    @T.prim_func
    def double_rows(a: T.handle, b: T.handle):
        n = T.int32()
        A = T.match_buffer(a, (n, 64), "float32")
        B = T.match_buffer(b, (n, 64), "float32")
        W = T.alloc_buffer((64 * 1024,), "float32")
        for i in T.parallel(n):
            for j in range(64):
                B[i, j] = A[i, j] * T.float32(2)
        for i in range(64 * 1024):
            W[i] = T.Cast("float32", i)
        for j in range(64):
            B[0, j] = B[0, j] + W[j]


def main(folder: Path) -> None:
    """Write the libraries."""
    folder.mkdir(parents=True, exist_ok=True)
    for host in ("c", "llvm"):
        target = tvm.target.Target("metal", host=host)
        tvm.compile(Metal, target=target).export_library(str(folder / f"metal_{host}.so"))
        tvm.compile(Cpu, target=tvm.target.Target(host)).export_library(
            str(folder / f"cpu_{host}.so")
        )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
