#include "metal/serialized.h"

#include <tvm/ffi/error.h>

#include <string>
#include <utility>
#include <vector>

namespace mlx_tvm_ffi {
namespace {

// Little-endian reader that stays inside its bytes. The first failure is kept; reads after it give
// nothing.
class Reader {
 public:
  explicit Reader(std::string_view bytes) : bytes_(bytes) {}

  uint32_t U32() { return static_cast<uint32_t>(Int(4)); }

  std::string_view Str(const char* what) {
    const size_t size = Count(what, 1);
    const std::string_view out = bytes_.substr(at_, size);
    at_ += size;
    return out;
  }

  // A number of items of at least `item_bytes` each: one that the remaining bytes cannot hold is a
  // failure.
  size_t Count(const char* what, size_t item_bytes) {
    const size_t start = at_;
    if (bytes_.size() - at_ < 8) return Fail(what, "a number of 8 bytes", start);
    const uint64_t count = Int(8);
    if (count > (bytes_.size() - at_) / item_bytes) {
      return Fail(what, "a number that the remaining bytes can hold", start);
    }
    return static_cast<size_t>(count);
  }

  size_t Fail(const char* what, const char* expected, size_t at) {
    if (!failed()) {
      what_ = what;
      expected_ = expected;
      failed_at_ = at;
    }
    at_ = bytes_.size();
    return 0;
  }

  [[nodiscard]] bool failed() const { return what_ != nullptr; }
  [[nodiscard]] size_t at() const { return at_; }
  [[nodiscard]] bool done() const { return at_ == bytes_.size(); }

  [[noreturn]] void Throw() const {
    TVM_FFI_THROW(ValueError) << "[mlx_tvm_ffi.metal.module] " << what_ << ": expected "
                              << expected_ << " at byte " << failed_at_ << ", got " << bytes_.size()
                              << " bytes in all. The module is damaged or of an unknown layout.";
    TVM_FFI_UNREACHABLE();
  }

 private:
  uint64_t Int(size_t size) {
    if (bytes_.size() - at_ < size) return 0;
    uint64_t value = 0;
    for (size_t i = size; i-- > 0;) {
      value = value << 8U | static_cast<unsigned char>(bytes_[at_ + i]);
    }
    at_ += size;
    return value;
  }

  std::string_view bytes_;
  size_t at_ = 0;
  const char* what_ = nullptr;
  const char* expected_ = nullptr;
  size_t failed_at_ = 0;
};

// What the bytes say, before any rule is applied. Views point into the bytes.
struct Raw {
  struct Function {
    std::string_view key;
    std::vector<DLDataType> arg_types;
    std::vector<std::string> launch_tags;
  };
  std::string_view format;
  std::vector<Function> functions;
  std::vector<std::pair<std::string_view, std::string_view>> payloads;
};

// Layout: format, functions by name, payloads by name. A function has a name that nobody uses,
// argument types, launch tags and, in newer modules, one extra tag per argument.
Raw Read(Reader& in, bool has_extra_tags) {
  Raw raw;
  raw.format = in.Str("format");
  for (size_t n = in.Count("function table", 32); n > 0 && !in.failed(); --n) {
    Raw::Function& f = raw.functions.emplace_back();
    f.key = in.Str("function name");
    in.Str("function name");
    for (size_t i = in.Count("argument types", 4); i > 0; --i) {
      const uint32_t t = in.U32();
      f.arg_types.push_back({static_cast<uint8_t>(t), static_cast<uint8_t>(t >> 8U),
                             static_cast<uint16_t>(t >> 16U)});
    }
    for (size_t i = in.Count("launch tags", 8); i > 0 && !in.failed(); --i) {
      f.launch_tags.emplace_back(in.Str("launch tag"));
    }
    if (!has_extra_tags) continue;
    for (size_t i = in.Count("extra argument tags", 4); i > 0 && !in.failed(); --i) {
      const size_t at = in.at();
      if (in.U32() != 0) in.Fail("extra argument tag", "0, since Metal has no tensor maps,", at);
    }
  }
  for (size_t n = in.Count("payload table", 16); n > 0 && !in.failed(); --n) {
    const std::string_view key = in.Str("payload name");
    raw.payloads.emplace_back(key, in.Str("payload"));
  }
  if (!in.failed() && !in.done()) in.Fail("end", "no bytes after the payloads", in.at());
  return raw;
}

[[noreturn]] void ThrowTable(const char* what) {
  TVM_FFI_THROW(ValueError) << "[mlx_tvm_ffi.metal.module] " << what << ". The module is damaged.";
  TVM_FFI_UNREACHABLE();
}

}  // namespace

KernelSources ParseSerialized(std::string_view bytes) {
  Reader reader(bytes);
  Raw raw = Read(reader, /*has_extra_tags=*/true);
  if (reader.failed()) {
    Reader older(bytes);
    raw = Read(older, /*has_extra_tags=*/false);
    if (older.failed()) reader.Throw();
  }

  KernelSources kernels;
  for (const Raw::Function& f : raw.functions) {
    KernelSource kernel;
    kernel.info = MakeKernelInfo(f.key, f.arg_types, f.launch_tags);
    kernel.format = ParsePayloadFormat(f.key, raw.format);
    if (!kernels.emplace(f.key, std::move(kernel)).second) {
      ThrowTable("function table: expected each name once, got one twice");
    }
  }
  for (const auto& [key, payload] : raw.payloads) {
    const auto it = kernels.find(key);
    if (it == kernels.end()) ThrowTable("payload table: expected a function's name, got another");
    if (!it->second.payload.empty())
      ThrowTable("payload table: expected each name once, got one twice");
    CheckPayload(key, it->second.format, payload);
    it->second.payload = payload;
  }
  if (kernels.empty() || raw.payloads.size() != kernels.size()) {
    ThrowTable(
        "payload table: expected one payload for each of one or more functions, got another "
        "number");
  }
  return kernels;
}

}  // namespace mlx_tvm_ffi
