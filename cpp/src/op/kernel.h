/*!
 * \file kernel.h
 * \brief What the parts of an op share about its kernel.
 */
#ifndef MLX_TVM_FFI_OP_KERNEL_H_
#define MLX_TVM_FFI_OP_KERNEL_H_

#include <mlx_tvm_ffi/op.h>

#include <string>

namespace mlx_tvm_ffi {

/*! \brief How messages about an op begin. */
std::string Where(const Options& options);

/*! \brief Throws an error of a run: the op's name and the kind stand before the message, since MLX
 * keeps that alone. */
[[noreturn]] void ThrowNamed(const Options& options, const std::string& kind,
                             const std::string& message, const std::string& backtrace = "");

/*! \throws tvm::ffi::Error ValueError where an output is not like the input whose memory it is to
 * take. */
void CheckAlias(const Options& options, int output, const mx::Shape& shape, mx::Dtype dtype,
                const mx::array& input);

}  // namespace mlx_tvm_ffi

#endif  // MLX_TVM_FFI_OP_KERNEL_H_
