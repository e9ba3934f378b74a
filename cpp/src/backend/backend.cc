#include "backend/backend.h"

#include <mlx/utils.h>
#include <tvm/ffi/error.h>

#ifdef __linux__
#include <dlfcn.h>
#include <mlx/backend/cuda/cuda.h>
#endif

#include <array>
#include <atomic>
#include <mutex>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>

#include "backend/cpu.h"
#include "backend/metal.h"

namespace mlx_tvm_ffi {

namespace {

constinit std::array<std::atomic<Backend*>, 2> backends{};

/*! \brief Why a backend that this machine could use is absent; empty where none is. */
std::string& Problem() {
  static std::string problem;
  return problem;
}

#ifdef __linux__
// The CUDA backend is a library beside this one: what it needs only MLX's CUDA builds have.
void RegisterCudaBackend() {
  Dl_info here{};
  dladdr(reinterpret_cast<void*>(&RegisterCudaBackend), &here);
  std::string path = here.dli_fname;
  path = path.substr(0, path.rfind('/') + 1) + "libmlx_tvm_ffi_cuda.so";
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    Problem() = dlerror();
    return;
  }
  reinterpret_cast<void (*)()>(dlsym(library, "MlxTvmFfiRegisterCuda"))();
}
#endif

// The lines by which backends join. Each offers MLX's interface as default of its device.
void RegisterAll() {
  RegisterCpuBackend();
#ifdef _METAL_  // by MLX's own CMake files, where it has Metal
  RegisterMetalBackend();
#endif
#ifdef __linux__
  if (mx::cu::is_available()) RegisterCudaBackend();
#endif
}

std::atomic<Backend*>& Slot(mx::Device::DeviceType type) {
  return backends[type == mx::Device::gpu ? 1 : 0];
}

Backend* Find(mx::Device::DeviceType type) {
  // Once a process, and no more than a load after that: direct calls ask for each argument.
  static std::once_flag once;
  static std::atomic<bool> done{false};
  if (!done.load(std::memory_order_acquire)) {
    std::call_once(once, RegisterAll);
    done.store(true, std::memory_order_release);
  }
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
        << (Problem().empty() ? "" : " (" + Problem() + ")")
        << ". Run `python -m mlx_tvm_ffi` to see what is missing.";
  }
  return *backend;
}

void Rethrow(const std::string& where, const std::runtime_error& error) {
  if (std::string_view(error.what()).find("There is no Stream(") == 0) {
    TVM_FFI_THROW(RuntimeError)
        << where << error.what()
        << " A stream belongs to the thread that made it: evaluate arrays there, with mx.eval, "
           "before another thread uses them, or use a stream of mx.new_thread_unsafe_stream.";
  }
  throw;
}

void RegisterBackend(mx::Device::DeviceType type, Backend* backend) {
  Slot(type).store(backend, std::memory_order_release);
  mx::Device device(type);
  OfferDefaultStream(backend->ToDLDevice(device), backend->MakeInterface(device, std::nullopt));
}

bool HasBackend(mx::Device::DeviceType type) { return Find(type) != nullptr; }

StreamRef MakeMlxStream(std::shared_ptr<MlxStream> stream) { return MakeStream(std::move(stream)); }

std::optional<mx::Stream> ToMlxStream(const StreamRef& stream) {
  if (!stream) return std::nullopt;
  auto* ours = dynamic_cast<MlxStream*>(Implementation(stream));
  if (ours == nullptr) return std::nullopt;
  return ours->Resolve();
}

mx::Stream CurrentMlxStream() {
  if (StreamRef innermost = InnermostStream()) {
    std::optional<mx::Stream> scoped = ToMlxStream(innermost);
    if (scoped && !IsRunning(*scoped)) return *scoped;
  }
  return mx::default_stream(mx::default_device());
}

}  // namespace mlx_tvm_ffi
