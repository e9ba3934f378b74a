// Kernels for gradients, vmap, compile, aliases and scratch memory. Row-contiguous float32.
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/function.h>

#include <atomic>
#include <cstdint>

#include "device.h"

namespace {

namespace ffi = tvm::ffi;
using ffi::TensorView;

float* Floats(TensorView tensor) {
  return reinterpret_cast<float*>(static_cast<char*>(tensor.data_ptr()) + tensor.byte_offset());
}

std::atomic<int64_t> calls{0};

int64_t Calls() { return calls.exchange(0); }

// product = a * b
void Multiply(TensorView a, TensorView b, TensorView product) {
  ++calls;
  float *x = Floats(a), *y = Floats(b), *z = Floats(product);
  ForEach(a.device(), product.numel(), [=] ON_DEVICE(int64_t i) { z[i] = x[i] * y[i]; });
}

// Called as the short form of a gradient is: primals, cotangent, output; then its own outputs.
void MultiplyBackward(TensorView a, TensorView b, TensorView cotangent, TensorView, TensorView da,
                      TensorView db) {
  float *x = Floats(a), *y = Floats(b), *g = Floats(cotangent), *dx = Floats(da), *dy = Floats(db);
  ForEach(a.device(), a.numel(), [=] ON_DEVICE(int64_t i) {
    dx[i] = g[i] * y[i];
    dy[i] = g[i] * x[i];
  });
}

// sum = a + b, difference = a - b
void SumAndDifference(TensorView a, TensorView b, TensorView sum, TensorView difference) {
  ++calls;
  float *x = Floats(a), *y = Floats(b), *s = Floats(sum), *d = Floats(difference);
  ForEach(a.device(), a.numel(), [=] ON_DEVICE(int64_t i) {
    s[i] = x[i] + y[i];
    d[i] = x[i] - y[i];
  });
}

// The sum over the last dimension, of any number of rows; times factor.
void RowSum(TensorView x, TensorView y, double factor) {
  ++calls;
  int64_t columns = x.size(x.ndim() - 1);
  float *from = Floats(x), *to = Floats(y), scale = static_cast<float>(factor);
  ForEach(x.device(), y.numel(), [=] ON_DEVICE(int64_t row) {
    float sum = 0;
    for (int64_t i = 0; i < columns; ++i) sum += from[row * columns + i];
    to[row] = scale * sum;
  });
}

void RowSumBackward(TensorView x, TensorView cotangent, TensorView, TensorView dx, double factor) {
  int64_t columns = x.size(x.ndim() - 1);
  float *g = Floats(cotangent), *to = Floats(dx), scale = static_cast<float>(factor);
  ForEach(x.device(), x.numel(), [=] ON_DEVICE(int64_t i) { to[i] = scale * g[i / columns]; });
}

// y = x + 1, also where y is x.
void AddOne(TensorView x, TensorView y) {
  ++calls;
  float *from = Floats(x), *to = Floats(y);
  ForEach(x.device(), x.numel(), [=] ON_DEVICE(int64_t i) { to[i] = from[i] + 1; });
}

// y += 1, whatever the input is.
void Increment(TensorView, TensorView y) {
  float* to = Floats(y);
  ForEach(y.device(), y.numel(), [=] ON_DEVICE(int64_t i) { to[i] += 1; });
}

// first += 1, second += 2, both aliases of x.
void IncrementBoth(TensorView x, TensorView first, TensorView second) {
  float *a = Floats(first), *b = Floats(second);
  ForEach(x.device(), x.numel(), [=] ON_DEVICE(int64_t i) {
    a[i] += 1;
    b[i] += 2;
  });
}

// Writes row into the cache's row number position; the rest of the cache is there already.
void Append(TensorView, TensorView row, TensorView cache, int64_t position) {
  float *from = Floats(row), *to = Floats(cache) + position * row.numel();
  ForEach(row.device(), row.numel(), [=] ON_DEVICE(int64_t i) { to[i] = from[i]; });
}

ffi::Tensor Allocate(TensorView like) {
  return ffi::Tensor::FromEnvAlloc(TVMFFIEnvTensorAlloc, like.shape(), like.dtype(), like.device());
}

// y = x + 1 by way of `count` pieces of scratch memory of x's size.
void ThroughScratch(TensorView x, TensorView y, int64_t count) {
  float* from = Floats(x);
  ffi::Tensor scratch;
  for (int64_t n = 0; n < count; ++n) {
    scratch = Allocate(x);
    float *source = from, *target = static_cast<float*>(scratch.data_ptr());
    ForEach(x.device(), x.numel(), [=] ON_DEVICE(int64_t i) { target[i] = source[i]; });
  }
  float *last = static_cast<float*>(scratch.data_ptr()), *to = Floats(y);
  ForEach(x.device(), x.numel(), [=] ON_DEVICE(int64_t i) { to[i] = last[i] + 1; });
}

// x + 1 in memory that the kernel allocates and returns.
ffi::Tensor Returned(TensorView x) {
  ffi::Tensor y = Allocate(x);
  float *from = Floats(x), *to = static_cast<float*>(y.data_ptr());
  ForEach(x.device(), x.numel(), [=] ON_DEVICE(int64_t i) { to[i] = from[i] + 1; });
  return y;
}

int64_t Address(TensorView x) { return reinterpret_cast<int64_t>(Floats(x)); }

// The address of the memory that the kernel got for its output.
void OutputAddress(TensorView x, TensorView y, TensorView address) {
  AddOne(x, y);
  static_cast<int64_t*>(address.data_ptr())[0] = Address(y);
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(calls, Calls)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(multiply, Multiply)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(multiply_backward, MultiplyBackward)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(sum_and_difference, SumAndDifference)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(row_sum, RowSum)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(row_sum_backward, RowSumBackward)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(add_one, AddOne)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(increment, Increment)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(increment_both, IncrementBoth)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(append, Append)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(through_scratch, ThroughScratch)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(returned, Returned)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(address, Address)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(output_address, OutputAddress)
