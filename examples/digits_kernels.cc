// GELU of a sum with a bias, forward and backward, as tvm-ffi kernels on the CPU. Tensors are
// float32 and row-contiguous; inputs come first, then the outputs that are filled.

#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/function.h>

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "kernel_helpers.h"

namespace {

using tvm::ffi::TensorView;

// y = gelu(x + bias) for x: [rows, features] and bias: [features].
void BiasGelu(TensorView x, TensorView bias, TensorView y) {
  TVM_FFI_CHECK(
      x.ndim() == 2 && bias.ndim() == 1 && bias.size(0) == x.size(1) && y.numel() == x.numel(),
      ValueError)
      << "shapes do not fit: x " << x.shape() << ", bias " << bias.shape() << ", y " << y.shape();
  const float* in = Data<float>(x, "x");
  const float* b = Data<float>(bias, "bias");
  float* out = Data<float>(y, "y");
  const int64_t features = x.size(1);
  for (int64_t row = 0; row < x.size(0); ++row, in += features, out += features) {
#pragma omp simd
    for (int64_t i = 0; i < features; ++i) {
      out[i] = Gelu(in[i] + b[i]);
    }
  }
}

// dx = dy * gelu'(x + bias), dbias = the sum of dx over the rows: one pass over the memory.
void BiasGeluGrad(TensorView x, TensorView bias, TensorView dy, TensorView dx, TensorView dbias) {
  TVM_FFI_CHECK(x.ndim() == 2 && bias.ndim() == 1 && bias.size(0) == x.size(1) &&
                    dy.numel() == x.numel() && dx.numel() == x.numel() &&
                    dbias.numel() == bias.numel(),
                ValueError)
      << "shapes do not fit: x " << x.shape() << ", bias " << bias.shape() << ", dy " << dy.shape()
      << ", dx " << dx.shape() << ", dbias " << dbias.shape();
  const float* in = Data<float>(x, "x");
  const float* b = Data<float>(bias, "bias");
  const float* din = Data<float>(dy, "dy");
  float* dout = Data<float>(dx, "dx");
  float* db = Data<float>(dbias, "dbias");
  const int64_t features = x.size(1);
  std::fill(db, db + features, 0.0f);
  for (int64_t row = 0; row < x.size(0); ++row, in += features, din += features, dout += features) {
#pragma omp simd
    for (int64_t i = 0; i < features; ++i) {
      dout[i] = din[i] * GeluSlope(in[i] + b[i]);
      db[i] += dout[i];
    }
  }
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(bias_gelu, BiasGelu);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(bias_gelu_grad, BiasGeluGrad);
