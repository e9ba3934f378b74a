#include "backend/backend.h"

#include <mlx/utils.h>
#include <tvm/ffi/error.h>

#include <array>
#include <atomic>
#include <mutex>

#include "backend/cpu.h"
#include "backend/metal.h"

namespace mlx_tvm_ffi {

namespace {

std::array<std::atomic<Backend*>, 2>& Backends() {
  static std::array<std::atomic<Backend*>, 2> backends{};
  return backends;
}

// The line by which a backend joins. Each offers MLX's interface as default of its device.
void RegisterAll() {
  RegisterCpuBackend();
#ifdef _METAL_  // by MLX's own CMake files, where it has Metal
  RegisterMetalBackend();
#endif
}

std::atomic<Backend*>& Slot(mx::Device::DeviceType type) {
  return Backends()[type == mx::Device::gpu ? 1 : 0];
}

Backend* Find(mx::Device::DeviceType type) {
  static std::once_flag once;
  std::call_once(once, RegisterAll);
  return Slot(type).load(std::memory_order_acquire);
}

}  // namespace

mx::Stream MlxStream::Resolve() const {
  return stream_.has_value() ? *stream_ : mx::default_stream(device_);
}

Backend& GetBackend(const mx::Device& device) {
  Backend* backend = Find(device.type);
  if (backend == nullptr) {
    TVM_FFI_THROW(RuntimeError)
        << "[mlx_tvm_ffi.backend] device: expected one that this installation supports, got "
        << (device.type == mx::Device::gpu ? "gpu" : "cpu")
        << ". Run `python -m mlx_tvm_ffi` to see what is missing.";
  }
  return *backend;
}

void RegisterBackend(mx::Device::DeviceType type, Backend* backend) {
  Slot(type).store(backend, std::memory_order_release);
  mx::Device device(type);
  OfferDefaultStream(backend->ToDLDevice(device), backend->MakeInterface(device, std::nullopt));
}

bool HasBackend(mx::Device::DeviceType type) { return Find(type) != nullptr; }

std::optional<mx::Stream> ToMlxStream(const StreamRef& stream) {
  if (!stream) return std::nullopt;
  auto* ours = dynamic_cast<MlxStream*>(Implementation(stream));
  if (ours == nullptr) return std::nullopt;
  return ours->Resolve();
}

mx::Stream CurrentMlxStream() {
  if (std::optional<mx::Stream> scoped = ToMlxStream(InnermostStream())) return *scoped;
  return mx::default_stream(mx::default_device());
}

}  // namespace mlx_tvm_ffi
