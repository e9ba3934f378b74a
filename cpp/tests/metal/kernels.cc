// Kernels that encode on the framework's encoder, as a kernel library does: metal-cpp and stream.h,
// neither MLX nor us.
#include <mlx_tvm_ffi/stream.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/container/tuple.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/function.h>

#include <Metal/Metal.hpp>
#include <algorithm>
#include <map>
#include <mutex>
#include <string>

namespace {

namespace ffi = tvm::ffi;

using ffi::TensorView;
using mlx_tvm_ffi::CurrentStream;
using mlx_tvm_ffi::StreamRef;

constexpr const char* kSource = R"(
#include <metal_stdlib>
using namespace metal;
kernel void add_one(device const float* x [[buffer(0)]], device float* y [[buffer(1)]],
                    uint i [[thread_position_in_grid]]) { y[i] = x[i] + 1; }
kernel void increment(device float* x [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  x[i] += 1;
}
kernel void add(device const float* a [[buffer(0)]], device const float* b [[buffer(1)]],
                device float* y [[buffer(2)]], uint i [[thread_position_in_grid]]) {
  y[i] = a[i] + b[i];
}
kernel void fill(device float* y [[buffer(0)]], constant float& value [[buffer(1)]],
                 uint i [[thread_position_in_grid]]) { y[i] = value; }
)";

NS::String* ToString(const char* text) { return NS::String::string(text, NS::UTF8StringEncoding); }

// Pipelines of this library, released when it is unloaded.
class Pipelines {
 public:
  MTL::ComputePipelineState* Get(MTL::Device* device, const std::string& name) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto& pipeline = pipelines_[name];
    if (pipeline) return pipeline.get();
    auto pool = NS::TransferPtr(NS::AutoreleasePool::alloc()->init());
    NS::Error* error = nullptr;
    auto library = NS::TransferPtr(device->newLibrary(ToString(kSource), nullptr, &error));
    if (!library) TVM_FFI_THROW(RuntimeError) << error->localizedDescription()->utf8String();
    auto function = NS::TransferPtr(library->newFunction(ToString(name.c_str())));
    pipeline = NS::TransferPtr(device->newComputePipelineState(function.get(), &error));
    if (!pipeline) TVM_FFI_THROW(RuntimeError) << error->localizedDescription()->utf8String();
    return pipeline.get();
  }

 private:
  std::mutex mutex_;
  std::map<std::string, NS::SharedPtr<MTL::ComputePipelineState>> pipelines_;
};

MTL::ComputePipelineState* Pipeline(const StreamRef& stream, const char* name) {
  static Pipelines pipelines;
  return pipelines.Get(static_cast<MTL::Device*>(stream.GetDevice()), name);
}

MTL::Buffer* Buffer(TensorView tensor) { return static_cast<MTL::Buffer*>(tensor.data_ptr()); }

NS::UInteger Bytes(TensorView tensor) {
  return static_cast<NS::UInteger>(tensor.numel()) * sizeof(float);
}

void Bind(MTL::ComputeCommandEncoder* encoder, NS::UInteger index, TensorView tensor) {
  encoder->setBuffer(Buffer(tensor), tensor.byte_offset(), index);
}

void Dispatch(MTL::ComputeCommandEncoder* encoder, TensorView tensor) {
  const auto threads = static_cast<NS::UInteger>(tensor.numel());
  if (threads == 0) return;
  encoder->dispatchThreads(MTL::Size(threads, 1, 1),
                           MTL::Size(std::min<NS::UInteger>(threads, 64), 1, 1));
}

void EncodeAddOne(MTL::ComputeCommandEncoder* encoder, const StreamRef& stream, TensorView x,
                  TensorView y) {
  encoder->setComputePipelineState(Pipeline(stream, "add_one"));
  Bind(encoder, 0, x);
  Bind(encoder, 1, y);
  Dispatch(encoder, y);
}

// The stream of a tensor, with its encoder.
struct Encoding {
  explicit Encoding(TensorView tensor) : stream(CurrentStream(tensor.device())), scope(stream) {}
  MTL::ComputeCommandEncoder* encoder() const {
    return static_cast<MTL::ComputeCommandEncoder*>(scope.encoder());
  }
  StreamRef stream;
  mlx_tvm_ffi::EncoderScope scope;
};

ffi::Tensor Allocate(TensorView like) {
  return ffi::Tensor::FromEnvAlloc(TVMFFIEnvTensorAlloc, like.shape(), like.dtype(), like.device());
}

void AddOne(TensorView x, TensorView y) {
  Encoding encoding(x);
  EncodeAddOne(encoding.encoder(), encoding.stream, x, y);
}

void Increment(TensorView x) {
  Encoding encoding(x);
  encoding.encoder()->setComputePipelineState(Pipeline(encoding.stream, "increment"));
  Bind(encoding.encoder(), 0, x);
  Dispatch(encoding.encoder(), x);
}

// For an op whose output starts with its input's value.
void IncrementOutput(TensorView, TensorView y) { Increment(y); }

void Add(TensorView a, TensorView b, TensorView y) {
  Encoding encoding(a);
  encoding.encoder()->setComputePipelineState(Pipeline(encoding.stream, "add"));
  Bind(encoding.encoder(), 0, a);
  Bind(encoding.encoder(), 1, b);
  Bind(encoding.encoder(), 2, y);
  Dispatch(encoding.encoder(), y);
}

void Fill(TensorView y, double value) {
  Encoding encoding(y);
  const auto number = static_cast<float>(value);
  encoding.encoder()->setComputePipelineState(Pipeline(encoding.stream, "fill"));
  Bind(encoding.encoder(), 0, y);
  encoding.encoder()->setBytes(&number, sizeof(number), 1);
  Dispatch(encoding.encoder(), y);
}

// On an encoder of its own.
void AddOneSerially(TensorView x, TensorView y) {
  StreamRef stream = CurrentStream(x.device());
  mlx_tvm_ffi::CommandBufferScope scope(stream);
  auto pool = NS::TransferPtr(NS::AutoreleasePool::alloc()->init());
  auto* encoder = static_cast<MTL::CommandBuffer*>(scope.command_buffer())->computeCommandEncoder();
  EncodeAddOne(encoder, stream, x, y);
  encoder->endEncoding();
}

// y = x + 2 by two dispatches, the second of which needs what the first wrote to scratch.
void AddTwo(TensorView x, TensorView y, bool barrier) {
  ffi::Tensor scratch = Allocate(x);
  Encoding encoding(x);
  EncodeAddOne(encoding.encoder(), encoding.stream, x, scratch);
  if (barrier) encoding.stream.Barrier();
  EncodeAddOne(encoding.encoder(), encoding.stream, scratch, y);
}

// The same on an encoder of its own, in whose order dispatches wait for each other.
void AddTwoSerially(TensorView x, TensorView y) {
  ffi::Tensor scratch = Allocate(x);
  StreamRef stream = CurrentStream(x.device());
  mlx_tvm_ffi::CommandBufferScope scope(stream);
  auto pool = NS::TransferPtr(NS::AutoreleasePool::alloc()->init());
  auto* encoder = static_cast<MTL::CommandBuffer*>(scope.command_buffer())->computeCommandEncoder();
  EncodeAddOne(encoder, stream, x, scratch);
  EncodeAddOne(encoder, stream, scratch, y);
  encoder->endEncoding();
}

void Blit(TensorView x, TensorView y) {
  mlx_tvm_ffi::CommandBufferScope scope(CurrentStream(x.device()));
  auto pool = NS::TransferPtr(NS::AutoreleasePool::alloc()->init());
  auto* encoder = static_cast<MTL::CommandBuffer*>(scope.command_buffer())->blitCommandEncoder();
  encoder->copyFromBuffer(Buffer(x), x.byte_offset(), Buffer(y), y.byte_offset(), Bytes(x));
  encoder->endEncoding();
}

ffi::Tensor MakeOneMore(TensorView x) {
  ffi::Tensor y = Allocate(x);
  AddOne(x, y);
  return y;
}

// The same, with memory that was not there when the encoder was acquired.
ffi::Tensor MakeOneMoreLate(TensorView x) {
  Encoding encoding(x);
  ffi::Tensor y = Allocate(x);
  EncodeAddOne(encoding.encoder(), encoding.stream, x, y);
  return y;
}

// Fails before, or after, it has written y.
void Fail(TensorView x, TensorView y, bool after) {
  Encoding encoding(x);
  if (after) EncodeAddOne(encoding.encoder(), encoding.stream, x, y);
  TVM_FFI_THROW(ValueError) << "this kernel always fails";
}

// Forgets to release what it acquires.
void AddOneUnreleased(TensorView x, TensorView y) {
  StreamRef stream = CurrentStream(x.device());
  EncodeAddOne(static_cast<MTL::ComputeCommandEncoder*>(stream.AcquireEncoder()), stream, x, y);
}

void BlitUnreleased(TensorView x, TensorView y) {
  auto* buffer = static_cast<MTL::CommandBuffer*>(CurrentStream(x.device()).AcquireCommandBuffer());
  auto pool = NS::TransferPtr(NS::AutoreleasePool::alloc()->init());
  auto* encoder = buffer->blitCommandEncoder();
  encoder->copyFromBuffer(Buffer(x), x.byte_offset(), Buffer(y), y.byte_offset(), Bytes(x));
  encoder->endEncoding();
}

// Asks for the command buffer with the encoder acquired, or the other way round.
void AcquireBoth(TensorView x, bool encoder_first) {
  StreamRef stream = CurrentStream(x.device());
  if (encoder_first) {
    mlx_tvm_ffi::EncoderScope encoder(stream);
    mlx_tvm_ffi::CommandBufferScope buffer(stream);
  } else {
    mlx_tvm_ffi::CommandBufferScope buffer(stream);
    mlx_tvm_ffi::EncoderScope encoder(stream);
  }
}

// Balances what was never acquired, or asks for a barrier there.
void ReleaseUnacquired(TensorView x, const ffi::String& what) {
  StreamRef stream = CurrentStream(x.device());
  if (what == "encoder") stream.ReleaseEncoder();
  if (what == "command buffer") stream.ReleaseCommandBuffer();
  if (what == "barrier") stream.Barrier();
}

int64_t ToInteger(void* pointer) { return reinterpret_cast<int64_t>(pointer); }

// The buffer's handle, and the offset in bytes.
ffi::Tuple<int64_t, int64_t> Where(TensorView x) {
  return ffi::Tuple<int64_t, int64_t>(ToInteger(x.data_ptr()),
                                      static_cast<int64_t>(x.byte_offset()));
}

// A tensor that no array stands for, on memory of the caller's.
ffi::Tensor TensorAt(int64_t buffer, int64_t count) {
  struct Borrowed {
    explicit Borrowed(void* data) : data(data) {}
    void AllocData(DLTensor* tensor) { tensor->data = data; }
    void FreeData(DLTensor*) {}
    void* data;
  };
  return ffi::Tensor::FromNDAlloc(Borrowed(reinterpret_cast<void*>(buffer)), {count},
                                  DLDataType{kDLFloat, 32, 1}, DLDevice{kDLMetal, 0});
}

using FourHandles = ffi::Tuple<int64_t, int64_t, int64_t, int64_t>;

// Encoder, nested encoder, device, queue.
FourHandles Handles(TensorView x) {
  Encoding outer(x);
  Encoding inner(x);
  return FourHandles(ToInteger(outer.scope.encoder()), ToInteger(inner.scope.encoder()),
                     ToInteger(outer.stream.GetDevice()),
                     ToInteger(outer.stream.GetDispatchQueue()));
}

// Calls `function` with the encoder held.
void CallInside(TensorView x, const ffi::Function& function) {
  Encoding encoding(x);
  function();
}

// Calls `dropped` when the device is done with what is encoded so far.
void CallWhenDone(TensorView x, ffi::Function dropped) {
  Encoding encoding(x);
  encoding.stream.Keep(std::shared_ptr<void>(nullptr, [dropped](void*) { dropped(); }));
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(add_one, AddOne);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(increment, Increment);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(increment_output, IncrementOutput);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(add, Add);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(fill, Fill);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(add_one_serially, AddOneSerially);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(add_two, AddTwo);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(add_two_serially, AddTwoSerially);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(blit, Blit);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(make_one_more, MakeOneMore);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(make_one_more_late, MakeOneMoreLate);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(fail, Fail);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(add_one_unreleased, AddOneUnreleased);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(blit_unreleased, BlitUnreleased);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(acquire_both, AcquireBoth);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(release_unacquired, ReleaseUnacquired);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(where, Where);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(tensor_at, TensorAt);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(handles, Handles);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(call_inside, CallInside);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(call_when_done, CallWhenDone);
