#include "op/evaluation.h"

#include <mlx/ops.h>
#include <mlx/version.h>
#include <tvm/ffi/error.h>

#include <algorithm>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>

#include "array/pool.h"
#include "backend/backend.h"
#include "op/kernel.h"
#include "op/launch.h"

namespace mlx_tvm_ffi {

namespace {

/*! \brief Whether MLX would write an output into this input's memory. */
bool MayDonate(const mx::array& input) {
  // As MLX has it: a much larger buffer is not held by a small output.
  constexpr size_t kSlackBytes = 16384;
  if (!input.is_donatable() || !input.flags().row_contiguous) return false;
#if MLX_VERSION_NUMERIC < 32004
  // Memory of numpy or torch counts as donatable before 0.32.4, and is freed by a closure; MLX's
  // own is by its function, whose address is another in each library.
  if (input.data_shared_ptr()->d.target<void (*)(mx::allocator::Buffer)>() == nullptr) return false;
#endif
  return input.buffer_size() <= input.nbytes() + kSlackBytes;
}

/*! \brief One evaluation of a call: mends the inputs, gives the outputs memory and hands the launch
 * to the backend. */
class Evaluation {
 public:
  Evaluation(KernelPrimitive& primitive, const std::vector<mx::array>& inputs,
             std::vector<mx::array>& outputs, bool at_once)
      : call_(primitive.call()),
        kernel_(*call_->kernel),
        stream_(primitive.stream()),
        backend_(GetBackend(stream_.device)),
        inputs_(inputs),
        outputs_(outputs),
        at_once_(at_once) {}

  void Run() {
    try {
      Prepare();
    } catch (...) {
      // Work that was encoded to fill them still runs.
      for (auto& [i, copy] : copies_) backend_.KeepScratch(copy, stream_);
      throw;
    }
    bool all_empty = std::all_of(outputs_.begin(), outputs_.end(),
                                 [](const mx::array& output) { return output.size() == 0; });
    if (all_empty) return;  // nothing to write, and an empty grid is an error on a GPU
    if (copies_.empty()) return Encode(inputs_);
    std::vector<mx::array> inputs = inputs_;
    for (auto& [i, copy] : copies_) {
      inputs[i] = copy;
      if (copy.data_shared_ptr().use_count() <= 2) backend_.KeepScratch(copy, stream_);
    }
    Encode(inputs);
  }

 private:
  bool HasOffset(const mx::array& input) const {
    if (input.size() == 0) return false;  // it has no memory
    DLTensor tensor{};
    backend_.Address(input, &tensor);
    return tensor.byte_offset != 0;
  }

  void Prepare() {
    for (size_t i = 0; i < inputs_.size(); ++i) {
      if ((kernel_.contiguous(i) && !inputs_[i].flags().row_contiguous) ||
          (!kernel_.options().offsets && HasOffset(inputs_[i]))) {
        copies_.emplace(i, Copy(inputs_[i]));
      }
    }
    for (size_t i = 0; i < outputs_.size(); ++i) GiveMemory(i);
  }

  void Encode(const std::vector<mx::array>& inputs) {
    backend_.Encode(
        stream_, inputs, outputs_,
        std::allocate_shared<KernelLaunch>(PoolAllocator<KernelLaunch>(), call_, backend_, stream_,
                                           inputs, outputs_, at_once_));
  }

  // Memory of its own with the input's values, row-contiguous, by MLX's own primitive.
  mx::array Copy(const mx::array& input) {
    // MLX would share the memory of what it takes for row-contiguous.
    mx::array view(input.shape(), input.dtype(), nullptr, {});
    view.copy_shared_buffer(input, input.strides(), {false, false, false}, input.data_size());
    mx::array copy = mx::contiguous(view, false, stream_);
    std::vector<mx::array> outputs{copy};
    backend_.Evaluate(copy.primitive(), {view}, outputs);
    copy.set_status(mx::array::Status::evaluated);
    copy.detach();
    return copy;
  }

  void GiveMemory(size_t output) {
    for (const auto& [aliased, input] : kernel_.options().aliases) {
      if (static_cast<size_t>(aliased) == output) {
        const mx::array& array = outputs_[output];  // of other shapes than the call's, if shapeless
        CheckAlias(kernel_.options(), aliased, array.shape(), array.dtype(),
                   inputs_[static_cast<size_t>(input)]);
        return Alias(&outputs_[output], static_cast<size_t>(input));
      }
    }
    backend_.Allocate(outputs_[output], stream_);
  }

  // The input's own memory where MLX may donate it, else a copy; never one that an earlier output
  // has taken.
  void Alias(mx::array* output, size_t i) {
    const mx::array& input = inputs_[i];
    auto copied = copies_.find(i);
    if (copied != copies_.end() && copied->second.data_shared_ptr().use_count() == 1) {
      output->copy_shared_buffer(copied->second);
    } else if (copied == copies_.end() && MayDonate(input)) {
      output->copy_shared_buffer(input);
    } else {
      output->copy_shared_buffer(Copy(input));
    }
  }

  const std::shared_ptr<const KernelCall>& call_;
  const Kernel& kernel_;
  mx::Stream stream_;
  Backend& backend_;
  const std::vector<mx::array>& inputs_;
  std::vector<mx::array>& outputs_;
  bool at_once_;
  std::map<size_t, mx::array> copies_;
};

}  // namespace

void Evaluate(KernelPrimitive& primitive, const std::vector<mx::array>& inputs,
              std::vector<mx::array>& outputs, bool at_once) {
  try {
    Evaluation(primitive, inputs, outputs, at_once).Run();
  } catch (const tvm::ffi::Error& error) {
    const Options& options = primitive.call()->kernel->options();
    if (error.message().starts_with(Where(options))) throw;
    ThrowNamed(options, error.kind(), error.message(), error.backtrace());
  } catch (const std::runtime_error& error) {
    Rethrow(Where(primitive.call()->kernel->options()), error);
  }
}

}  // namespace mlx_tvm_ffi
