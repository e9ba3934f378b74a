// One kernel for two frameworks, picked by the device of its tensors: y = factor * x.
#include <mlx_tvm_ffi/stream.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/function.h>

#include <atomic>
#include <memory>

#include "toy.h"

namespace {

using mlx_tvm_ffi::CurrentStream;
using mlx_tvm_ffi::EncoderScope;
using mlx_tvm_ffi::StreamRef;
using tvm::ffi::TensorView;

std::atomic<int64_t> alive{0};
std::atomic<int64_t> last_stream{0};

// What a kernel has to keep until the device is done.
struct Pipeline {
  Pipeline() { ++alive; }
  ~Pipeline() { --alive; }
};

void Compute(TensorView x, TensorView y, float factor) {
  const auto* in = static_cast<const float*>(x.data_ptr());
  auto* out = static_cast<float*>(y.data_ptr());
  for (int64_t i = 0; i < x.numel(); ++i) out[i] = factor * in[i];
}

void Scale(TensorView x, TensorView y, double factor) {
  const StreamRef stream = CurrentStream(x.device());
  last_stream = reinterpret_cast<int64_t>(stream.get());
  const auto by = static_cast<float>(factor);
  if (x.device().device_type != kToyDevice) return Compute(x, y, by);
  mlx_tvm_ffi::EncodeOn(stream, [&] {
    const EncoderScope scope(stream);
    stream.Keep(std::make_shared<Pipeline>());
    auto* encoder = static_cast<ToyEncoder*>(scope.encoder());
    encoder->commands.emplace_back([=] { Compute(x, y, by); });
  });
}

// Wrong: a framework with a dispatch queue wants it used.
void ScaleOffQueue(TensorView x, TensorView, double) { EncoderScope{CurrentStream(x.device())}; }

void RaiseOnQueue(TensorView x) {
  mlx_tvm_ffi::EncodeOn(CurrentStream(x.device()),
                        [] { TVM_FFI_THROW(KeyError) << "on the queue"; });
}

int64_t Alive() { return alive; }
int64_t LastStream() { return last_stream; }

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(scale, Scale)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(scale_off_queue, ScaleOffQueue)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(raise_on_queue, RaiseOnQueue)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(alive, Alive)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(last_stream, LastStream)
