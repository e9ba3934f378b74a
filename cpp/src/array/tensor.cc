#include "array/tensor.h"

#include <tvm/ffi/dtype.h>
#include <tvm/ffi/error.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <limits>
#include <mutex>
#include <new>
#include <optional>
#include <unordered_map>
#include <utility>

// A few bytes of the room that every thread has anyway: an access is one instruction and not a
// call.
#if defined(__linux__)
#define MLX_TVM_FFI_STATIC_TLS __attribute__((tls_model("initial-exec")))
#else
#define MLX_TVM_FFI_STATIC_TLS
#endif

namespace mlx_tvm_ffi {

namespace {

constexpr int kInlineDims = 8;

/*! \brief A managed tensor of the pool: it holds an array, or the owner of some other memory. */
struct Lent {
  DLManagedTensorVersioned managed;
  std::optional<mx::array> array;
  std::shared_ptr<void> owner;
  Backend* backend;
  Lent* next;
  std::unique_ptr<int64_t[]> wide_dims;
  std::array<int64_t, 2 * kInlineDims> inline_dims;
};

void ReturnLent(DLManagedTensorVersioned* managed);

/*!
 * \brief Where managed tensors come from and go back to: a free list per thread, refilled from one
 * list of the process. Slabs are never freed, so an address can be recognised as ours without a
 * lock.
 */
class Pool {
 public:
  static Pool& Get() {
    static Pool* pool = new Pool;  // leaked: deleters may run at exit
    return *pool;
  }

  Lent* Take() {
    ThreadList& list = local_;
    if (list.head == nullptr) Refill(&list);
    Lent* lent = list.head;
    list.head = lent->next;
    --list.size;
    return lent;
  }

  void Give(Lent* lent) {
    ThreadList& list = local_;
    lent->next = list.head;
    list.head = lent;
    if (++list.size == 1) CloseAtThreadsEnd();
    if (list.size > 2 * kBatch || list.closed) Return(&list, list.closed ? 0 : kBatch);
  }

  /*! \brief Gives a tensor dims that do not fit into it. */
  [[gnu::noinline]] int64_t* AddWide(Lent* lent, int ndim) {
    lent->wide_dims = std::make_unique<int64_t[]>(2 * static_cast<size_t>(ndim));
    std::lock_guard<std::mutex> lock(mutex_);
    wide_.emplace(lent->wide_dims.get(), lent);
    return lent->wide_dims.get();
  }

  // Not inlined, as others here: what each call needs stays short.
  [[gnu::noinline]] void RemoveWide(Lent* lent) {
    std::lock_guard<std::mutex> lock(mutex_);
    wide_.erase(lent->wide_dims.get());
    lent->wide_dims.reset();
  }

  /*! \brief The managed tensor of `ndim` dimensions whose shape `dims` is; null where it is not
   * one of ours. */
  Lent* Find(const int64_t* dims, int ndim) {
    if (ndim > kInlineDims) {
      std::lock_guard<std::mutex> lock(mutex_);
      auto found = wide_.find(dims);
      return found == wide_.end() ? nullptr : found->second;
    }
    auto address = reinterpret_cast<std::uintptr_t>(dims);
    for (size_t i = 0, n = slab_count_.load(std::memory_order_acquire); i < n; ++i) {
      auto begin = reinterpret_cast<std::uintptr_t>(slabs_[i].begin);
      if (address >= begin && address < begin + slabs_[i].count * sizeof(Lent)) {
        return slabs_[i].begin + (address - begin) / sizeof(Lent);
      }
    }
    return nullptr;
  }

 private:
  static constexpr size_t kBatch = 64;

  // Without a destructor, so that each access is a plain one; Closer gives the rest back at the
  // thread's end.
  struct ThreadList {
    Lent* head;
    size_t size;
    bool closed;
  };
  struct Closer {
    ~Closer() {
      local_.closed = true;
      Get().Return(&local_, 0);
    }
  };

  struct Slab {
    Lent* begin;
    size_t count;
  };

  static void CloseAtThreadsEnd() {
    static thread_local Closer closer;
    (void)closer;
  }

  [[gnu::noinline]] void Refill(ThreadList* list) {
    CloseAtThreadsEnd();
    std::lock_guard<std::mutex> lock(mutex_);
    if (free_ == nullptr) AddSlab();
    for (size_t i = 0; i < kBatch && free_ != nullptr; ++i) {
      Lent* lent = std::exchange(free_, free_->next);
      lent->next = std::exchange(list->head, lent);
      ++list->size;
    }
  }

  [[gnu::noinline]] void Return(ThreadList* list, size_t keep) {
    std::lock_guard<std::mutex> lock(mutex_);
    while (list->size > keep) {
      Lent* lent = std::exchange(list->head, list->head->next);
      lent->next = std::exchange(free_, lent);
      --list->size;
    }
  }

  // Each slab is twice the last, so that few are enough for any number of tensors.
  void AddSlab() {
    size_t index = slab_count_.load(std::memory_order_relaxed);
    size_t count = kBatch << index;
    Lent* begin = new Lent[count];
    for (size_t i = 0; i < count; ++i) {
      begin[i].managed.version = {DLPACK_MAJOR_VERSION, DLPACK_MINOR_VERSION};
      begin[i].managed.manager_ctx = begin + i;
      begin[i].managed.deleter = ReturnLent;
      begin[i].managed.flags = 0;
      begin[i].next = std::exchange(free_, begin + i);
    }
    slabs_[index] = {begin, count};
    slab_count_.store(index + 1, std::memory_order_release);
  }

  static thread_local ThreadList local_ MLX_TVM_FFI_STATIC_TLS;

  std::mutex mutex_;  // of the process's list and of wide_
  Lent* free_ = nullptr;
  std::unordered_map<const int64_t*, Lent*> wide_;
  std::array<Slab, 40> slabs_;
  std::atomic<size_t> slab_count_{0};
};

constinit thread_local Pool::ThreadList Pool::local_ MLX_TVM_FFI_STATIC_TLS{nullptr, 0, false};

void ReturnLent(DLManagedTensorVersioned* managed) {
  Lent* lent = reinterpret_cast<Lent*>(managed);
  if (lent->array.has_value()) {
    lent->backend->Finish(*lent->array);
    lent->array.reset();
  } else {
    lent->owner.reset();
  }
  if (lent->wide_dims != nullptr) Pool::Get().RemoveWide(lent);
  Pool::Get().Give(lent);
}

Lent* NewLent(int ndim, int64_t** dims) {
  Lent* lent = Pool::Get().Take();
  *dims = ndim > kInlineDims ? Pool::Get().AddWide(lent, ndim) : lent->inline_dims.data();
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
  auto make = [](DLDataTypeCode code, int bits) {
    return DLDataType{static_cast<uint8_t>(code), static_cast<uint8_t>(bits), 1};
  };
  switch (dtype.val()) {
    case mx::Dtype::Val::bool_:
      return make(kDLBool, 8);
    case mx::Dtype::Val::uint8:
    case mx::Dtype::Val::uint16:
    case mx::Dtype::Val::uint32:
    case mx::Dtype::Val::uint64:
      return make(kDLUInt, 8 * dtype.size());
    case mx::Dtype::Val::int8:
    case mx::Dtype::Val::int16:
    case mx::Dtype::Val::int32:
    case mx::Dtype::Val::int64:
      return make(kDLInt, 8 * dtype.size());
    case mx::Dtype::Val::float16:
    case mx::Dtype::Val::float32:
    case mx::Dtype::Val::float64:
      return make(kDLFloat, 8 * dtype.size());
    case mx::Dtype::Val::bfloat16:
      return make(kDLBfloat, 16);
    case mx::Dtype::Val::complex64:
      return make(kDLComplex, 64);
  }
  TVM_FFI_THROW(InternalError)
      << "[mlx_tvm_ffi.array] dtype: unknown to this build of mlx_tvm_ffi.";
  TVM_FFI_UNREACHABLE();
}

mx::Dtype FromDLPack(DLDataType dtype) {
  static const std::array<mx::Dtype, 14> kAll = {
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
  Lent* lent = Pool::Get().Find(tensor.shape, tensor.ndim);
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
