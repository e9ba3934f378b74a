#include "array/py_exchange.h"

#include <dlpack/dlpack.h>
#include <pybind11/pybind11.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/function.h>

#include <stdexcept>

#include "array/py_array.h"
#include "array/py_error.h"
#include "array/tensor.h"
#include "backend/backend.h"

namespace mlx_tvm_ffi {

namespace {

/*! \brief Where arrays are lent from: a device with its backend. */
struct Place {
  mx::Device device;
  Backend& backend;
};

Place CurrentPlace() {
  // Without a GPU there is nothing to ask for at each argument.
  static Backend* const kOnly =
      HasBackend(mx::Device::gpu) ? nullptr : &GetBackend(mx::Device(mx::Device::cpu));
  if (kOnly != nullptr) return {mx::Device(mx::Device::cpu), *kOnly};
  mx::Device device = CurrentMlxStream().device;
  return {device, GetBackend(device)};
}

// The array evaluated and waited for, without Python's lock. Not inlined: most arrays are ready.
[[gnu::noinline]] DLManagedTensorVersioned* LendWhenReady(const mx::array& array,
                                                          const Place& place) {
  mx::array held = array;  // its object may be given another value while Python runs on
  {
    pybind11::gil_scoped_release release;
    try {
      place.backend.Prepare(held);
    } catch (const std::runtime_error& error) {
      Rethrow("[mlx_tvm_ffi.direct_call] argument: ", error);
    }
  }
  DLManagedTensorVersioned* tensor = Lend(held, place.device, place.backend);
  place.backend.Start(held);
  return tensor;
}

int FromPyObject(void* object, DLManagedTensorVersioned** out) {
  try {
    mx::array* array = AsArray(static_cast<PyObject*>(object));
    if (array == nullptr) {
      PyErr_SetString(
          PyExc_TypeError,
          "[mlx_tvm_ffi.direct_call] argument: expected an initialised mlx.core.array, got one "
          "whose __init__ has not run. Call super().__init__ in the subclass.");
      return -1;
    }
    if (array->is_tracer()) {
      PyErr_SetString(
          PyExc_ValueError,
          "[mlx_tvm_ffi.direct_call] argument: expected an array with a value, got a tracer of "
          "mx.grad, mx.compile, mx.vmap or the like. Make the kernel an op with mlx_tvm_ffi.op.");
      return -1;
    }
    Place place = CurrentPlace();
    if (place.backend.Ready(*array)) {
      *out = Lend(*array, place.device, place.backend);
      place.backend.Start(*array);
    } else {
      *out = LendWhenReady(*array, place);
    }
    return 0;
  } catch (...) {
    SetPythonError();
    return -1;
  }
}

int ToPyObject(DLManagedTensorVersioned* tensor, void** out) {
  try {
    *out = FromArray(ToArray(tensor->dl_tensor));
    if (*out == nullptr) return -1;
    if (tensor->deleter != nullptr) tensor->deleter(tensor);  // after a failure the caller calls it
    return 0;
  } catch (...) {
    SetPythonError();
    return -1;
  }
}

int CurrentWorkStream(DLDeviceType type, int32_t id, void** out) {
  try {
    *out = type == kDLCPU ? nullptr
                          : GetBackend(mx::Device::gpu).EnvStream(mx::Device(mx::Device::gpu, id));
    return 0;
  } catch (...) {
    SetPythonError();
    return -1;
  }
}

DLPackExchangeAPI MakeApi() {
  DLPackExchangeAPI api{};
  api.header.version = {DLPACK_MAJOR_VERSION, DLPACK_MINOR_VERSION};
  api.managed_tensor_allocator = AllocateTensor;
  api.managed_tensor_from_py_object_no_sync = FromPyObject;
  api.managed_tensor_to_py_object_no_sync = ToPyObject;
  api.current_work_stream = CurrentWorkStream;
  return api;
}

}  // namespace

void OfferAllocator() {
  if (TVMFFIEnvGetDLPackManagedTensorAllocator() != nullptr) return;
  TVM_FFI_CHECK_SAFE_CALL(TVMFFIEnvSetDLPackManagedTensorAllocator(AllocateTensor, 1, nullptr));
  // That is the process's; this thread's was set too.
  TVM_FFI_CHECK_SAFE_CALL(TVMFFIEnvSetDLPackManagedTensorAllocator(nullptr, 0, nullptr));
}

void InstallExchange() {
  static DLPackExchangeAPI api = MakeApi();
  pybind11::capsule capsule(&api, "dlpack_exchange_api");
  pybind11::handle(reinterpret_cast<PyObject*>(ArrayType())).attr("__dlpack_c_exchange_api__") =
      capsule;
  // Lets the import find out whether tvm-ffi uses it on this thread.
  tvm::ffi::Function::SetGlobal(
      "mlx_tvm_ffi.same",
      tvm::ffi::Function::FromTyped([](tvm::ffi::Tensor tensor) { return tensor; }), true);
}

}  // namespace mlx_tvm_ffi
