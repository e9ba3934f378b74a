#include "resources.h"

#include <dlfcn.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <unordered_map>

#include "report.h"

namespace metal_sim {
namespace {

constexpr NSUInteger kPage = 16384;
constexpr std::chrono::seconds kDeadlock(10);
constexpr uint64_t kForeverMs = 1000000000;
constexpr std::string_view kLibraryMagic = "MTLB";

struct Registry {
  std::mutex mutex;
  std::unordered_map<const Tracked*, uint64_t> live;
};

Registry& GetRegistry() {
  static auto* registry = new Registry;
  return *registry;
}

uint64_t NextNumber() {
  static std::atomic<uint64_t> next{1};
  return next++;
}

bool IsLive(const Tracked* object, uint64_t number) {
  std::lock_guard lock(GetRegistry().mutex);
  auto it = GetRegistry().live.find(object);
  return it != GetRegistry().live.end() && it->second == number;
}

// Bytes of an MTLDataType that is a scalar.
size_t SizeOfType(NSUInteger type) {
  enum : NSUInteger { kHalf = 16, kShort = 37, kUShort = 41, kChar = 45, kUChar = 49, kBool = 53 };
  if (type == kChar || type == kUChar || type == kBool) return 1;
  if (type == kHalf || type == kShort || type == kUShort) return 2;
  return 4;
}

std::string ReadFile(const std::string& path) {
  std::ostringstream text;
  text << std::ifstream(path, std::ios::binary).rdbuf();
  return text.str();
}

// Compiles MSL with the command in METAL_SIM_MSLC, which gets the paths of a source and of a
// library to make. \return The library's bytes.
std::string Compile(const std::string& source, void** error) {
  const char* compiler = getenv("METAL_SIM_MSLC");
  if (!compiler) {
    SetError(error, "METAL_SIM_MSLC, the command that compiles MSL, is not set");
    return "";
  }
  std::string base = std::filesystem::temp_directory_path() / "metal_sim.XXXXXX";
  if (!mkdtemp(base.data())) {
    SetError(error, "no temporary folder");
    return "";
  }
  std::ofstream(base + "/kernel.metal") << source;
  std::string command = std::string(compiler) + " " + base + "/kernel.metal " + base +
                        "/kernel.so > " + base + "/log 2>&1 < /dev/null";
  std::string bytes;
  if (system(command.c_str()) == 0) {
    bytes = ReadFile(base + "/kernel.so");
  } else {
    SetError(error, ReadFile(base + "/log"));
  }
  std::filesystem::remove_all(base);
  return bytes;
}

}  // namespace

Tracked::Tracked(objc_class* cls) : Labelled(cls), number(NextNumber()) {
  std::lock_guard lock(GetRegistry().mutex);
  GetRegistry().live[this] = number;
}

Tracked::~Tracked() {
  std::lock_guard lock(GetRegistry().mutex);
  GetRegistry().live.erase(this);
}

template <class T>
bool Unretained<T>::Alive() const {
  return IsLive(object, number);
}
template struct Unretained<Buffer>;
template struct Unretained<Pipeline>;
template struct Unretained<Fence>;

Buffer::Buffer(void* contents, NSUInteger length, bool owned)
    : Tracked(GetClass("SimBuffer")),
      contents(static_cast<char*>(contents)),
      length(length),
      owned_(owned) {}

Buffer::~Buffer() {
  ForgetAccesses(this);
  if (owned_) {
    memset(contents, 0xDD, length);  // so that a late reader sees it
    free(contents);
  }
  if (heap) heap->Release();
}

Buffer* NewBuffer(NSUInteger length) {
  void* contents = aligned_alloc(kPage, (length + kPage - 1) / kPage * kPage);
  memset(contents, 0xCD, length);
  return new Buffer(contents, length, true);
}

void* Heap::NewHeapBuffer(NSUInteger length, NSUInteger) {
  Buffer* buffer = NewBuffer(length);
  buffer->heap = Retain();
  return ToId(buffer);
}

Library* Library::FromBytes(const std::string& bytes, void** error) {
  if (!bytes.starts_with(kLibraryMagic)) {
    SetError(error, "Invalid library file");
    return nullptr;
  }
  int file = memfd_create("metal_library", 0);
  std::string_view image = std::string_view(bytes).substr(kLibraryMagic.size());
  bool written = write(file, image.data(), image.size()) == static_cast<ssize_t>(image.size());
  // A path of its own for each library: dlopen takes one path for one library.
  std::string path = "/proc/" + std::to_string(getpid()) + "/fd/" + std::to_string(file);
  void* handle = written ? dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL) : nullptr;
  if (!handle || !dlsym(handle, "metal_kernel_names")) {
    SetError(error, "Invalid library file");
    close(file);
    return nullptr;
  }
  return new Library(handle);  // the file stays open, so that no other gets its path
}

Library* Library::FromFile(const std::string& path, void** error) {
  if (access(path.c_str(), R_OK) != 0) {
    SetError(error, "library not found: " + path);
    return nullptr;
  }
  return FromBytes(ReadFile(path), error);
}

Library* Library::FromSource(const std::string& source, void** error) {
  Log("library from %zu bytes of source", source.size());
  static auto* compiled = new std::map<std::string, std::string>;  // by source
  static auto* mutex = new std::mutex;
  std::lock_guard lock(*mutex);
  std::string& bytes = (*compiled)[source];
  if (bytes.empty()) bytes = Compile(source, error);
  return bytes.empty() ? nullptr : FromBytes(std::string(kLibraryMagic) + bytes, error);
}

Kernel Library::Find(const std::string& name) const {
  return reinterpret_cast<Kernel>(dlsym(handle_, ("metal_kernel_" + name).c_str()));
}

uint64_t Library::Slots(const std::string& name) const {
  void* slots = dlsym(handle_, ("metal_slots_" + name).c_str());
  return *static_cast<uint64_t*>(slots);
}

void* Library::NewFunction(void* name) {
  std::string text = ToString(name);
  return Find(text) ? ToId(new Function(this, text)) : nullptr;
}

const Constant* Library::Constants() const {
  return static_cast<const Constant*>(dlsym(handle_, "metal_constants"));
}

void* Library::NewFunctionWithConstants(void* name, void* values, void** error) {
  auto* function = FromId<Function>(NewFunction(name));
  if (!function) {
    SetError(error, "no function " + ToString(name));
    return nullptr;
  }
  auto* given = FromId<ConstantValues>(values);
  for (const Constant* constant = Constants(); constant->name; constant++) {
    std::string value;
    if (auto it = given->at.find(constant->index); it != given->at.end()) value = it->second;
    if (auto it = given->named.find(constant->name); it != given->named.end()) value = it->second;
    if (value.size() != constant->size) {
      SetError(error, std::string("no value of its type for constant ") + constant->name);
      function->Release();
      return nullptr;
    }
    function->constants.emplace_back(constant, value);
  }
  return ToId(function);
}

void ConstantValues::SetAt(const void* value, NSUInteger type, NSUInteger index) {
  at[index].assign(static_cast<const char*>(value), SizeOfType(type));
}

void ConstantValues::SetNamed(const void* value, NSUInteger type, void* name) {
  named[ToString(name)].assign(static_cast<const char*>(value), SizeOfType(type));
}

void Pipeline::Run(const Dispatch& dispatch) const {
  // The constants are the library's own variables: one kernel at a time.
  static auto* mutex = new std::mutex;
  std::unique_lock<std::mutex> lock;
  if (!function->constants.empty()) lock = std::unique_lock(*mutex);
  for (auto& [constant, value] : function->constants) {
    memcpy(constant->variable, value.data(), value.size());
  }
  kernel(&dispatch);
}

void* Library::FunctionNames() {
  auto* names = new Array;
  using Names = const char* const*;
  for (auto list = static_cast<Names>(dlsym(handle_, "metal_kernel_names")); *list; list++) {
    names->objects.push_back(new String(*list));
  }
  return ToId(names->Autorelease());
}

Function::Function(Library* library, std::string name)
    : Labelled(GetClass("SimFunction")), library(library), name(std::move(name)) {
  library->Retain();
}

Pipeline::Pipeline(Function* function)
    : Tracked(GetClass("SimComputePipelineState")),
      function(function),
      kernel(function->library->Find(function->name)),
      slots(function->library->Slots(function->name)) {
  function->Retain();
}

void Event::HostSaw(uint64_t value) {
  EncoderSet done;
  {
    std::lock_guard lock(mutex_);
    for (auto& [at, encoders] : done_at_) {
      if (at <= value) done.Add(encoders);
    }
  }
  std::lock_guard lock(OrderMutex());
  SeenByHost().Add(done);
}

uint64_t Event::Value() {
  uint64_t value;
  {
    std::lock_guard lock(mutex_);
    value = value_;
  }
  HostSaw(value);
  return value;
}

void Event::SetValue(uint64_t value) { SignalFromGpu(value, {}); }

bool Event::WaitFor(uint64_t value, uint64_t timeout_ms) {
  GetCounters().event_host_waits++;
  bool forever = timeout_ms > kForeverMs;
  auto timeout = forever ? std::chrono::milliseconds(kDeadlock)
                         : std::chrono::milliseconds(static_cast<int64_t>(timeout_ms));
  bool reached;
  {
    std::unique_lock lock(mutex_);
    reached = changed_.wait_for(lock, timeout, [&] { return value_ >= value; });
  }
  if (reached) HostSaw(value);
  if (!reached && forever) Fault("deadlock: the host waits for an event that nothing signals");
  return reached;
}

void Event::SignalFromGpu(uint64_t value, const EncoderSet& done) {
  {
    std::lock_guard lock(mutex_);
    done_at_[value].Add(done);
    value_ = std::max(value_, value);
  }
  changed_.notify_all();
}

EncoderSet Event::WaitOnGpu(uint64_t value) {
  std::unique_lock lock(mutex_);
  if (!changed_.wait_for(lock, kDeadlock, [&] { return value_ >= value; })) {
    Fault("deadlock: the GPU waits for an event that nothing signals");
  }
  auto it = done_at_.lower_bound(value);
  return it == done_at_.end() ? EncoderSet() : it->second;
}

namespace {

[[maybe_unused]] const bool registered = [] {
  objc_class* labelled = GetClass("SimLabelled");
  AddMethod<&Labelled::SetLabel>(labelled, "setLabel:");
  AddMethod<&Labelled::Label>(labelled, "label");
  objc_class* buffer = GetClass("SimBuffer", labelled);
  AddMethod<&Buffer::Contents>(buffer, "contents");
  AddMethod<&Buffer::Length>(buffer, "length");
  AddMethod<&Buffer::Length>(buffer, "allocatedSize");
  AddMethod<&Buffer::StorageMode>(buffer, "storageMode");
  AddMethod<&Buffer::HeapId>(buffer, "heap");
  AddMethod<&Buffer::GpuAddress>(buffer, "gpuAddress");
  AddMethod<&Buffer::DidModify>(buffer, "didModifyRange:");
  objc_class* heap = GetClass("SimHeap", labelled);
  AddMethod<&Heap::NewHeapBuffer>(heap, "newBufferWithLength:options:");
  AddMethod<&Heap::AllocatedSize>(heap, "allocatedSize");
  objc_class* library = GetClass("SimLibrary", labelled);
  AddMethod<&Library::NewFunction>(library, "newFunctionWithName:");
  AddMethod<&Library::NewFunctionWithConstants>(library,
                                                "newFunctionWithName:constantValues:error:");
  AddMethod<&Library::FunctionNames>(library, "functionNames");
  AddClassMethod<&ConstantValues::Alloc>(GetClass("MTLFunctionConstantValues"), "alloc");
  objc_class* values = GetClass("SimFunctionConstantValues");
  AddMethod<&ConstantValues::SetAt>(values, "setConstantValue:type:atIndex:");
  AddMethod<&ConstantValues::SetNamed>(values, "setConstantValue:type:withName:");
  AddMethod<&Function::Name>(GetClass("SimFunction", labelled), "name");
  objc_class* pipeline = GetClass("SimComputePipelineState", labelled);
  AddMethod<&Pipeline::MaxThreads>(pipeline, "maxTotalThreadsPerThreadgroup");
  AddMethod<&Pipeline::SimdWidth>(pipeline, "threadExecutionWidth");
  AddMethod<&Pipeline::StaticThreadgroupBytes>(pipeline, "staticThreadgroupMemoryLength");
  GetClass("SimFence", labelled);
  objc_class* event = GetClass("SimSharedEvent", labelled);
  AddMethod<&Event::Value>(event, "signaledValue");
  AddMethod<&Event::SetValue>(event, "setSignaledValue:");
  AddMethod<&Event::WaitFor>(event, "waitUntilSignaledValue:timeoutMS:");
  objc_class* set = GetClass("SimResidencySet", labelled);
  AddMethod<&ResidencySet::Add>(set, "addAllocation:");
  AddMethod<&ResidencySet::Add>(set, "removeAllocation:");
  AddMethod<&ResidencySet::Nothing>(set, "commit");
  AddMethod<&ResidencySet::Nothing>(set, "requestResidency");
  AddMethod<&ResidencySet::Nothing>(set, "endResidency");
  return true;
}();

}  // namespace
}  // namespace metal_sim
