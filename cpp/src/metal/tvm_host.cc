// What host code made by TVM or TileLang calls of TVM's runtime, for processes that have none. A
// library of its own, loaded when it is needed: C hosts find these functions by name, LLVM hosts
// through tvm-ffi's context symbols.
#include <mlx_tvm_ffi/stream.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/function.h>

#include <cstdlib>
#include <mutex>
#include <unordered_map>

namespace {

namespace ffi = tvm::ffi;

// What TVM promises its generated code.
constexpr size_t kWorkspaceAlignmentBytes = 64;

// Workspaces on a device, by the handle that the host code got. Leaked: a library may free at exit.
struct DeviceWorkspaces {
  std::mutex mutex;
  std::unordered_map<void*, ffi::Tensor> tensors;

  static DeviceWorkspaces& Get() {
    static auto* workspaces = new DeviceWorkspaces;
    return *workspaces;
  }
};

void* Alloc(DLDevice device, uint64_t bytes) {
  if (bytes > uint64_t{INT64_MAX} - kWorkspaceAlignmentBytes) {
    TVM_FFI_THROW(ValueError)
        << "[mlx_tvm_ffi.load_module] workspace: expected a size in bytes, got " << bytes << ".";
  }
  if (device.device_type == kDLCPU) {
    const size_t rounded = (bytes / kWorkspaceAlignmentBytes + 1) * kWorkspaceAlignmentBytes;
    void* memory = std::aligned_alloc(kWorkspaceAlignmentBytes, rounded);
    if (memory != nullptr) return memory;
    TVM_FFI_THROW(RuntimeError) << "[mlx_tvm_ffi.load_module] workspace: expected " << bytes
                                << " bytes of memory, got none.";
  }
  const ffi::Tensor tensor = ffi::Tensor::FromEnvAlloc(
      TVMFFIEnvTensorAlloc, {static_cast<int64_t>(bytes == 0 ? 1 : bytes)}, {kDLUInt, 8, 1},
      device);
  if (tensor.byte_offset() != 0) {
    TVM_FFI_THROW(RuntimeError)
        << "[mlx_tvm_ffi.load_module] workspace: expected memory at offset 0, which is "
           "where TVM's kernels bind it, got offset "
        << tensor.byte_offset() << ".";
  }
  DeviceWorkspaces& workspaces = DeviceWorkspaces::Get();
  const std::lock_guard lock(workspaces.mutex);
  workspaces.tensors.emplace(tensor.data_ptr(), tensor);
  return tensor.data_ptr();
}

void FreeOnDevice(void* handle) {
  DeviceWorkspaces& workspaces = DeviceWorkspaces::Get();
  ffi::Optional<ffi::Tensor> last;  // released without the lock
  const std::lock_guard lock(workspaces.mutex);
  auto it = workspaces.tensors.find(handle);
  if (it == workspaces.tensors.end()) {
    TVM_FFI_THROW(RuntimeError)
        << "[mlx_tvm_ffi.load_module] workspace: expected one in use, got another.";
  }
  last = std::move(it->second);
  workspaces.tensors.erase(it);
}

}  // namespace

extern "C" {

struct TVMParallelGroupEnv {
  void* sync_handle;
  int32_t num_task;
};

MLX_TVM_FFI_API int TVMBackendGetFuncFromEnv(void* library, const char* name,
                                             TVMFFIObjectHandle* function) {
  return TVMFFIEnvModLookupFromImports(library, name, function);
}

MLX_TVM_FFI_API void* TVMBackendAllocWorkspace(int device_type, int device_id, uint64_t bytes, int,
                                               int) {
  void* memory = nullptr;
  auto alloc = [&]() -> int {
    TVM_FFI_SAFE_CALL_BEGIN();
    memory = Alloc({static_cast<DLDeviceType>(device_type), device_id}, bytes);
    TVM_FFI_SAFE_CALL_END();
  };
  return alloc() == 0 ? memory : nullptr;
}

MLX_TVM_FFI_API int TVMBackendFreeWorkspace(int device_type, int, void* memory) {
  TVM_FFI_SAFE_CALL_BEGIN();
  if (device_type == kDLCPU) {
    std::free(memory);
  } else {
    FreeOnDevice(memory);
  }
  TVM_FFI_SAFE_CALL_END();
}

// One task after the other on this thread, and one only where the caller leaves the number open.
MLX_TVM_FFI_API int TVMBackendParallelLaunch(int (*task)(int, TVMParallelGroupEnv*, void*),
                                             void* data, int num_task) {
  TVMParallelGroupEnv env{nullptr, num_task > 0 ? num_task : 1};
  for (int i = 0; i < env.num_task; ++i) {
    if (task(i, &env, data) != 0) return -1;
  }
  return 0;
}

MLX_TVM_FFI_API int TVMBackendParallelBarrier(int, TVMParallelGroupEnv* env) {
  if (env->num_task == 1) return 0;
  TVMFFIErrorSetRaisedFromCStr(
      "NotImplementedError",
      "[mlx_tvm_ffi.load_module] parallel tasks: expected none that wait for each other, "
      "got some. Import tvm before loading the library.");
  return -1;
}

// Not when the library is loaded: where TVM is there, its own functions are the better ones.
MLX_TVM_FFI_API int mlx_tvm_ffi_register_tvm_host() {
  TVM_FFI_SAFE_CALL_BEGIN();
  auto add = [](const char* name, auto* function) {
    TVM_FFI_CHECK_SAFE_CALL(
        TVMFFIEnvModRegisterContextSymbol(name, reinterpret_cast<void*>(function)));
  };
  add("__TVMFFIFunctionCall", TVMFFIFunctionCall);
  add("__TVMFFIErrorSetRaisedFromCStr", TVMFFIErrorSetRaisedFromCStr);
  add("__TVMFFIEnvModLookupFromImports", TVMFFIEnvModLookupFromImports);
  add("__TVMFFIHandleInitOnce", TVMFFIHandleInitOnce);
  add("__TVMBackendAllocWorkspace", TVMBackendAllocWorkspace);
  add("__TVMBackendFreeWorkspace", TVMBackendFreeWorkspace);
  add("__TVMBackendParallelLaunch", TVMBackendParallelLaunch);
  add("__TVMBackendParallelBarrier", TVMBackendParallelBarrier);
  TVM_FFI_SAFE_CALL_END();
}

}  // extern "C"
