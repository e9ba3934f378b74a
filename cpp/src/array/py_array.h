/*!
 * \file py_array.h
 * \brief PyObject <-> mx::array, Stream, Device, Dtype: the one place that knows how mlx.core's
 * objects lie in memory.
 *
 * mlx.core is bound with nanobind, whose own casters work only between modules built with the same
 * version of it. The head of an instance has been the same in all of them since 2.4
 * (nb_internals.h, struct nb_inst); InitPyArray proves it. Everything here is called with Python's
 * lock held.
 */
#ifndef MLX_TVM_FFI_ARRAY_PY_ARRAY_H_
#define MLX_TVM_FFI_ARRAY_PY_ARRAY_H_

#include <Python.h>
#include <mlx/array.h>
#include <mlx/utils.h>

#include <optional>

namespace mlx_tvm_ffi {

namespace mx = mlx::core;

/*! \brief Finds mlx.core's types and proves that their instances lie as expected. \throws
 * ImportError otherwise. */
void InitPyArray();

/*! \brief mlx.core.array, borrowed. */
PyTypeObject* ArrayType();

/*! \brief The array inside `object`, borrowed; null where it is not an mlx.core.array that has been
 * initialised. */
mx::array* AsArray(PyObject* object);

/*! \brief A new mlx.core.array; null with a Python error where that fails. */
PyObject* FromArray(mx::array array);

/*! \brief From mx.Stream, mx.ThreadLocalStream, mx.Device, mx.DeviceType or None; nothing where it
 * is none of these. */
std::optional<mx::StreamOrDevice> AsStreamOrDevice(PyObject* object);

/*! \brief From mx.Dtype; nothing where it is not one. */
std::optional<mx::Dtype> AsDtype(PyObject* object);

/*! \brief From mx.Device or mx.DeviceType; nothing where it is neither. */
std::optional<mx::Device> AsDevice(PyObject* object);

}  // namespace mlx_tvm_ffi

#endif  // MLX_TVM_FFI_ARRAY_PY_ARRAY_H_
