"""Count what kernels cost on MLX's Metal encoder: encoders, commits, waits, Objective-C messages.

    python benchmarks/metal.py [OUTPUT.json]

Needs the simulated Metal (`make metal-bench`), which counts and does not time. Each row is 1,000
consecutive kernels on 64 floats, each of which needs what the one before it wrote.

`make metal-bench` runs on a stand-in for MLX's Metal half, which lacks MLX's custom kernel. The
counts in results/metal.json were taken on MLX 0.32.1's own Metal backend, compiled from its
unmodified source against the same simulated Metal.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import mlx.core as mx
import tvm_ffi

import mlx_tvm_ffi as mtf

if TYPE_CHECKING:
    from collections.abc import Callable

KERNELS = 1000
ELEMENTS = 64
ROUNDS = 3
COUNTS = {
    "encoders": ("compute_encoders", "blit_encoders"),
    "commits": ("commits",),
    "waits": ("waits", "event_host_waits"),
    "barriers": ("barriers",),
    "handlers": ("handlers",),
}


def rows(kernels: tvm_ffi.Module) -> dict[str, Callable[[], object]]:
    """Give what is compared, by name."""
    x = mx.array([0.0] * ELEMENTS)
    op = mtf.op(kernels.add_one, outputs=lambda x: x)
    own_encoder = mtf.op(kernels.add_one_serially, outputs=lambda x: x)

    def graph(step: Callable[[mx.array], mx.array], *, each: bool = False) -> mx.array:
        y = x
        for _ in range(KERNELS):
            y = step(y)
            if each:
                mx.eval(y)
        mx.eval(y)
        return y

    def direct() -> mx.array:
        a, b = mx.array([0.0] * ELEMENTS), mx.array([0.0] * ELEMENTS)
        for _ in range(KERNELS):
            kernels.add_one(a, b)
            a, b = b, a
        mx.eval(a)
        return a

    def scope() -> mx.array:
        with mtf.stream():
            return direct()

    result = {
        "op": lambda: graph(op),
        "op with an encoder of its own": lambda: graph(own_encoder),
        "direct calls in a scope": scope,
        "direct calls": direct,
        "op, evaluated each": lambda: graph(op, each=True),
    }
    metal_kernel = mx.fast.metal_kernel(
        name="add_one",
        input_names=["x"],
        output_names=["y"],
        source="uint i = thread_position_in_grid.x; y[i] = x[i] + 1;",
    )

    def mlx_own(y: mx.array) -> mx.array:
        size = (ELEMENTS, 1, 1)
        shapes, dtypes = [(ELEMENTS,)], [mx.float32]
        return metal_kernel(
            inputs=[y], grid=size, threadgroup=size, output_shapes=shapes, output_dtypes=dtypes
        )[0]

    try:
        mx.eval(mlx_own(x))
    except RuntimeError:  # it is not there with the stand-in for MLX's Metal half
        return result
    return {
        "MLX's custom kernel": lambda: graph(mlx_own),
        **result,
        "MLX's custom kernel, evaluated each": lambda: graph(mlx_own, each=True),
    }


def count(sim: tvm_ffi.Module, work: Callable[[], object]) -> dict[str, float]:
    """Count one run of work, after one that fills MLX's caches; the fewest messages of some."""
    work()
    messages = []
    for _ in range(ROUNDS):
        mx.synchronize()
        sim.reset_counts()
        result = work()
        found = dict(sim.counts())
        messages.append(sum(dict(sim.messages(False)).values()) / KERNELS)
        if result.tolist() != [KERNELS] * ELEMENTS:
            message = f"expected {KERNELS} in each element, got {result.tolist()}"
            raise RuntimeError(message)
    counts = {name: sum(found[key] for key in keys) for name, keys in COUNTS.items()}
    return {**counts, "messages per kernel": min(messages)}


def main() -> None:
    """Print the table, and write it where asked to."""
    if "METAL_SIM_LIBRARY" not in os.environ:
        print("benchmarks/metal.py: needs the simulated Metal; run make metal-bench")
        return
    mx.set_default_device(mx.gpu)
    sim = tvm_ffi.load_module(os.environ["METAL_SIM_LIBRARY"])
    kernels = tvm_ffi.load_module(os.environ["METAL_KERNELS"])
    table = {name: count(sim, work) for name, work in rows(kernels).items()}
    columns = [*COUNTS, "messages per kernel"]
    print(f"{'':36}" + "".join(f"{column:>{len(column) + 2}}" for column in columns))
    for name, row in table.items():
        cells = (f"{row[column]:>{len(column) + 2}.6g}" for column in columns)
        print(f"{name:36}" + "".join(cells))
    if sys.argv[1:]:
        versions = {name: importlib.metadata.version(name) for name in ("mlx", "apache-tvm-ffi")}
        text = json.dumps({"versions": versions, "rows": table}, indent=1)
        Path(sys.argv[1]).write_text(f"{text}\n")


if __name__ == "__main__":
    main()
