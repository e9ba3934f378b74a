/*!
 * \file cpu.h
 * \brief Kernels on MLX's CPU stream threads.
 */
#ifndef MLX_TVM_FFI_BACKEND_CPU_H_
#define MLX_TVM_FFI_BACKEND_CPU_H_

namespace mlx_tvm_ffi {

/*! \brief Registers the CPU backend. */
void RegisterCpuBackend();

}  // namespace mlx_tvm_ffi

#endif  // MLX_TVM_FFI_BACKEND_CPU_H_
