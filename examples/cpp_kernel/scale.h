// y = factor * x, in float32: one function for each kind of device.
#ifndef SCALE_H_
#define SCALE_H_

#include <tvm/ffi/container/tensor.h>

void ScaleCpu(tvm::ffi::TensorView x, tvm::ffi::TensorView y, float factor);
void ScaleCuda(tvm::ffi::TensorView x, tvm::ffi::TensorView y, float factor);
void ScaleMetal(tvm::ffi::TensorView x, tvm::ffi::TensorView y, float factor);

#endif  // SCALE_H_
