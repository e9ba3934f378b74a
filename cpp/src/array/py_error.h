/*!
 * \file py_error.h
 * \brief C++ exceptions as Python errors of the same kind.
 */
#ifndef MLX_TVM_FFI_ARRAY_PY_ERROR_H_
#define MLX_TVM_FFI_ARRAY_PY_ERROR_H_

#include <exception>

namespace mlx_tvm_ffi {

/*! \brief Sets the Python error for the exception in flight. Call inside a catch block, with
 * Python's lock held. */
void SetPythonError();

/*! \brief Makes pybind11 translate tvm::ffi::Error the same way. */
void TranslateErrors();

}  // namespace mlx_tvm_ffi

#endif  // MLX_TVM_FFI_ARRAY_PY_ERROR_H_
