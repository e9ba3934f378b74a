#include "array/tensor.h"

#include <tvm/ffi/dtype.h>
#include <tvm/ffi/error.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>
#include <mutex>
#include <new>
#include <optional>
#include <unordered_map>
#include <utility>

#include "array/pool.h"

namespace mlx_tvm_ffi {

namespace {

constexpr int kInlineDims = 8;

// By the number of MLX's dtype.
constexpr std::array<DLDataType, 14> kDLPackDtypes = {{{kDLBool, 8, 1},
                                                       {kDLUInt, 8, 1},
                                                       {kDLUInt, 16, 1},
                                                       {kDLUInt, 32, 1},
                                                       {kDLUInt, 64, 1},
                                                       {kDLInt, 8, 1},
                                                       {kDLInt, 16, 1},
                                                       {kDLInt, 32, 1},
                                                       {kDLInt, 64, 1},
                                                       {kDLFloat, 16, 1},
                                                       {kDLFloat, 32, 1},
                                                       {kDLFloat, 64, 1},
                                                       {kDLBfloat, 16, 1},
                                                       {kDLComplex, 64, 1}}};
static_assert(static_cast<size_t>(mx::Dtype::Val::complex64) + 1 == kDLPackDtypes.size());

void ReturnLent(DLManagedTensorVersioned* managed);

/*! \brief A managed tensor of the pool: it holds an array, or the owner of some other memory. */
struct Lent {
  Lent() {
    managed.version = {DLPACK_MAJOR_VERSION, DLPACK_MINOR_VERSION};
    managed.manager_ctx = this;
    managed.deleter = ReturnLent;
    managed.flags = 0;
  }

  DLManagedTensorVersioned managed;
  std::optional<mx::array> array;
  std::shared_ptr<void> owner;
  Backend* backend;
  Lent* next;
  std::unique_ptr<int64_t[]> wide_dims;
  std::array<int64_t, 2 * kInlineDims> inline_dims;
};

/*! \brief The managed tensors whose dims do not fit into them. */
class WideTensors {
 public:
  static WideTensors& Get() {
    static WideTensors* tensors = new WideTensors;  // leaked: deleters may run at exit
    return *tensors;
  }

  // Not inlined, as Remove: what each call needs stays short.
  [[gnu::noinline]] int64_t* Add(Lent* lent, int ndim) {
    lent->wide_dims = std::make_unique<int64_t[]>(2 * static_cast<size_t>(ndim));
    std::lock_guard<std::mutex> lock(mutex_);
    tensors_.emplace(lent->wide_dims.get(), lent);
    return lent->wide_dims.get();
  }

  [[gnu::noinline]] void Remove(Lent* lent) {
    std::lock_guard<std::mutex> lock(mutex_);
    tensors_.erase(lent->wide_dims.get());
    lent->wide_dims.reset();
  }

  Lent* Find(const int64_t* dims) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = tensors_.find(dims);
    return found == tensors_.end() ? nullptr : found->second;
  }

 private:
  std::mutex mutex_;
  std::unordered_map<const int64_t*, Lent*> tensors_;
};

/*! \brief The managed tensor of `ndim` dimensions whose shape `dims` is; null where it is not one
 * of ours. */
Lent* FindLent(const int64_t* dims, int ndim) {
  return ndim > kInlineDims ? WideTensors::Get().Find(dims) : Pool<Lent>::Get().Find(dims);
}

void ReturnLent(DLManagedTensorVersioned* managed) {
  Lent* lent = reinterpret_cast<Lent*>(managed);
  if (lent->array.has_value()) {
    lent->backend->Finish(*lent->array);
    lent->array.reset();
  } else {
    lent->owner.reset();
  }
  if (lent->wide_dims != nullptr) WideTensors::Get().Remove(lent);
  Pool<Lent>::Get().Give(lent);
}

Lent* NewLent(int ndim, int64_t** dims) {
  Lent* lent = Pool<Lent>::Get().Take();
  *dims = ndim > kInlineDims ? WideTensors::Get().Add(lent, ndim) : lent->inline_dims.data();
  return lent;
}

thread_local AllocationHook* current_hook = nullptr;

mx::Device FromDLDevice(DLDevice device) {
  if (device.device_type == kDLCPU) return mx::Device(mx::Device::cpu);
  if (device.device_type == kDLMetal || device.device_type == kDLCUDA) {
    return mx::Device(mx::Device::gpu, device.device_id);
  }
  TVM_FFI_THROW(NotImplementedError)
      << "[mlx_tvm_ffi.allocate] device: expected cpu, cuda or metal, got device type "
      << device.device_type << ". Allocate on the device of the kernel's arguments.";
  TVM_FFI_UNREACHABLE();
}

mx::Shape FromDLShape(const DLTensor& tensor) {
  constexpr int64_t kMostBytes = int64_t{1} << 62;
  int64_t bytes = std::max(1, tensor.dtype.bits * tensor.dtype.lanes / 8);
  mx::Shape shape;
  for (int i = 0; i < tensor.ndim; ++i) {
    int64_t dim = tensor.shape[i];
    if (dim < 0 || dim > std::numeric_limits<int32_t>::max()) {
      TVM_FFI_THROW(ValueError)
          << "[mlx_tvm_ffi.allocate] shape: expected dimensions from 0 to 2^31 - 1, got " << dim
          << " in dimension " << i << ". Use a smaller tensor.";
    }
    if (dim != 0 && bytes > kMostBytes / dim) {
      TVM_FFI_THROW(ValueError) << "[mlx_tvm_ffi.allocate] shape: expected less than 2^62 bytes, "
                                   "got more by dimension "
                                << i << ". Use a smaller tensor.";
    }
    bytes *= dim;
    shape.push_back(static_cast<int32_t>(dim));
  }
  return shape;
}

// Copies the dimensions from `dim` on; returns the end of what was written.
char* CopyDimensions(const DLTensor& from, int dim, const char* source, char* to, size_t itemsize) {
  if (dim == from.ndim) {
    std::memcpy(to, source, itemsize);
    return to + itemsize;
  }
  for (int64_t i = 0; i < from.shape[dim]; ++i) {
    to = CopyDimensions(from, dim + 1,
                        source + i * from.strides[dim] * static_cast<int64_t>(itemsize), to,
                        itemsize);
  }
  return to;
}

mx::array CopyFromCpu(const DLTensor& tensor) {
  mx::array out(FromDLShape(tensor), FromDLPack(tensor.dtype), nullptr, {});
  mx::Device cpu(mx::Device::cpu);
  GetBackend(cpu).Allocate(out, mx::default_stream(cpu));
  out.set_status(mx::array::Status::available);
  CopyRows(tensor, out.data<char>());
  return out;
}

}  // namespace

void CopyRows(const DLTensor& tensor, void* to) {
  size_t itemsize = tensor.dtype.bits * tensor.dtype.lanes / 8u;
  const char* source = static_cast<const char*>(tensor.data) + tensor.byte_offset;
  size_t bytes = itemsize;
  bool row_contiguous = true;
  for (int i = tensor.ndim; i-- > 0;) {
    size_t size = static_cast<size_t>(tensor.shape[i]);
    row_contiguous = row_contiguous && (size == 1 || tensor.strides == nullptr ||
                                        static_cast<size_t>(tensor.strides[i]) * itemsize == bytes);
    bytes *= size;
  }
  if (bytes == 0) return;
  if (row_contiguous) {
    std::memcpy(to, source, bytes);
  } else {
    CopyDimensions(tensor, 0, source, static_cast<char*>(to), itemsize);
  }
}

std::string NameOf(DLDataType dtype) {
  try {
    return tvm::ffi::DLDataTypeToString(dtype);
  } catch (const tvm::ffi::Error&) {  // complex64, for one
    return (dtype.code == kDLComplex ? "complex"
                                     : "code " + std::to_string(dtype.code) + " bits ") +
           std::to_string(dtype.bits) + (dtype.lanes == 1 ? "" : "x" + std::to_string(dtype.lanes));
  }
}

DLDataType ToDLPack(mx::Dtype dtype) {
  size_t number = static_cast<size_t>(dtype.val());
  if (number < kDLPackDtypes.size()) return kDLPackDtypes[number];
  TVM_FFI_THROW(InternalError)
      << "[mlx_tvm_ffi.array] dtype: unknown to this build of mlx_tvm_ffi.";
  TVM_FFI_UNREACHABLE();
}

mx::Dtype FromDLPack(DLDataType dtype) {
  static const std::array<mx::Dtype, kDLPackDtypes.size()> kAll = {
      mx::bool_, mx::uint8, mx::uint16,  mx::uint32,  mx::uint64,  mx::int8,     mx::int16,
      mx::int32, mx::int64, mx::float16, mx::float32, mx::float64, mx::bfloat16, mx::complex64};
  for (const mx::Dtype& candidate : kAll) {
    DLDataType known = ToDLPack(candidate);
    if (known.code == dtype.code && known.bits == dtype.bits && known.lanes == dtype.lanes) {
      return candidate;
    }
  }
  TVM_FFI_THROW(NotImplementedError)
      << "[mlx_tvm_ffi.array] dtype: expected one of MLX's, got " << NameOf(dtype)
      << ". View the memory as an unsigned integer of the same width.";
  TVM_FFI_UNREACHABLE();
}

void FillTensor(const mx::array& array, const mx::Device& device, const Backend& backend,
                int64_t* dims, DLTensor* tensor) {
  size_t ndim = array.ndim();
  for (size_t i = 0; i < ndim; ++i) {  // few: as std::copy they would be vectorised, at a loss
    dims[i] = array.shape()[i];
    dims[ndim + i] = array.strides()[i];
  }
  tensor->device = backend.ToDLDevice(device);
  tensor->ndim = static_cast<int32_t>(ndim);
  tensor->dtype = ToDLPack(array.dtype());
  tensor->shape = dims;
  tensor->strides = dims + ndim;
  if (array.size() == 0) {  // DLPack: data of a tensor without elements is null
    tensor->data = nullptr;
    tensor->byte_offset = 0;
  } else {
    backend.Address(array, tensor);
  }
}

DLManagedTensorVersioned* Lend(const mx::array& array, const mx::Device& device, Backend& backend) {
  int64_t* dims = nullptr;
  Lent* lent = NewLent(static_cast<int>(array.ndim()), &dims);
  try {
    FillTensor(array, device, backend, dims, &lent->managed.dl_tensor);
  } catch (...) {
    ReturnLent(&lent->managed);
    throw;
  }
  lent->array.emplace(array);
  lent->backend = &backend;
  return &lent->managed;
}

DLManagedTensorVersioned* LendMemory(const DLTensor& tensor, std::shared_ptr<void> owner) {
  int64_t* dims = nullptr;
  Lent* lent = NewLent(tensor.ndim, &dims);
  std::copy_n(tensor.shape, tensor.ndim, dims);
  std::copy_n(tensor.strides, tensor.ndim, dims + tensor.ndim);
  lent->managed.dl_tensor = tensor;
  lent->managed.dl_tensor.shape = dims;
  lent->managed.dl_tensor.strides = dims + tensor.ndim;
  lent->owner = std::move(owner);
  return &lent->managed;
}

mx::array ToArray(const DLTensor& tensor) {
  Lent* lent = FindLent(tensor.shape, tensor.ndim);
  if (lent != nullptr && lent->array.has_value()) {
    const DLTensor& known = lent->managed.dl_tensor;
    if (known.data == tensor.data && known.byte_offset == tensor.byte_offset &&
        known.shape == tensor.shape && known.strides == tensor.strides &&
        known.ndim == tensor.ndim) {
      return *lent->array;
    }
  }
  if (tensor.device.device_type != kDLCPU) {
    TVM_FFI_THROW(NotImplementedError) << "[mlx_tvm_ffi.array] result: expected GPU memory that "
                                          "MLX allocated, got a tensor with memory of "
                                          "its own. Allocate results through TVMFFIEnvTensorAlloc, "
                                          "or fill an output that is passed in.";
  }
  return CopyFromCpu(tensor);
}

int AllocateTensor(DLTensor* prototype, DLManagedTensorVersioned** out, void* error_context,
                   void (*set_error)(void*, const char*, const char*)) {
  try {
    mx::Device device = FromDLDevice(prototype->device);
    mx::Shape shape = FromDLShape(*prototype);
    mx::Dtype dtype = FromDLPack(prototype->dtype);
    if (current_hook != nullptr && current_hook->device() == device) {
      *out = current_hook->Allocate(std::move(shape), dtype);
      return 0;
    }
    Backend& backend = GetBackend(device);
    mx::array array(std::move(shape), dtype, nullptr, {});
    mx::Stream current = CurrentMlxStream();
    mx::Stream stream = current.device == device ? current : mx::default_stream(device);
    backend.Allocate(array, stream);
    array.set_status(mx::array::Status::available);
    *out = Lend(array, device, backend);
    backend.Start(array);
    return 0;
  } catch (const tvm::ffi::Error& error) {
    set_error(error_context, error.kind().c_str(), error.message().c_str());
  } catch (const std::bad_alloc&) {
    set_error(error_context, "MemoryError", "[mlx_tvm_ffi.allocate] out of memory");
  } catch (const std::exception& error) {
    set_error(error_context, "RuntimeError", error.what());
  }
  return -1;
}

AllocationHook::AllocationHook(mx::Device device)
    : device_(device), outer_(std::exchange(current_hook, this)) {}

AllocationHook::~AllocationHook() { current_hook = outer_; }

}  // namespace mlx_tvm_ffi
