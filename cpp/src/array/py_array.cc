#include "array/py_array.h"

#include <pybind11/pybind11.h>

#include <algorithm>
#include <new>
#include <string>
#include <utility>

namespace mlx_tvm_ffi {

namespace py = pybind11;

namespace {

/*! \brief The head of a nanobind instance. */
struct Instance {
  PyObject_HEAD int32_t offset;  // bytes from this object to the C++ value, or to a pointer to it
  uint8_t flags;
};

constexpr uint8_t kStateMask = 3;
constexpr uint8_t kReady = 2;
constexpr uint8_t kDirect = 4;     // the value itself lies at the offset
constexpr uint8_t kDestruct = 16;  // deallocation runs the value's destructor

struct Types {
  PyTypeObject* array;
  PyTypeObject* dtype;
  PyTypeObject* stream;
  PyTypeObject* thread_local_stream;
  PyTypeObject* device;
  PyTypeObject* device_type;
};
Types types;

// The value inside an instance; null where it has not been initialised.
template <typename T>
T* Value(PyObject* object) {
  auto* instance = reinterpret_cast<Instance*>(object);
  if ((instance->flags & kStateMask) != kReady) return nullptr;
  void* at = reinterpret_cast<char*>(object) + instance->offset;
  if ((instance->flags & kDirect) == 0) at = *static_cast<void**>(at);
  return static_cast<T*>(at);
}

PyTypeObject* FindType(const py::module_& core, const char* name) {
  return reinterpret_cast<PyTypeObject*>(
      py::object(core.attr(name)).release().ptr());  // kept for ever
}

void Expect(bool proved, const char* what) {
  if (proved) return;
  throw py::import_error(
      std::string("[mlx_tvm_ffi.import] mlx.core: expected ") + what +
      " laid out as in the MLX this was built with, got something else. Reinstall "
      "mlx and mlx-tvm-ffi together.");
}

}  // namespace

void InitPyArray() {
  py::module_ core = py::module_::import("mlx.core");
  types = {FindType(core, "array"),  FindType(core, "Dtype"),
           FindType(core, "Stream"), FindType(core, "ThreadLocalStream"),
           FindType(core, "Device"), FindType(core, "DeviceType")};

  py::object dtype = core.attr("float32");
  const auto* float32 = Value<mx::Dtype>(dtype.ptr());
  Expect(float32 != nullptr && *float32 == mx::float32, "Dtype");
  py::object device = core.attr("Device")(core.attr("cpu"), 0);
  const auto* cpu = Value<mx::Device>(device.ptr());
  Expect(cpu != nullptr && *cpu == mx::Device(mx::Device::cpu, 0), "Device");
  py::object probe = core.attr("array")(py::make_tuple(py::make_tuple(1.0, 2.0, 3.0)), dtype);
  mx::array* array = AsArray(probe.ptr());
  Expect(array != nullptr && array->ndim() == 2 && array->shape(0) == 1 && array->shape(1) == 3 &&
             array->dtype() == mx::float32 && array->size() == 3,
         "array");
  py::object copy = py::reinterpret_steal<py::object>(FromArray(*array));
  Expect(copy && AsArray(copy.ptr()) != nullptr && AsArray(copy.ptr())->id() == array->id() &&
             copy.attr("tolist")().equal(probe.attr("tolist")()),
         "array");
}

PyTypeObject* ArrayType() { return types.array; }

mx::array* AsArray(PyObject* object) {
  if (!PyObject_TypeCheck(object, types.array)) return nullptr;
  return Value<mx::array>(object);
}

PyObject* FromArray(mx::array array) {
  static PyObject* no_arguments = PyTuple_New(0);
  PyObject* object = types.array->tp_new(types.array, no_arguments, nullptr);
  if (object == nullptr) return nullptr;
  auto* instance = reinterpret_cast<Instance*>(object);
  new (reinterpret_cast<char*>(object) + instance->offset) mx::array(std::move(array));
  instance->flags = static_cast<uint8_t>((instance->flags & ~kStateMask) | kReady | kDestruct);
  return object;
}

std::optional<mx::Device> AsDevice(PyObject* object) {
  if (PyObject_TypeCheck(object, types.device)) {
    const auto* device = Value<mx::Device>(object);
    if (device == nullptr) return std::nullopt;
    int count = std::max(mx::device_count(device->type), 1);  // no GPU is an error of its own
    if (device->index < 0 || device->index >= count) {
      throw py::value_error("[mlx_tvm_ffi.device] index: expected one below the " +
                            std::to_string(count) + " that MLX has, got " +
                            std::to_string(device->index) + ". Use mx.device_count().");
    }
    return *device;
  }
  if (PyObject_TypeCheck(object, types.device_type)) {
    int value = py::handle(object).attr("value").cast<int>();
    return mx::Device(static_cast<mx::Device::DeviceType>(value));
  }
  return std::nullopt;
}

std::optional<mx::StreamOrDevice> AsStreamOrDevice(PyObject* object) {
  if (object == Py_None) return mx::StreamOrDevice{};
  if (PyObject_TypeCheck(object, types.stream)) {
    const auto* stream = Value<mx::Stream>(object);
    return stream == nullptr ? std::nullopt : std::optional<mx::StreamOrDevice>(*stream);
  }
  if (PyObject_TypeCheck(object, types.thread_local_stream)) {
    const auto* stream = Value<mx::ThreadLocalStream>(object);
    return stream == nullptr ? std::nullopt : std::optional<mx::StreamOrDevice>(*stream);
  }
  if (auto device = AsDevice(object)) return mx::StreamOrDevice(*device);
  return std::nullopt;
}

std::optional<mx::Dtype> AsDtype(PyObject* object) {
  if (!PyObject_TypeCheck(object, types.dtype)) return std::nullopt;
  const auto* dtype = Value<mx::Dtype>(object);
  return dtype == nullptr ? std::nullopt : std::optional(*dtype);
}

}  // namespace mlx_tvm_ffi
