#include <mlx/ops.h>
#include <mlx/transforms.h>
#include <mlx/utils.h>
#include <mlx_tvm_ffi/op.h>
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/error.h>

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "backend/backend.h"
#include "op/evaluation.h"
#include "op/kernel.h"

namespace mlx_tvm_ffi {

namespace ffi = tvm::ffi;

namespace {

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

[[noreturn]] void ThrowNoRule(const Options& options, const char* transform, const char* option) {
  TVM_FFI_THROW(NotImplementedError)
      << Where(options) << transform << ": expected an op with a rule for it, got none. "
      << "Pass " << option << "= to mlx_tvm_ffi.op.";
  TVM_FFI_UNREACHABLE();
}

// A view, which mx::take would copy.
mx::array Element(const mx::array& batched, int axis, int i, const mx::Stream& stream) {
  mx::Shape start(batched.ndim(), 0);
  mx::Shape stop = batched.shape();
  start[static_cast<size_t>(axis)] = i;
  stop[static_cast<size_t>(axis)] = i + 1;
  return mx::squeeze(mx::slice(batched, start, stop, stream), axis, stream);
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
                                     : Element(inputs[i], axes[i], b, primitive.stream()));
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

KernelPrimitive::KernelPrimitive(mx::Stream stream, std::shared_ptr<const KernelCall> call,
                                 std::shared_ptr<const std::vector<ShapeDtype>> outputs)
    : mx::Primitive(stream), call_(std::move(call)), outputs_(std::move(outputs)) {}

KernelPrimitive::~KernelPrimitive() = default;

void KernelPrimitive::eval_cpu(const std::vector<mx::array>& inputs,
                               std::vector<mx::array>& outputs) {
  Evaluate(*this, inputs, outputs);
}

void KernelPrimitive::eval_gpu(const std::vector<mx::array>& inputs,
                               std::vector<mx::array>& outputs) {
  Evaluate(*this, inputs, outputs);
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
  // Through MLX's bindings, to which this is a ValueError and an error of tvm-ffi none.
  throw std::invalid_argument(
      Where(call_->kernel->options()) +
      "outputs: expected a callable for shapes that are not known yet, as under "
      "mx.compile(shapeless=True), got fixed shapes. Pass "
      "outputs=lambda *arrays, **attributes: ... to mlx_tvm_ffi.op.");
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
  std::shared_ptr<const std::vector<ShapeDtype>> specs(shared, &shared->outputs);
  const KernelCall* call = &shared->call;
  return Apply(std::make_shared<KernelPrimitive>(
                   ToStream(stream), std::shared_ptr<const KernelCall>(std::move(shared), call),
                   std::move(specs)),
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
