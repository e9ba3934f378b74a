// The kernels that benchmarks/cuda.py measures: row-contiguous float32, y as large as x.
#include <cuda_runtime.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/function.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <vector>

namespace {

using tvm::ffi::TensorView;

cudaStream_t StreamOf(TensorView x) {
  DLDevice device = x.device();
  return static_cast<cudaStream_t>(TVMFFIEnvGetStream(device.device_type, device.device_id));
}

__global__ void AddOneKernel(int n, const float* x, float* y) {
  int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (i < n) y[i] = x[i] + 1;
}

void Launch(cudaStream_t stream, TensorView x, TensorView y) {
  int n = static_cast<int>(x.numel());
  AddOneKernel<<<static_cast<unsigned>((n + 255) / 256), 256, 0, stream>>>(
      n, static_cast<const float*>(x.data_ptr()), static_cast<float*>(y.data_ptr()));
}

void AddOne(TensorView x, TensorView y) { Launch(StreamOf(x), x, y); }

// Host microseconds of one bare launch: the median over runs of `count` launches each.
double BareLaunch(TensorView x, TensorView y, int64_t count) {
  cudaStream_t stream = StreamOf(x);
  std::vector<double> times;
  for (int run = 0; run < 9; ++run) {
    cudaStreamSynchronize(stream);
    auto start = std::chrono::steady_clock::now();
    for (int64_t i = 0; i < count; ++i) Launch(stream, x, y);
    std::chrono::duration<double, std::micro> elapsed = std::chrono::steady_clock::now() - start;
    times.push_back(elapsed.count() / static_cast<double>(count));
  }
  cudaStreamSynchronize(stream);
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

__global__ void CopyKernel(const float4* x, float4* y) {
  int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  y[i] = x[i];
}

void Copy(TensorView x, TensorView y) {
  TVM_FFI_CHECK(x.numel() % 1024 == 0, ValueError) << "expected a multiple of 1024 elements";
  CopyKernel<<<static_cast<unsigned>(x.numel() / 1024), 256, 0, StreamOf(x)>>>(
      static_cast<const float4*>(x.data_ptr()), static_cast<float4*>(y.data_ptr()));
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(add_one, AddOne)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(bare_launch, BareLaunch)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(copy, Copy)
