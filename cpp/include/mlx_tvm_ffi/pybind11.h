/*!
 * \file pybind11.h
 * \brief For pybind11 modules of op authors: functions take and return mx::array, take `stream=`,
 * and raise errors of tvm-ffi.
 *
 * mlx.core is bound with nanobind, whose casters work only between modules built with the same
 * version of it. These go through mlx_tvm_ffi's own module, which is imported at the first use.
 */
#ifndef MLX_TVM_FFI_PYBIND11_H_
#define MLX_TVM_FFI_PYBIND11_H_

#include <mlx/array.h>
#include <mlx/utils.h>
#include <mlx/version.h>
#include <pybind11/pybind11.h>
#include <tvm/ffi/error.h>

#include <cstdint>
#include <exception>
#include <optional>
#include <string>
#include <utility>

namespace mlx_tvm_ffi {

/*! \brief How arrays cross: what the extension module offers. With Python's lock held. */
struct PyArrayApi {
  /*! \brief MLX_VERSION_NUMERIC of its build: mx::array is the same only within one version. */
  int32_t mlx_version;
  /*! \brief Borrowed; null where it is no mlx.core.array. */
  mlx::core::array* (*as_array)(PyObject* object);
  /*! \brief A new reference; null with a Python error set where that fails. */
  PyObject* (*from_array)(mlx::core::array array);
  /*! \brief Nothing where it is neither a stream, nor a device, nor None. */
  std::optional<mlx::core::StreamOrDevice> (*as_stream)(PyObject* object);
  /*! \brief Sets the Python error of the C++ exception in flight. In a catch block. */
  void (*set_error)();
};

inline constexpr const char* kPyArrayApiName = "mlx_tvm_ffi._core.array_api";

/*! \throws ImportError where mlx_tvm_ffi cannot be imported, or was built with another MLX. */
inline const PyArrayApi& ImportPyArrayApi() {
  static const PyArrayApi* const api = [] {
    const auto* found = static_cast<PyArrayApi*>(PyCapsule_Import(kPyArrayApiName, 0));
    if (found == nullptr) throw pybind11::error_already_set();
    if (found->mlx_version != MLX_VERSION_NUMERIC) {
      throw pybind11::import_error(
          "[mlx_tvm_ffi] mlx: expected the version that mlx_tvm_ffi was built with, " +
          std::to_string(found->mlx_version) + ", got a module built with " +
          std::to_string(MLX_VERSION_NUMERIC) + ". Rebuild the module.");
    }
    return found;
  }();
  return *api;
}

/*! \brief Lets a tvm::ffi::Error become a Python error of its kind. Call once in the module's init.
 */
inline void TranslateErrorsOfModule() {
  pybind11::register_local_exception_translator([](std::exception_ptr error) {
    try {
      if (error) std::rethrow_exception(error);
    } catch (const tvm::ffi::Error&) {
      ImportPyArrayApi().set_error();
    }
  });
}

}  // namespace mlx_tvm_ffi

namespace pybind11::detail {

template <>
struct type_caster<mlx::core::array> {
  static constexpr auto name = const_name("mlx.core.array");
  template <typename T>
  using cast_op_type = movable_cast_op_type<T>;

  bool load(handle source, bool) {
    const mlx::core::array* array = mlx_tvm_ffi::ImportPyArrayApi().as_array(source.ptr());
    if (array != nullptr) value_ = *array;
    return array != nullptr;
  }
  static handle cast(mlx::core::array array, return_value_policy, handle) {
    return mlx_tvm_ffi::ImportPyArrayApi().from_array(std::move(array));
  }

  operator mlx::core::array*() { return &*value_; }
  operator mlx::core::array&() { return *value_; }
  operator mlx::core::array&&() && { return std::move(*value_); }

 private:
  std::optional<mlx::core::array> value_;
};

template <>
struct type_caster<mlx::core::StreamOrDevice> {
  PYBIND11_TYPE_CASTER(mlx::core::StreamOrDevice,
                       const_name("mlx.core.Stream | mlx.core.Device | None"));

  bool load(handle source, bool) {
    std::optional<mlx::core::StreamOrDevice> stream =
        mlx_tvm_ffi::ImportPyArrayApi().as_stream(source.ptr());
    if (stream) value = *stream;
    return stream.has_value();
  }
  static handle cast(const mlx::core::StreamOrDevice&, return_value_policy, handle) = delete;
};

}  // namespace pybind11::detail

#endif  // MLX_TVM_FFI_PYBIND11_H_
