#include "metal/kernel_info.h"

#include <tvm/ffi/error.h>

#include <algorithm>
#include <array>
#include <optional>

namespace mlx_tvm_ffi {
namespace {

// A name comes from a file: what is shown of it is short and printable.
std::string Quoted(std::string_view text) {
  constexpr size_t kShown = 64;
  std::string out = "'";
  for (char c : text.substr(0, kShown)) out += (c >= ' ' && c <= '~') ? c : '?';
  return out + (text.size() > kShown ? "...'" : "'");
}

std::string Prefix(std::string_view kernel) {
  return "[mlx_tvm_ffi.metal] kernel " + Quoted(kernel) + ": ";
}

constexpr const char* kScalars = "int32, uint32, int64, uint64 or float32";

std::optional<KernelInfo::Scalar> ScalarOf(DLDataType t) {
  using Scalar = KernelInfo::Scalar;
  if (t.lanes != 1) return std::nullopt;
  if (t.code == kDLInt && t.bits == 32) return Scalar::kInt32;
  if (t.code == kDLInt && t.bits == 64) return Scalar::kInt64;
  if (t.code == kDLUInt && t.bits == 32) return Scalar::kUInt32;
  if (t.code == kDLUInt && t.bits == 64) return Scalar::kUInt64;
  if (t.code == kDLFloat && t.bits == 32) return Scalar::kFloat32;
  return std::nullopt;
}

// Older compilers wrote "tir." for what is "tirx." now. Tags that only tell CUDA something set
// nothing.
bool IsTag(std::string_view tag, std::string_view name) {
  return tag == "tirx." + std::string(name) || tag == "tir." + std::string(name);
}

bool IsCudaOnly(std::string_view tag) {
  return IsTag(tag, "use_programtic_dependent_launch") || IsTag(tag, "use_cooperative_launch") ||
         IsTag(tag, "use_required_block_dimension");
}

std::optional<KernelInfo::Launch> LaunchOf(std::string_view tag) {
  constexpr std::array<std::string_view, 6> kAxes = {"blockIdx.x",  "blockIdx.y",  "blockIdx.z",
                                                     "threadIdx.x", "threadIdx.y", "threadIdx.z"};
  const auto* it = std::find(kAxes.begin(), kAxes.end(), tag);
  if (it != kAxes.end()) return static_cast<KernelInfo::Launch>(it - kAxes.begin());
  if (IsTag(tag, "use_dyn_shared_memory")) return KernelInfo::Launch::kDynamicMemory;
  return std::nullopt;
}

bool StartsWith(std::string_view bytes, std::string_view start) {
  return bytes.substr(0, start.size()) == start;
}

// A compiled library, of one architecture or of several.
bool IsMetallib(std::string_view bytes) {
  return StartsWith(bytes, "MTLB") || StartsWith(bytes, "\xcb\xfe\xba\xbe") ||
         StartsWith(bytes, "\xca\xfe\xba\xbe");
}

// Text without control characters other than white space, in UTF-8 by shape.
bool IsText(std::string_view bytes) {
  size_t follow = 0;
  for (char c : bytes) {
    const auto u = static_cast<unsigned char>(c);
    if (follow > 0) {
      if ((u & 0xc0U) != 0x80U) return false;
      --follow;
    } else if (u >= 0x80U) {
      if (u < 0xc2U || u > 0xf4U) return false;
      follow = u >= 0xf0U ? 3 : u >= 0xe0U ? 2 : 1;
    } else if ((u < ' ' && (u < '\t' || u > '\r')) || u == 0x7fU) {
      return false;
    }
  }
  return follow == 0;
}

}  // namespace

KernelInfo MakeKernelInfo(std::string_view kernel, const std::vector<DLDataType>& arg_types,
                          const std::vector<std::string>& launch_tags) {
  // Buffer slots of Metal's argument table; the packed scalars take one.
  constexpr size_t kSlots = 31;
  if (kernel.empty() || kernel.find('\0') != std::string_view::npos) {
    TVM_FFI_THROW(ValueError) << Prefix(kernel) << "expected a name, got " << kernel.size()
                              << " bytes that are none.";
  }
  KernelInfo info;
  for (size_t i = 0; i < arg_types.size(); ++i) {
    const DLDataType t = arg_types[i];
    if (t.code == kDLOpaqueHandle) {
      if (!info.scalars.empty()) {
        TVM_FFI_THROW(ValueError) << Prefix(kernel)
                                  << "expected buffers before scalars, got argument " << i
                                  << ", a buffer, after a scalar.";
      }
      ++info.num_buffers;
    } else {
      info.scalars.push_back(ToScalar(kernel, t));
    }
  }
  if (const size_t slots = info.num_buffers + (info.scalars.empty() ? 0 : 1); slots > kSlots) {
    TVM_FFI_THROW(ValueError) << Prefix(kernel) << "expected at most " << kSlots
                              << " buffer slots, got " << slots << ".";
  }
  for (const std::string& tag : launch_tags) {
    if (IsCudaOnly(tag)) continue;
    const auto what = LaunchOf(tag);
    if (!what) {
      TVM_FFI_THROW(ValueError) << Prefix(kernel)
                                << "expected launch tags that Metal has (blockIdx.x to "
                                   "threadIdx.z), got "
                                << Quoted(tag) << ".";
    }
    if (std::find(info.launch.begin(), info.launch.end(), *what) != info.launch.end()) {
      TVM_FFI_THROW(ValueError) << Prefix(kernel) << "expected each launch tag once, got "
                                << Quoted(tag) << " twice.";
    }
    info.launch.push_back(*what);
  }
  return info;
}

KernelInfo::Scalar ToScalar(std::string_view kernel, DLDataType dtype) {
  if (auto scalar = ScalarOf(dtype)) return *scalar;
  TVM_FFI_THROW(ValueError) << Prefix(kernel) << "expected scalars of " << kScalars
                            << ", got type code " << int{dtype.code} << " of " << int{dtype.bits}
                            << " bits and " << dtype.lanes << " lanes.";
  TVM_FFI_UNREACHABLE();
}

PayloadFormat ParsePayloadFormat(std::string_view kernel, std::string_view name) {
  if (name == "metal") return PayloadFormat::kMetal;
  if (name == "metallib") return PayloadFormat::kMetallib;
  TVM_FFI_THROW(ValueError) << Prefix(kernel) << "expected format 'metal' or 'metallib', got "
                            << Quoted(name) << ".";
  TVM_FFI_UNREACHABLE();
}

void CheckPayload(std::string_view kernel, PayloadFormat declared, std::string_view payload) {
  const bool metallib = IsMetallib(payload);
  const bool source = !metallib && !payload.empty() && IsText(payload);
  if (declared == PayloadFormat::kMetal ? source : metallib) return;
  auto error = [&](const char* found, const char* advice) {
    TVM_FFI_THROW(ValueError) << Prefix(kernel) << "expected format '"
                              << (declared == PayloadFormat::kMetal ? "metal" : "metallib")
                              << "' as declared, got " << found << ", " << payload.size()
                              << " bytes that start with " << Quoted(payload.substr(0, 16)) << ". "
                              << advice;
  };
  if (payload.empty()) error("nothing", "Compile the module again.");
  if (metallib) error("a compiled library", "Declare it as 'metallib'.");
  if (source) error("source text", "Declare it as 'metal', or compile it.");
  error("neither source text nor a compiled library", "Compile the module again.");
}

}  // namespace mlx_tvm_ffi
