#include "python/attributes.h"

#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/dtype.h>
#include <tvm/ffi/string.h>

#include "array/py_array.h"
#include "array/tensor.h"

namespace mlx_tvm_ffi {

namespace ffi = tvm::ffi;
namespace py = pybind11;

namespace {

std::string Where(const std::string& op, const std::string& name) {
  return "[mlx_tvm_ffi.op " + op + "] " + name + ": ";
}

// A type of tvm_ffi's Python package, kept for ever.
py::handle TvmFfiType(const char* name) {
  return py::object(py::module_::import("tvm_ffi").attr(name)).release();
}

[[noreturn]] void ThrowNotCarried(const std::string& op, const std::string& name, PyObject* value) {
  bool is_array = AsArray(value) != nullptr;
  throw py::type_error(
      Where(op, name) +
      "expected None, a bool, int, float, str, bytes, dtype, device, or a sequence of these, got " +
      Py_TYPE(value)->tp_name +
      (is_array ? ". Pass arrays as positional inputs." : ". Convert it first."));
}

ffi::Any FromInteger(const std::string& op, const std::string& name, py::object* value) {
  py::object number = py::reinterpret_steal<py::object>(PyNumber_Index(value->ptr()));
  if (!number) {
    if (PyErr_ExceptionMatches(PyExc_TypeError) == 0) throw py::error_already_set();
    PyErr_Clear();  // an array of NumPy, for one
    ThrowNotCarried(op, name, value->ptr());
  }
  int overflow = 0;
  long long result = PyLong_AsLongLongAndOverflow(number.ptr(), &overflow);
  if (overflow != 0) {
    throw py::value_error(Where(op, name) + "expected an integer that fits 64 bits, got " +
                          ToText(number) + ". Pass it as a string or an array.");
  }
  if (PyLong_Check(value->ptr()) == 0) *value = std::move(number);
  return static_cast<int64_t>(result);
}

ffi::Any FromSequence(const std::string& op, const std::string& name, py::object* value) {
  if (Py_EnterRecursiveCall(" in an attribute") != 0) throw py::error_already_set();
  struct Leave {
    ~Leave() { Py_LeaveRecursiveCall(); }
  } leave;
  py::tuple items = ReadItems(*value);
  bool is_fixed = PyTuple_Check(value->ptr()) != 0;  // which may have names for its items
  ffi::Array<ffi::Any> array;
  for (size_t i = 0; i < items.size(); ++i) {
    py::object item = items[i];
    array.push_back(ToAttribute(op, name, &item));
    if (item.is(items[i])) continue;
    items[i] = std::move(item);
    is_fixed = false;
  }
  if (!is_fixed) *value = std::move(items);
  return array;
}

}  // namespace

Py_ssize_t ReadIndex(py::handle integer) {
  Py_ssize_t value = PyNumber_AsSsize_t(integer.ptr(), nullptr);
  if (value == -1 && PyErr_Occurred() != nullptr) throw py::error_already_set();
  return value;
}

std::string ToText(py::handle object) {
  try {
    return py::str(object).cast<std::string>();
  } catch (const py::error_already_set& error) {
    if (!error.matches(PyExc_Exception)) throw;
    return Py_TYPE(object.ptr())->tp_name;  // as for an integer of 5000 digits
  }
}

py::tuple ReadItems(py::handle sequence) {
  Py_ssize_t size = PySequence_Size(sequence.ptr());
  auto items = py::reinterpret_steal<py::tuple>(size < 0 ? nullptr : PyTuple_New(size));
  if (!items) throw py::error_already_set();
  for (Py_ssize_t i = 0; i < size; ++i) {
    PyObject* item = PySequence_GetItem(sequence.ptr(), i);
    if (item == nullptr) throw py::error_already_set();
    PyTuple_SET_ITEM(items.ptr(), i, item);
  }
  return items;
}

ffi::Any ToAttribute(const std::string& op, const std::string& name, py::object* kept) {
  PyObject* value = kept->ptr();
  static py::handle dtype_type = TvmFfiType("dtype");
  static py::handle device_type = TvmFfiType("Device");
  if (value == Py_None) return nullptr;
  if (PyBool_Check(value)) return value == Py_True;
  if (PyFloat_Check(value)) return PyFloat_AS_DOUBLE(value);
  if (PyIndex_Check(value) && AsArray(value) == nullptr) return FromInteger(op, name, kept);
  if (py::isinstance(value, dtype_type)) {  // before str, which it derives from
    return ffi::StringToDLDataType(py::str(py::handle(value)).cast<std::string>());
  }
  if (PyUnicode_Check(value)) {
    Py_ssize_t size = 0;
    const char* data = PyUnicode_AsUTF8AndSize(value, &size);
    if (data == nullptr) throw py::error_already_set();
    return ffi::String(data, static_cast<size_t>(size));
  }
  if (PyBytes_Check(value)) {
    return ffi::Bytes(PyBytes_AS_STRING(value), static_cast<size_t>(PyBytes_GET_SIZE(value)));
  }
  if (PyTuple_Check(value) || PyList_Check(value)) return FromSequence(op, name, kept);
  if (auto dtype = AsDtype(value)) return ToDLPack(*dtype);
  if (auto device = AsDevice(value)) return GetBackend(*device).ToDLDevice(*device);
  if (py::isinstance(value, device_type)) {
    py::handle device(value);
    return DLDevice{static_cast<DLDeviceType>(device.attr("dlpack_device_type")().cast<int>()),
                    device.attr("index").cast<int>()};
  }
  ThrowNotCarried(op, name, value);
}

}  // namespace mlx_tvm_ffi
