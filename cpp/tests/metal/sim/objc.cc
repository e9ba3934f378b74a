#include "objc.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <utility>
#include <vector>

#include "sim.h"

namespace metal_sim {
namespace {

// Everything static here is leaked: MLX's thread-local encoders outlive static destructors.
std::recursive_mutex& Mutex() {
  static auto* mutex = new std::recursive_mutex;
  return *mutex;
}

auto& Selectors() {
  static auto* selectors = new std::unordered_map<std::string, const std::string*>;
  return *selectors;
}

auto& Classes() {
  static auto* classes = new std::unordered_map<std::string, objc_class*>;
  return *classes;
}

class Pool;
std::vector<Pool*>& Pools() {
  thread_local auto* pools = new std::vector<Pool*>;
  return *pools;
}

class Pool : public Object {
 public:
  Pool() : Object(GetClass("NSAutoreleasePool")) { Pools().push_back(this); }
  ~Pool() override {
    auto& pools = Pools();
    while (!pools.empty()) {  // pools inside this one die with it
      Pool* pool = pools.back();
      pools.pop_back();
      for (Object* object : std::exchange(pool->objects_, {})) object->Release();
      if (pool == this) break;
    }
  }
  void Add(Object* object) { objects_.push_back(object); }
  void* Init() { return ToId(this); }
  void Drain() { Release(); }
  static void* Alloc() { return ToId(new Pool); }

 private:
  std::vector<Object*> objects_;
};

// An object of a class that is not modelled, such as a descriptor: it keeps its properties.
class PropertyBag : public Object {
 public:
  using Object::Object;
  std::unordered_map<std::string, uint64_t> properties;
};

uint64_t GetProperty(void* self, SEL selector) {
  return FromId<PropertyBag>(self)->properties[sel_getName(selector)];
}

void SetProperty(void* self, SEL selector, uint64_t value) {
  std::string name = sel_getName(selector) + strlen("set");
  name.pop_back();
  name[0] = static_cast<char>(tolower(name[0]));
  FromId<PropertyBag>(self)->properties[name] = value;
}

void* AllocPropertyBag(void* cls, SEL) {
  return ToId(new PropertyBag(static_cast<objc_class*>(cls)));
}

struct Root : Object {  // NSObject's methods
  void* RetainId() { return ToId(Retain()); }
  void ReleaseId() { Release(); }
  void* AutoreleaseId() { return ToId(Autorelease()); }
  unsigned long Count() { return RetainCount(); }
  unsigned long Hash() { return reinterpret_cast<unsigned long>(this); }
  bool IsEqual(void* other) { return ToId(this) == other; }
  bool RespondsTo(SEL selector) { return isa->Find(selector) != nullptr; }
  void* Init() { return ToId(this); }
  void* MethodSignature(SEL) { return nullptr; }
};

objc_class* NewClass(const char* name, objc_class* super) {
  auto* meta = new objc_class;
  meta->name = name;
  meta->is_meta = true;
  meta->super = super ? super->isa : nullptr;
  auto* cls = new objc_class;
  cls->name = name;
  cls->isa = meta;
  cls->super = super;
  Classes()[name] = cls;
  return cls;
}

objc_class* RootClass() {
  static objc_class* root = [] {
    objc_class* cls = NewClass("NSObject", nullptr);
    AddMethod<&Root::RetainId>(cls, "retain");
    AddMethod<&Root::ReleaseId>(cls, "release");
    AddMethod<&Root::AutoreleaseId>(cls, "autorelease");
    AddMethod<&Root::Count>(cls, "retainCount");
    AddMethod<&Root::Hash>(cls, "hash");
    AddMethod<&Root::IsEqual>(cls, "isEqual:");
    AddMethod<&Root::RespondsTo>(cls, "respondsToSelector:");
    AddMethod<&Root::Init>(cls, "init");
    AddMethod<&Root::MethodSignature>(cls, "methodSignatureForSelector:");
    cls->isa->methods[sel_registerName("alloc")] = reinterpret_cast<void*>(&AllocPropertyBag);
    return cls;
  }();
  return root;
}

bool HasProperties(const objc_class* cls) {
  return !cls->is_meta && (cls->name.ends_with("Descriptor") || cls->name == "MTLCompileOptions" ||
                           cls->name == "MTLLinkedFunctions");
}

std::unordered_map<SEL, long>& MessageCounts(bool gpu) {
  static auto* counts = new std::unordered_map<SEL, long>[2];
  return counts[gpu ? 1 : 0];
}

thread_local bool is_gpu_thread = false;

}  // namespace

Object* Object::Retain() {
  references_.fetch_add(1);
  return this;
}

void Object::Release() {
  if (references_.fetch_sub(1) == 1) delete this;
}

Object* Object::Autorelease() {
  if (Pools().empty()) {
    Fault("%s autoreleased with no pool in place: it leaks", isa->name.c_str());
  } else {
    Pools().back()->Add(this);
  }
  return this;
}

objc_class* GetClass(const char* name, objc_class* super) {
  std::lock_guard lock(Mutex());
  objc_class* root = RootClass();
  if (auto it = Classes().find(name); it != Classes().end()) return it->second;
  objc_class* cls = NewClass(name, super ? super : root);
  if (!strcmp(name, "NSAutoreleasePool")) {
    AddClassMethod<&Pool::Alloc>(cls, "alloc");
    AddMethod<&Pool::Init>(cls, "init");
    AddMethod<&Pool::Drain>(cls, "drain");
  }
  return cls;
}

void CountAsGpuThread() { is_gpu_thread = true; }

std::map<std::string, long> Messages(bool gpu) {
  std::lock_guard lock(Mutex());
  std::map<std::string, long> result;
  for (auto& [selector, count] : MessageCounts(gpu)) result[sel_getName(selector)] = count;
  return result;
}

std::map<std::string, long> LiveObjects() {
  std::lock_guard lock(Mutex());
  std::map<std::string, long> result;
  for (auto& [name, cls] : Classes()) {
    if (cls->live.load() != 0) result[name] = cls->live.load();
  }
  return result;
}

void ResetMessages() {
  std::lock_guard lock(Mutex());
  MessageCounts(false).clear();
  MessageCounts(true).clear();
}

}  // namespace metal_sim

void* objc_class::Find(SEL selector) const {
  for (auto* cls = this; cls; cls = cls->super) {
    if (auto it = cls->methods.find(selector); it != cls->methods.end()) return it->second;
  }
  return nullptr;
}

extern "C" {

SEL sel_registerName(const char* name) {
  std::lock_guard lock(metal_sim::Mutex());
  auto& selector = metal_sim::Selectors()[name];
  if (!selector) selector = new std::string(name);
  return reinterpret_cast<SEL>(const_cast<std::string*>(selector));
}

const char* sel_getName(SEL selector) {
  return reinterpret_cast<const std::string*>(selector)->c_str();
}

Class objc_lookUpClass(const char* name) { return metal_sim::GetClass(name); }
Class objc_getClass(const char* name) { return metal_sim::GetClass(name); }
Protocol* objc_getProtocol(const char*) { return nullptr; }

__attribute__((used)) void* metal_sim_lookup(void* self, SEL selector) {
  auto* cls = *static_cast<objc_class**>(self);
  std::lock_guard lock(metal_sim::Mutex());
  metal_sim::MessageCounts(metal_sim::is_gpu_thread)[selector]++;
  if (void* method = cls->Find(selector)) return method;
  const char* name = sel_getName(selector);
  if (metal_sim::HasProperties(cls)) {
    const char* colon = strchr(name, ':');
    if (!colon) return reinterpret_cast<void*>(&metal_sim::GetProperty);
    if (!strncmp(name, "set", 3) && !colon[1]) {
      return reinterpret_cast<void*>(&metal_sim::SetProperty);
    }
  }
  fprintf(stderr, "metal_sim: %c[%s %s]: unrecognized selector\n", cls->is_meta ? '+' : '-',
          cls->name.c_str(), name);
  abort();
}

}  // extern "C"

// Keep every argument register, find the method, jump to it. A message to nil returns zero.
#define METAL_SIM_TRAMPOLINE(NAME, SELF, SELECTOR)                                         \
  asm(".text\n.globl " NAME "\n.type " NAME ",@function\n" NAME                            \
      ":\n"                                                                                \
      "  test %" SELF ", %" SELF                                                           \
      "\n  jz 1f\n"                                                                        \
      "  push %rbp\n  mov %rsp, %rbp\n  sub $0xd0, %rsp\n"                                 \
      "  mov %rdi,0(%rsp)\n  mov %rsi,8(%rsp)\n  mov %rdx,16(%rsp)\n  mov %rcx,24(%rsp)\n" \
      "  mov %r8,32(%rsp)\n  mov %r9,40(%rsp)\n  mov %rax,48(%rsp)\n"                      \
      "  movaps %xmm0,64(%rsp)\n  movaps %xmm1,80(%rsp)\n  movaps %xmm2,96(%rsp)\n"        \
      "  movaps %xmm3,112(%rsp)\n  movaps %xmm4,128(%rsp)\n  movaps %xmm5,144(%rsp)\n"     \
      "  movaps %xmm6,160(%rsp)\n  movaps %xmm7,176(%rsp)\n"                               \
      "  mov %" SELF ", %rdi\n  mov %" SELECTOR                                            \
      ", %rsi\n"                                                                           \
      "  call metal_sim_lookup@PLT\n  mov %rax, %r11\n"                                    \
      "  mov 0(%rsp),%rdi\n  mov 8(%rsp),%rsi\n  mov 16(%rsp),%rdx\n  mov 24(%rsp),%rcx\n" \
      "  mov 32(%rsp),%r8\n  mov 40(%rsp),%r9\n  mov 48(%rsp),%rax\n"                      \
      "  movaps 64(%rsp),%xmm0\n  movaps 80(%rsp),%xmm1\n  movaps 96(%rsp),%xmm2\n"        \
      "  movaps 112(%rsp),%xmm3\n  movaps 128(%rsp),%xmm4\n  movaps 144(%rsp),%xmm5\n"     \
      "  movaps 160(%rsp),%xmm6\n  movaps 176(%rsp),%xmm7\n"                               \
      "  leave\n  jmp *%r11\n"                                                             \
      "1: xor %eax,%eax\n  xor %edx,%edx\n  pxor %xmm0,%xmm0\n  ret\n"                     \
      ".size " NAME ",.-" NAME "\n")
METAL_SIM_TRAMPOLINE("objc_msgSend", "rdi", "rsi");
METAL_SIM_TRAMPOLINE("objc_msgSend_fpret", "rdi", "rsi");
// A structure returned in memory: the hidden pointer comes first.
METAL_SIM_TRAMPOLINE("objc_msgSend_stret", "rsi", "rdx");
