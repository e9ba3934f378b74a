// On Metal the encoder is the framework's open compute encoder: dispatch, and leave ending and
// committing to it. A tensor's data is its MTLBuffer; where in it the tensor starts is in
// byte_offset.
#define METALCPP_SYMBOL_VISIBILITY_HIDDEN
#define NS_PRIVATE_IMPLEMENTATION
#define MTL_PRIVATE_IMPLEMENTATION
#include <Foundation/Foundation.hpp>
#include <Metal/Metal.hpp>
// metal-cpp first: it defines what its implementation needs.
#include <mlx_tvm_ffi/stream.h>

#include <algorithm>
#include <map>
#include <mutex>

#include "scale.h"

namespace {

constexpr const char* kSource = R"(
#include <metal_stdlib>
using namespace metal;
kernel void scale(const device float* in [[buffer(0)]], device float* out [[buffer(1)]],
                  constant float& factor [[buffer(2)]], uint i [[thread_position_in_grid]]) {
  out[i] = factor * in[i];
}
)";

[[noreturn]] void Fail(const char* what, NS::Error* error) {
  TVM_FFI_THROW(RuntimeError) << "[scale] " << what << ": "
                              << (error != nullptr ? error->localizedDescription()->utf8String()
                                                   : "unknown");
  throw;  // not reached
}

// Compiled once for each device, and kept: a command buffer does not keep the pipelines it uses.
MTL::ComputePipelineState* Pipeline(MTL::Device* device) {
  static std::mutex mutex;
  static auto& pipelines = *new std::map<MTL::Device*, MTL::ComputePipelineState*>;
  std::lock_guard<std::mutex> lock(mutex);
  MTL::ComputePipelineState*& pipeline = pipelines[device];
  if (pipeline != nullptr) return pipeline;
  auto pool = NS::TransferPtr(NS::AutoreleasePool::alloc()->init());
  NS::Error* error = nullptr;
  auto source = NS::String::string(kSource, NS::UTF8StringEncoding);
  auto library = NS::TransferPtr(device->newLibrary(source, nullptr, &error));
  if (!library) Fail("library", error);
  auto function =
      NS::TransferPtr(library->newFunction(NS::String::string("scale", NS::UTF8StringEncoding)));
  if (!function) Fail("function", nullptr);
  pipeline = device->newComputePipelineState(function.get(), &error);
  if (pipeline == nullptr) Fail("pipeline", error);
  return pipeline;
}

}  // namespace

void ScaleMetal(tvm::ffi::TensorView x, tvm::ffi::TensorView y, float factor) {
  const mlx_tvm_ffi::StreamRef stream = mlx_tvm_ffi::CurrentStream(x.device());
  MTL::ComputePipelineState* pipeline = Pipeline(static_cast<MTL::Device*>(stream.GetDevice()));
  mlx_tvm_ffi::EncodeOn(stream, [&] {
    const mlx_tvm_ffi::EncoderScope scope(stream);
    auto* encoder = static_cast<MTL::ComputeCommandEncoder*>(scope.encoder());
    encoder->setComputePipelineState(pipeline);
    encoder->setBuffer(static_cast<MTL::Buffer*>(x.data_ptr()), x.byte_offset(), 0);
    encoder->setBuffer(static_cast<MTL::Buffer*>(y.data_ptr()), y.byte_offset(), 1);
    encoder->setBytes(&factor, sizeof(factor), 2);
    const auto size = static_cast<NS::UInteger>(x.numel());
    const NS::UInteger group = std::min(size, pipeline->maxTotalThreadsPerThreadgroup());
    encoder->dispatchThreads(MTL::Size(size, 1, 1), MTL::Size(group, 1, 1));
  });
}
