// Kernels that do as little as they can, for benchmarks/cpu.py. Row-contiguous float32.
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/function.h>

#include <cstdint>
#include <cstring>

namespace {

using tvm::ffi::TensorView;

void Nothing(TensorView, TensorView) {}

// y = x + 1, of any shape.
void AddOne(TensorView x, TensorView y) {
  auto *from = static_cast<const float*>(x.data_ptr()), *end = from + x.numel();
  for (auto* to = static_cast<float*>(y.data_ptr()); from != end;) *to++ = *from++ + 1;
}

// Writes a row into the cache, of which the rest is there already.
void Append(TensorView, TensorView row, TensorView cache, int64_t position) {
  int64_t n = row.numel();
  std::memcpy(static_cast<float*>(cache.data_ptr()) + position * n, row.data_ptr(),
              static_cast<size_t>(n) * sizeof(float));
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(nothing, Nothing)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(add_one, AddOne)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(append, Append)
