// MLX's Device: pipelines by name, and the limits of a command buffer.
#define NS_PRIVATE_IMPLEMENTATION
#define CA_PRIVATE_IMPLEMENTATION
#define MTL_PRIVATE_IMPLEMENTATION

#include <cstdlib>
#include <stdexcept>

#include "standin.h"

namespace mlx_standin {
namespace {

// Read through the rule that an explicit instantiation may name private members.
template <class Tag, typename Tag::type P>
struct Reach {
  friend typename Tag::type Member(Tag) { return P; }
};
struct MaxOps {
  using type = int mx::metal::Device::*;
  friend type Member(MaxOps);
};
struct MaxMb {
  using type = int mx::metal::Device::*;
  friend type Member(MaxMb);
};
template struct Reach<MaxOps, &mx::metal::Device::max_ops_per_buffer_>;
template struct Reach<MaxMb, &mx::metal::Device::max_mb_per_buffer_>;

int FromEnvironment(const char* name, int otherwise) {
  const char* value = getenv(name);
  return value ? atoi(value) : otherwise;
}

std::string Text(NS::Error* error) {
  return error ? error->localizedDescription()->utf8String() : "no reason given";
}

}  // namespace

extern "C" [[gnu::visibility("default")]] void mlx_standin_set_limits(int max_ops, int max_mb) {
  mx::metal::Device& device = mx::metal::device(mx::Device::gpu);
  device.*Member(MaxOps{}) = max_ops;
  device.*Member(MaxMb{}) = max_mb;
}

}  // namespace mlx_standin

namespace mlx::core::metal {

ResidencySets::ResidencySets(MTL::Device* device) : device_(device) {}
ResidencySets::~ResidencySets() = default;

NS::SharedPtr<NS::AutoreleasePool> new_scoped_memory_pool() {
  return NS::TransferPtr(NS::AutoreleasePool::alloc()->init());
}

// The limits are those of a chip of the larger kind ("max").
Device::Device()
    : device_(NS::TransferPtr(MTL::CreateSystemDefaultDevice())),
      residency_sets_(device_.get()),
      arch_("applegpu_g13s"),
      arch_gen_(13),
      max_ops_per_buffer_(mlx_standin::FromEnvironment("MLX_MAX_OPS_PER_BUFFER", 50)),
      max_mb_per_buffer_(mlx_standin::FromEnvironment("MLX_MAX_MB_PER_BUFFER", 50)) {}

Device::~Device() = default;

Device& device(mlx::core::Device) {
  static auto* device = new Device;
  return *device;
}

MTL::Library* Device::get_library(const std::string& name, const CompileOptions&,
                                  const std::function<std::string()>& builder) {
  std::unique_lock lock(library_mtx_);
  auto& library = library_map_[name];
  if (!library) {
    auto pool = new_scoped_memory_pool();
    auto source = NS::String::string(builder().c_str(), NS::UTF8StringEncoding);
    auto options = NS::TransferPtr(MTL::CompileOptions::alloc()->init());
    NS::Error* error = nullptr;
    library = NS::TransferPtr(device_->newLibrary(source, options.get(), &error));
    if (!library) {
      std::string reason = mlx_standin::Text(error);
      library_map_.erase(name);
      throw std::runtime_error("[metal::Device] Unable to build metal library from source\n" +
                               reason);
    }
  }
  return library.get();
}

void Device::clear_library(const std::string& name) {
  std::unique_lock lock(library_mtx_);
  auto it = library_map_.find(name);
  if (it == library_map_.end()) return;
  library_kernels_.erase(it->second.get());
  library_map_.erase(it);
}

MTL::ComputePipelineState* Device::get_kernel(const std::string& base_name, MTL::Library* library,
                                              const std::string& hash_name, const MTLFCList&,
                                              const std::vector<MTL::Function*>&) {
  std::unique_lock lock(kernel_mtx_);
  auto& kernel = library_kernels_[library][hash_name.empty() ? base_name : hash_name];
  if (!kernel) {
    auto pool = new_scoped_memory_pool();
    auto name = NS::String::string(base_name.c_str(), NS::UTF8StringEncoding);
    auto function = NS::TransferPtr(library->newFunction(name));
    NS::Error* error = nullptr;
    if (function)
      kernel = NS::TransferPtr(device_->newComputePipelineState(function.get(), &error));
    if (!kernel) {
      throw std::runtime_error("[metal::Device] Unable to load kernel " + base_name + "\n" +
                               mlx_standin::Text(error));
    }
  }
  return kernel.get();
}

}  // namespace mlx::core::metal
