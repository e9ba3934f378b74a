#include "swish.h"

#include <mlx_tvm_ffi/op.h>
#include <tvm/ffi/container/tensor.h>

#include <cmath>
#include <memory>
#include <utility>
#include <vector>

namespace mx = mlx::core;
namespace mtf = mlx_tvm_ffi;
using tvm::ffi::TensorView;

namespace {

float Sigmoid(float x) { return 1 / (1 + std::exp(-x)); }

// The kernels. They could as well come from a kernel library:
// tvm::ffi::Module::LoadFromFile(path)->GetFunction(name).
void Forward(TensorView x, TensorView y, double beta) {
  const auto* in = static_cast<const float*>(x.data_ptr());
  auto* out = static_cast<float*>(y.data_ptr());
  const auto b = static_cast<float>(beta);
  for (int64_t i = 0; i < x.numel(); ++i) out[i] = in[i] * Sigmoid(b * in[i]);
}

void Backward(TensorView x, TensorView dy, TensorView dx, double beta) {
  const auto* in = static_cast<const float*>(x.data_ptr());
  const auto* cotangent = static_cast<const float*>(dy.data_ptr());
  auto* out = static_cast<float*>(dx.data_ptr());
  const auto b = static_cast<float>(beta);
  for (int64_t i = 0; i < x.numel(); ++i) {
    const float s = Sigmoid(b * in[i]);
    out[i] = cotangent[i] * (s + b * in[i] * s * (1 - s));
  }
}

template <typename Function>
std::shared_ptr<const mtf::Kernel> MakeKernel(Function function, const char* name) {
  mtf::Options options;
  options.name = name;
  options.vmap = mtf::Vmap::kBroadcast;  // elementwise: a batch is one more dimension
  return std::make_shared<const mtf::Kernel>(tvm::ffi::Function::FromTyped(function), options);
}

// A call of a kernel, and what MLX needs to know besides: its gradient.
class SwishPrimitive final : public mtf::KernelPrimitive {
 public:
  using KernelPrimitive::KernelPrimitive;

  std::vector<mx::array> vjp(const std::vector<mx::array>& primals,
                             const std::vector<mx::array>& cotangents, const std::vector<int>&,
                             const std::vector<mx::array>&) override {
    static const auto backward = MakeKernel(Backward, "swish_backward");
    return mtf::Call(backward, {primals[0], cotangents[0]},
                     {{primals[0].shape(), primals[0].dtype()}}, call()->attributes, stream());
  }

  std::shared_ptr<KernelPrimitive> Clone(
      std::shared_ptr<const std::vector<mtf::ShapeDtype>> outputs) const override {
    return std::make_shared<SwishPrimitive>(const_cast<SwishPrimitive*>(this)->stream(), call(),
                                            std::move(outputs));
  }
};

}  // namespace

mx::array Swish(const mx::array& x, float beta, const mx::StreamOrDevice& stream) {
  if (x.dtype() != mx::float32) TVM_FFI_THROW(TypeError) << "[swish] x: expected float32.";
  static const auto forward = MakeKernel(Forward, "swish");
  auto call = std::make_shared<const mtf::KernelCall>(mtf::KernelCall{forward, {{"beta", beta}}});
  auto outputs = std::make_shared<const std::vector<mtf::ShapeDtype>>(
      std::vector<mtf::ShapeDtype>{{x.shape(), x.dtype()}});
  return mtf::Apply(std::make_shared<SwishPrimitive>(mtf::ToStream(stream), call, outputs), {x})[0];
}
