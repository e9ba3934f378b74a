#ifndef MLX_TVM_FFI_EXAMPLES_SENTENCE_SHAPES_H_
#define MLX_TVM_FFI_EXAMPLES_SENTENCE_SHAPES_H_

// The shapes that the kernels of sentence_kernels.cc and sentence_kernels.cu take.

#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>

#include <cstdint>

inline void CheckAddLayerNorm(const tvm::ffi::TensorView& x, const tvm::ffi::TensorView& residual,
                              const tvm::ffi::TensorView& weight, const tvm::ffi::TensorView& bias,
                              const tvm::ffi::TensorView& y) {
  const int64_t features = weight.numel();
  TVM_FFI_CHECK(features > 0 && bias.numel() == features && x.ndim() > 0 &&
                    x.size(x.ndim() - 1) == features && x.numel() == y.numel() &&
                    residual.numel() > 0 && residual.numel() % features == 0 &&
                    x.numel() % residual.numel() == 0,
                ValueError)
      << "shapes do not fit: x " << x.shape() << ", residual " << residual.shape() << ", weight "
      << weight.shape() << ", bias " << bias.shape() << ", y " << y.shape();
}

inline void CheckGelu(const tvm::ffi::TensorView& x, const tvm::ffi::TensorView& y) {
  TVM_FFI_CHECK(x.numel() == y.numel(), ValueError)
      << "shapes differ: x " << x.shape() << ", y " << y.shape();
}

inline void CheckMaskedSoftmax(const tvm::ffi::TensorView& scores,
                               const tvm::ffi::TensorView& lengths, const tvm::ffi::TensorView& y) {
  TVM_FFI_CHECK(scores.ndim() >= 2 && lengths.ndim() == 1 && lengths.size(0) == scores.size(0) &&
                    scores.numel() == y.numel(),
                ValueError)
      << "shapes do not fit: scores " << scores.shape() << ", lengths " << lengths.shape() << ", y "
      << y.shape();
}

inline void CheckMeanPoolNormalize(const tvm::ffi::TensorView& hidden,
                                   const tvm::ffi::TensorView& lengths,
                                   const tvm::ffi::TensorView& y) {
  TVM_FFI_CHECK(hidden.ndim() == 3 && lengths.ndim() == 1 && y.ndim() == 2 &&
                    lengths.size(0) == hidden.size(0) && y.size(0) == hidden.size(0) &&
                    y.size(1) == hidden.size(2),
                ValueError)
      << "shapes do not fit: hidden " << hidden.shape() << ", lengths " << lengths.shape() << ", y "
      << y.shape();
}

#endif  // MLX_TVM_FFI_EXAMPLES_SENTENCE_SHAPES_H_
