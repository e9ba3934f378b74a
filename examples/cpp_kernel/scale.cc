// What the outside sees: checks the arguments and picks the device of the tensor.
#include "scale.h"

#include <tvm/ffi/error.h>
#include <tvm/ffi/function.h>

namespace {

void Check(tvm::ffi::TensorView tensor, const char* name) {
  const DLDataType dtype = tensor.dtype();
  if (dtype.code != kDLFloat || dtype.bits != 32 || dtype.lanes != 1) {
    TVM_FFI_THROW(TypeError) << "[scale] " << name << ": expected float32.";
  }
  if (!tensor.IsContiguous()) {
    TVM_FFI_THROW(ValueError) << "[scale] " << name << ": expected a contiguous tensor.";
  }
}

void Scale(tvm::ffi::TensorView x, tvm::ffi::TensorView y, double factor) {
  Check(x, "x");
  Check(y, "y");
  const DLDevice device = x.device();
  if (y.numel() != x.numel()) TVM_FFI_THROW(ValueError) << "[scale] y: expected x's size.";
  if (y.device().device_type != device.device_type || y.device().device_id != device.device_id) {
    TVM_FFI_THROW(ValueError) << "[scale] y: expected x's device.";
  }
  if (x.numel() == 0) return;
  const auto scale = static_cast<float>(factor);
  switch (device.device_type) {
    case kDLCPU:
      return ScaleCpu(x, y, scale);
#ifdef SCALE_CUDA
    case kDLCUDA:
      return ScaleCuda(x, y, scale);
#endif
#ifdef SCALE_METAL
    case kDLMetal:
      return ScaleMetal(x, y, scale);
#endif
    default:
      TVM_FFI_THROW(NotImplementedError)
          << "[scale] x: expected a device that this library was built for, got DLPack device type "
          << device.device_type << ".";
  }
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(scale, Scale)
