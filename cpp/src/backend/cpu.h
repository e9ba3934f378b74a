/*!
 * \file cpu.h
 * \brief Kernels on MLX's CPU stream threads.
 */
#ifndef MLX_TVM_FFI_BACKEND_CPU_H_
#define MLX_TVM_FFI_BACKEND_CPU_H_

#include <mlx/stream.h>
#include <mlx_tvm_ffi/op.h>

namespace mlx_tvm_ffi {

/*! \brief Registers the CPU backend. */
void RegisterCpuBackend();

/*! \brief Whether this thread is that of the CPU stream, and runs a kernel as one of its tasks:
 * what the stream is given now runs when the kernel has returned. */
MLX_TVM_FFI_API bool IsRunning(const mx::Stream& stream);

}  // namespace mlx_tvm_ffi

#endif  // MLX_TVM_FFI_BACKEND_CPU_H_
