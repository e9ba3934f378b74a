// What a kernel folder's library has: two functions on float arrays.
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/function.h>

namespace {

void Apply(tvm::ffi::TensorView x, tvm::ffi::TensorView y, float factor) {
  const auto* from = static_cast<const float*>(x.data_ptr());
  auto* to = static_cast<float*>(y.data_ptr());
  for (int64_t i = 0; i < x.numel(); ++i) to[i] = factor * from[i];
}

void Negate(tvm::ffi::TensorView x, tvm::ffi::TensorView y) { Apply(x, y, -1); }
void DoubleIt(tvm::ffi::TensorView x, tvm::ffi::TensorView y) { Apply(x, y, 2); }

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(negate, Negate)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(double_it, DoubleIt)
