/*!
 * \file metal.h
 * \brief Kernels on the Metal encoder that MLX has open.
 */
#ifndef MLX_TVM_FFI_BACKEND_METAL_H_
#define MLX_TVM_FFI_BACKEND_METAL_H_

namespace mlx_tvm_ffi {

/*! \brief Registers the Metal backend. */
void RegisterMetalBackend();

}  // namespace mlx_tvm_ffi

#endif  // MLX_TVM_FFI_BACKEND_METAL_H_
