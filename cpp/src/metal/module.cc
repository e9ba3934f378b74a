// Metal kernels as tvm-ffi has them: modules in TVM's calling convention, and single functions in
// the user's own.
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/dtype.h>
#include <tvm/ffi/extra/module.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/reflection/registry.h>

#include <algorithm>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "metal/arguments.h"
#include "metal/encode.h"
#include "metal/serialized.h"

namespace mlx_tvm_ffi {
namespace {

namespace ffi = tvm::ffi;

// A kernel called as TVM's host code calls it: buffers, scalars, launch arguments.
void CallAsTvm(MetalKernel& kernel, const KernelInfo& info, const ffi::PackedArgs& packed) {
  const KernelArguments args(kernel.function.name, packed);
  args.ExpectCount(info.num_args());
  MetalDispatch dispatch;
  size_t next = 0;
  for (; next < info.num_buffers; ++next) args.Bind(next, &dispatch.slots[next]);
  dispatch.num_slots = info.num_buffers;

  std::vector<uint64_t> scalars(info.scalars.size());
  for (size_t i = 0; i < scalars.size(); ++i) scalars[i] = args.Scalar(next++, info.scalars[i]);
  if (!scalars.empty()) {
    dispatch.slots[dispatch.num_slots++] = {nullptr, 0, scalars.data(),
                                            scalars.size() * sizeof(uint64_t)};
  }
  for (const KernelInfo::Launch what : info.launch) {
    // A shape with a zero gives a grid with one; TVM launches that as 1, and its kernels check
    // their bounds.
    const auto size = static_cast<uint64_t>(std::max(args.Int(next++, 0, UINT32_MAX), int64_t{1}));
    if (what == KernelInfo::Launch::kDynamicMemory) continue;  // TVM's Metal code declares its own
    const auto axis = static_cast<size_t>(what);
    (axis < 3 ? dispatch.grid : dispatch.group)[axis % 3] = size;
  }
  kernel.Encode(dispatch);
}

// What TVM's host code asks for before a launch. MLX has one Metal device, and the stream knows it.
void SetDevice(int device_type, int device_id) {
  if (device_type == kDLMetal && device_id == 0) return;
  TVM_FFI_THROW(ValueError) << "[mlx_tvm_ffi.metal] device: expected Metal's device 0, got type "
                            << device_type << ", id " << device_id << ".";
}

/*!
 * \brief A module of Metal kernels. It answers "__tvm_set_device" itself, so that nothing has to be
 * registered where TVM's own runtime would look for it.
 *
 * Of ModuleObj only kind, GetPropertyMask and GetFunction are overridden: their slots and the
 * representation of what they give are the same in every tvm-ffi that we support.
 */
class MetalModule final : public ffi::ModuleObj {
 public:
  explicit MetalModule(KernelSources sources) {
    for (auto& [name, source] : sources) {
      // Fast math is what TVM's own runtime compiles with.
      auto kernel = std::make_shared<MetalKernel>(MetalFunction{
          name, source.format, std::move(source.payload), /*fast_math=*/true, {}, {}});
      auto call = [kernel = std::move(kernel), info = std::move(source.info)](
                      ffi::PackedArgs args, ffi::Any*) { CallAsTvm(*kernel, info, args); };
      functions_.emplace(name, ffi::Function::FromPacked(std::move(call)));
    }
    functions_.emplace("__tvm_set_device", ffi::Function::FromTyped(SetDevice));
  }

  const char* kind() const final { return "metal"; }
  int GetPropertyMask() const final { return ffi::Module::kRunnable; }
  ffi::Optional<ffi::Function> GetFunction(const ffi::String& name) final {
    const auto it = functions_.find(std::string_view(name.data(), name.size()));
    if (it == functions_.end()) return std::nullopt;
    return it->second;
  }

 private:
  std::map<std::string, ffi::Function, std::less<>> functions_;
};

ffi::Module MakeModule(KernelSources sources) {
  return ffi::Module(ffi::make_object<MetalModule>(std::move(sources)));
}

std::string ToString(const ffi::Bytes& bytes) { return {bytes.data(), bytes.size()}; }

ffi::Module LoadFromBytes(const ffi::Bytes& bytes) {
  return MakeModule(ParseSerialized({bytes.data(), bytes.size()}));
}

// Parallel arrays: the i-th kernel's name, payload, format, argument types and launch tags.
ffi::Module ModuleFromParts(const ffi::Array<ffi::String>& names,
                            const ffi::Array<ffi::Bytes>& payloads, const ffi::String& format,
                            const ffi::Array<ffi::Array<DLDataType>>& arg_types,
                            const ffi::Array<ffi::Array<ffi::String>>& launch_tags) {
  KernelSources sources;
  for (size_t i = 0; i < names.size(); ++i) {
    const std::string name = names[i];
    KernelSource source;
    source.info = MakeKernelInfo(name, {arg_types[i].begin(), arg_types[i].end()},
                                 {launch_tags[i].begin(), launch_tags[i].end()});
    source.format = ParsePayloadFormat(name, std::string(format));
    source.payload = ToString(payloads[i]);
    CheckPayload(name, source.format, source.payload);
    sources.emplace(name, std::move(source));
  }
  return MakeModule(std::move(sources));
}

}  // namespace

TVM_FFI_STATIC_INIT_BLOCK() {
  ffi::reflection::GlobalDef()
      .def("mlx_tvm_ffi.metal.load_from_bytes", LoadFromBytes)
      .def("mlx_tvm_ffi.metal.module", ModuleFromParts);
}

}  // namespace mlx_tvm_ffi
