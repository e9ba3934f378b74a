#include "array/py_error.h"

#include <Python.h>
#include <pybind11/pybind11.h>
#include <tvm/ffi/error.h>

#include <new>
#include <stdexcept>
#include <string>

namespace mlx_tvm_ffi {

namespace {

PyObject* KindToType(const std::string& kind) {
  // A kind is the name of a built-in exception; anything else is a RuntimeError.
  PyObject* type = PyDict_GetItemString(PyEval_GetBuiltins(), kind.c_str());
  bool is_exception = type != nullptr && PyExceptionClass_Check(type);
  return is_exception ? type : PyExc_RuntimeError;
}

}  // namespace

void SetPythonError() {
  try {
    throw;
  } catch (pybind11::error_already_set& error) {
    error.restore();
  } catch (const pybind11::builtin_exception& error) {
    error.set_error();
  } catch (const tvm::ffi::Error& error) {
    // A kernel's text may be anything.
    std::string text = error.message();
    PyObject* message =
        PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), "replace");
    if (message == nullptr) return;
    PyErr_SetObject(KindToType(error.kind()), message);
    Py_DECREF(message);
  } catch (const std::bad_alloc&) {
    PyErr_NoMemory();
  } catch (const std::invalid_argument& error) {
    PyErr_SetString(PyExc_ValueError, error.what());
  } catch (const std::out_of_range& error) {
    PyErr_SetString(PyExc_IndexError, error.what());
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  } catch (...) {
    PyErr_SetString(PyExc_RuntimeError, "an exception that is no std::exception");
  }
}

void TranslateErrors() {
  pybind11::register_local_exception_translator([](std::exception_ptr exception) {
    try {
      if (exception) std::rethrow_exception(exception);
    } catch (const tvm::ffi::Error&) {
      SetPythonError();
    }
  });
}

}  // namespace mlx_tvm_ffi
