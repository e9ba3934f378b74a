// A whole framework beside MLX: streams with a dispatch queue and memory of its own. It knows
// neither MLX nor us.
#include <dispatch/dispatch.h>
#include <mlx_tvm_ffi/stream.h>
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/function.h>

#include <atomic>
#include <cstdlib>
#include <memory>
#include <utility>
#include <vector>

#include "toy.h"

namespace {

using mlx_tvm_ffi::StreamRef;
using tvm::ffi::Tensor;

std::atomic<int64_t> commits{0};

DLDevice ToyDevice() { return {static_cast<DLDeviceType>(kToyDevice), 0}; }

class ToyStream final : public mlx_tvm_ffi::StreamInterface {
 public:
  DLDevice device() const override { return ToyDevice(); }

  void* AcquireEncoder() override {
    CheckQueue();
    ++acquired_;
    return &encoder_;
  }
  // As the interface has it: commits as the outermost release outside a scope, else when the scope
  // is left.
  void ReleaseEncoder() override {
    CheckQueue();
    if (--acquired_ == 0 && scopes_ == 0) Commit();
  }
  void Barrier() override { CheckQueue(); }
  void* GetDevice() override { return this; }
  void* GetDispatchQueue() override { return &queue_; }
  void Keep(std::shared_ptr<void> object) override { kept_.push_back(std::move(object)); }
  void Enter() override { ++scopes_; }
  void Leave() override {
    if (--scopes_ == 0) Commit();
  }

 private:
  void CheckQueue() const {
    if (std::this_thread::get_id() != queue_.thread.get_id()) {
      TVM_FFI_THROW(RuntimeError)
          << "[toy] encoder: expected the dispatch queue, got another thread.";
    }
  }
  void Commit() {
    if (encoder_.commands.empty()) return;
    ++commits;
    for (const auto& command : std::exchange(encoder_.commands, {})) command();
    kept_.clear();
  }

  dispatch_queue_s queue_;
  ToyEncoder encoder_;
  std::vector<std::shared_ptr<void>> kept_;
  std::atomic<int> acquired_{0};
  std::atomic<int> scopes_{0};
};

// The caller owns the reference.
void* NewStream() { return mlx_tvm_ffi::MakeStream(std::make_shared<ToyStream>()).release(); }

void ReleaseStream(void* stream) { StreamRef::Steal(static_cast<mtf_stream*>(stream)); }

// What a framework does when it is imported.
bool OfferDefault() {
  return mlx_tvm_ffi::OfferDefaultStream(ToyDevice(),
                                         mlx_tvm_ffi::MakeStream(std::make_shared<ToyStream>()));
}

struct Allocator {
  void AllocData(DLTensor* tensor) {
    tensor->data = std::calloc(1, tvm::ffi::GetDataSize(*tensor));
  }
  void FreeData(DLTensor* tensor) { std::free(tensor->data); }
};

Tensor Full(int64_t size, double value) {
  Tensor tensor =
      Tensor::FromNDAlloc(Allocator(), tvm::ffi::Shape({size}), {kDLFloat, 32, 1}, ToyDevice());
  auto* data = static_cast<float*>(tensor.data_ptr());
  for (int64_t i = 0; i < size; ++i) data[i] = static_cast<float>(value);
  return tensor;
}

double First(Tensor tensor) { return static_cast<double>(*static_cast<float*>(tensor.data_ptr())); }

int64_t Commits() { return commits; }

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(new_stream, NewStream)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(release_stream, ReleaseStream)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(offer_default, OfferDefault)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(full, Full)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(first, First)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(commits, Commits)
