/*!
 * \file stream_bindings.h
 * \brief StreamInterface and the functions behind mlx_tvm_ffi.stream.
 */
#ifndef MLX_TVM_FFI_PYTHON_STREAM_BINDINGS_H_
#define MLX_TVM_FFI_PYTHON_STREAM_BINDINGS_H_

#include <pybind11/pybind11.h>

namespace mlx_tvm_ffi {

/*! \brief Adds them to the module. */
void BindStream(pybind11::module_& module);

}  // namespace mlx_tvm_ffi

#endif  // MLX_TVM_FFI_PYTHON_STREAM_BINDINGS_H_
