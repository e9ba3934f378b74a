/*!
 * \file op_type.h
 * \brief mlx_tvm_ffi.Op: a callable type of its own, so that a call costs no argument tuple and no
 * dict.
 */
#ifndef MLX_TVM_FFI_PYTHON_OP_TYPE_H_
#define MLX_TVM_FFI_PYTHON_OP_TYPE_H_

#include <pybind11/pybind11.h>

namespace mlx_tvm_ffi {

/*! \brief Adds the type Op and the function make_op to the module. */
void BindOp(pybind11::module_& module);

}  // namespace mlx_tvm_ffi

#endif  // MLX_TVM_FFI_PYTHON_OP_TYPE_H_
