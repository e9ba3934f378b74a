#include "metal/arguments.h"

#include <tvm/ffi/error.h>

#include <cstring>

namespace mlx_tvm_ffi {

void KernelArguments::ExpectCount(size_t expected) const {
  if (static_cast<size_t>(args_.size()) == expected) return;
  TVM_FFI_THROW(TypeError) << Prefix() << "arguments: expected " << expected << ", got "
                           << args_.size() << ".";
}

const DLTensor* KernelArguments::Tensor(size_t i) const {
  const TVMFFIAny& arg = At(i);
  const DLTensor* tensor = nullptr;
  if (arg.type_index == kTVMFFIDLTensorPtr) {
    tensor = static_cast<const DLTensor*>(arg.v_ptr);
  } else if (arg.type_index == kTVMFFITensor) {
    tensor = TVMFFITensorGetDLTensorPtr(arg.v_obj);
  } else {
    Throw(i, "a tensor");
  }
  if (tensor->device.device_type != kDLMetal) {
    TVM_FFI_THROW(ValueError) << Prefix() << "argument " << i
                              << ": expected a tensor on Metal, got one on device type "
                              << tensor->device.device_type << ". Use MLX's GPU.";
  }
  return tensor;
}

void KernelArguments::Bind(size_t i, MetalDispatch::Slot* slot) const {
  const TVMFFIAny& arg = At(i);
  if (arg.type_index == kTVMFFINone) return;
  if (arg.type_index == kTVMFFIOpaquePtr) {
    slot->buffer = arg.v_ptr;
    return;
  }
  const DLTensor* tensor = Tensor(i);
  slot->buffer = tensor->data;
  slot->offset = tensor->byte_offset;
}

uint64_t KernelArguments::Scalar(size_t i, KernelInfo::Scalar type) const {
  switch (type) {
    case KernelInfo::Scalar::kInt32:
      return static_cast<uint32_t>(Int(i, INT32_MIN, INT32_MAX));
    case KernelInfo::Scalar::kUInt32:
      return static_cast<uint64_t>(Int(i, 0, UINT32_MAX));
    case KernelInfo::Scalar::kInt64:
    case KernelInfo::Scalar::kUInt64:  // tvm-ffi carries its upper half as negative numbers
      return static_cast<uint64_t>(Int(i, INT64_MIN, INT64_MAX));
    case KernelInfo::Scalar::kFloat32:
      break;
  }
  const TVMFFIAny& arg = At(i);
  float value = 0;
  if (arg.type_index == kTVMFFIFloat) {
    value = static_cast<float>(arg.v_float64);
  } else if (arg.type_index == kTVMFFIInt || arg.type_index == kTVMFFIBool) {
    value = static_cast<float>(arg.v_int64);
  } else {
    Throw(i, "a float");
  }
  uint32_t bits = 0;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

int64_t KernelArguments::Int(size_t i, int64_t low, int64_t high) const {
  const TVMFFIAny& arg = At(i);
  if (arg.type_index != kTVMFFIInt && arg.type_index != kTVMFFIBool) Throw(i, "an int");
  if (arg.v_int64 < low || arg.v_int64 > high) {
    TVM_FFI_THROW(ValueError) << Prefix() << "argument " << i << ": expected an int from " << low
                              << " to " << high << ", got " << arg.v_int64 << ".";
  }
  return arg.v_int64;
}

std::string KernelArguments::Prefix() const {
  return "[mlx_tvm_ffi.metal] kernel '" + kernel_ + "': ";
}

const TVMFFIAny& KernelArguments::At(size_t i) const {
  return reinterpret_cast<const TVMFFIAny*>(args_.data())[i];
}

void KernelArguments::Throw(size_t i, const char* expected) const {
  TVM_FFI_THROW(TypeError) << Prefix() << "argument " << i << ": expected " << expected << ", got "
                           << args_[static_cast<int>(i)].GetTypeKey() << ".";
  TVM_FFI_UNREACHABLE();
}

}  // namespace mlx_tvm_ffi
