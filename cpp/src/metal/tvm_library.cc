// Libraries that TVM made, for memory that TVM did not allocate.
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/dtype.h>
#include <tvm/ffi/extra/module.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/reflection/registry.h>

#include <cstdlib>
#include <cstring>
#include <list>
#include <memory>
#include <new>
#include <utility>
#include <vector>

namespace mlx_tvm_ffi {
namespace {

namespace ffi = tvm::ffi;

// TVM's CPU code loads whole vectors and takes this for granted. MLX's memory on the CPU has 8.
constexpr size_t kAlignmentBytes = 64;

struct Free {
  void operator()(void* memory) const { std::free(memory); }
};

// Aligned copies of memory on the CPU, for the time of one call.
class StandIns {
 public:
  DLTensor* Add(const DLTensor& tensor) {
    char* original = static_cast<char*>(tensor.data) + tensor.byte_offset;
    const size_t bytes = ffi::GetDataSize(tensor);
    tensors_.push_back(tensor);
    tensors_.back().data = Copy(original, bytes);
    tensors_.back().byte_offset = 0;
    return &tensors_.back();
  }

  // Memory that the kernel only read may be shared: it is not written.
  void WriteBack() const {
    for (const Memory& m : memory_) {
      if (std::memcmp(m.original, m.copy.get(), m.bytes) != 0) {
        std::memcpy(m.original, m.copy.get(), m.bytes);
      }
    }
  }

 private:
  struct Memory {
    char* original;
    size_t bytes;
    std::unique_ptr<void, Free> copy;
  };

  // The same memory twice is one copy: a kernel that works in place reads what it writes.
  void* Copy(char* original, size_t bytes) {
    for (const Memory& m : memory_) {
      if (m.original == original && m.bytes == bytes) return m.copy.get();
    }
    const size_t rounded = (bytes / kAlignmentBytes + 1) * kAlignmentBytes;
    void* copy = std::aligned_alloc(kAlignmentBytes, rounded);
    if (copy == nullptr) throw std::bad_alloc();
    memory_.push_back({original, bytes, std::unique_ptr<void, Free>(copy)});
    std::memcpy(copy, original, bytes);
    return copy;
  }

  std::list<DLTensor> tensors_;
  std::vector<Memory> memory_;
};

const DLTensor* ToTensor(const TVMFFIAny& arg) {
  if (arg.type_index == kTVMFFIDLTensorPtr) return static_cast<const DLTensor*>(arg.v_ptr);
  if (arg.type_index == kTVMFFITensor) return TVMFFITensorGetDLTensorPtr(arg.v_obj);
  return nullptr;
}

bool IsMisaligned(const DLTensor& tensor) {
  const auto address = reinterpret_cast<uintptr_t>(tensor.data) + tensor.byte_offset;
  return tensor.device.device_type == kDLCPU && address % kAlignmentBytes != 0;
}

bool IsCompact(const DLTensor& tensor) {
  int64_t stride = 1;
  for (int axis = tensor.ndim - 1; axis >= 0; --axis) {
    if (tensor.strides != nullptr && tensor.shape[axis] != 1 && tensor.strides[axis] != stride) {
      return false;
    }
    stride *= tensor.shape[axis];
  }
  return true;
}

void CallAligned(const ffi::Function& function, ffi::PackedArgs args, ffi::Any* result) {
  const auto* raw = reinterpret_cast<const TVMFFIAny*>(args.data());
  StandIns stand_ins;
  std::vector<ffi::AnyView> views;
  for (int i = 0; i < args.size(); ++i) {
    const DLTensor* tensor = ToTensor(raw[i]);
    if (tensor == nullptr) continue;
    if (tensor->device.device_type == kDLMetal && tensor->byte_offset != 0) {
      TVM_FFI_THROW(ValueError)
          << "[mlx_tvm_ffi.load_module] argument " << i
          << ": expected the start of a buffer, where TVM's kernels bind it, got byte "
          << tensor->byte_offset << " of one. Use mlx_tvm_ffi.op(..., offsets=False).";
    }
    if (!IsMisaligned(*tensor) || !IsCompact(*tensor)) continue;  // TVM refuses what is not compact
    if (views.empty()) views.assign(args.data(), args.data() + args.size());
    views[static_cast<size_t>(i)] = stand_ins.Add(*tensor);
  }
  if (views.empty()) {
    function.CallPacked(args, result);
    return;
  }
  function.CallPacked(views.data(), static_cast<int32_t>(views.size()), result);
  stand_ins.WriteBack();
}

/*! \brief A library module whose functions take any memory. See MetalModule for what may be
 * overridden. */
class TvmLibrary final : public ffi::ModuleObj {
 public:
  explicit TvmLibrary(ffi::Module library) : library_(std::move(library)) {}

  const char* kind() const final { return "mlx_tvm_ffi.tvm_library"; }
  int GetPropertyMask() const final { return ffi::Module::kRunnable; }
  ffi::Optional<ffi::Function> GetFunction(const ffi::String& name) final {
    ffi::Optional<ffi::Function> function = library_->GetFunction(name);
    if (!function.has_value()) return std::nullopt;
    return ffi::Function::FromPacked(
        [function = *std::move(function)](ffi::PackedArgs args, ffi::Any* result) {
          CallAligned(function, args, result);
        });
  }

 private:
  ffi::Module library_;
};

}  // namespace

TVM_FFI_STATIC_INIT_BLOCK() {
  ffi::reflection::GlobalDef().def("mlx_tvm_ffi.tvm_library", [](ffi::Module library) {
    return ffi::Module(ffi::make_object<TvmLibrary>(std::move(library)));
  });
}

}  // namespace mlx_tvm_ffi
