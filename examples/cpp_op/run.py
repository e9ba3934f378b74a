"""Use the op from Python: in MLX's graph, differentiated, mapped and compiled."""

from __future__ import annotations

import mlx.core as mx
import swish

x = mx.linspace(-4, 4, 12).reshape(3, 4)
y = swish.swish(x, beta=1.5, stream=mx.cpu)
assert mx.allclose(y, x * mx.sigmoid(1.5 * x))


def loss(x: mx.array) -> mx.array:
    return swish.swish(x, stream=mx.cpu).sum()


def plain(x: mx.array) -> mx.array:
    return (x * mx.sigmoid(x)).sum()


assert mx.allclose(mx.grad(loss)(x), mx.grad(plain)(x), atol=1e-6)
assert mx.allclose(mx.vmap(lambda row: swish.swish(row, 1.5, stream=mx.cpu))(x), y)
assert mx.allclose(mx.compile(lambda x: swish.swish(x * 2, 1.5, stream=mx.cpu) + 1)(x / 2), y + 1)
try:
    swish.swish(x.astype(mx.float16))
except TypeError as error:
    print("as expected:", error)
print(y)
