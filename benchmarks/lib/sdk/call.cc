// Times Call of op.h against MLX's own sin, both computing sin on 4 floats; prints nanoseconds per
// op.
#include <mlx/mlx.h>
#include <mlx_tvm_ffi/op.h>
#include <tvm/ffi/container/tensor.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <functional>
#include <iostream>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace mx = mlx::core;
using tvm::ffi::TensorView;

namespace {

constexpr int kOps = 1000;
constexpr int kRounds = 51;

void Sin(TensorView x, TensorView y) {
  const auto* in = static_cast<const float*>(x.data_ptr());
  auto* out = static_cast<float*>(y.data_ptr());
  for (int64_t i = 0; i < x.numel(); ++i) out[i] = std::sin(in[i]);
}

double Time(const std::function<void()>& work) {
  const auto start = std::chrono::steady_clock::now();
  work();
  const std::chrono::duration<double, std::nano> time = std::chrono::steady_clock::now() - start;
  return time.count() / kOps;
}

}  // namespace

int main() {
  mx::set_default_device(mx::Device::cpu);
  const mx::array x = mx::arange(4, mx::float32);
  mx::array y = x;
  mx::eval(y);
  const auto kernel = std::make_shared<const mlx_tvm_ffi::Kernel>(
      tvm::ffi::Function::FromTyped(Sin), mlx_tvm_ffi::Options());
  auto call = [&](const mx::array& in) {
    return mlx_tvm_ffi::Call(kernel, {in}, {{in.shape(), in.dtype()}})[0];
  };
  // What an op with a class of its own does: what is the same in every call is made once.
  const auto kernel_call =
      std::make_shared<const mlx_tvm_ffi::KernelCall>(mlx_tvm_ffi::KernelCall{kernel, {}});
  const auto outputs = std::make_shared<const std::vector<mlx_tvm_ffi::ShapeDtype>>(
      std::vector<mlx_tvm_ffi::ShapeDtype>{{x.shape(), x.dtype()}});
  auto apply = [&](const mx::array& in) {
    return mlx_tvm_ffi::Apply(std::make_shared<mlx_tvm_ffi::KernelPrimitive>(
                                  mlx_tvm_ffi::ToStream(), kernel_call, outputs),
                              {in})[0];
  };
  auto sin = [](const mx::array& in) { return mx::sin(in); };

  auto build = [&](auto op) {
    return [&, op] {
      std::vector<mx::array> ops;
      ops.reserve(kOps);
      for (int i = 0; i < kOps; ++i) ops.push_back(op(y));
    };
  };
  auto chain = [&](auto op) {
    return [&, op] {
      mx::array z = y;
      for (int i = 0; i < kOps; ++i) z = op(z);
      mx::eval(z);
    };
  };
  const std::map<std::string, std::function<void()>> works = {
      {"build_call", build(call)}, {"build_apply", build(apply)}, {"build_sin", build(sin)},
      {"chain_call", chain(call)}, {"chain_apply", chain(apply)}, {"chain_sin", chain(sin)}};
  std::map<std::string, std::vector<double>> times;
  for (int round = 0; round < kRounds; ++round) {
    for (const auto& [name, work] : works) times[name].push_back(Time(work));
  }
  for (auto& [name, values] : times) {
    std::nth_element(values.begin(), values.begin() + kRounds / 2, values.end());
    std::cout << name << ' ' << values[kRounds / 2] << '\n';
  }
}
