// The kernels of sentence_kernels.cc for CUDA: same names, parameters and results. A length that no
// sentence can have gives NaN, since lengths are on the GPU, out of reach of an error.

#include <cuda_runtime.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/function.h>

#include <cmath>
#include <cstdint>

#include "sentence_shapes.h"
#include "tensor_checks.h"

namespace {

using tvm::ffi::TensorView;

constexpr int kThreads = 128;

// Launches `rows` blocks of kThreads on the stream that tvm-ffi names.
template <typename... Params, typename... Args>
void Launch(void (*kernel)(Params...), const TensorView& like, int64_t rows, Args... args) {
  if (rows == 0) return;
  const DLDevice device = like.device();
  auto stream = static_cast<cudaStream_t>(TVMFFIEnvGetStream(device.device_type, device.device_id));
  kernel<<<static_cast<unsigned>(rows), kThreads, 0, stream>>>(args...);
  const cudaError_t error = cudaGetLastError();
  TVM_FFI_CHECK(error == cudaSuccess, RuntimeError) << cudaGetErrorString(error);
}

struct Sum {
  __device__ float operator()(float a, float b) const { return a + b; }
};
struct Max {
  __device__ float operator()(float a, float b) const { return fmaxf(a, b); }
};

// Combines a value of each thread of the block; every thread gets the result.
template <typename Combine>
__device__ float Reduce(float value, Combine combine) {
  __shared__ float parts[kThreads / 32];
  for (int step = 16; step > 0; step /= 2) {
    value = combine(value, __shfl_xor_sync(0xffffffffu, value, step));
  }
  __syncthreads();  // `parts` may still be read from the last time
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = value;
  __syncthreads();
  value = parts[0];
  for (int i = 1; i < kThreads / 32; ++i) value = combine(value, parts[i]);
  return value;
}

__global__ void AddLayerNormKernel(const float* x, const float* residual, const float* weight,
                                   const float* bias, float* y, int features, int64_t residual_rows,
                                   float eps) {
  const float* in = x + static_cast<int64_t>(blockIdx.x) * features;
  const float* add = residual + blockIdx.x % residual_rows * features;
  float* out = y + static_cast<int64_t>(blockIdx.x) * features;
  float sum = 0;
  for (int i = threadIdx.x; i < features; i += kThreads) {
    out[i] = in[i] + add[i];
    sum += out[i];
  }
  const float mean = Reduce(sum, Sum()) / static_cast<float>(features);
  float squares = 0;
  for (int i = threadIdx.x; i < features; i += kThreads) {
    squares += (out[i] - mean) * (out[i] - mean);
  }
  const float scale = rsqrtf(Reduce(squares, Sum()) / static_cast<float>(features) + eps);
  for (int i = threadIdx.x; i < features; i += kThreads) {
    out[i] = (out[i] - mean) * scale * weight[i] + bias[i];
  }
}

void AddLayerNorm(TensorView x, TensorView residual, TensorView weight, TensorView bias,
                  TensorView y, double eps) {
  const int64_t features = weight.numel();
  CheckAddLayerNorm(x, residual, weight, bias, y);
  Launch(AddLayerNormKernel, x, x.numel() / features, Data<float>(x, "x"),
         Data<float>(residual, "residual"), Data<float>(weight, "weight"),
         Data<float>(bias, "bias"), Data<float>(y, "y"), static_cast<int>(features),
         residual.numel() / features, static_cast<float>(eps));
}

__global__ void GeluKernel(const float* x, float* y, int64_t size) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i < size) y[i] = x[i] * normcdff(x[i]);
}

void Gelu(TensorView x, TensorView y) {
  CheckGelu(x, y);
  Launch(GeluKernel, x, (x.numel() + kThreads - 1) / kThreads, Data<float>(x, "x"),
         Data<float>(y, "y"), x.numel());
}

// The length of sentence `b`; 0 where it is none.
__device__ int Length(const int* lengths, int64_t b, int tokens) {
  return lengths[b] > 0 && lengths[b] <= tokens ? lengths[b] : 0;
}

__global__ void MaskedSoftmaxKernel(const float* scores, const int* lengths, float* y, int tokens,
                                    int64_t rows_per_sentence, float scale) {
  const float* in = scores + static_cast<int64_t>(blockIdx.x) * tokens;
  float* out = y + static_cast<int64_t>(blockIdx.x) * tokens;
  const int length = Length(lengths, blockIdx.x / rows_per_sentence, tokens);
  float largest = -INFINITY;
  for (int i = threadIdx.x; i < length; i += kThreads) largest = fmaxf(largest, in[i] * scale);
  largest = Reduce(largest, Max());
  float sum = 0;
  for (int i = threadIdx.x; i < length; i += kThreads) {
    out[i] = expf(in[i] * scale - largest);
    sum += out[i];
  }
  sum = Reduce(sum, Sum());
  for (int i = threadIdx.x; i < tokens; i += kThreads) {
    out[i] = length == 0 ? NAN : i < length ? out[i] / sum : 0.0f;
  }
}

void MaskedSoftmax(TensorView scores, TensorView lengths, TensorView y, double scale) {
  CheckMaskedSoftmax(scores, lengths, y);
  if (scores.numel() == 0) return;
  const int64_t tokens = scores.size(scores.ndim() - 1);
  const int64_t rows = scores.numel() / tokens;
  Launch(MaskedSoftmaxKernel, scores, rows, Data<float>(scores, "scores"),
         Data<int32_t>(lengths, "lengths"), Data<float>(y, "y"), static_cast<int>(tokens),
         rows / scores.size(0), static_cast<float>(scale));
}

__global__ void MeanPoolNormalizeKernel(const float* hidden, const int* lengths, float* y,
                                        int tokens, int features) {
  const float* in = hidden + static_cast<int64_t>(blockIdx.x) * tokens * features;
  float* out = y + static_cast<int64_t>(blockIdx.x) * features;
  const int length = Length(lengths, blockIdx.x, tokens);
  float squares = 0;
  for (int i = threadIdx.x; i < features; i += kThreads) {
    float mean = 0;
    for (int token = 0; token < length; ++token) mean += in[token * features + i];
    mean /= static_cast<float>(length);  // NaN without a length
    out[i] = mean;
    squares += mean * mean;
  }
  const float norm = fmaxf(sqrtf(Reduce(squares, Sum())), 1e-12f);
  for (int i = threadIdx.x; i < features; i += kThreads) out[i] /= norm;
}

void MeanPoolNormalize(TensorView hidden, TensorView lengths, TensorView y) {
  CheckMeanPoolNormalize(hidden, lengths, y);
  Launch(MeanPoolNormalizeKernel, hidden, hidden.size(0), Data<float>(hidden, "hidden"),
         Data<int32_t>(lengths, "lengths"), Data<float>(y, "y"), static_cast<int>(hidden.size(1)),
         static_cast<int>(hidden.size(2)));
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(add_layer_norm, AddLayerNorm);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(gelu, Gelu);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(masked_softmax, MaskedSoftmax);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(mean_pool_normalize, MeanPoolNormalize);
