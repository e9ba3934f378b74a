/*!
 * \file evaluation.h
 * \brief What eval_cpu and eval_gpu do: inputs made fit, outputs given memory, the launch handed to
 * the backend.
 */
#ifndef MLX_TVM_FFI_OP_EVALUATION_H_
#define MLX_TVM_FFI_OP_EVALUATION_H_

#include <mlx_tvm_ffi/op.h>

#include <vector>

namespace mlx_tvm_ffi {

/*! \brief Evaluates a call. On the thread that evaluates; the inputs are as MLX gave them, for the
 * sake of donation.
 * \param at_once As Launch has it. */
MLX_TVM_FFI_API void Evaluate(KernelPrimitive& primitive, const std::vector<mx::array>& inputs,
                              std::vector<mx::array>& outputs, bool at_once = false);

}  // namespace mlx_tvm_ffi

#endif  // MLX_TVM_FFI_OP_EVALUATION_H_
