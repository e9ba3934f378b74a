"""Measure direct calls, ops and transformations on the CPU against MLX, PyTorch and tvm-ffi.

    python benchmarks/cpu.py

Needs PyTorch and a C++20 compiler (``make bench``). What is compared runs in turn, many times; a
ratio is the median of the rounds' ratios, and a time the median of its rounds.
"""

from __future__ import annotations

import gc
import platform
import resource
import statistics
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx
import mlx.core as mx
import tvm_ffi
import tvm_ffi.cpp
from mlx import nn, optimizers

import mlx_tvm_ffi as mtf
from mlx_tvm_ffi import _built

try:
    import torch
except ImportError as error:
    sys.exit(f"cpu.py: {error}. Run `make bench`, or install torch==2.13.0.")

if TYPE_CHECKING:
    from collections.abc import Callable

HERE = Path(__file__).parent
EXAMPLES = HERE.parent / "examples"
CALLS = 1000
MB = 1 << 20

Work = "Callable[[], object]"


def compare(ours: Work, peer: Work, count: int, rounds: int = 31) -> tuple[float, float, float]:
    """Run both in turn: microseconds for each of ``count``, ours and the peer's; the ratio."""
    times: tuple[list[float], list[float]] = ([], [])
    gc.collect()
    gc.disable()
    for turn in range(rounds + 3):
        for work, results in zip((ours, peer), times, strict=True):
            start = time.perf_counter()
            work()
            if turn >= 3:
                results.append((time.perf_counter() - start) * 1e6 / count)
    gc.enable()
    ratio = statistics.median(a / b for a, b in zip(*times, strict=True))
    return statistics.median(times[0]), statistics.median(times[1]), ratio


def row(what: str, figures: tuple[float, float, float], reach: float | None) -> None:
    """Print a line of the table."""
    ours, peer, ratio = figures
    verdict = "" if reach is None else "reached" if ratio <= reach else "missed"
    limit = "" if reach is None else f"{reach:.2f}"
    print(f"{what:62} {ours:10.3f} {peer:10.3f} {ratio:6.2f} {limit:>6} {verdict}", flush=True)


def fact(what: str, value: float, unit: str, reach: float | None = None) -> None:
    """Print a line with a figure that is no ratio."""
    verdict = "" if reach is None else "reached" if value <= reach else "missed"
    limit = "" if reach is None else f"{reach:g}"
    print(f"{what:62} {value:10.2f} {unit:>17} {limit:>6} {verdict}", flush=True)


def load() -> tuple[Any, Any]:
    """Compile the kernels, and the C++ part against MLX and this package."""
    package = Path(_built.__file__).parent
    (root,) = mlx.__path__
    lib = HERE / "lib"
    kernels = tvm_ffi.cpp.load("benchmark_cpu_kernels", sources=str(lib / "cpu_kernels.cc"))
    ops = tvm_ffi.cpp.load(
        "benchmark_cpu_ops",
        sources=str(lib / "cpu_ops.cc"),
        extra_cflags=["-std=c++20", "-O2"],
        extra_include_paths=[f"{root}/include", str(package / "include")],
        extra_ldflags=[f"-L{root}/lib", "-lmlx", f"-L{package / 'lib'}", "-lmlx_tvm_ffi"],
    )
    return kernels, ops


def repeat(function: Callable[..., object], *arguments: object) -> Work:
    """Give a function that calls ``function`` so often that a call can be timed."""

    def work() -> None:
        for _ in range(CALLS):
            function(*arguments)

    return work


def direct_calls(kernels: Any) -> None:
    """Call a kernel that does nothing on two arrays of each framework."""
    nothing = kernels.nothing
    ours = repeat(nothing, mx.ones(4), mx.ones(4))
    theirs = repeat(nothing, torch.ones(4), torch.ones(4))
    own = tvm_ffi.from_dlpack(torch.ones(4)), tvm_ffi.from_dlpack(torch.ones(4))
    row("direct call, two arrays : two PyTorch tensors", compare(ours, theirs, CALLS), 0.72)
    row(
        "direct call, two arrays : two tvm_ffi.Tensors",
        compare(ours, repeat(nothing, *own), CALLS),
        1.66,
    )


def chain(*steps: Callable[[mx.array], mx.array]) -> Callable[[mx.array], mx.array]:
    """Give a function of CALLS steps, in turn."""

    def function(x: mx.array) -> mx.array:
        for _ in range(CALLS // len(steps)):
            for step in steps:
                x = step(x)
        return x

    return function


def ops(kernels: Any, cpp: Any) -> None:
    """Build ops; build and evaluate them."""
    op = mtf.op(kernels.add_one, outputs=mtf.ShapeDtype((4,), mx.float32))
    x = mx.ones(4)
    mx.eval(x)
    row("building an op : mx.sin", compare(repeat(op, x), repeat(mx.sin, x), CALLS), 0.75)
    dynamic = mtf.op(kernels.add_one, outputs=lambda x: x)
    row(
        "building an op, outputs=lambda : mx.sin",
        compare(repeat(dynamic, x), repeat(mx.sin, x), CALLS),
        None,
    )
    figures = compare(lambda: mx.eval(chain(op)(x)), lambda: mx.eval(chain(mx.sin)(x)), CALLS)
    row("chain of 1,000 ops, built and evaluated : mx.sin", figures, 1.0)
    compiled, plain = mx.compile(chain(op)), mx.compile(chain(mx.cumsum, mx.sort))
    figures = compare(lambda: mx.eval(compiled(x)), lambda: mx.eval(plain(x)), CALLS)
    row("the same, compiled : mx.cumsum and mx.sort", figures, 0.9)
    for evaluate in (False, True):
        figures = compare(
            partial(cpp.calls, kernels.add_one, CALLS, evaluate),
            partial(cpp.sines, CALLS, evaluate),
            CALLS,
        )
        what = "built and evaluated" if evaluate else "built"
        row(f"chain of 1,000 C++ calls, {what} : C++ sin", figures, 1.0 if evaluate else None)


def training_step() -> None:
    """Run a compiled training step with the fused kernels of examples/train_digits.py."""
    module = tvm_ffi.cpp.load(
        "digits_kernels",
        sources=str(EXAMPLES / "digits_kernels.cc"),
        extra_cflags=["-O3", "-fopenmp-simd", "-fno-math-errno", "-fno-trapping-math"],
    )
    gradient = mtf.op(module.bias_gelu_grad, outputs=lambda x, bias, _: (x, bias))
    fused = mtf.op(
        module.bias_gelu,
        outputs=lambda x, _: x,
        vjp=lambda primals, cotangent, _: gradient(*primals, cotangent),
    )
    x, y = mx.random.normal((64, 64)), mx.random.randint(0, 10, (64,))

    def make(bias_gelu: Callable[[mx.array, mx.array], mx.array]) -> Work:
        layers = [nn.Linear(64, 128), nn.Linear(128, 128), nn.Linear(128, 10)]
        network = nn.Sequential(*layers)
        optimizer = optimizers.AdamW(learning_rate=1e-3)
        state = [network.state, optimizer.state]

        def loss(x: mx.array, y: mx.array) -> mx.array:
            for layer in layers[:2]:
                x = bias_gelu(x @ layer.weight.T, layer.bias)
            return nn.losses.cross_entropy(layers[2](x), y, reduction="mean")

        loss_and_gradients = nn.value_and_grad(network, loss)

        @partial(mx.compile, inputs=state, outputs=state)
        def step(x: mx.array, y: mx.array) -> mx.array:
            value, gradients = loss_and_gradients(x, y)
            optimizer.update(network, gradients)
            return value

        return lambda: mx.eval(step(x, y), state)

    figures = compare(make(fused), make(lambda x, bias: nn.gelu(x + bias)), 1)
    row("compiled training step, fused GELU : plain MLX", figures, None)


def cache_step(kernels: Any) -> None:
    """Write one row into a cache of 64 MB."""
    append = mtf.op(kernels.append, outputs=lambda cache, *_, **__: cache, aliases={0: 0})
    token = mx.ones((1024,))
    caches = {name: mx.zeros((16 * 1024, 1024)) for name in ("ours", "plain")}
    mx.eval(token, caches)

    def ours() -> None:
        caches["ours"] = append(caches["ours"], token, position=5)
        mx.eval(caches["ours"])

    def plain() -> None:
        caches["plain"] = caches["plain"].at[5].add(token)
        mx.eval(caches["plain"])

    def copied() -> None:  # as wherever the cache is still held
        mx.eval(caches["plain"].at[5].add(token))

    row("cache step in place, 64 MB : array.at, which copies", compare(ours, copied, 1, 15), None)
    row("cache step in place, 64 MB : array.at, donated", compare(ours, plain, 1, 15), None)
    ours()
    active = mx.get_active_memory()
    mx.reset_peak_memory()
    for _ in range(1000):
        ours()
    fact("cache step, 1,000 times: allocated", mx.get_peak_memory() / MB, "MB", 0)
    fact(
        "cache step, 1,000 times: active memory grew by",
        (mx.get_active_memory() - active) / MB,
        "MB",
        0,
    )


def mapped(kernels: Any) -> None:
    """Map over 64 rows, in one kernel call or in a Python loop."""
    op = mtf.op(kernels.add_one, outputs=lambda x: x, vmap="broadcast")
    x = mx.ones((64, 256))
    mx.eval(x)
    function = mx.vmap(op)
    figures = compare(
        lambda: mx.eval(function(x)), lambda: mx.eval(mx.stack([op(x[i]) for i in range(64)])), 1
    )
    row('vmap "broadcast" of 64 rows : a Python loop', figures, None)


def imports() -> None:
    """Import, in interpreters of their own."""
    code = (
        "import mlx.core, tvm_ffi, time; start = time.perf_counter(); import mlx_tvm_ffi; "
        "print(time.perf_counter() - start)"
    )
    command = [sys.executable, "-c", code]
    times = [float(subprocess.check_output(command, text=True)) for _ in range(9)]
    fact("import after mlx.core and tvm_ffi", 1e3 * statistics.median(times), "ms", 50)


def resident() -> float:
    """Give the resident memory of this process, in MB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / MB


def growth(kernels: Any) -> None:
    """Watch resident memory over a million calls."""
    op = mtf.op(kernels.add_one, outputs=mtf.ShapeDtype((4,), mx.float32))
    x = mx.ones(4)
    mx.eval(x)
    calls = repeat(kernels.nothing, x, x)
    evaluated = chain(op)
    for what, work in (
        ("1,000,000 direct calls", calls),
        ("1,000,000 ops", lambda: mx.eval(evaluated(x))),
    ):
        for _ in range(200):
            work()
        before = resident()
        for _ in range(1_000_000 // CALLS):
            work()
        fact(f"{what}: resident memory grew by", resident() - before, "MB", 1)


def main() -> None:
    """Measure, and print a table."""
    mx.set_default_device(mx.cpu)
    kernels, cpp = load()
    print(
        f"{platform.processor() or platform.machine()}, Python {platform.python_version()}, MLX "
        f"{mx.__version__}, tvm-ffi {tvm_ffi.__version__}, PyTorch {torch.__version__}"
    )
    print(f"{'ours : peer (microseconds)':62} {'ours':>10} {'peer':>10} {'ratio':>6} {'reach':>6}")
    direct_calls(kernels)
    ops(kernels, cpp)
    training_step()
    cache_step(kernels)
    mapped(kernels)
    imports()
    growth(kernels)


if __name__ == "__main__":
    main()
