// Metal used against its rules, one rule each: what the simulated Metal has to report.
#include <tvm/ffi/function.h>

#include <Metal/Metal.hpp>

namespace {

constexpr const char* kSource = R"(
#include <metal_stdlib>
using namespace metal;
kernel void increment(device const float* x [[buffer(0)]], device float* y [[buffer(1)]],
                      uint i [[thread_position_in_grid]]) { y[i] = x[i] + 1; }
)";
constexpr NS::UInteger kSize = 8;

// A queue and two buffers, and a command buffer that retains nothing, as MLX's.
class Bench {
 public:
  Bench() {
    auto source = NS::String::string(kSource, NS::UTF8StringEncoding);
    NS::Error* error = nullptr;
    auto library = NS::TransferPtr(device->newLibrary(source, nullptr, &error));
    auto name = NS::String::string("increment", NS::UTF8StringEncoding);
    auto function = NS::TransferPtr(library->newFunction(name));
    pipeline = NS::TransferPtr(device->newComputePipelineState(function.get(), &error));
    x = NewBuffer();
    y = NewBuffer();
    commands = queue->commandBufferWithUnretainedReferences();
  }

  NS::SharedPtr<MTL::Buffer> NewBuffer() {
    const float zeros[kSize] = {};
    return NS::TransferPtr(device->newBuffer(zeros, sizeof zeros, MTL::ResourceStorageModeShared));
  }
  MTL::ComputeCommandEncoder* Encoder() {
    auto* encoder = commands->computeCommandEncoder(MTL::DispatchTypeConcurrent);
    encoder->setComputePipelineState(pipeline.get());
    return encoder;
  }
  void Dispatch(MTL::ComputeCommandEncoder* encoder, MTL::Buffer* from, MTL::Buffer* to) {
    encoder->setBuffer(from, 0, 0);
    encoder->setBuffer(to, 0, 1);
    encoder->dispatchThreads(MTL::Size(kSize, 1, 1), MTL::Size(kSize, 1, 1));
  }
  void Finish() {
    commands->commit();
    commands->waitUntilCompleted();
  }

  NS::SharedPtr<NS::AutoreleasePool> pool = NS::TransferPtr(NS::AutoreleasePool::alloc()->init());
  NS::SharedPtr<MTL::Device> device = NS::TransferPtr(MTL::CreateSystemDefaultDevice());
  NS::SharedPtr<MTL::CommandQueue> queue = NS::TransferPtr(device->newCommandQueue());
  NS::SharedPtr<MTL::ComputePipelineState> pipeline;
  NS::SharedPtr<MTL::Buffer> x, y;
  MTL::CommandBuffer* commands;
};

void Nothing() {
  Bench bench;
  auto* encoder = bench.Encoder();
  bench.Dispatch(encoder, bench.x.get(), bench.y.get());
  encoder->memoryBarrier(MTL::BarrierScopeBuffers);
  bench.Dispatch(encoder, bench.y.get(), bench.x.get());
  encoder->endEncoding();
  bench.Finish();
}

void NoBarrier() {
  Bench bench;
  auto* encoder = bench.Encoder();
  bench.Dispatch(encoder, bench.x.get(), bench.y.get());
  bench.Dispatch(encoder, bench.y.get(), bench.x.get());
  encoder->endEncoding();
  bench.Finish();
}

void TwoEncoders(bool fence) {
  Bench bench;
  auto order = NS::TransferPtr(bench.device->newFence());
  auto* first = bench.Encoder();
  bench.Dispatch(first, bench.x.get(), bench.y.get());
  if (fence) first->updateFence(order.get());
  first->endEncoding();
  auto* second = bench.Encoder();
  if (fence) second->waitForFence(order.get());
  bench.Dispatch(second, bench.y.get(), bench.x.get());
  second->endEncoding();
  bench.Finish();
}

void ReleasedBuffer() {
  Bench bench;
  auto* encoder = bench.Encoder();
  bench.Dispatch(encoder, bench.x.get(), bench.y.get());
  encoder->endEncoding();
  bench.x.reset();
  auto other = bench.NewBuffer();  // most likely at the address that is free now
  bench.Finish();
}

void ReleasedPipeline() {
  Bench bench;
  auto* encoder = bench.Encoder();
  bench.Dispatch(encoder, bench.x.get(), bench.y.get());
  encoder->endEncoding();
  bench.pipeline.reset();
  bench.Finish();
}

void UseAfterEnd() {
  Bench bench;
  auto* encoder = bench.Encoder();
  encoder->endEncoding();
  bench.Dispatch(encoder, bench.x.get(), bench.y.get());
  bench.Finish();
}

void OpenAtCommit() {
  Bench bench;
  auto* encoder = bench.Encoder();
  bench.commands->commit();
  encoder->endEncoding();
}

void HandlerAfterCommit() {
  Bench bench;
  bench.Finish();
  bench.commands->addCompletedHandler([](MTL::CommandBuffer*) {});
}

void WaitBeforeCommit() {
  Bench bench;
  bench.commands->waitUntilCompleted();
}

void EmptyGrid() {
  Bench bench;
  auto* encoder = bench.Encoder();
  encoder->dispatchThreads(MTL::Size(0, 1, 1), MTL::Size(1, 1, 1));
  encoder->endEncoding();
}

void UnboundSlot() {
  Bench bench;
  auto* encoder = bench.Encoder();
  encoder->setBuffer(bench.x.get(), 0, 0);
  encoder->dispatchThreads(MTL::Size(kSize, 1, 1), MTL::Size(kSize, 1, 1));
  encoder->endEncoding();
}

void NoPool() {
  Bench bench;
  bench.pool.reset();
  bench.device->name();
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(nothing, Nothing);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(no_barrier, NoBarrier);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(two_encoders, TwoEncoders);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(released_buffer, ReleasedBuffer);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(released_pipeline, ReleasedPipeline);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(use_after_end, UseAfterEnd);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(open_at_commit, OpenAtCommit);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(handler_after_commit, HandlerAfterCommit);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(wait_before_commit, WaitBeforeCommit);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(empty_grid, EmptyGrid);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(unbound_slot, UnboundSlot);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(no_pool, NoPool);
