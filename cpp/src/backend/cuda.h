/*!
 * \file cuda.h
 * \brief Kernels on MLX's CUDA streams and graphs. Lives in a library of its own,
 * libmlx_tvm_ffi_cuda, because it needs what only MLX's CUDA builds have.
 */
#ifndef MLX_TVM_FFI_BACKEND_CUDA_H_
#define MLX_TVM_FFI_BACKEND_CUDA_H_

#include <mlx_tvm_ffi/stream.h>

/*! \brief Registers the CUDA backend: the one symbol of its library. Called once, where MLX has
 * CUDA. */
extern "C" MLX_TVM_FFI_API void MlxTvmFfiRegisterCuda();

#endif  // MLX_TVM_FFI_BACKEND_CUDA_H_
