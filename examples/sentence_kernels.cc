// The four parts of a BERT-like sentence encoder that are not matrix products, as tvm-ffi kernels
// on the CPU. Tensors are float32 and row-contiguous; inputs come first, then the output that is
// filled, then attributes. B: sentences, L: tokens per sentence (padded at the end), D: features.

#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/function.h>

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "kernel_helpers.h"
#include "sentence_shapes.h"

namespace {

using tvm::ffi::TensorView;

// The length of sentence `b`, which no kernel may read beyond or divide by zero.
int64_t Length(const int32_t* lengths, int64_t b, int64_t tokens) {
  TVM_FFI_CHECK(0 < lengths[b] && lengths[b] <= tokens, ValueError)
      << "lengths[" << b << "]: expected 1 to " << tokens << ", got " << lengths[b];
  return lengths[b];
}

// y = normalise(x + residual) * weight + bias over the last axis. A residual with fewer rows than x
// (position embeddings) repeats.
void AddLayerNorm(TensorView x, TensorView residual, TensorView weight, TensorView bias,
                  TensorView y, double eps) {
  const int64_t features = weight.numel();
  CheckAddLayerNorm(x, residual, weight, bias, y);
  const float* x_data = Data<float>(x, "x");
  const float* residual_data = Data<float>(residual, "residual");
  const float* w = Data<float>(weight, "weight");
  const float* b = Data<float>(bias, "bias");
  float* y_data = Data<float>(y, "y");
  const int64_t rows = x.numel() / features;
  const int64_t residual_rows = residual.numel() / features;
  for (int64_t row = 0; row < rows; ++row) {
    const float* in = x_data + row * features;
    const float* add = residual_data + row % residual_rows * features;
    float* out = y_data + row * features;
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < features; ++i) {
      out[i] = in[i] + add[i];
      sum += out[i];
    }
    const float mean = sum / static_cast<float>(features);
    float squares = 0;
#pragma omp simd reduction(+ : squares)
    for (int64_t i = 0; i < features; ++i) {
      squares += (out[i] - mean) * (out[i] - mean);
    }
    const float variance = squares / static_cast<float>(features);
    const float scale = 1.0f / std::sqrt(variance + static_cast<float>(eps));
#pragma omp simd
    for (int64_t i = 0; i < features; ++i) {
      out[i] = (out[i] - mean) * scale * w[i] + b[i];
    }
  }
}

// y = x * P(Z < x) for a standard normal Z: the exact GELU, not its tanh approximation.
void GeluKernel(TensorView x, TensorView y) {
  CheckGelu(x, y);
  const float* in = Data<float>(x, "x");
  float* out = Data<float>(y, "y");
  const int64_t size = x.numel();
#pragma omp simd
  for (int64_t i = 0; i < size; ++i) {
    out[i] = Gelu(in[i]);
  }
}

// y = softmax(scores * scale) over the first lengths[b] of the last axis, zero beyond.
// scores: [B, ..., L].
void MaskedSoftmax(TensorView scores, TensorView lengths, TensorView y, double scale) {
  CheckMaskedSoftmax(scores, lengths, y);
  const float* in = Data<float>(scores, "scores");
  const int32_t* length_data = Data<int32_t>(lengths, "lengths");
  float* out = Data<float>(y, "y");
  const int64_t batch = scores.size(0);
  const int64_t tokens = scores.size(scores.ndim() - 1);
  const float factor = static_cast<float>(scale);
  for (int64_t b = 0; b < batch; ++b) {
    const int64_t length = Length(length_data, b, tokens);
    const int64_t rows = scores.numel() / (batch * tokens);
    for (int64_t row = 0; row < rows; ++row, in += tokens, out += tokens) {
      float largest = in[0] * factor;
#pragma omp simd reduction(max : largest)
      for (int64_t i = 0; i < length; ++i) {
        largest = std::max(largest, in[i] * factor);
      }
      float sum = 0;
#pragma omp simd reduction(+ : sum)
      for (int64_t i = 0; i < length; ++i) {
        out[i] = Exp(in[i] * factor - largest);
        sum += out[i];
      }
      const float inverse = 1.0f / sum;
#pragma omp simd
      for (int64_t i = 0; i < length; ++i) {
        out[i] *= inverse;
      }
      std::fill(out + length, out + tokens, 0.0f);
    }
  }
}

// y = m / |m| for the mean m of the first lengths[b] tokens. hidden: [B, L, D], y: [B, D].
void MeanPoolNormalize(TensorView hidden, TensorView lengths, TensorView y) {
  CheckMeanPoolNormalize(hidden, lengths, y);
  const float* in = Data<float>(hidden, "hidden");
  const int32_t* length_data = Data<int32_t>(lengths, "lengths");
  float* out = Data<float>(y, "y");
  const int64_t tokens = hidden.size(1);
  const int64_t features = hidden.size(2);
  for (int64_t b = 0; b < hidden.size(0); ++b, in += tokens * features, out += features) {
    const int64_t length = Length(length_data, b, tokens);
    std::fill(out, out + features, 0.0f);
    for (int64_t token = 0; token < length; ++token) {
#pragma omp simd
      for (int64_t i = 0; i < features; ++i) {
        out[i] += in[token * features + i];
      }
    }
    float squares = 0;
#pragma omp simd reduction(+ : squares)
    for (int64_t i = 0; i < features; ++i) {
      out[i] /= static_cast<float>(length);
      squares += out[i] * out[i];
    }
    const float norm = std::max(std::sqrt(squares), 1e-12f);
#pragma omp simd
    for (int64_t i = 0; i < features; ++i) {
      out[i] /= norm;
    }
  }
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(add_layer_norm, AddLayerNorm);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(gelu, GeluKernel);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(masked_softmax, MaskedSoftmax);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(mean_pool_normalize, MeanPoolNormalize);
