#include "python/stream_bindings.h"

#include <mlx/stream.h>
#include <mlx/utils.h>
#include <mlx_tvm_ffi/op.h>
#include <mlx_tvm_ffi/stream.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <utility>

#include "array/py_array.h"
#include "backend/backend.h"
#include "backend/cpu.h"

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

StreamRef FromHandle(uintptr_t handle) {
  if (handle == 0) {
    TVM_FFI_THROW(ValueError) << "[mlx_tvm_ffi.StreamInterface] handle: expected the address of an "
                                 "mtf_stream, got 0.";
  }
  return StreamRef::Share(reinterpret_cast<mtf_stream*>(handle));
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

// A scope of Python: also makes a stream of MLX MLX's default for its device. mlx_tvm_ffi._stream
// takes care that it is left once, on the thread that entered it.
class Scope {
 public:
  Scope(const StreamRef& stream, bool wait) : mlx_stream_(ToMlxStream(stream)), wait_(wait) {
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

  void Leave() {
    if (previous_) mx::set_default_stream(*previous_);
    py::gil_scoped_release unlocked;
    detail::Call(detail::StreamApi(), &mtf_stream_api::leave, "stream", &scope_);
    if (wait_ && mlx_stream_) mx::synchronize(*mlx_stream_);
  }

 private:
  std::optional<mx::Stream> mlx_stream_;
  std::optional<mx::Stream> previous_;
  bool wait_;
  mtf_scope scope_{};
};

}  // namespace

void BindStream(py::module_& module) {
  py::class_<StreamRef>(module, "StreamInterface",
                        "The stream of some framework, as kernels see it.\n\n"
                        "Encoder, device and queue are addresses; None where there is none.")
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

  py::class_<Scope>(module, "Scope", "What a scope has to put back.")
      .def(py::init<const StreamRef&, bool>(), py::arg("stream"), py::arg("wait"))
      .def("leave", &Scope::Leave);

  module.def(
      "mlx_stream_interface",
      [](py::handle stream) {
        return ToStreamRef(mx::to_stream(AsStreamOrDevice(stream.ptr()).value()));
      },
      py::arg("stream"));
  module.def(
      "dl_device",
      [](py::handle device) {
        const mx::Device of = AsDevice(device.ptr()).value();
        const DLDevice result = GetBackend(of).ToDLDevice(of);
        return std::pair(static_cast<int32_t>(result.device_type), result.device_id);
      },
      py::arg("device"));
  module.def(
      "current_stream", [](int32_t type, int32_t id) { return CurrentStream(ToDevice(type, id)); },
      py::arg("type"), py::arg("id"));
  module.def("innermost_stream", [] { return NoneForNull(InnermostStream()); });
  module.def(
      "exchange_default_stream",
      [](int32_t type, int32_t id, const std::optional<StreamRef>& stream) {
        return NoneForNull(ExchangeDefaultStream(ToDevice(type, id), stream.value_or(StreamRef())));
      },
      py::arg("type"), py::arg("id"), py::arg("stream"));
}

}  // namespace mlx_tvm_ffi
