/*!
 * \file py_exchange.h
 * \brief DLPack's exchange API for mlx.core.array: how tvm-ffi takes arrays as arguments and hands
 * results back.
 */
#ifndef MLX_TVM_FFI_ARRAY_PY_EXCHANGE_H_
#define MLX_TVM_FFI_ARRAY_PY_EXCHANGE_H_

#include <Python.h>

namespace mlx_tvm_ffi {

/*! \brief Sets mlx.core.array.__dlpack_c_exchange_api__. After InitPyArray. \throws a Python error.
 */
void InstallExchange();

/*! \brief Makes MLX's memory what kernels get that are called without the exchange, where nobody's
 * is.
 */
void OfferAllocator();

}  // namespace mlx_tvm_ffi

#endif  // MLX_TVM_FFI_ARRAY_PY_EXCHANGE_H_
