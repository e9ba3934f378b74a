#include "python/stream_bindings.h"

#include <mlx/stream.h>
#include <mlx/utils.h>
#include <mlx_tvm_ffi/op.h>
#include <mlx_tvm_ffi/stream.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <iterator>
#include <list>
#include <optional>
#include <string>
#include <utility>

#include "array/py_array.h"
#include "backend/backend.h"
#include "backend/cpu.h"
#include "python/rules.h"

namespace mlx_tvm_ffi {
namespace {

namespace py = pybind11;

// Addresses go to Python as integers, null as None.
std::optional<uintptr_t> Address(const void* pointer) {
  if (pointer == nullptr) return std::nullopt;
  return reinterpret_cast<uintptr_t>(pointer);
}

DLDevice ToDevice(int32_t type, int32_t id) { return {static_cast<DLDeviceType>(type), id}; }

std::optional<StreamRef> NoneForNull(StreamRef stream) {
  if (!stream) return std::nullopt;
  return stream;
}

StreamRef FromHandle(py::handle handle) {
  if (PyLong_Check(handle.ptr()) == 0) {
    throw py::type_error(std::string("[mlx_tvm_ffi.StreamInterface] handle: expected the address "
                                     "of an mtf_stream, got ") +
                         Py_TYPE(handle.ptr())->tp_name + ". Pass it as an integer.");
  }
  void* address = PyLong_AsVoidPtr(handle.ptr());
  if (PyErr_Occurred() != nullptr) throw py::error_already_set();
  if (address == nullptr) {
    TVM_FFI_THROW(ValueError) << "[mlx_tvm_ffi.StreamInterface] handle: expected the address of an "
                                 "mtf_stream, got 0.";
  }
  return StreamRef::Share(static_cast<mtf_stream*>(address));
}

py::object DeviceOf(const StreamRef& stream) {
  const DLDevice device = stream.device();
  return py::module_::import("tvm_ffi").attr("Device")(static_cast<int>(device.device_type),
                                                       device.device_id);
}

py::str Repr(const StreamRef& stream) {
  return py::str("<mlx_tvm_ffi.StreamInterface {} at {:#x}>")
      .format(DeviceOf(stream), reinterpret_cast<uintptr_t>(stream.get()));
}

// `value`, read from `object`.
template <typename T>
T Initialized(std::optional<T> value, py::handle object) {
  if (value.has_value()) return *std::move(value);
  throw py::type_error(std::string("[mlx_tvm_ffi.stream] stream or device: expected one whose "
                                   "__init__ has run, got ") +
                       Py_TYPE(object.ptr())->tp_name + " without. Call its base's __init__.");
}

StreamRef OfMlx(py::handle stream) {
  return ToStreamRef(mx::to_stream(Initialized(AsStreamOrDevice(stream.ptr()), stream)));
}

std::pair<int32_t, int32_t> DlDevice(py::handle device) {
  const mx::Device of = Initialized(AsDevice(device.ptr()), device);
  const DLDevice result = GetBackend(of).ToDLDevice(of);
  return {static_cast<int32_t>(result.device_type), result.device_id};
}

// The innermost of this thread, or the current one of MLX's default device.
StreamRef CurrentOfThread() {
  if (StreamRef innermost = InnermostStream()) return innermost;
  const mx::Device device = mx::default_device();
  return CurrentStream(GetBackend(device).ToDLDevice(device));
}

// A scope of Python: also makes a stream of MLX MLX's default for its device.
class Scope {
 public:
  /*! \param owner What opened it, and is to leave it. */
  Scope(py::object owner, const StreamRef& stream, bool wait)
      : owner_(std::move(owner)), mlx_stream_(ToMlxStream(stream)), wait_(wait) {
    if (wait && !mlx_stream_) {
      TVM_FFI_THROW(ValueError)
          << "[mlx_tvm_ffi.stream] wait: expected False for another framework's stream, got True. "
             "Wait with that framework.";
    }
    // What a kernel makes must not wait for the kernel.
    if (mlx_stream_ && IsRunning(*mlx_stream_)) mlx_stream_.reset();
    if (mlx_stream_) previous_ = mx::default_stream(mlx_stream_->device);
    detail::Call(detail::StreamApi(), &mtf_stream_api::enter, "stream", stream.get(), &scope_);
    if (mlx_stream_) mx::set_default_stream(*mlx_stream_);
  }

  bool IsOf(py::handle owner) const { return owner_.get().is(owner); }

  void Leave() {
    if (previous_) mx::set_default_stream(*previous_);
    py::gil_scoped_release unlocked;
    detail::Call(detail::StreamApi(), &mtf_stream_api::leave, "stream", &scope_);
    if (wait_ && mlx_stream_) mx::synchronize(*mlx_stream_);
  }

 private:
  HeldObject owner_;  // by a thread that may end with the scope open
  std::optional<mx::Stream> mlx_stream_;
  std::optional<mx::Stream> previous_;
  bool wait_;
  mtf_scope scope_{};
};

// Those open on this thread, innermost last.
std::list<Scope>& Scopes() {
  static thread_local std::list<Scope> scopes;
  return scopes;
}

// __enter__ and __exit__ of mlx_tvm_ffi.StreamScope. No Python code runs between a scope's opening
// and the place that leaves it, since an interrupt there would leave it open.
StreamRef EnterScope(py::handle self) {
  py::object s = self.attr("_stream");
  StreamRef stream = s.is_none()                    ? CurrentOfThread()
                     : py::isinstance<StreamRef>(s) ? s.cast<StreamRef>()
                                                    : OfMlx(s);
  Scopes().emplace_back(py::reinterpret_borrow<py::object>(self), stream,
                        self.attr("_wait").cast<bool>());
  return stream;
}

void LeaveScope(py::handle self, const py::args&) {
  std::list<Scope>& scopes = Scopes();
  auto found = std::find_if(scopes.rbegin(), scopes.rend(),
                            [&](const Scope& scope) { return scope.IsOf(self); });
  if (found == scopes.rend()) {
    TVM_FFI_THROW(RuntimeError)
        << "[mlx_tvm_ffi.stream] thread: expected one that has this scope open, got another. "
           "Leave a scope on the thread that entered it, as often as it was entered.";
  }
  std::ptrdiff_t inside = std::distance(scopes.rbegin(), found);
  std::exception_ptr error;
  for (std::ptrdiff_t i = 0; i <= inside; ++i) {  // all of them, whatever one raises
    std::list<Scope> innermost;
    innermost.splice(innermost.end(), scopes, std::prev(scopes.end()));
    try {
      innermost.back().Leave();
    } catch (...) {
      if (error == nullptr) error = std::current_exception();
    }
  }
  if (error != nullptr) std::rethrow_exception(error);
  if (inside > 0) {
    TVM_FFI_THROW(RuntimeError)
        << "[mlx_tvm_ffi.stream] scope: expected the innermost of this thread, got one with "
        << inside << " open inside it, now left too. Leave scopes in the reverse order of "
        << "entering, and hold none across a yield or an await.";
  }
}

// A method that a class in Python takes over.
template <typename Function>
void BindMethod(py::module_& module, const char* name, Function function) {
  module.attr(name) = py::cpp_function(function, py::name(name), py::is_method(module));
}

}  // namespace

void BindStream(py::module_& module) {
  py::class_<StreamRef>(module, "StreamInterface", py::is_final(),
                        "The stream of some framework, as kernels see it.\n\n"
                        "Encoder, device and queue are addresses; None where there is none.")
      // Made by __new__, so that there is none without a stream; __init__ finds it made.
      .def_static(
          "__new__", [](py::handle, py::handle handle) { return FromHandle(handle); },
          py::arg("cls"), py::arg("handle"))
      .def("__reduce__",
           [](const StreamRef&) -> py::object {
             throw py::type_error(
                 "[mlx_tvm_ffi.StreamInterface] object: expected one that can be copied or "
                 "pickled, got a stream of this process. Hand the object itself on.");
           })
      .def(py::init(&FromHandle), py::arg("handle"),
           "Share a stream that its framework made, given the address of its mtf_stream.")
      .def_property_readonly(
          "handle", [](const StreamRef& stream) { return Address(stream.get()); },
          "The address of the mtf_stream: lent, for as long as this object lives.")
      .def_property_readonly("device", &DeviceOf, "The device of the stream.")
      .def(
          "acquire_encoder",
          [](const StreamRef& stream) { return Address(stream.AcquireEncoder()); },
          "Get the framework's open encoder, for as long as until release_encoder.")
      .def("release_encoder", &StreamRef::ReleaseEncoder, "Give the encoder back.")
      .def("barrier", &StreamRef::Barrier,
           "Let dispatches after it see what those before it wrote.")
      .def(
          "get_device", [](const StreamRef& stream) { return Address(stream.GetDevice()); },
          "Get the framework's own device.")
      .def(
          "get_dispatch_queue",
          [](const StreamRef& stream) { return Address(stream.GetDispatchQueue()); },
          "Get the dispatch queue that encoding must happen on.")
      .def(
          "acquire_command_buffer",
          [](const StreamRef& stream) { return Address(stream.AcquireCommandBuffer()); },
          "Get the command buffer, with no encoder open on it.")
      .def("release_command_buffer", &StreamRef::ReleaseCommandBuffer, "Give it back.")
      .def("__repr__", &Repr)
      .def(
          "__eq__", [](const StreamRef& a, const StreamRef& b) { return a.get() == b.get(); },
          py::is_operator())
      .def("__hash__", [](const StreamRef& stream) { return std::hash<void*>()(stream.get()); });

  BindMethod(module, "enter_scope", &EnterScope);
  BindMethod(module, "leave_scope", &LeaveScope);

  module.def("mlx_stream_interface", &OfMlx, py::arg("stream"));
  module.def("dl_device", &DlDevice, py::arg("device"));
  module.def(
      "current_stream", [](int32_t type, int32_t id) { return CurrentStream(ToDevice(type, id)); },
      py::arg("type"), py::arg("id"));
  module.def("current_stream_of_thread", &CurrentOfThread);
  module.def(
      "exchange_default_stream",
      [](int32_t type, int32_t id, const std::optional<StreamRef>& stream) {
        return NoneForNull(ExchangeDefaultStream(ToDevice(type, id), stream.value_or(StreamRef())));
      },
      py::arg("type"), py::arg("id"), py::arg("stream"));
}

}  // namespace mlx_tvm_ffi
