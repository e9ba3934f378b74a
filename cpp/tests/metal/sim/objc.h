/*! \file The few parts of an Objective-C runtime that metal-cpp needs. */
#ifndef MLX_TVM_FFI_TESTS_METAL_SIM_OBJC_H_
#define MLX_TVM_FFI_TESTS_METAL_SIM_OBJC_H_

#include <objc/runtime.h>

#include <atomic>
#include <cstddef>
#include <string>
#include <unordered_map>

struct objc_class {
  objc_class* isa = nullptr;  // the metaclass: class methods live there
  objc_class* super = nullptr;
  std::string name;
  bool is_meta = false;
  std::unordered_map<SEL, void*> methods;
  std::atomic<long> live{0};

  void* Find(SEL selector) const;
};

namespace metal_sim {

/*! \brief Base of every simulated object. */
class Object {
 public:
  explicit Object(objc_class* cls) : isa(cls) { isa->live++; }
  virtual ~Object() { isa->live--; }
  Object(const Object&) = delete;
  Object& operator=(const Object&) = delete;

  Object* Retain();
  void Release();
  Object* Autorelease();
  unsigned long RetainCount() const { return static_cast<unsigned long>(references_.load()); }

  objc_class* isa;

 private:
  std::atomic<long> references_{1};
};

// objc_msgSend wants `isa` as an object's first word, where C++ has its vtable pointer: an id
// points at `isa`.
inline void* ToId(Object* object) { return object ? &object->isa : nullptr; }

template <class T = Object>
T* FromId(const void* id) {
  if (id == nullptr) return nullptr;
  static const ptrdiff_t offset = [] {
    alignas(Object) static char storage[sizeof(Object)];
    auto* object = reinterpret_cast<Object*>(storage);
    return reinterpret_cast<char*>(&object->isa) - storage;
  }();
  auto* object =
      reinterpret_cast<Object*>(const_cast<char*>(static_cast<const char*>(id)) - offset);
  return static_cast<T*>(object);
}

/*! \brief The class of that name, made at its first use. */
objc_class* GetClass(const char* name, objc_class* super = nullptr);

template <auto F>
struct Implementation;
template <class T, class R, class... A, R (T::*F)(A...)>
struct Implementation<F> {
  static R Call(void* self, SEL, A... args) { return (FromId<T>(self)->*F)(args...); }
};
template <class R, class... A, R (*F)(A...)>
struct Implementation<F> {
  static R Call(void*, SEL, A... args) { return F(args...); }
};

template <auto F>
void AddMethod(objc_class* cls, const char* selector) {
  cls->methods[sel_registerName(selector)] = reinterpret_cast<void*>(&Implementation<F>::Call);
}
template <auto F>
void AddClassMethod(objc_class* cls, const char* selector) {
  AddMethod<F>(cls->isa, selector);
}

/*! \brief Count the calling thread's messages apart, as the GPU's and its handlers'. */
void CountAsGpuThread();

}  // namespace metal_sim

#endif  // MLX_TVM_FFI_TESTS_METAL_SIM_OBJC_H_
