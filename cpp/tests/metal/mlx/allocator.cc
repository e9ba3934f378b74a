// MLX's Metal allocator: an allocation is an MTLBuffer, freed into a cache.
#include <map>
#include <mutex>
#include <unordered_map>

#include "standin.h"

namespace {

using mlx::core::allocator::Buffer;

constexpr size_t kPage = 16384;

class MetalAllocator final : public mlx::core::allocator::Allocator {
 public:
  static MetalAllocator& Get() {
    static auto* allocator = new MetalAllocator;
    return *allocator;
  }

  Buffer malloc(size_t size) override {
    if (size == 0) return Buffer(nullptr);
    MTL::Device* device = mlx::core::metal::device(mlx::core::Device::gpu).mtl_device();
    if (size > device->maxBufferLength()) {
      throw std::runtime_error("[metal::malloc] Attempting to allocate " + std::to_string(size) +
                               " bytes which is greater than the maximum allowed buffer size.");
    }
    if (size > kPage) size = (size + kPage - 1) / kPage * kPage;
    std::lock_guard lock(mutex_);
    auto it = cache_.lower_bound(size);
    MTL::Buffer* buffer;
    if (it != cache_.end() && it->first < 2 * size) {
      buffer = it->second;
      cached_ -= it->first;
      cache_.erase(it);
    } else {
      buffer = device->newBuffer(size, MTL::ResourceStorageModeShared);
    }
    Count(buffer);
    Trim(cache_limit_);
    return Buffer(buffer);
  }

  void free(Buffer buffer) override {
    if (buffer.ptr() == nullptr) return;
    auto* metal = static_cast<MTL::Buffer*>(buffer.ptr());
    std::lock_guard lock(mutex_);
    active_ -= metal->length();
    cached_ += metal->length();
    cache_.emplace(metal->length(), metal);
    Trim(cache_limit_);
  }

  size_t size(Buffer buffer) const override {
    return static_cast<MTL::Buffer*>(buffer.ptr())->length();
  }

  Buffer make_buffer(void* bytes, size_t size) override {
    MTL::Device* device = mlx::core::metal::device(mlx::core::Device::gpu).mtl_device();
    auto* buffer = device->newBuffer(bytes, size, MTL::ResourceStorageModeShared, nullptr);
    if (buffer == nullptr) return Buffer(nullptr);
    std::lock_guard lock(mutex_);
    Count(buffer);
    return Buffer(buffer);
  }

  void release(Buffer buffer) override {
    if (buffer.ptr() == nullptr) return;
    auto* metal = static_cast<MTL::Buffer*>(buffer.ptr());
    {
      std::lock_guard lock(mutex_);
      active_ -= metal->length();
    }
    metal->release();
  }

  size_t Active() { return Read(active_); }
  size_t Peak() { return Read(peak_); }
  size_t Cached() { return Read(cached_); }
  size_t MemoryLimit() { return Read(memory_limit_); }
  void ResetPeak() {
    std::lock_guard lock(mutex_);
    peak_ = 0;
  }
  size_t SetMemoryLimit(size_t limit) {
    std::lock_guard lock(mutex_);
    return std::exchange(memory_limit_, limit);
  }
  size_t SetCacheLimit(size_t limit) {
    std::lock_guard lock(mutex_);
    return std::exchange(cache_limit_, limit);
  }
  void ClearCache() {
    std::lock_guard lock(mutex_);
    Trim(0);
  }

 private:
  size_t Read(const size_t& value) {
    std::lock_guard lock(mutex_);
    return value;
  }
  void Count(MTL::Buffer* buffer) {
    active_ += buffer->length();
    peak_ = std::max(peak_, active_);
  }
  void Trim(size_t limit) {
    while (cached_ > limit) {
      auto it = cache_.begin();
      cached_ -= it->first;
      it->second->release();
      cache_.erase(it);
    }
  }

  std::mutex mutex_;
  std::multimap<size_t, MTL::Buffer*> cache_;
  size_t active_ = 0, peak_ = 0, cached_ = 0;
  size_t memory_limit_ = 12UL << 30, cache_limit_ = 12UL << 30;
};

}  // namespace

namespace mlx::core {

namespace allocator {

Allocator& allocator() { return MetalAllocator::Get(); }

void* Buffer::raw_ptr() { return ptr_ ? static_cast<MTL::Buffer*>(ptr_)->contents() : nullptr; }

bool can_reuse_alien_buffer(void*) { return true; }

}  // namespace allocator

size_t get_active_memory() { return MetalAllocator::Get().Active(); }
size_t get_peak_memory() { return MetalAllocator::Get().Peak(); }
void reset_peak_memory() { MetalAllocator::Get().ResetPeak(); }
size_t get_cache_memory() { return MetalAllocator::Get().Cached(); }
size_t get_memory_limit() { return MetalAllocator::Get().MemoryLimit(); }
size_t set_memory_limit(size_t limit) { return MetalAllocator::Get().SetMemoryLimit(limit); }
size_t set_cache_limit(size_t limit) { return MetalAllocator::Get().SetCacheLimit(limit); }
size_t set_wired_limit(size_t) { return 0; }
void clear_cache() { MetalAllocator::Get().ClearCache(); }

}  // namespace mlx::core
