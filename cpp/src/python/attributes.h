/*!
 * \file attributes.h
 * \brief Python values as attributes of an op.
 */
#ifndef MLX_TVM_FFI_PYTHON_ATTRIBUTES_H_
#define MLX_TVM_FFI_PYTHON_ATTRIBUTES_H_

#include <pybind11/pybind11.h>
#include <tvm/ffi/any.h>

#include <string>

namespace mlx_tvm_ffi {

/*!
 * \brief The items of a sequence of any kind, held: many make them only when they are asked.
 * \throws What the sequence raises.
 */
pybind11::tuple ReadItems(pybind11::handle sequence);

/*! \brief What an integer of any type is, the nearest that fits where it is beyond 64 bits.
 * \throws What its __index__ raises. */
Py_ssize_t ReadIndex(pybind11::handle integer);

/*! \brief An object's text, for messages; its type's name where that fails. */
std::string ToText(pybind11::handle object);

/*!
 * \brief A value that owns all it refers to. With Python's lock held.
 * \param kept The value; replaced by what will not change either: a tuple of a list, an int of an
 * integer of another type.
 * \throws TypeError for a type that is not carried, ValueError for an integer out of range; both
 * name `op` and `name`.
 */
tvm::ffi::Any ToAttribute(const std::string& op, const std::string& name, pybind11::object* kept);

}  // namespace mlx_tvm_ffi

#endif  // MLX_TVM_FFI_PYTHON_ATTRIBUTES_H_
