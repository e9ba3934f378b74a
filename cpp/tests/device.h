// One loop over elements for kernels that tests run on any device: on the CPU a plain for; compiled
// as CUDA, where the test suite runs with DEVICE=gpu, a kernel on the stream that tvm-ffi names.
#ifndef MLX_TVM_FFI_TESTS_DEVICE_H_
#define MLX_TVM_FFI_TESTS_DEVICE_H_

#include <dlpack/dlpack.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/c_env_api.h>

#include <cstdint>

#ifdef __CUDACC__
#define ON_DEVICE __host__ __device__

template <typename Body>
__global__ void Loop(int64_t n, Body body) {
  int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < n) body(i);
}
#else
#define ON_DEVICE
#endif

// Calls body(i) for i below n, in any order. What `body` captures is copied: pointers and numbers.
template <typename Body>
void ForEach(DLDevice device, int64_t n, Body body) {
  if (n == 0) return;
#ifdef __CUDACC__
  if (device.device_type == kDLCUDA) {
    auto stream = static_cast<cudaStream_t>(TVMFFIEnvGetStream(kDLCUDA, device.device_id));
    Loop<<<static_cast<unsigned>((n + 255) / 256), 256, 0, stream>>>(n, body);
    cudaError_t error = cudaGetLastError();
    if (error != cudaSuccess) TVM_FFI_THROW(RuntimeError) << cudaGetErrorString(error);
    return;
  }
#endif
  if (device.device_type != kDLCPU) {
    TVM_FFI_THROW(ValueError) << "no kernel for device type " << device.device_type;
  }
  for (int64_t i = 0; i < n; ++i) body(i);
}

#endif  // MLX_TVM_FFI_TESTS_DEVICE_H_
