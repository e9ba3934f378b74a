#ifndef MLX_TVM_FFI_EXAMPLES_TENSOR_CHECKS_H_
#define MLX_TVM_FFI_EXAMPLES_TENSOR_CHECKS_H_

// What the examples' kernels expect of their tensors, on the CPU and on CUDA.

#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>

#include <cstdint>
#include <type_traits>

#ifdef __CUDACC__
constexpr DLDeviceType kKernelDevice = kDLCUDA;
#else
constexpr DLDeviceType kKernelDevice = kDLCPU;
#endif

/*! \brief The elements of a tensor, which must be what the kernels expect: see the checks. */
template <typename T>
inline T* Data(const tvm::ffi::TensorView& tensor, const char* name) {
  constexpr bool kIsFloat = std::is_floating_point_v<T>;
  const DLDataType dtype = tensor.dtype();
  TVM_FFI_CHECK(dtype.code == (kIsFloat ? kDLFloat : kDLInt) && dtype.bits == 32, TypeError)
      << name << ": expected " << (kIsFloat ? "float32" : "int32") << ", got " << dtype;
  TVM_FFI_CHECK(tensor.device().device_type == kKernelDevice, ValueError)
      << name << ": not on the " << (kKernelDevice == kDLCPU ? "CPU" : "GPU");
  TVM_FFI_CHECK(tensor.IsContiguous(), ValueError) << name << ": not row-contiguous";
  return reinterpret_cast<T*>(static_cast<char*>(tensor.data_ptr()) + tensor.byte_offset());
}

#endif  // MLX_TVM_FFI_EXAMPLES_TENSOR_CHECKS_H_
