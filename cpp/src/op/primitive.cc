#include <mlx/ops.h>
#include <mlx/transforms.h>
#include <mlx/utils.h>
#include <mlx/version.h>
#include <mlx_tvm_ffi/op.h>
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/error.h>

#include <algorithm>
#include <charconv>
#include <map>
#include <optional>
#include <set>
#include <utility>

#include "backend/backend.h"
#include "op/launch.h"

namespace mlx_tvm_ffi {

namespace ffi = tvm::ffi;

namespace {

std::string Where(const Options& options) { return "[mlx_tvm_ffi.op " + options.name + "] "; }

// "args.3" -> 3 for the prefix "args."; nothing where the rest is not a number.
std::optional<size_t> IndexAfter(const std::string& text, const std::string& prefix) {
  if (text.compare(0, prefix.size(), prefix) != 0) return std::nullopt;
  size_t index = 0;
  const char* end = text.data() + text.size();
  auto [rest, error] = std::from_chars(text.data() + prefix.size(), end, index);
  if (error != std::errc() || rest != end) return std::nullopt;
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

bool Same(const ffi::Any& a, const ffi::Any& b) {
  if (ffi::AnyEqual()(a, b)) return true;
  auto left = a.as<ffi::Array<ffi::Any>>();
  auto right = b.as<ffi::Array<ffi::Any>>();
  if (!left || !right || left->size() != right->size()) return false;
  for (int64_t i = 0; i < static_cast<int64_t>(left->size()); ++i) {
    if (!Same((*left)[i], (*right)[i])) return false;
  }
  return true;
}

bool Same(const Attributes& a, const Attributes& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](const auto& x, const auto& y) {
    return x.first == y.first && Same(x.second, y.second);
  });
}

bool Same(const std::vector<ShapeDtype>& a, const std::vector<ShapeDtype>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](const auto& x, const auto& y) {
    return x.dtype == y.dtype && x.shape == y.shape;
  });
}

/*! \brief Whether MLX would write an output into this input's memory. */
bool MayDonate(const mx::array& input) {
  // As MLX has it: a much larger buffer is not held by a small output.
  constexpr size_t kSlackBytes = 16384;
  if (!input.is_donatable() || !input.flags().row_contiguous) return false;
#if MLX_VERSION_NUMERIC < 32004
  // Memory of numpy or torch counts as donatable before 0.32.4, and is freed by a closure; MLX's
  // own is by its function, whose address is another in each library.
  if (input.data_shared_ptr()->d.target<void (*)(mx::allocator::Buffer)>() == nullptr) return false;
#endif
  return input.buffer_size() <= input.nbytes() + kSlackBytes;
}

void CheckAlias(const Options& options, int output, const mx::Shape& shape, mx::Dtype dtype,
                const mx::array& input) {
  if (shape == input.shape() && dtype == input.dtype()) return;
  TVM_FFI_THROW(ValueError) << Where(options) << "aliases: expected output " << output
                            << " to be like its input, " << input.dtype() << input.shape()
                            << ", got " << dtype << shape << ". Correct outputs.";
}

/*! \brief One evaluation of a call: mends the inputs, gives the outputs memory and hands the launch
 * to the backend. */
class Evaluation {
 public:
  Evaluation(KernelPrimitive& primitive, const std::vector<mx::array>& inputs,
             std::vector<mx::array>& outputs)
      : call_(primitive.call()),
        kernel_(*call_->kernel),
        stream_(primitive.stream()),
        backend_(GetBackend(stream_.device)),
        inputs_(inputs),
        outputs_(outputs) {}

  void Run() {
    for (size_t i = 0; i < inputs_.size(); ++i) {
      if ((kernel_.contiguous(i) && !inputs_[i].flags().row_contiguous) ||
          (!kernel_.options().offsets && HasOffset(inputs_[i]))) {
        copies_.emplace(i, Copy(inputs_[i]));
      }
    }
    for (size_t i = 0; i < outputs_.size(); ++i) GiveMemory(i);
    bool all_empty = std::all_of(outputs_.begin(), outputs_.end(),
                                 [](const mx::array& output) { return output.size() == 0; });
    if (all_empty) return;  // nothing to write, and an empty grid is an error on a GPU
    if (copies_.empty()) return Encode(inputs_);
    std::vector<mx::array> inputs = inputs_;
    for (auto& [i, copy] : copies_) {
      inputs[i] = copy;
      if (copy.data_shared_ptr().use_count() <= 2) backend_.KeepScratch(copy, stream_);
    }
    Encode(inputs);
  }

 private:
  bool HasOffset(const mx::array& input) const {
    if (input.size() == 0) return false;  // it has no memory
    DLTensor tensor{};
    backend_.Address(input, &tensor);
    return tensor.byte_offset != 0;
  }

  void Encode(const std::vector<mx::array>& inputs) {
    backend_.Encode(stream_, inputs, outputs_,
                    std::make_shared<KernelLaunch>(call_, backend_, stream_, inputs, outputs_));
  }

  // Memory of its own with the input's values, row-contiguous, by MLX's own primitive.
  mx::array Copy(const mx::array& input) {
    // MLX would share the memory of what it takes for row-contiguous.
    mx::array view(input.shape(), input.dtype(), nullptr, {});
    view.copy_shared_buffer(input, input.strides(), {false, false, false}, input.data_size());
    mx::array copy = mx::contiguous(view, false, stream_);
    std::vector<mx::array> outputs{copy};
    backend_.Evaluate(copy.primitive(), {view}, outputs);
    copy.set_status(mx::array::Status::evaluated);
    copy.detach();
    return copy;
  }

  void GiveMemory(size_t output) {
    for (const auto& [aliased, input] : kernel_.options().aliases) {
      if (static_cast<size_t>(aliased) == output) {
        const mx::array& array = outputs_[output];  // of other shapes than the call's, if shapeless
        CheckAlias(kernel_.options(), aliased, array.shape(), array.dtype(),
                   inputs_[static_cast<size_t>(input)]);
        return Alias(&outputs_[output], static_cast<size_t>(input));
      }
    }
    backend_.Allocate(outputs_[output], stream_);
  }

  // The input's own memory where MLX may donate it, else a copy; never one that an earlier output
  // has taken.
  void Alias(mx::array* output, size_t i) {
    const mx::array& input = inputs_[i];
    auto copied = copies_.find(i);
    if (copied != copies_.end() && copied->second.data_shared_ptr().use_count() == 1) {
      output->copy_shared_buffer(copied->second);
    } else if (copied == copies_.end() && MayDonate(input)) {
      output->copy_shared_buffer(input);
    } else {
      output->copy_shared_buffer(Copy(input));
    }
  }

  const std::shared_ptr<const KernelCall>& call_;
  const Kernel& kernel_;
  mx::Stream stream_;
  Backend& backend_;
  const std::vector<mx::array>& inputs_;
  std::vector<mx::array>& outputs_;
  std::map<size_t, mx::array> copies_;
};

[[noreturn]] void ThrowNoRule(const Options& options, const char* transform, const char* option) {
  TVM_FFI_THROW(NotImplementedError)
      << Where(options) << transform << ": expected an op with a rule for it, got none. "
      << "Pass " << option << "= to mlx_tvm_ffi.op.";
  TVM_FFI_UNREACHABLE();
}

// One call for each element of the batch, its outputs stacked.
std::vector<mx::array> MapSequentially(KernelPrimitive& primitive,
                                       const std::vector<mx::array>& inputs,
                                       const std::vector<int>& axes, int batch) {
  const std::vector<ShapeDtype>& specs = *primitive.outputs();
  std::vector<std::vector<mx::array>> parts(specs.size());
  for (int b = 0; b < batch; ++b) {
    std::vector<mx::array> elements;
    for (size_t i = 0; i < inputs.size(); ++i) {
      elements.push_back(axes[i] < 0 ? inputs[i]
                                     : mx::take(inputs[i], b, axes[i], primitive.stream()));
    }
    std::vector<mx::array> results = Apply(primitive.Clone(primitive.outputs()), elements);
    for (size_t i = 0; i < results.size(); ++i) parts[i].push_back(results[i]);
  }
  std::vector<mx::array> outputs;
  for (size_t i = 0; i < specs.size(); ++i) {
    mx::Shape shape = specs[i].shape;
    shape.insert(shape.begin(), batch);
    outputs.push_back(batch == 0 ? mx::zeros(shape, specs[i].dtype, primitive.stream())
                                 : mx::stack(parts[i], 0, primitive.stream()));
  }
  return outputs;
}

void CheckShape(const Options& options, const ShapeDtype& output) {
  uint64_t bytes = mx::size_of(output.dtype);
  for (mx::ShapeElem size : output.shape) {
    if (size < 0) {
      TVM_FFI_THROW(ValueError) << Where(options) << "outputs: expected sizes of 0 or more, got "
                                << size << ". Correct the shape.";
    }
    if (size != 0 && bytes > static_cast<uint64_t>(INT64_MAX) / static_cast<uint64_t>(size)) {
      TVM_FFI_THROW(ValueError)
          << Where(options)
          << "outputs: expected fewer than 2**63 bytes, got more. Correct the shape.";
    }
    bytes *= static_cast<uint64_t>(size);
  }
}

// One call with the batch in front of every input and output.
std::vector<mx::array> MapByBroadcast(KernelPrimitive& primitive,
                                      const std::vector<mx::array>& inputs,
                                      const std::vector<int>& axes, int batch) {
  std::vector<mx::array> batched;
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (axes[i] >= 0) {
      batched.push_back(mx::moveaxis(inputs[i], axes[i], 0, primitive.stream()));
      continue;
    }
    mx::Shape shape = inputs[i].shape();
    shape.insert(shape.begin(), batch);
    batched.push_back(mx::broadcast_to(inputs[i], shape, primitive.stream()));
  }
  std::vector<ShapeDtype> specs = *primitive.outputs();
  for (ShapeDtype& spec : specs) spec.shape.insert(spec.shape.begin(), batch);
  return Apply(primitive.Clone(std::make_shared<const std::vector<ShapeDtype>>(std::move(specs))),
               batched);
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
  if (options_.name.empty() || options_.name.find(' ') != std::string::npos) {
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

KernelPrimitive::KernelPrimitive(mx::Stream stream, std::shared_ptr<const KernelCall> call,
                                 std::shared_ptr<const std::vector<ShapeDtype>> outputs)
    : mx::Primitive(stream), call_(std::move(call)), outputs_(std::move(outputs)) {}

KernelPrimitive::~KernelPrimitive() = default;

void KernelPrimitive::eval_cpu(const std::vector<mx::array>& inputs,
                               std::vector<mx::array>& outputs) {
  Evaluation(*this, inputs, outputs).Run();
}

void KernelPrimitive::eval_gpu(const std::vector<mx::array>& inputs,
                               std::vector<mx::array>& outputs) {
  Evaluation(*this, inputs, outputs).Run();
}

std::vector<mx::array> KernelPrimitive::jvp(const std::vector<mx::array>&,
                                            const std::vector<mx::array>&,
                                            const std::vector<int>&) {
  ThrowNoRule(call_->kernel->options(), "jvp", "jvp");
}

std::vector<mx::array> KernelPrimitive::vjp(const std::vector<mx::array>&,
                                            const std::vector<mx::array>&, const std::vector<int>&,
                                            const std::vector<mx::array>&) {
  ThrowNoRule(call_->kernel->options(), "vjp", "vjp");
}

std::pair<std::vector<mx::array>, std::vector<int>> KernelPrimitive::vmap(
    const std::vector<mx::array>& inputs, const std::vector<int>& axes) {
  int batch = 0;
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (axes[i] >= 0) batch = inputs[i].shape(axes[i]);
  }
  std::vector<mx::array> outputs;
  switch (call_->kernel->options().vmap) {
    case Vmap::kNone:
      ThrowNoRule(call_->kernel->options(), "vmap", "vmap");
    case Vmap::kSequential:
      outputs = MapSequentially(*this, inputs, axes, batch);
      break;
    case Vmap::kBroadcast:
      outputs = MapByBroadcast(*this, inputs, axes, batch);
      break;
  }
  return {outputs, std::vector<int>(outputs.size(), 0)};
}

bool KernelPrimitive::is_equivalent(const mx::Primitive& other) const {
  const auto* peer = dynamic_cast<const KernelPrimitive*>(&other);
  return peer != nullptr && call_->kernel->options().pure &&
         *call_->kernel == *peer->call_->kernel &&
         Same(call_->attributes, peer->call_->attributes) && Same(*outputs_, *peer->outputs_);
}

std::vector<mx::Shape> KernelPrimitive::output_shapes(const std::vector<mx::array>&) {
  TVM_FFI_THROW(ValueError)
      << Where(call_->kernel->options())
      << "outputs: expected a callable for shapes that are not known yet, as under "
         "mx.compile(shapeless=True), got fixed shapes. Pass "
         "outputs=lambda *arrays, **attributes: ... to mlx_tvm_ffi.op.";
  TVM_FFI_UNREACHABLE();
}

std::shared_ptr<KernelPrimitive> KernelPrimitive::Clone(
    std::shared_ptr<const std::vector<ShapeDtype>> outputs) const {
  // stream() is not const in MLX.
  mx::Stream stream = const_cast<KernelPrimitive*>(this)->stream();
  return std::make_shared<KernelPrimitive>(stream, call_, std::move(outputs));
}

void KernelPrimitive::Check(const std::vector<mx::array>& inputs) {
  const Options& options = call_->kernel->options();
  call_->kernel->CheckCall(inputs.size(), outputs_->size(), call_->attributes);
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (inputs[i].id() == 0) {
      TVM_FFI_THROW(ValueError) << Where(options) << "inputs: expected arrays, got number " << i
                                << " without a value. It was moved from.";
    }
  }
  for (const auto& [output, input] : options.aliases) {
    const ShapeDtype& spec = (*outputs_)[static_cast<size_t>(output)];
    CheckAlias(options, output, spec.shape, spec.dtype, inputs[static_cast<size_t>(input)]);
  }
  for (const ShapeDtype& output : *outputs_) {
    CheckShape(options, output);
    if (device() == mx::Device::gpu && output.dtype == mx::float64) {
      TVM_FFI_THROW(ValueError)
          << Where(options)
          << "outputs: expected a dtype that a GPU has, got float64. Use float32, or "
             "stream=mx.cpu.";
    }
  }
}

std::vector<mx::array> Apply(const std::shared_ptr<KernelPrimitive>& primitive,
                             std::vector<mx::array> inputs) {
  if (primitive == nullptr || primitive->call() == nullptr ||
      primitive->call()->kernel == nullptr || primitive->outputs() == nullptr) {
    TVM_FFI_THROW(ValueError) << "[mlx_tvm_ffi.Apply] primitive: expected one with a kernel and "
                                 "outputs, got null. Make them first.";
  }
  primitive->Check(inputs);
  const std::vector<ShapeDtype>& outputs = *primitive->outputs();
  if (outputs.size() == 1) {
    std::vector<mx::array> result;
    result.emplace_back(outputs[0].shape, outputs[0].dtype, primitive, std::move(inputs));
    return result;
  }
  std::vector<mx::Shape> shapes;
  std::vector<mx::Dtype> dtypes;
  for (const ShapeDtype& output : outputs) {
    shapes.push_back(output.shape);
    dtypes.push_back(output.dtype);
  }
  return mx::array::make_arrays(std::move(shapes), dtypes, primitive, inputs);
}

std::vector<mx::array> Call(const std::shared_ptr<const Kernel>& kernel,
                            std::vector<mx::array> inputs, std::vector<ShapeDtype> outputs,
                            Attributes attributes, const mx::StreamOrDevice& stream) {
  struct Shared {
    KernelCall call;
    std::vector<ShapeDtype> outputs;
  };
  // One allocation for both: those that live as long as the node are most of what a call costs.
  auto shared =
      std::make_shared<const Shared>(Shared{{kernel, std::move(attributes)}, std::move(outputs)});
  return Apply(std::make_shared<KernelPrimitive>(
                   ToStream(stream), std::shared_ptr<const KernelCall>(shared, &shared->call),
                   std::shared_ptr<const std::vector<ShapeDtype>>(shared, &shared->outputs)),
               std::move(inputs));
}

std::vector<mx::array> Call(const ffi::Function& function, std::vector<mx::array> inputs,
                            std::vector<ShapeDtype> outputs, Options options,
                            const mx::StreamOrDevice& stream) {
  return Call(std::make_shared<const Kernel>(function, std::move(options)), std::move(inputs),
              std::move(outputs), {}, stream);
}

mx::Stream ToStream(const mx::StreamOrDevice& stream) {
  return std::holds_alternative<std::monostate>(stream) ? CurrentMlxStream()
                                                        : mx::to_stream(stream);
}

StreamRef ToStreamRef(const mx::Stream& stream) {
  return GetBackend(stream.device).MakeInterface(stream.device, stream);
}

}  // namespace mlx_tvm_ffi
