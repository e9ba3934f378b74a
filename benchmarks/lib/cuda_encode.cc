// Chains of ops built and timed in C++, for benchmarks/cuda.py.
#include <mlx/ops.h>
#include <mlx/transforms.h>
#include <mlx_tvm_ffi/op.h>
#include <tvm/ffi/function.h>

#include <chrono>
#include <memory>
#include <vector>

namespace {

namespace ffi = tvm::ffi;
namespace mtf = mlx_tvm_ffi;
namespace mx = mlx::core;
using Clock = std::chrono::steady_clock;

// Times its own eval_gpu; with `synchronise` it also waits for the device, as an adapter that knows
// nothing of MLX's graph has to.
class Timed final : public mtf::KernelPrimitive {
 public:
  Timed(mx::Stream stream, std::shared_ptr<const mtf::KernelCall> call,
        std::shared_ptr<const std::vector<mtf::ShapeDtype>> outputs, bool synchronise)
      : mtf::KernelPrimitive(stream, std::move(call), std::move(outputs)),
        synchronise_(synchronise) {}

  void eval_gpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    auto start = Clock::now();
    mtf::KernelPrimitive::eval_gpu(inputs, outputs);
    if (synchronise_) mx::synchronize(stream());
    spent += Clock::now() - start;
  }

  inline static Clock::duration spent{};

 private:
  bool synchronise_;
};

double Microseconds(Clock::duration time, int64_t count) {
  return std::chrono::duration<double, std::micro>(time).count() / static_cast<double>(count);
}

// Microseconds per kernel of a dependent chain: in eval_gpu, or, with `synchronise`, in all.
double Chain(ffi::Function function, int64_t count, bool synchronise) {
  mx::Stream stream = mx::default_stream(mx::Device::gpu);
  mx::array x = mx::zeros({1024}, mx::float32, stream);
  mx::eval(x);
  auto call = std::make_shared<const mtf::KernelCall>(mtf::KernelCall{
      std::make_shared<const mtf::Kernel>(std::move(function), mtf::Options{}), {}});
  auto outputs = std::make_shared<const std::vector<mtf::ShapeDtype>>(
      std::vector<mtf::ShapeDtype>{{x.shape(), x.dtype()}});
  Timed::spent = {};
  auto start = Clock::now();
  for (int64_t i = 0; i < count; ++i) {
    x = mtf::Apply(std::make_shared<Timed>(stream, call, outputs, synchronise), {x})[0];
  }
  mx::eval(x);
  return Microseconds(synchronise ? Clock::now() - start : Timed::spent, count);
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(chain, Chain)
