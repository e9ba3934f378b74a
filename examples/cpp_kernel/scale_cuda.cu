// With CUDA the encoder is the cudaStream_t that the framework launches on, or captures a graph from.
#include <mlx_tvm_ffi/stream.h>

#include "scale.h"

namespace {

__global__ void Scale(const float* in, float* out, float factor, int64_t size) {
  const int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x;
  if (i < size) out[i] = factor * in[i];
}

}  // namespace

void ScaleCuda(tvm::ffi::TensorView x, tvm::ffi::TensorView y, float factor) {
  const mlx_tvm_ffi::EncoderScope scope(mlx_tvm_ffi::CurrentStream(x.device()));
  const int64_t size = x.numel();
  constexpr int kThreads = 256;
  Scale<<<static_cast<unsigned>((size + kThreads - 1) / kThreads), kThreads, 0,
          static_cast<cudaStream_t>(scope.encoder())>>>(
      static_cast<const float*>(x.data_ptr()), static_cast<float*>(y.data_ptr()), factor, size);
  const cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess) {
    TVM_FFI_THROW(RuntimeError) << "[scale] launch: " << cudaGetErrorString(error);
  }
}
