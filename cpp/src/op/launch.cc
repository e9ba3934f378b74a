#include "op/launch.h"

#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <exception>
#include <string>
#include <utility>

#include "array/tensor.h"
#include "backend/reap.h"
#include "op/kernel.h"

namespace mlx_tvm_ffi {

namespace ffi = tvm::ffi;

namespace {

/*! \brief A tensor object of ours that a kernel sees for the time of one call. */
class BorrowedTensor : public ffi::TensorObj {
 public:
  /*! \brief Makes a tensor that the kernel kept stand on its own: with its dims, and a share in its
   * memory. */
  void Outlive(std::shared_ptr<void> memory) {
    size_t n = static_cast<size_t>(ndim);
    dims_.assign(shape, shape + n);
    dims_.insert(dims_.end(), strides, strides + n);
    shape = dims_.data();
    strides = dims_.data() + n;
    if (memory == nullptr) data = nullptr;
    memory_ = std::move(memory);
  }

 private:
  std::vector<int64_t> dims_;
  std::shared_ptr<void> memory_;
};

/*! \brief This thread's borrowed tensors, used as a stack: a kernel may run ops of its own. */
struct Borrowed {
  std::vector<ffi::ObjectPtr<BorrowedTensor>> tensors;
  size_t top = 0;

  static Borrowed& OfThread() {
    static thread_local Borrowed borrowed;
    return borrowed;
  }
};

/*! \brief tvm-ffi's environment allocator, set to MLX's for the time of a run. */
class AllocatorScope {
 public:
  AllocatorScope() {
    TVM_FFI_CHECK_SAFE_CALL(
        TVMFFIEnvSetDLPackManagedTensorAllocator(AllocateTensor, 0, &previous_));
  }
  AllocatorScope(const AllocatorScope&) = delete;
  AllocatorScope& operator=(const AllocatorScope&) = delete;
  ~AllocatorScope() { TVMFFIEnvSetDLPackManagedTensorAllocator(previous_, 0, nullptr); }

 private:
  DLPackManagedTensorAllocator previous_ = nullptr;
};

bool SameDims(const DLTensor& a, const DLTensor& b) {
  return a.ndim == b.ndim && a.dtype.code == b.dtype.code && a.dtype.bits == b.dtype.bits &&
         a.dtype.lanes == b.dtype.lanes && std::equal(a.shape, a.shape + a.ndim, b.shape);
}

std::string Describe(const DLTensor& tensor) {
  std::string text = NameOf(tensor.dtype);
  text += "[";
  for (int i = 0; i < tensor.ndim; ++i) {
    text += (i == 0 ? "" : ", ") + std::to_string(tensor.shape[i]);
  }
  return text + "]";
}

size_t Bytes(const DLTensor& tensor) {
  size_t bytes = tensor.dtype.bits / 8;
  for (int i = 0; i < tensor.ndim; ++i) bytes *= static_cast<size_t>(tensor.shape[i]);
  return bytes;
}

bool IsRowContiguous(const DLTensor& tensor) {
  if (tensor.strides == nullptr) return true;
  int64_t expected = 1;
  for (int i = tensor.ndim; i-- > 0;) {
    if (tensor.shape[i] != 1 && tensor.strides[i] != expected) return false;
    expected *= tensor.shape[i];
  }
  return true;
}

char* Address(const DLTensor& tensor) {
  return static_cast<char*>(tensor.data) + tensor.byte_offset;
}

// Whether a kernel that was given the memory of `output` returned just that.
bool InPlace(const DLTensor& returned, const DLTensor& output) {
  return Address(returned) == Address(output) && IsRowContiguous(returned);
}

}  // namespace

/*!
 * \brief What a kernel allocates while it runs as an op. A kernel that returns its outputs is given
 * the output's own memory for the first tensor of the same shape and dtype, so that nothing has to
 * be copied.
 */
class KernelLaunch::Scratch final : public AllocationHook {
 public:
  explicit Scratch(KernelLaunch* launch)
      : AllocationHook(launch->stream_.device), launch_(launch) {}

  DLManagedTensorVersioned* Allocate(mx::Shape shape, mx::Dtype dtype) override {
    mx::array array(std::move(shape), dtype, nullptr, {});
    if (launch_->call_->kernel->returns_outputs()) {
      claims_.resize(launch_->tensors_.size());
      claimed_.resize(launch_->tensors_.size());
      for (size_t i = launch_->inputs_; i < claimed_.size(); ++i) {
        const Bound& output = launch_->tensors_[i];
        if (claimed_[i] || !Fits(output.tensor, array)) continue;
        if (std::shared_ptr<void> memory = output.data.lock()) {
          claimed_[i] = true;
          auto claim = std::make_shared<std::shared_ptr<void>>(std::move(memory));
          claims_[i] = claim;
          return LendMemory(output.tensor, std::move(claim));
        }
      }
    }
    launch_->backend_.Allocate(array, launch_->stream_);
    launch_->backend_.KeepScratch(array, launch_->stream_);
    DLTensor tensor;
    std::vector<int64_t> dims(2 * array.ndim() + 1);
    FillTensor(array, launch_->stream_.device, launch_->backend_, dims.data(), &tensor);
    return LendMemory(tensor, array.data_shared_ptr());
  }

  /*! \brief The number of a tensor whose memory the kernel still holds, or -1. */
  int Kept() const {
    for (size_t i = 0; i < claims_.size(); ++i) {
      if (!claims_[i].expired()) return static_cast<int>(i);
    }
    return -1;
  }

 private:
  static bool Fits(const DLTensor& output, const mx::array& array) {
    DLDataType dtype = ToDLPack(array.dtype());
    return output.ndim == static_cast<int32_t>(array.ndim()) && output.dtype.code == dtype.code &&
           output.dtype.bits == dtype.bits &&
           std::equal(array.shape().begin(), array.shape().end(), output.shape);
  }

  KernelLaunch* launch_;
  std::vector<std::weak_ptr<void>> claims_;
  std::vector<bool> claimed_;
};

KernelLaunch::KernelLaunch(std::shared_ptr<const KernelCall> call, Backend& backend,
                           const mx::Stream& stream, const std::vector<mx::array>& inputs,
                           const std::vector<mx::array>& outputs, bool at_once)
    : call_(std::move(call)),
      backend_(backend),
      stream_(stream),
      inputs_(inputs.size()),
      at_once_(at_once) {
  size_t dims = 0;
  for (const mx::array& array : inputs) dims += 2 * array.ndim();
  for (const mx::array& array : outputs) dims += 2 * array.ndim();
  dims_.resize(dims + 1);  // never empty: a tensor without dimensions points into it too
  tensors_.reserve(inputs.size() + outputs.size());
  int64_t* next = dims_.data();
  for (const mx::array& array : inputs) Bind(array, stream.device, &next);
  for (const mx::array& array : outputs) Bind(array, stream.device, &next);
}

KernelLaunch::~KernelLaunch() {
  // The last owner of a Python kernel needs Python's lock to let go, for which MLX may make this
  // thread wait for ever.
  if (call_.use_count() == 1 && call_->kernel.use_count() == 1 &&
      call_->kernel->function().use_count() == 1) {
    Reap({KeepAlive()});
  }
}

void KernelLaunch::Bind(const mx::array& array, const mx::Device& device, int64_t** dims) {
  tensors_.emplace_back();
  Bound& bound = tensors_.back();
  FillTensor(array, device, backend_, *dims, &bound.tensor);
  bound.data = array.data_shared_ptr();
  *dims += 2 * array.ndim();
}

std::shared_ptr<void> KernelLaunch::KeepAlive() const {
  return std::const_pointer_cast<KernelCall>(call_);
}

void KernelLaunch::Run(const StreamRef& stream) {
  const Options& options = call_->kernel->options();
  try {
    StreamScope scope(stream);
    AllocatorScope allocator;
    Scratch scratch(this);
    Call();
    if (scratch.Kept() >= 0) ThrowKept(scratch.Kept());
  } catch (const ffi::Error& error) {
    if (!error.defined()) {  // tvm-ffi could not make one of what the kernel raised
      ThrowNamed(options, "RuntimeError", "an exception whose text is not Unicode");
    }
    ThrowNamed(options, error.kind(), error.message(), error.backtrace());
  } catch (const std::exception& error) {
    ThrowNamed(options, "RuntimeError", error.what());
  } catch (...) {
    ThrowNamed(options, "RuntimeError", "the kernel threw something that is not a std::exception");
  }
}

void KernelLaunch::Spoil() noexcept {
  constexpr int kNan = 0xff;  // -1 as an integer
  for (size_t i = inputs_; i < tensors_.size(); ++i) {
    const Bound& output = tensors_[i];
    std::shared_ptr<void> memory = output.data.lock();
    bool is_bool = output.tensor.dtype.code == kDLBool;
    if (memory != nullptr) {
      std::memset(Address(output.tensor), is_bool ? 1 : kNan, Bytes(output.tensor));
    }
  }
}

void KernelLaunch::Call() {
  Borrowed& borrowed = Borrowed::OfThread();
  size_t base = borrowed.top;
  size_t count = tensors_.size();
  while (borrowed.tensors.size() < base + count) {
    borrowed.tensors.push_back(ffi::make_object<BorrowedTensor>());
  }
  borrowed.top = base + count;
  for (size_t i = 0; i < count; ++i) {
    static_cast<DLTensor&>(*borrowed.tensors[base + i]) = tensors_[i].tensor;
  }

  // Gives the tensors back. One that the kernel still holds is replaced, and made to outlive this
  // call.
  int kept = -1;
  auto give_back = [&]() noexcept {
    for (size_t i = 0; i < count; ++i) {
      ffi::ObjectPtr<BorrowedTensor>& tensor = borrowed.tensors[base + i];
      if (tensor.use_count() != 1) {
        tensor->Outlive(tensors_[i].data.lock());
        tensor = ffi::make_object<BorrowedTensor>();
        kept = static_cast<int>(i);
      }
    }
    borrowed.top = base;
  };
  struct OnThrow {
    decltype(give_back)* run;
    ~OnThrow() {
      if (run != nullptr) (*run)();
    }
  } on_throw{&give_back};

  mx::SmallVector<ffi::AnyView, 16> arguments;
  arguments.reserve(count + call_->attributes.size() + 1);
  auto push_tensor = [&](size_t i) {
    arguments.emplace_back(static_cast<const ffi::TensorObj*>(borrowed.tensors[base + i].get()));
  };
  const Kernel& kernel = *call_->kernel;
  for (const Kernel::Slot& slot : kernel.slots()) {
    switch (slot.kind) {
      case Kernel::Slot::Kind::kArgs:
        for (size_t i = 0; i < inputs_; ++i) push_tensor(i);
        break;
      case Kernel::Slot::Kind::kArg:
        push_tensor(slot.index);
        break;
      case Kernel::Slot::Kind::kRets:
        for (size_t i = inputs_; i < count; ++i) push_tensor(i);
        break;
      case Kernel::Slot::Kind::kRet:
        push_tensor(inputs_ + slot.index);
        break;
      case Kernel::Slot::Kind::kStream: {
        DLDevice device = backend_.ToDLDevice(stream_.device);
        arguments.emplace_back(TVMFFIEnvGetStream(device.device_type, device.device_id));
        break;
      }
      case Kernel::Slot::Kind::kAttribute:
        for (const auto& [key, value] : call_->attributes) {
          if (key == slot.name) arguments.emplace_back(value);
        }
        break;
    }
  }
  if (kernel.options().arg_spec.empty()) {
    for (const auto& attribute : call_->attributes) arguments.emplace_back(attribute.second);
  }

  {
    ffi::Any result;
    kernel.function().CallPacked(arguments.data(), static_cast<int32_t>(arguments.size()), &result);
    if (kernel.returns_outputs()) {
      TakeReturned(result);
    } else if (result != nullptr &&
               (result.as<ffi::Tensor>() || result.as<ffi::Array<ffi::Any>>())) {
      TVM_FFI_THROW(TypeError) << "expected a kernel that fills its outputs, got one that returns "
                               << result.GetTypeKey()
                               << ". Name what it takes in arg_spec, without \"rets\".";
    }
  }
  on_throw.run = nullptr;
  give_back();
  if (kept >= 0) ThrowKept(kept);
}

void KernelLaunch::ThrowKept(int tensor) const {
  size_t number = static_cast<size_t>(tensor);
  bool is_input = number < inputs_;
  TVM_FFI_THROW(RuntimeError)
      << "expected a kernel that lets go of its tensors when it returns, but it kept "
      << (is_input ? "input " : "output ") << (is_input ? number : number - inputs_)
      << ". Copy what must outlive the call.";
}

void KernelLaunch::TakeReturned(const ffi::Any& result) const {
  size_t outputs = tensors_.size() - inputs_;
  std::vector<ffi::Tensor> returned;
  auto take = [&](const ffi::Any& value, size_t i) {
    auto tensor = value.as<ffi::Tensor>();
    if (!tensor.has_value() || !tensor->defined()) {  // None is a tensor that is not defined
      TVM_FFI_THROW(TypeError) << "expected a kernel that returns a tensor for output " << i
                               << ", got " << value.GetTypeKey()
                               << ". Name \"rets\" in arg_spec if it fills its outputs.";
    }
    CheckReturned(*tensor->GetDLTensorPtr(), i);
    returned.push_back(*std::move(tensor));
  };
  if (auto array = result.as<ffi::Array<ffi::Any>>()) {
    if (array->size() != outputs) {
      TVM_FFI_THROW(ValueError) << "expected a kernel that returns " << outputs << " tensors, got "
                                << array->size() << ". Make `outputs` say what it returns.";
    }
    for (size_t i = 0; i < outputs; ++i) take((*array)[static_cast<int64_t>(i)], i);
  } else if (outputs == 1) {
    take(result, 0);
  } else {
    TVM_FFI_THROW(TypeError) << "expected a kernel that returns " << outputs << " tensors, got "
                             << result.GetTypeKey() << ". Make `outputs` say what it returns.";
  }
  CopyReturned(returned);
}

void KernelLaunch::CheckReturned(const DLTensor& returned, size_t output) const {
  const DLTensor& expected = tensors_[inputs_ + output].tensor;
  if (!SameDims(returned, expected)) {
    TVM_FFI_THROW(ValueError) << "expected a kernel that returns " << Describe(expected)
                              << " for output " << output << ", got " << Describe(returned)
                              << ". Make `outputs` say what it returns.";
  }
  if (InPlace(returned, expected)) return;
  if (returned.device.device_type != kDLCPU || expected.device.device_type != kDLCPU) {
    TVM_FFI_THROW(NotImplementedError) << "expected a kernel that allocates output " << output
                                       << " through TVMFFIEnvTensorAlloc, got memory from "
                                          "elsewhere. Let it fill an output instead.";
  }
}

void KernelLaunch::CopyReturned(const std::vector<ffi::Tensor>& returned) const {
  auto in_an_output = [this](const DLTensor& tensor) {
    return std::any_of(tensors_.begin() + static_cast<std::ptrdiff_t>(inputs_), tensors_.end(),
                       [&](const Bound& output) {
                         std::ptrdiff_t bytes = Address(tensor) - Address(output.tensor);
                         return bytes >= 0 && static_cast<size_t>(bytes) < Bytes(output.tensor);
                       });
  };
  // A kernel may return the memory of one output as another: that is read before any is written.
  std::vector<std::vector<char>> read(returned.size());
  for (size_t i = 0; i < returned.size(); ++i) {
    const DLTensor& tensor = *returned[i].GetDLTensorPtr();
    if (InPlace(tensor, tensors_[inputs_ + i].tensor) || !in_an_output(tensor)) continue;
    read[i].resize(Bytes(tensor));
    CopyRows(tensor, read[i].data());
  }
  for (size_t i = 0; i < returned.size(); ++i) {
    const DLTensor& tensor = *returned[i].GetDLTensorPtr();
    const DLTensor& output = tensors_[inputs_ + i].tensor;
    if (!read[i].empty()) {
      std::memcpy(Address(output), read[i].data(), read[i].size());
    } else if (!InPlace(tensor, output)) {
      CopyRows(tensor, Address(output));
    }
  }
}

}  // namespace mlx_tvm_ffi
