// The op in a program without Python: its values and gradient against MLX's own ops.
#include <mlx/mlx.h>

#include <iostream>

#include "swish.h"

namespace mx = mlx::core;

int main() {
  const float beta = 1.5F;
  const mx::array x = mx::linspace(-4, 4, 1001, mx::float32, mx::Device::cpu);
  auto ours = [&](const mx::array& x) { return Swish(x, beta, mx::Device::cpu); };
  auto plain = [&](const mx::array& x) { return x * mx::sigmoid(mx::array(beta) * x); };
  auto gradient = [&](auto f) {
    return mx::grad([=](const mx::array& x) { return mx::sum(f(x)); })(x);
  };
  mx::set_default_device(mx::Device::cpu);

  const float value_error = mx::max(mx::abs(ours(x) - plain(x))).item<float>();
  const float gradient_error = mx::max(mx::abs(gradient(ours) - gradient(plain))).item<float>();
  std::cout << "largest difference: value " << value_error << ", gradient " << gradient_error
            << '\n';
  return value_error < 1e-5F && gradient_error < 1e-5F ? 0 : 1;
}
