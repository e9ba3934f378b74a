/*! \file What a command refers to: buffers, pipelines, fences, events. */
#ifndef MLX_TVM_FFI_TESTS_METAL_SIM_RESOURCES_H_
#define MLX_TVM_FFI_TESTS_METAL_SIM_RESOURCES_H_

#include <condition_variable>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>

#include "foundation.h"
#include "kernel.h"
#include "order.h"
#include "sim.h"

namespace metal_sim {

struct Size {
  NSUInteger width, height, depth;
  NSUInteger Volume() const { return width * height * depth; }
};

class Labelled : public Object {
 public:
  using Object::Object;
  void SetLabel(void* label) { label_ = ToString(label); }
  void* Label() { return MakeString(label_); }

 private:
  std::string label_;
};

/*! \brief An object that a command may outlive: commands keep its address and number, which tell
 *  whether it is still there. */
class Tracked : public Labelled {
 public:
  explicit Tracked(objc_class* cls);
  ~Tracked() override;
  const uint64_t number;
};

/*! \brief A command's reference, which keeps nothing alive. */
template <class T>
struct Unretained {
  T* object = nullptr;
  uint64_t number = 0;

  Unretained() = default;
  explicit Unretained(T* object) : object(object), number(object ? object->number : 0) {}
  bool Alive() const;
};

class Buffer final : public Tracked {
 public:
  Buffer(void* contents, NSUInteger length, bool owned);
  ~Buffer() override;
  void* Contents() { return contents; }
  NSUInteger Length() { return length; }
  NSUInteger StorageMode() { return 0; }
  void* HeapId() { return heap ? ToId(heap) : nullptr; }
  uint64_t GpuAddress() { return reinterpret_cast<uint64_t>(contents); }
  void DidModify(NSUInteger, NSUInteger) {}

  char* contents;
  NSUInteger length;
  Object* heap = nullptr;  // owned

 private:
  bool owned_;
};

Buffer* NewBuffer(NSUInteger length);

class Heap final : public Labelled {
 public:
  explicit Heap(NSUInteger size) : Labelled(GetClass("SimHeap")), size_(size) {}
  void* NewHeapBuffer(NSUInteger length, NSUInteger);
  NSUInteger AllocatedSize() { return size_; }

 private:
  NSUInteger size_;
};

/*! \brief Values for function constants, by index and by name. */
class ConstantValues final : public Object {
 public:
  ConstantValues() : Object(GetClass("SimFunctionConstantValues")) {}
  static void* Alloc() { return ToId(new ConstantValues); }
  void SetAt(const void* value, NSUInteger type, NSUInteger index);
  void SetNamed(const void* value, NSUInteger type, void* name);

  std::map<NSUInteger, std::string> at;
  std::map<std::string, std::string> named;
};

class Library final : public Labelled {
 public:
  explicit Library(void* handle) : Labelled(GetClass("SimLibrary")), handle_(handle) {}
  static Library* FromSource(const std::string& source, void** error);
  static Library* FromBytes(const std::string& bytes, void** error);
  static Library* FromFile(const std::string& path, void** error);

  /*! \brief The kernel's entry point; null where there is none of that name. */
  Kernel Find(const std::string& name) const;
  /*! \brief The buffer slots that the kernel uses, and in the upper half those it only reads. */
  uint64_t Slots(const std::string& name) const;
  /*! \brief Its function constants, ended by one without a name. */
  const Constant* Constants() const;

  void* NewFunction(void* name);
  void* NewFunctionWithConstants(void* name, void* constants, void** error);
  void* FunctionNames();

 private:
  void* handle_;
};

class Function final : public Labelled {
 public:
  Function(Library* library, std::string name);
  ~Function() override { library->Release(); }
  void* Name() { return MakeString(name); }

  Library* library;  // owned
  std::string name;
  std::vector<std::pair<const Constant*, std::string>> constants;
};

class Pipeline final : public Tracked {
 public:
  explicit Pipeline(Function* function);
  ~Pipeline() override { function->Release(); }
  NSUInteger MaxThreads() { return 1024; }
  NSUInteger SimdWidth() { return 32; }
  NSUInteger StaticThreadgroupBytes() { return 0; }
  bool Uses(int slot) const { return slots >> slot & 1; }
  bool OnlyReads(int slot) const { return slots >> (32 + slot) & 1; }
  void Run(const Dispatch& dispatch) const;

  Function* function;  // owned
  Kernel kernel;
  uint64_t slots;
};

class Fence final : public Tracked {
 public:
  Fence() : Tracked(GetClass("SimFence")) {}
  int updater = -1;  // the encoder that updated it last
};

class Event final : public Labelled {
 public:
  Event() : Labelled(GetClass("SimSharedEvent")) {}
  uint64_t Value();
  void SetValue(uint64_t value);
  bool WaitFor(uint64_t value, uint64_t timeout_ms);

  void SignalFromGpu(uint64_t value, const EncoderSet& done);
  /*! \brief Wait on the GPU. \return The encoders that the signal comes after. */
  EncoderSet WaitOnGpu(uint64_t value);

 private:
  void HostSaw(uint64_t value);

  std::mutex mutex_;
  std::condition_variable changed_;
  uint64_t value_ = 0;
  std::map<uint64_t, EncoderSet> done_at_;
};

class ResidencySet final : public Labelled {
 public:
  ResidencySet() : Labelled(GetClass("SimResidencySet")) {}
  void Add(void*) {}
  void Nothing() {}
};

}  // namespace metal_sim

#endif  // MLX_TVM_FFI_TESTS_METAL_SIM_RESOURCES_H_
