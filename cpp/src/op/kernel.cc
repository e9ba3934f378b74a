#include "op/kernel.h"

#include <mlx/utils.h>
#include <mlx_tvm_ffi/op.h>
#include <tvm/ffi/error.h>

#include <algorithm>
#include <charconv>
#include <optional>
#include <set>
#include <utility>

#include "op/kernel.h"

namespace mlx_tvm_ffi {

namespace ffi = tvm::ffi;

std::string Where(const Options& options) { return "[mlx_tvm_ffi.op " + options.name + "] "; }

void ThrowNamed(const Options& options, const std::string& kind, const std::string& message,
                const std::string& backtrace) {
  throw tvm::ffi::Error(kind, Where(options) + kind + ": " + message, backtrace);
}

void CheckAlias(const Options& options, int output, const mx::Shape& shape, mx::Dtype dtype,
                const mx::array& input) {
  if (shape == input.shape() && dtype == input.dtype()) return;
  TVM_FFI_THROW(ValueError) << Where(options) << "aliases: expected output " << output
                            << " to be like its input, " << input.dtype() << input.shape()
                            << ", got " << dtype << shape << ". Correct outputs.";
}

namespace {

// "args.3" -> 3 for the prefix "args."; nothing where the rest is not a number. Each has one name:
// "args.03" is none.
std::optional<size_t> IndexAfter(const std::string& text, const std::string& prefix) {
  if (text.compare(0, prefix.size(), prefix) != 0) return std::nullopt;
  size_t index = 0;
  const char* end = text.data() + text.size();
  auto [rest, error] = std::from_chars(text.data() + prefix.size(), end, index);
  if (error != std::errc() || rest != end) return std::nullopt;
  if (text.size() > prefix.size() + 1 && text[prefix.size()] == '0') return std::nullopt;
  return index;
}

Kernel::Slot ParseSlot(const Options& options, const std::string& text) {
  using Kind = Kernel::Slot::Kind;
  const std::string attribute = "attrs.";
  if (text == "args") return {Kind::kArgs};
  if (text == "rets") return {Kind::kRets};
  if (text == "ctx.stream") return {Kind::kStream};
  if (auto index = IndexAfter(text, "args.")) return {Kind::kArg, *index};
  if (auto index = IndexAfter(text, "rets.")) return {Kind::kRet, *index};
  if (text.size() > attribute.size() && text.compare(0, attribute.size(), attribute) == 0) {
    return {Kind::kAttribute, 0, text.substr(attribute.size())};
  }
  TVM_FFI_THROW(ValueError) << Where(options)
                            << "arg_spec: expected \"args\", \"args.N\", \"rets\", \"rets.N\", "
                               "\"attrs.NAME\" or \"ctx.stream\", got \""
                            << text << "\". Correct the name.";
  TVM_FFI_UNREACHABLE();
}

}  // namespace

Kernel::Kernel(ffi::Function function, Options options)
    : function_(std::move(function)),
      options_(std::move(options)),
      capture_(options_.capture ? Capture::kUnknown : Capture::kNo) {
  if (function_ == nullptr) {
    TVM_FFI_THROW(TypeError)
        << Where(options_)
        << "function: expected a tvm_ffi.Function, got null. Load the kernel first.";
  }
  bool printable = std::none_of(options_.name.begin(), options_.name.end(),
                                [](unsigned char c) { return c <= ' ' || c == 127; });
  if (options_.name.empty() || !printable) {
    TVM_FFI_THROW(ValueError) << Where(options_) << "name: expected a name without spaces, got \""
                              << options_.name << "\". Use letters, digits, '_' and '.'.";
  }
  if (options_.arg_spec.empty()) {
    slots_ = {{Slot::Kind::kArgs}, {Slot::Kind::kRets}};
    returns_outputs_ = false;
    attributes_follow_ = true;
  }
  std::set<std::string> seen;
  for (const std::string& text : options_.arg_spec) {
    slots_.push_back(ParseSlot(options_, text));
    if (!seen.insert(text).second) {
      TVM_FFI_THROW(ValueError) << Where(options_) << "arg_spec: expected each name once, got \""
                                << text << "\" twice. Remove one.";
    }
    Slot::Kind kind = slots_.back().kind;
    if (kind == Slot::Kind::kRets || kind == Slot::Kind::kRet) returns_outputs_ = false;
  }
  std::set<int> aliased;
  for (const auto& [output, input] : options_.aliases) {
    if (output < 0 || input < 0 || !aliased.insert(output).second) {
      TVM_FFI_THROW(ValueError)
          << Where(options_)
          << "aliases: expected each output at most once and no negative number, got {" << output
          << ": " << input << "}. Correct the numbers.";
    }
  }
}

Kernel::~Kernel() = default;

bool Kernel::contiguous(size_t input) const {
  const std::vector<bool>& flags = options_.contiguous;
  return flags.empty() || flags[flags.size() == 1 ? 0 : input];
}

bool Kernel::operator==(const Kernel& other) const {
  const Options& a = options_;
  const Options& b = other.options_;
  return this == &other ||
         (function_.same_as(other.function_) && a.name == b.name && a.arg_spec == b.arg_spec &&
          a.contiguous == b.contiguous && a.offsets == b.offsets && a.aliases == b.aliases &&
          a.pure == b.pure && a.capture == b.capture && a.vmap == b.vmap);
}

void Kernel::CheckCall(size_t inputs, size_t outputs, const Attributes& attributes) const {
  if (outputs == 0) {
    TVM_FFI_THROW(ValueError)
        << Where(options_)
        << "outputs: expected at least one, got none. Say what the kernel writes.";
  }
  if (options_.contiguous.size() > 1 && options_.contiguous.size() != inputs) {
    TVM_FFI_THROW(ValueError) << Where(options_) << "contiguous: expected one flag for each of "
                              << inputs << " inputs, got " << options_.contiguous.size()
                              << ". Pass one bool for all.";
  }
  for (const auto& [output, input] : options_.aliases) {
    if (static_cast<size_t>(output) >= outputs || static_cast<size_t>(input) >= inputs) {
      TVM_FFI_THROW(ValueError) << Where(options_) << "aliases: expected outputs below " << outputs
                                << " and inputs below " << inputs << ", got {" << output << ": "
                                << input << "}. Correct the numbers.";
    }
  }
  if (attributes_follow_) return;

  size_t named_inputs = 0, named_outputs = 0, named_attributes = 0;
  for (const Slot& slot : slots_) {
    switch (slot.kind) {
      case Slot::Kind::kArgs:
        named_inputs += inputs;
        break;
      case Slot::Kind::kRets:
        named_outputs += outputs;
        break;
      case Slot::Kind::kArg:
      case Slot::Kind::kRet: {
        bool is_input = slot.kind == Slot::Kind::kArg;
        size_t count = is_input ? inputs : outputs;
        if (slot.index >= count) {
          TVM_FFI_THROW(ValueError)
              << Where(options_) << "arg_spec: expected numbers below the " << count
              << (is_input ? " inputs" : " outputs") << ", got \"" << (is_input ? "args." : "rets.")
              << slot.index << "\". Pass more arrays or correct the number.";
        }
        ++(is_input ? named_inputs : named_outputs);
        break;
      }
      case Slot::Kind::kAttribute:
        ++named_attributes;
        if (std::none_of(attributes.begin(), attributes.end(),
                         [&](const auto& attribute) { return attribute.first == slot.name; })) {
          TVM_FFI_THROW(ValueError)
              << Where(options_) << "attributes: expected " << slot.name
              << ", which arg_spec names, got none. Pass " << slot.name << "=.";
        }
        break;
      case Slot::Kind::kStream:
        break;
    }
  }
  if (named_inputs != inputs) {
    TVM_FFI_THROW(ValueError) << Where(options_) << "inputs: expected the " << named_inputs
                              << " that arg_spec names, got " << inputs
                              << ". Name each input once.";
  }
  if (!returns_outputs_ && named_outputs != outputs) {
    TVM_FFI_THROW(ValueError) << Where(options_) << "outputs: expected the " << named_outputs
                              << " that arg_spec names, got " << outputs
                              << ". Name each output once.";
  }
  if (named_attributes != attributes.size()) {
    for (const auto& [name, value] : attributes) {
      if (std::none_of(slots_.begin(), slots_.end(), [&, &key = name](const Slot& slot) {
            return slot.kind == Slot::Kind::kAttribute && slot.name == key;
          })) {
        TVM_FFI_THROW(ValueError) << Where(options_)
                                  << "attributes: expected those that arg_spec names, got " << name
                                  << ". Add \"attrs." << name << "\" to arg_spec.";
      }
    }
  }
}

}  // namespace mlx_tvm_ffi
