#include "foundation.h"

#include <dispatch/dispatch.h>

namespace metal_sim {

void* String::Make(const char* value, NSUInteger) { return MakeString(value); }

void* Error::Description() { return MakeString(message); }

void* Array::Make(void* const* ids, NSUInteger count) {
  auto* array = new Array;
  for (NSUInteger i = 0; i < count; i++) array->objects.push_back(FromId(ids[i])->Retain());
  return ToId(array->Autorelease());
}

void* Url::Make(void* path) { return ToId((new Url(ToString(path)))->Autorelease()); }

std::string ToString(const void* string_id) {
  return string_id ? FromId<String>(string_id)->value : std::string();
}

void* MakeString(const std::string& value) { return ToId((new String(value))->Autorelease()); }

void SetError(void** error, const std::string& message) {
  if (error) *error = ToId((new Error(message))->Autorelease());
}

namespace {

[[maybe_unused]] const bool registered = [] {
  objc_class* string = GetClass("NSString");
  AddMethod<&String::Utf8>(string, "UTF8String");
  AddMethod<&String::Utf8>(string, "fileSystemRepresentation");
  AddMethod<&String::CString>(string, "cStringUsingEncoding:");
  AddMethod<&String::Length>(string, "length");
  AddMethod<&String::LengthOfBytes>(string, "lengthOfBytesUsingEncoding:");
  AddMethod<&String::Equals>(string, "isEqualToString:");
  AddClassMethod<&String::Alloc>(string, "alloc");
  AddMethod<&String::Init>(string, "initWithCString:encoding:");
  AddClassMethod<&String::Make>(string, "stringWithCString:encoding:");
  objc_class* error = GetClass("NSError");
  AddMethod<&Error::Description>(error, "localizedDescription");
  AddMethod<&Error::Description>(error, "description");
  AddMethod<&Error::Code>(error, "code");
  objc_class* array = GetClass("NSArray");
  AddMethod<&Array::Count>(array, "count");
  AddMethod<&Array::At>(array, "objectAtIndex:");
  AddClassMethod<&Array::Make>(array, "arrayWithObjects:count:");
  objc_class* url = GetClass("NSURL");
  AddMethod<&Url::Path>(url, "fileSystemRepresentation");
  AddClassMethod<&Url::Make>(url, "fileURLWithPath:");
  return true;
}();

}  // namespace
}  // namespace metal_sim

extern "C" {

dispatch_data_t dispatch_data_create(const void* bytes, size_t size, dispatch_queue_t,
                                     dispatch_block_t) {
  std::string copy(static_cast<const char*>(bytes), size);
  return static_cast<dispatch_data_t>(metal_sim::ToId(new metal_sim::Data(std::move(copy))));
}

void dispatch_release(void* object) { metal_sim::FromId(object)->Release(); }

}  // extern "C"
