// The one device, and Metal's C functions.
#include "commands.h"
#include "report.h"

namespace metal_sim {
namespace {

constexpr NSUInteger kPage = 16384;
constexpr long kFamilyMetal4 = 5002;

class Architecture final : public Object {
 public:
  Architecture() : Object(GetClass("SimArchitecture")) {}
  void* Name() { return MakeString("applegpu_g13s"); }
};

class Device final : public Labelled {
 public:
  Device() : Labelled(GetClass("SimDevice")) {}

  static Device& Get() {
    static auto* device = new Device;
    return *device;
  }

  void* Name() { return MakeString("Simulated Metal"); }
  void* GetArchitecture() {
    static auto* architecture = new Architecture;
    return ToId(architecture);
  }
  bool SupportsFamily(long family) { return family != kFamilyMetal4; }
  bool HasUnifiedMemory() { return true; }
  NSUInteger MaxBufferLength() { return 8UL << 30; }
  uint64_t RecommendedMemory() { return 12UL << 30; }
  NSUInteger AllocatedSize() { return 0; }
  Size MaxThreadsPerGroup() { return {1024, 1024, 1024}; }
  NSUInteger MaxThreadgroupBytes() { return 32768; }
  uint64_t RegistryId() { return 1; }

  void* NewQueue() { return ToId(new Queue); }
  void* NewQueueOfLength(NSUInteger) { return NewQueue(); }
  void* NewBufferOfLength(NSUInteger length, NSUInteger) {
    return length ? ToId(NewBuffer(length)) : nullptr;
  }
  void* NewBufferWithBytes(const void* bytes, NSUInteger length, NSUInteger) {
    Buffer* buffer = NewBuffer(length);
    __builtin_memcpy(buffer->contents, bytes, length);
    return ToId(buffer);
  }
  void* NewBufferNoCopy(void* bytes, NSUInteger length, NSUInteger, Handler) {
    bool whole_pages = reinterpret_cast<uintptr_t>(bytes) % kPage == 0 && length % kPage == 0;
    return whole_pages ? ToId(new Buffer(bytes, length, false)) : nullptr;
  }
  void* NewHeap(void*) { return ToId(new Heap(1UL << 22)); }
  void* NewFence() { return ToId(new Fence); }
  void* NewEvent() { return ToId(new Event); }
  void* NewResidencySet(void*, void**) { return ToId(new ResidencySet); }

  void* NewLibraryFromFile(void* path, void** error) {
    return ToId(Library::FromFile(ToString(path), error));
  }
  void* NewLibraryFromUrl(void* url, void** error) {
    return ToId(Library::FromFile(FromId<Url>(url)->path, error));
  }
  void* NewLibraryFromData(void* data, void** error) {
    return ToId(Library::FromBytes(FromId<Data>(data)->bytes, error));
  }
  void* NewLibraryFromSource(void* source, void*, void** error) {
    return ToId(Library::FromSource(ToString(source), error));
  }
  void* NewPipeline(void* id, void**) {
    auto* function = FromId<Function>(id);
    return ToId(new Pipeline(function));
  }
};

[[maybe_unused]] const bool registered = [] {
  AddMethod<&Architecture::Name>(GetClass("SimArchitecture"), "name");
  objc_class* device = GetClass("SimDevice", GetClass("SimLabelled"));
  AddMethod<&Device::Name>(device, "name");
  AddMethod<&Device::GetArchitecture>(device, "architecture");
  AddMethod<&Device::SupportsFamily>(device, "supportsFamily:");
  AddMethod<&Device::HasUnifiedMemory>(device, "hasUnifiedMemory");
  AddMethod<&Device::MaxBufferLength>(device, "maxBufferLength");
  AddMethod<&Device::RecommendedMemory>(device, "recommendedMaxWorkingSetSize");
  AddMethod<&Device::AllocatedSize>(device, "currentAllocatedSize");
  AddMethod<&Device::MaxThreadsPerGroup>(device, "maxThreadsPerThreadgroup");
  AddMethod<&Device::MaxThreadgroupBytes>(device, "maxThreadgroupMemoryLength");
  AddMethod<&Device::RegistryId>(device, "registryID");
  AddMethod<&Device::NewQueue>(device, "newCommandQueue");
  AddMethod<&Device::NewQueueOfLength>(device, "newCommandQueueWithMaxCommandBufferCount:");
  AddMethod<&Device::NewBufferOfLength>(device, "newBufferWithLength:options:");
  AddMethod<&Device::NewBufferWithBytes>(device, "newBufferWithBytes:length:options:");
  AddMethod<&Device::NewBufferNoCopy>(device,
                                      "newBufferWithBytesNoCopy:length:options:deallocator:");
  AddMethod<&Device::NewHeap>(device, "newHeapWithDescriptor:");
  AddMethod<&Device::NewFence>(device, "newFence");
  AddMethod<&Device::NewEvent>(device, "newEvent");
  AddMethod<&Device::NewEvent>(device, "newSharedEvent");
  AddMethod<&Device::NewResidencySet>(device, "newResidencySetWithDescriptor:error:");
  AddMethod<&Device::NewLibraryFromFile>(device, "newLibraryWithFile:error:");
  AddMethod<&Device::NewLibraryFromUrl>(device, "newLibraryWithURL:error:");
  AddMethod<&Device::NewLibraryFromData>(device, "newLibraryWithData:error:");
  AddMethod<&Device::NewLibraryFromSource>(device, "newLibraryWithSource:options:error:");
  AddMethod<&Device::NewPipeline>(device, "newComputePipelineStateWithFunction:error:");
  return true;
}();

}  // namespace
}  // namespace metal_sim

extern "C" {

void* MTLCreateSystemDefaultDevice() { return metal_sim::ToId(metal_sim::Device::Get().Retain()); }

void* MTLCopyAllDevices() {
  auto* devices = new metal_sim::Array;
  devices->objects.push_back(metal_sim::Device::Get().Retain());
  return metal_sim::ToId(devices);
}

void* MTLCopyAllDevicesWithObserver(void**, void*) { return MTLCopyAllDevices(); }
void MTLRemoveDeviceObserver(void*) {}

}  // extern "C"
