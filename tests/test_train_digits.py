"""The training example: its gradients and its result against plain MLX."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType

for package in ("sklearn", "ninja"):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"needs the examples' package {package}", allow_module_level=True)

# The kernels that are there run on the CPU.
pytestmark = pytest.mark.cpu


@pytest.fixture(scope="module")
def example() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(__file__).parents[1] / "examples")
        yield importlib.import_module("train_digits")


@pytest.fixture(scope="module")
def bias_gelu(example: ModuleType) -> Any:
    return example.kernel_bias_gelu(example.load_kernels("digits_kernels"))


def test_gradients_equal_plain_mlx(example: ModuleType, bias_gelu: Any) -> None:
    x, bias = 3 * mx.random.normal((50, 33)), mx.random.normal((33,))
    weights = mx.random.normal((50, 33))

    def value_and_gradients(function: Any) -> Any:
        return mx.value_and_grad(
            lambda x, bias: (function(x, bias) * weights).sum(), argnums=(0, 1)
        )(x, bias)

    value, gradients = value_and_gradients(bias_gelu)
    expected_value, expected_gradients = value_and_gradients(example.plain_bias_gelu)
    assert mx.allclose(value, expected_value, rtol=1e-5)
    for gradient, expected in zip(gradients, expected_gradients, strict=True):
        assert mx.allclose(gradient, expected, rtol=1e-5, atol=1e-5)


def test_training_reaches_the_accuracy_of_plain_mlx(example: ModuleType, bias_gelu: Any) -> None:
    ours = example.train(bias_gelu)
    plain = example.train(example.plain_bias_gelu)
    assert ours.accuracy > 0.95
    assert ours.accuracy == pytest.approx(plain.accuracy, abs=0.005)
    assert ours.loss == pytest.approx(plain.loss, rel=0.01)
