"""Train a small network on scikit-learn's digits, with a fused C++ kernel and its gradient.

    python examples/train_digits.py

``gelu(x + bias)`` is one tvm-ffi kernel, and its gradient for ``x`` and ``bias`` another, both from
``digits_kernels.cc``, compiled when first needed. MLX differentiates through the first with the
second, inside one compiled training step. The same network in plain MLX is trained for comparison.
"""

from __future__ import annotations

import statistics
import sys
import time
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import mlx.core as mx
import numpy as np
from kernels import load_kernels
from mlx import nn, optimizers

import mlx_tvm_ffi as mtf

try:
    from sklearn.datasets import load_digits
except ImportError as error:
    sys.exit(f"{error}. Install what is missing: pip install scikit-learn")

if TYPE_CHECKING:
    from collections.abc import Callable

HIDDEN = 128
BATCH = 64


def kernel_bias_gelu(module: Any) -> Callable[[mx.array, mx.array], mx.array]:
    """Make an op of the kernel, with the other kernel as its gradient."""
    gradient = mtf.op(
        module.bias_gelu_grad, outputs=lambda x, bias, _: (x, bias), name="bias_gelu_grad"
    )
    return mtf.op(
        module.bias_gelu,
        outputs=lambda x, _: x,
        name="bias_gelu",
        vjp=lambda primals, cotangent, _: gradient(*primals, cotangent),
    )


def plain_bias_gelu(x: mx.array, bias: mx.array) -> mx.array:
    """Write the same in MLX alone."""
    return nn.gelu(x + bias)


class Network(nn.Module):
    """Two hidden layers with GELU, and a linear one."""

    def __init__(self, bias_gelu: Callable[[mx.array, mx.array], mx.array]) -> None:
        super().__init__()
        self.bias_gelu = bias_gelu
        self.hidden = [nn.Linear(64, HIDDEN), nn.Linear(HIDDEN, HIDDEN)]
        self.last = nn.Linear(HIDDEN, 10)

    def __call__(self, x: mx.array) -> mx.array:
        """Give the logits of images (images, pixels)."""
        for layer in self.hidden:
            x = self.bias_gelu(x @ layer.weight.T, layer.bias)
        return self.last(x)


class Result(NamedTuple):
    """What training gave."""

    accuracy: float  # on images that were not trained on
    loss: float  # mean of the last epoch
    step_ms: float  # median


def train(
    bias_gelu: Callable[[mx.array, mx.array], mx.array], *, epochs: int = 10, seed: int = 0
) -> Result:
    """Train a network. The same seed gives the same first weights and the same batches."""
    mx.random.seed(seed)
    digits = load_digits()
    images = mx.array(digits.data / 16, mx.float32)
    labels = mx.array(digits.target, mx.int32)
    everyone = np.arange(len(digits.target))
    held_out = mx.array(everyone[everyone % 5 == 0])
    trained_on = mx.array(everyone[everyone % 5 != 0])

    network = Network(bias_gelu)
    optimizer = optimizers.AdamW(learning_rate=1e-3)
    state = [network.state, optimizer.state]
    loss_and_gradients = nn.value_and_grad(
        network, lambda x, y: nn.losses.cross_entropy(network(x), y, reduction="mean")
    )

    @partial(mx.compile, inputs=state, outputs=state)
    def step(x: mx.array, y: mx.array) -> mx.array:
        loss, gradients = loss_and_gradients(x, y)
        optimizer.update(network, gradients)
        return loss

    times = []
    for _ in range(epochs):
        losses = []
        order = trained_on[mx.random.permutation(len(trained_on))]
        for start in range(0, len(order) - BATCH + 1, BATCH):
            batch = order[start : start + BATCH]
            began = time.perf_counter()
            losses.append(step(images[batch], labels[batch]))
            mx.eval(state, losses[-1])
            times.append(time.perf_counter() - began)
    right = mx.argmax(network(images[held_out]), axis=-1) == labels[held_out]
    return Result(
        accuracy=float(right.mean()),
        loss=float(mx.stack(losses).mean()),
        step_ms=1e3 * statistics.median(times),
    )


def main() -> None:
    """Train both networks, and compare them."""
    mx.set_default_device(mx.cpu)  # where the kernels run
    fused = kernel_bias_gelu(load_kernels("digits_kernels"))
    print("                 accuracy    loss  ms a step")
    for name, bias_gelu in (("fused kernels", fused), ("plain MLX", plain_bias_gelu)):
        result = train(bias_gelu)
        print(f"{name:14} {result.accuracy:10.1%} {result.loss:7.4f} {result.step_ms:10.2f}")


if __name__ == "__main__":
    main()
