// Calls of the C++ API with bad input, by name.
#include <mlx/mlx.h>
#include <mlx_tvm_ffi/op.h>
#include <tvm/ffi/container/tensor.h>

#include <cstdint>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace {

namespace mx = mlx::core;
using mlx_tvm_ffi::Attributes;
using mlx_tvm_ffi::Call;
using mlx_tvm_ffi::Kernel;
using mlx_tvm_ffi::KernelCall;
using mlx_tvm_ffi::KernelPrimitive;
using mlx_tvm_ffi::Options;
using mlx_tvm_ffi::ShapeDtype;
using tvm::ffi::Function;
using tvm::ffi::TensorView;

Function Copy() {
  return Function::FromTyped([](TensorView x, TensorView y) {
    for (int64_t i = 0; i < x.numel(); ++i) {
      static_cast<float*>(y.data_ptr())[i] = static_cast<float*>(x.data_ptr())[i];
    }
  });
}

Options WithSpec(std::vector<std::string> arg_spec) {
  Options options;
  options.name = "copy";
  options.arg_spec = std::move(arg_spec);
  return options;
}

std::shared_ptr<const Kernel> MakeKernel(Options options) {
  return std::make_shared<const Kernel>(Copy(), std::move(options));
}

std::shared_ptr<const std::vector<ShapeDtype>> Outputs() {
  return std::make_shared<const std::vector<ShapeDtype>>(
      std::vector<ShapeDtype>{{{2}, mx::float32}});
}

void Evaluate(std::vector<mx::array> arrays) { mx::eval(std::move(arrays)); }

const std::map<std::string, std::function<void()>>& Cases() {
  static const mx::array x = mx::ones({2}, mx::float32, mx::Device::cpu);
  static const std::vector<ShapeDtype> out = {{{2}, mx::float32}};
  constexpr mx::ShapeElem kHuge = std::numeric_limits<mx::ShapeElem>::max();
  static const std::map<std::string, std::function<void()>> cases = {
      {"null function", [] { Call(Function(nullptr), {x}, out); }},
      {"null kernel", [] { Call(std::shared_ptr<const Kernel>(), {x}, out); }},
      {"null primitive", [] { mlx_tvm_ffi::Apply(nullptr, {x}); }},
      {"null call",
       [] {
         auto primitive =
             std::make_shared<KernelPrimitive>(mlx_tvm_ffi::ToStream(), nullptr, Outputs());
         mlx_tvm_ffi::Apply(primitive, {x});
       }},
      {"null outputs",
       [] {
         auto call = std::make_shared<const KernelCall>(KernelCall{MakeKernel({}), {}});
         mlx_tvm_ffi::Apply(
             std::make_shared<KernelPrimitive>(mlx_tvm_ffi::ToStream(), call, nullptr), {x});
       }},
      {"no outputs", [] { Call(Copy(), {x}, {}); }},
      {"no inputs", [] { Evaluate(Call(Copy(), {}, out, {}, mx::Device::cpu)); }},
      {"too many inputs", [] { Evaluate(Call(Copy(), {x, x, x}, out, {}, mx::Device::cpu)); }},
      {"more inputs than the spec",
       [] { Call(Copy(), {x, x}, out, WithSpec({"args.0", "rets"})); }},
      {"moved from",
       [] {
         mx::array gone = x + 1;
         mx::array taken = std::move(gone);
         Call(Copy(), {gone}, out);
       }},
      {"unknown in spec", [] { Call(Copy(), {x}, out, WithSpec({"arg", "rets"})); }},
      {"twice in spec", [] { Call(Copy(), {x}, out, WithSpec({"args", "args", "rets"})); }},
      {"number in spec", [] { Call(Copy(), {x}, out, WithSpec({"args.7", "rets"})); }},
      {"missing attribute",
       [] { Call(MakeKernel(WithSpec({"args", "rets", "attrs.beta"})), {x}, out); }},
      {"surplus attribute",
       [] { Call(MakeKernel(WithSpec({"args", "rets"})), {x}, out, {{"beta", 1.0}}); }},
      {"name with a space",
       [] {
         Options options;
         options.name = "a b";
         Call(Copy(), {x}, out, options);
       }},
      {"negative size", [] { Call(Copy(), {x}, {{{-1}, mx::float32}}); }},
      {"huge size", [] { Call(Copy(), {x}, {{{kHuge, kHuge, kHuge}, mx::float32}}); }},
      {"negative alias",
       [] {
         Options options;
         options.aliases = {{0, -1}};
         Call(Copy(), {x}, out, options);
       }},
      {"alias out of range",
       [] {
         Options options;
         options.aliases = {{0, 3}};
         Call(Copy(), {x}, out, options);
       }},
      {"flags for other inputs",
       [] {
         Options options;
         options.contiguous = {true, false};
         Call(Copy(), {x}, out, options);
       }},
      {"stream of nobody",
       [] { Evaluate(Call(Copy(), {x}, out, {}, mx::Stream(12345, mx::Device::cpu))); }},
      {"device of nobody", [] { Call(Copy(), {x}, out, {}, mx::Device(mx::Device::cpu, 77)); }},
      {"no gradient",
       [] {
         mx::grad([](const mx::array& x) {
           return mx::sum(Call(Copy(), {x}, out, {}, mx::Device::cpu)[0]);
         })(x);
       }},
      {"kernel raises",
       [] {
         auto fail = Function::FromTyped(
             [](TensorView, TensorView) { TVM_FFI_THROW(IndexError) << "from the kernel"; });
         Options options;
         options.name = "fail";
         Evaluate(Call(fail, {x}, out, options, mx::Device::cpu));
       }},
  };
  return cases;
}

// Runs a case, then checks that the rest still works.
void Run(const std::string& name) {
  try {
    Cases().at(name)();
  } catch (...) {
    mx::array x = mx::arange(2, mx::float32, mx::Device::cpu);
    mx::array y = Call(Copy(), {x}, {{{2}, mx::float32}}, {}, mx::Device::cpu)[0];
    if (!mx::array_equal(x, y, mx::Device::cpu).item<bool>()) {
      TVM_FFI_THROW(AssertionError) << "wrong after an error";
    }
    throw;
  }
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(run, Run)
