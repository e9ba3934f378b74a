// Chains of ops built in C++, for benchmarks/cpu.py: each returns nanoseconds per op.
#include <mlx/ops.h>
#include <mlx/transforms.h>
#include <mlx_tvm_ffi/op.h>
#include <tvm/ffi/function.h>

#include <chrono>
#include <cstdint>
#include <memory>

namespace {

namespace ffi = tvm::ffi;
namespace mtf = mlx_tvm_ffi;
namespace mx = mlx::core;
using Clock = std::chrono::steady_clock;

template <typename Step>
double Chain(const Step& step, int64_t count, bool evaluate) {
  mx::array x = mx::ones({4});
  mx::eval(x);
  auto start = Clock::now();
  for (int64_t i = 0; i < count; ++i) x = step(x);
  if (evaluate) mx::eval(x);
  std::chrono::duration<double, std::nano> time = Clock::now() - start;
  return time.count() / static_cast<double>(count);
}

double Calls(ffi::Function function, int64_t count, bool evaluate) {
  auto kernel = std::make_shared<const mtf::Kernel>(std::move(function), mtf::Options{});
  return Chain(
      [&](const mx::array& x) { return mtf::Call(kernel, {x}, {{x.shape(), x.dtype()}})[0]; },
      count, evaluate);
}

double Sines(int64_t count, bool evaluate) {
  return Chain([](const mx::array& x) { return mx::sin(x); }, count, evaluate);
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(calls, Calls)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(sines, Sines)
