"""Measure kernels on MLX's CUDA graph against MLX, PyTorch and a bare launch.

    python benchmarks/cuda.py [OUTPUT.json]

Needs MLX with CUDA, PyTorch, nvcc and a C++20 compiler. What is compared runs in turn, several
times; figures are medians.
"""

from __future__ import annotations

import datetime as dt
import gc
import importlib.metadata
import json
import platform
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx

if TYPE_CHECKING:
    from collections.abc import Callable

LIB = Path(__file__).parent / "lib"
ELEMENTS = 1024
CHAIN = 1000
ROUNDS = 15
GIB = 1 << 30


def medians(work: dict[str, Callable[[], float]], rounds: int = ROUNDS) -> dict[str, float]:
    """Run each work in turn, and give the median of what it returns, without the first rounds."""
    results: dict[str, list[float]] = {name: [] for name in work}
    gc.collect()
    gc.disable()
    for turn in range(rounds + 2):
        for name, run in work.items():
            run()  # the caches are its own then
            value = run()
            if turn >= 2:
                results[name].append(value)
    gc.enable()
    return {name: statistics.median(values) for name, values in results.items()}


def timed(work: Callable[[], object], count: int) -> Callable[[], float]:
    """Give a function that runs work and returns microseconds for each of ``count``."""

    def run() -> float:
        start = time.perf_counter()
        work()
        return (time.perf_counter() - start) * 1e6 / count

    return run


def load() -> tuple[Any, Any]:
    """Compile the kernels, and the C++ part against MLX and this package."""
    import mlx  # noqa: PLC0415
    import tvm_ffi.cpp  # noqa: PLC0415

    import mlx_tvm_ffi._built as built  # noqa: PLC0415

    package = Path(str(built.__file__)).parent
    (root,) = mlx.__path__
    kernels = tvm_ffi.cpp.load(
        "benchmark_cuda_kernels", sources=str(LIB / "cuda_kernels.cu"), backend="cuda"
    )
    encode = tvm_ffi.cpp.load(
        "benchmark_cuda_encode",
        sources=str(LIB / "cuda_encode.cc"),
        extra_cflags=["-std=c++20", "-O2"],
        extra_include_paths=[f"{root}/include", str(package / "include")],
        extra_ldflags=[f"-L{root}/lib", "-lmlx", f"-L{package / 'lib'}", "-lmlx_tvm_ffi"],
    )
    return kernels, encode


def main() -> None:
    """Measure, print a table, and write the figures."""
    try:
        if not mx.cuda.is_available():
            sys.exit(print("cuda.py: no CUDA in this MLX or on this machine; nothing measured."))
        import torch  # noqa: PLC0415
    except ImportError as error:
        sys.exit(f"cuda.py: {error}. Install PyTorch for CUDA.")

    import mlx_tvm_ffi as mtf  # noqa: PLC0415

    mx.set_default_device(mx.gpu)
    kernels, encode = load()
    vector = mtf.ShapeDtype((ELEMENTS,), mx.float32)
    op = mtf.op(kernels.add_one, outputs=vector)
    in_place = mtf.op(kernels.add_one, outputs=vector, aliases={0: 0})
    inline = mx.fast.cuda_kernel(
        name="add_one",
        input_names=["x"],
        output_names=["y"],
        source="""
            auto i = blockIdx.x * blockDim.x + threadIdx.x;
            if (i < x_shape[0]) y[i] = x[i] + 1;
        """,
    )

    def cuda_kernel(x: mx.array) -> mx.array:
        (y,) = inline(
            inputs=[x],
            output_shapes=[x.shape],
            output_dtypes=[x.dtype],
            grid=(ELEMENTS, 1, 1),
            threadgroup=(256, 1, 1),
        )
        return y

    start = mx.zeros(ELEMENTS)
    mx.eval(start)

    def chain(step: Callable[[mx.array], mx.array], count: int) -> Callable[[], float]:
        def work() -> None:
            x = start
            for _ in range(count):
                x = step(x)
            mx.eval(x)

        return timed(work, count)

    def single(step: Callable[[mx.array], mx.array]) -> Callable[[], float]:
        run = chain(step, 1)
        return lambda: statistics.median(run() for _ in range(50))

    torch_start = torch.zeros(ELEMENTS, device="cuda")
    torch_buffers = [torch.empty_like(torch_start) for _ in range(2)]

    def torch_chain(count: int, *, allocate: bool) -> Callable[[], float]:
        def work() -> None:
            x = torch_start
            for i in range(count):
                y = torch.empty_like(x) if allocate else torch_buffers[i % 2]
                kernels.add_one(x, y)
                x = y
            torch.cuda.synchronize()

        return timed(work, count)

    def add_one(x: mx.array) -> mx.array:
        return x + 1

    chains = medians(
        {
            "ours": chain(op, CHAIN),
            "ours in place": chain(in_place, CHAIN),
            "mlx": chain(add_one, CHAIN),
            "cuda_kernel": chain(cuda_kernel, CHAIN),
            "torch": torch_chain(CHAIN, allocate=True),
            "torch, buffers reused": torch_chain(CHAIN, allocate=False),
            "pairs ours": chain(lambda x: op(x) * 1.0, CHAIN),
            "pairs mlx": chain(lambda x: (x + 1) * 1.0, CHAIN),
            "encode": lambda: encode.chain(kernels.add_one, CHAIN, False),
            "synchronised": lambda: encode.chain(kernels.add_one, CHAIN, True),
            "bare": lambda: kernels.bare_launch(*torch_buffers, 500),
        }
    )
    singles = medians(
        {
            "ours": single(op),
            "mlx": single(add_one),
            "cuda_kernel": single(cuda_kernel),
        }
    )

    copy = mtf.op(kernels.copy, outputs=lambda x: x)
    large = mx.random.uniform(shape=(GIB // 4,))
    mx.eval(large)
    torch_large = torch.rand(GIB // 4, device="cuda")
    torch_copy = torch.empty_like(torch_large)

    def copies() -> None:
        x = large
        for _ in range(20):
            x = copy(x)
        mx.eval(x)

    def torch_copies() -> None:
        for _ in range(20):
            torch_copy.copy_(torch_large)
        torch.cuda.synchronize()

    bandwidth = {
        name: 2 * GIB / value / 1e6  # read and written, TB/s
        for name, value in medians(
            {"ours": timed(copies, 20), "torch": timed(torch_copies, 20)}
        ).items()
    }

    figures = []

    def figure(
        name: str, reach: float, ours: float, peer: float, unit: str, *, more: bool = False
    ) -> None:
        figures.append(
            {
                "name": name,
                "ratio": round(ours / peer, 3),
                "reach": reach,
                "higher_is_better": more,
                "ours": round(ours, 3),
                "peer": round(peer, 3),
                "unit": unit,
            }
        )

    per_kernel = "us per kernel"
    ours = chains["ours"]
    figure("chain of 1,000: PyTorch", 0.6, ours, chains["torch"], per_kernel)
    figure("chain of 1,000: mx.fast.cuda_kernel", 0.55, ours, chains["cuda_kernel"], per_kernel)
    figure("chain of 1,000: MLX x + 1", 0.9, ours, chains["mlx"], per_kernel)
    figure("chain of 1,000: synchronised", 0.07, ours, chains["synchronised"], per_kernel)
    pairs = chains["pairs ours"], chains["pairs mlx"]
    figure("in turn with an MLX op, 1,000 pairs: 2,000 MLX ops", 1.15, *pairs, "us per pair")
    figure("single op: MLX x + 1", 0.7, singles["ours"], singles["mlx"], "us")
    figure("encode in eval_gpu: bare launch", 1.0, chains["encode"], chains["bare"], per_kernel)
    figure("copy of 1 GiB: PyTorch", 0.95, bandwidth["ours"], bandwidth["torch"], "TB/s", more=True)

    for entry in figures:
        print(
            "{name:52} {ours:8.3f} / {peer:8.3f} {unit:14} = {ratio:6.3f} (reach {reach})".format(
                **entry
            )
        )
    # MLX's x + 1 writes into its input's memory, which nobody else uses; so can our op.
    for name in ("ours in place", "torch, buffers reused"):
        print(f"also: chain of 1,000, {name}: {chains[name]:.3f} us per kernel")
    print(f"also: single, cuda_kernel: {singles['cuda_kernel']:.3f} us")

    if len(sys.argv) > 1:
        versions = {
            name: importlib.metadata.version(name) for name in ("mlx", "apache-tvm-ffi", "torch")
        }
        versions |= {"python": platform.python_version(), "cuda": torch.version.cuda or ""}
        result = {
            "date": dt.datetime.now(tz=dt.timezone.utc).date().isoformat(),
            "device": torch.cuda.get_device_name(),
            "versions": versions,
            "figures": figures,
            "others": {name: round(value, 3) for name, value in chains.items()},
        }
        Path(sys.argv[1]).write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
