/*! \file Foundation's classes that metal-cpp's callers use. */
#ifndef MLX_TVM_FFI_TESTS_METAL_SIM_FOUNDATION_H_
#define MLX_TVM_FFI_TESTS_METAL_SIM_FOUNDATION_H_

#include <string>
#include <utility>
#include <vector>

#include "objc.h"

namespace metal_sim {

using NSUInteger = unsigned long;

class String : public Object {
 public:
  explicit String(std::string value) : Object(GetClass("NSString")), value(std::move(value)) {}
  const char* Utf8() { return value.c_str(); }
  const char* CString(NSUInteger) { return value.c_str(); }
  NSUInteger Length() { return value.size(); }
  NSUInteger LengthOfBytes(NSUInteger) { return value.size(); }
  bool Equals(void* other) { return FromId<String>(other)->value == value; }
  static void* Make(const char* value, NSUInteger);
  static void* Alloc() { return ToId(new String("")); }
  void* Init(const char* text, NSUInteger) {
    value = text;
    return ToId(this);
  }

  std::string value;
};

class Error : public Object {
 public:
  explicit Error(std::string message) : Object(GetClass("NSError")), message(std::move(message)) {}
  void* Description();
  long Code() { return 1; }

  std::string message;
};

class Array : public Object {
 public:
  Array() : Object(GetClass("NSArray")) {}
  ~Array() override {
    for (Object* object : objects) object->Release();
  }
  NSUInteger Count() { return objects.size(); }
  void* At(NSUInteger index) { return ToId(objects.at(index)); }
  static void* Make(void* const* ids, NSUInteger count);

  std::vector<Object*> objects;  // owned
};

class Url : public Object {
 public:
  explicit Url(std::string path) : Object(GetClass("NSURL")), path(std::move(path)) {}
  const char* Path() { return path.c_str(); }
  static void* Make(void* path);

  std::string path;
};

/*! \brief dispatch_data_t: bytes. */
class Data : public Object {
 public:
  explicit Data(std::string bytes)
      : Object(GetClass("OS_dispatch_data")), bytes(std::move(bytes)) {}

  std::string bytes;
};

std::string ToString(const void* string_id);
void* MakeString(const std::string& value);  // autoreleased
void SetError(void** error, const std::string& message);

}  // namespace metal_sim

#endif  // MLX_TVM_FFI_TESTS_METAL_SIM_FOUNDATION_H_
