#include "metal/encode.h"

#include <tvm/ffi/error.h>

#include <Metal/Metal.hpp>
#include <mutex>
#include <numeric>
#include <string_view>
#include <unordered_map>

namespace mlx_tvm_ffi {

struct MetalPipeline {
  void* device;
  MTL::ComputePipelineState* state;
  uint64_t max_threads;
  uint64_t max_memory;  // bytes of all threadgroup arguments
};

namespace {

template <typename T>
using Owned = NS::SharedPtr<T>;

Owned<NS::String> Text(const std::string& text) {
  return NS::TransferPtr(NS::String::alloc()->init(text.c_str(), NS::UTF8StringEncoding));
}

std::string Prefix(const MetalFunction& f) {
  return "[mlx_tvm_ffi.metal] kernel '" + f.name + "': ";
}

[[noreturn]] void ThrowMetal(const MetalFunction& f, const char* what, NS::Error* error) {
  const char* text = error == nullptr ? nullptr : error->localizedDescription()->utf8String();
  TVM_FFI_THROW(RuntimeError) << Prefix(f) << "expected " << what
                              << ", got: " << (text == nullptr ? "no reason from Metal" : text);
  TVM_FFI_UNREACHABLE();
}

Owned<MTL::Library> MakeLibrary(const MetalFunction& f, MTL::Device* device) {
  NS::Error* error = nullptr;
  Owned<MTL::Library> library;
  if (f.format == PayloadFormat::kMetal) {
    auto options = NS::TransferPtr(MTL::CompileOptions::alloc()->init());
    options->setFastMathEnabled(f.fast_math);
    library = NS::TransferPtr(device->newLibrary(Text(f.payload).get(), options.get(), &error));
    if (!library) ThrowMetal(f, "source that Metal compiles", error);
  } else {
    dispatch_data_t data = dispatch_data_create(f.payload.data(), f.payload.size(), nullptr,
                                                DISPATCH_DATA_DESTRUCTOR_DEFAULT);  // copies
    library = NS::TransferPtr(device->newLibrary(data, &error));
    dispatch_release(data);
    if (!library) ThrowMetal(f, "a library that Metal loads", error);
  }
  return library;
}

Owned<MTL::Function> MakeFunction(const MetalFunction& f, MTL::Library* library) {
  const Owned<NS::String> name = Text(f.name);
  if (f.constants.empty()) {
    auto function = NS::TransferPtr(library->newFunction(name.get()));
    if (!function) ThrowMetal(f, "a function of this name in the library", nullptr);
    return function;
  }
  auto values = NS::TransferPtr(MTL::FunctionConstantValues::alloc()->init());
  for (const FunctionConstant& c : f.constants) {
    const auto type = static_cast<MTL::DataType>(c.type);
    if (c.name.empty()) {
      values->setConstantValue(c.value.data(), type, NS::UInteger{c.index});
    } else {
      values->setConstantValue(c.value.data(), type, Text(c.name).get());
    }
  }
  NS::Error* error = nullptr;
  auto function = NS::TransferPtr(library->newFunction(name.get(), values.get(), &error));
  if (!function) ThrowMetal(f, "a function of this name that takes these constants", error);
  return function;
}

// Everything that decides what the pipeline computes, so that equal keys mean equal pipelines.
std::string Key(const MetalFunction& f, void* device) {
  std::string key;
  auto add = [&key](std::string_view part) {
    key += std::to_string(part.size()) + ':';
    key += part;
  };
  add(std::to_string(reinterpret_cast<uintptr_t>(device)));
  add(f.name);
  add(f.format == PayloadFormat::kMetallib ? "metallib"
      : f.fast_math                        ? "metal, fast math"
                                           : "metal");
  add(f.payload);
  for (const FunctionConstant& c : f.constants) {
    add(c.name.empty() ? std::to_string(c.index) : c.name);
    add(c.name.empty() ? "index" : "name");
    add(std::to_string(c.type));
    add(c.value);
  }
  return key;
}

const MetalPipeline* FindPipeline(const MetalFunction& f, void* device) {
  static auto* mutex = new std::mutex;
  static auto* pipelines = new std::unordered_map<std::string, MetalPipeline>;
  const std::lock_guard lock(*mutex);
  std::string key = Key(f, device);
  if (auto it = pipelines->find(key); it != pipelines->end()) return &it->second;

  auto pool = NS::TransferPtr(NS::AutoreleasePool::alloc()->init());
  auto* metal_device = static_cast<MTL::Device*>(device);
  const auto library = MakeLibrary(f, metal_device);
  const auto function = MakeFunction(f, library.get());
  NS::Error* error = nullptr;
  MTL::ComputePipelineState* state = metal_device->newComputePipelineState(function.get(), &error);
  if (state == nullptr) ThrowMetal(f, "a function that a pipeline can be made from", error);
  const MetalPipeline pipeline{
      device, state, state->maxTotalThreadsPerThreadgroup(),
      metal_device->maxThreadgroupMemoryLength() - state->staticThreadgroupMemoryLength()};
  return &pipelines->emplace(std::move(key), pipeline).first->second;
}

MTL::Size Size(const std::array<uint64_t, 3>& size) { return {size[0], size[1], size[2]}; }

// Metal ends the process, or the GPU's work, where these are broken.
void CheckLimits(const MetalFunction& f, const MetalPipeline& pipeline,
                 const MetalDispatch& dispatch) {
  constexpr size_t kMaxBytes = 4096;
  const auto& group = dispatch.group;
  // Each factor is checked first, so that the product cannot wrap.
  const uint64_t most = pipeline.max_threads;
  if (group[0] > most || group[1] > most || group[2] > most ||
      group[0] * group[1] * group[2] > most) {
    TVM_FFI_THROW(ValueError) << Prefix(f) << "expected a threadgroup of at most " << most
                              << " threads, got " << group[0] << " x " << group[1] << " x "
                              << group[2] << ". Use a smaller one.";
  }
  const uint64_t memory = std::accumulate(f.threadgroup_memory_bytes.begin(),
                                          f.threadgroup_memory_bytes.end(), uint64_t{0});
  if (memory > pipeline.max_memory) {
    TVM_FFI_THROW(ValueError) << Prefix(f) << "expected at most " << pipeline.max_memory
                              << " bytes of threadgroup memory, got " << memory << ". Use less.";
  }
  for (uint32_t i = 0; i < dispatch.num_slots; ++i) {
    if (dispatch.slots[i].size > kMaxBytes) {
      TVM_FFI_THROW(ValueError) << Prefix(f) << "expected at most " << kMaxBytes
                                << " bytes of scalars, got " << dispatch.slots[i].size
                                << ". Pass them in an array.";
    }
  }
}

void Encode(MetalKernel& kernel, const MetalDispatch& dispatch) {
  const MetalFunction& function = kernel.function;
  const StreamRef stream = CurrentStream({kDLMetal, 0});
  EncodeOn(stream, [&] {
    void* device = stream.GetDevice();
    const MetalPipeline* pipeline = kernel.pipeline.load(std::memory_order_acquire);
    if (pipeline == nullptr || pipeline->device != device) {
      pipeline = FindPipeline(function, device);
      kernel.pipeline.store(pipeline, std::memory_order_release);
    }
    CheckLimits(function, *pipeline, dispatch);
    const EncoderScope scope(stream);
    auto* encoder = static_cast<MTL::ComputeCommandEncoder*>(scope.encoder());
    encoder->setComputePipelineState(pipeline->state);
    for (uint32_t i = 0; i < dispatch.num_slots; ++i) {
      const MetalDispatch::Slot& slot = dispatch.slots[i];
      if (slot.bytes != nullptr) {
        encoder->setBytes(slot.bytes, slot.size, i);
      } else {
        encoder->setBuffer(static_cast<MTL::Buffer*>(slot.buffer), slot.offset, i);
      }
    }
    for (size_t i = 0; i < function.threadgroup_memory_bytes.size(); ++i) {
      encoder->setThreadgroupMemoryLength(function.threadgroup_memory_bytes[i], i);
    }
    if (dispatch.grid_in_threads) {
      encoder->dispatchThreads(Size(dispatch.grid), Size(dispatch.group));
    } else {
      encoder->dispatchThreadgroups(Size(dispatch.grid), Size(dispatch.group));
    }
  });
}

const bool registered = (SetMetalEncoder(Encode), true);

}  // namespace

}  // namespace mlx_tvm_ffi
