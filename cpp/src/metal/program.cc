// Functions made of dispatches of Metal kernels, with sizes that follow the shapes of the
// arguments.
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/shape.h>
#include <tvm/ffi/dtype.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/reflection/registry.h>

#include <array>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "metal/arguments.h"
#include "metal/encode.h"

namespace mlx_tvm_ffi {
namespace {

namespace ffi = tvm::ffi;

using ScalarType = KernelInfo::Scalar;

struct Parameter {
  bool is_tensor;
  DLDataType dtype;  // of a tensor: checked, and its layout with it; a handle: neither is
  ScalarType scalar;
};

// Comes from an argument, or from the geometry.
struct ScalarSource {
  bool from_geometry;
  size_t index;
  ScalarType type;
};

struct Slot {
  size_t tensor;
  std::vector<ScalarSource> scalars;  // empty: the tensor is bound
  size_t bytes_each;                  // of a scalar
};

struct Launch {
  std::shared_ptr<MetalKernel> kernel;
  std::vector<Slot> slots;
  bool grid_in_threads;
  std::array<size_t, 6> sizes;  // indices into the geometry: grid x, y, z, threadgroup x, y, z
};

/*!
 * \brief The sizes of all launches: fixed, or what a function says of the arguments' shapes and
 * scalars.
 *
 * The function is Python's, mostly, and needs its lock; the same shapes again need neither.
 */
class Geometry {
 public:
  using Values = std::shared_ptr<const std::vector<int64_t>>;

  explicit Geometry(const ffi::Any& what) {
    if (auto function = what.as<ffi::Function>()) {
      function_ = *std::move(function);
    } else {
      values_ = ToValues(what);
    }
  }

  Values Get(const std::vector<Parameter>& parameters, const KernelArguments& args,
             ffi::PackedArgs packed) {
    if (!function_) return values_;
    std::vector<int64_t> key;
    for (size_t i = 0; i < parameters.size(); ++i) {
      if (parameters[i].is_tensor) {
        const DLTensor* tensor = args.Tensor(i);
        key.push_back(tensor->ndim);
        key.push_back(tensor->dtype.code << 8 | tensor->dtype.bits);
        key.insert(key.end(), tensor->shape, tensor->shape + tensor->ndim);
      } else {
        key.push_back(static_cast<int64_t>(args.Scalar(i, parameters[i].scalar)));
      }
    }
    {
      const std::lock_guard lock(mutex_);
      if (key == key_ && values_ != nullptr) return values_;
    }
    // Without the lock: what waits for Python's lock must hold none that its holder may want.
    std::vector<ffi::Any> call;
    for (size_t i = 0; i < parameters.size(); ++i) {
      if (parameters[i].is_tensor) {
        const DLTensor* tensor = args.Tensor(i);
        call.emplace_back(ffi::Shape(tensor->shape, tensor->shape + tensor->ndim));
        call.emplace_back(tensor->dtype);
      } else {
        call.emplace_back(packed[static_cast<int>(i)]);
      }
    }
    std::vector<ffi::AnyView> views(call.begin(), call.end());
    ffi::Any result;
    function_->CallPacked(views.data(), static_cast<int32_t>(views.size()), &result);
    Values values = ToValues(result);
    const std::lock_guard lock(mutex_);
    key_ = std::move(key);
    values_ = values;
    return values;
  }

 private:
  static Values ToValues(const ffi::Any& what) {
    const auto array = what.cast<ffi::Array<int64_t>>();
    return std::make_shared<const std::vector<int64_t>>(array.begin(), array.end());
  }

  std::optional<ffi::Function> function_;
  std::mutex mutex_;
  std::vector<int64_t> key_;
  Values values_;
};

class Program {
 public:
  Program(std::string name, std::vector<Parameter> parameters, std::vector<Launch> launches,
          const ffi::Any& geometry)
      : name_(std::move(name)),
        parameters_(std::move(parameters)),
        launches_(std::move(launches)),
        geometry_(geometry) {}

  void Call(ffi::PackedArgs packed) {
    const KernelArguments args(name_, packed);
    args.ExpectCount(parameters_.size());
    for (size_t i = 0; i < parameters_.size(); ++i) CheckTensor(args, i);
    const Geometry::Values values = geometry_.Get(parameters_, args, packed);
    for (const Launch& launch : launches_) Dispatch(launch, args, *values);
  }

 private:
  // A kernel with a declared dtype indexes as if strides were those of the shape.
  void CheckTensor(const KernelArguments& args, size_t i) const {
    const Parameter& parameter = parameters_[i];
    if (!parameter.is_tensor || parameter.dtype.code == kDLOpaqueHandle) return;
    const DLTensor* tensor = args.Tensor(i);
    const DLDataType found = tensor->dtype;
    if (found.code != parameter.dtype.code || found.bits != parameter.dtype.bits ||
        found.lanes != parameter.dtype.lanes) {
      TVM_FFI_THROW(TypeError) << args.Prefix() << "argument " << i << ": expected dtype "
                               << ffi::DLDataTypeToString(parameter.dtype) << ", got "
                               << ffi::DLDataTypeToString(found) << ".";
    }
    int64_t stride = 1;
    for (int axis = tensor->ndim - 1; axis >= 0; --axis) {
      if (tensor->strides != nullptr && tensor->shape[axis] > 1 &&
          tensor->strides[axis] != stride) {
        TVM_FFI_THROW(ValueError) << args.Prefix() << "argument " << i
                                  << ": expected a row-contiguous array, got stride "
                                  << tensor->strides[axis] << " in axis " << axis
                                  << ". Pass mx.contiguous of it.";
      }
      stride *= tensor->shape[axis];
    }
  }

  void Dispatch(const Launch& launch, const KernelArguments& args,
                const std::vector<int64_t>& values) const {
    MetalDispatch dispatch;
    dispatch.grid_in_threads = launch.grid_in_threads;
    for (size_t axis = 0; axis < 6; ++axis) {
      const int64_t size = At(values, launch.sizes[axis]);
      if (size < 0 || size > int64_t{UINT32_MAX} || (size == 0 && axis >= 3)) {
        TVM_FFI_THROW(ValueError) << args.Prefix() << (axis < 3 ? "grid" : "threadgroup")
                                  << ": expected sizes from " << (axis < 3 ? 0 : 1) << " to "
                                  << UINT32_MAX << ", got " << size << ".";
      }
      (axis < 3 ? dispatch.grid : dispatch.group)[axis % 3] = static_cast<uint64_t>(size);
    }
    // Nothing to do, and an error of Metal.
    if (dispatch.grid[0] == 0 || dispatch.grid[1] == 0 || dispatch.grid[2] == 0) return;

    std::array<std::vector<char>, kMetalSlots> bytes;
    dispatch.num_slots = static_cast<uint32_t>(launch.slots.size());
    for (size_t i = 0; i < launch.slots.size(); ++i) {
      const Slot& slot = launch.slots[i];
      if (slot.scalars.empty()) {
        args.Bind(slot.tensor, &dispatch.slots[i]);
        continue;
      }
      for (const ScalarSource& source : slot.scalars) {
        const uint64_t bits = source.from_geometry ? Bits(source, At(values, source.index))
                                                   : args.Scalar(source.index, source.type);
        const char* low =
            reinterpret_cast<const char*>(&bits);  // little-endian, as all that Metal runs on
        bytes[i].insert(bytes[i].end(), low, low + slot.bytes_each);
      }
      dispatch.slots[i].bytes = bytes[i].data();
      dispatch.slots[i].size = bytes[i].size();
    }
    launch.kernel->Encode(dispatch);
  }

  // Dimensions are int32 in most kernels: one that is not would make the kernel index wrongly.
  uint64_t Bits(const ScalarSource& source, int64_t value) const {
    const bool wide = source.type == ScalarType::kInt64 || source.type == ScalarType::kUInt64;
    if (wide || value == static_cast<int32_t>(value)) return static_cast<uint64_t>(value);
    TVM_FFI_THROW(ValueError) << "[mlx_tvm_ffi.metal] kernel '" << name_
                              << "': geometry: expected a value of 32 bits, got " << value << ".";
    TVM_FFI_UNREACHABLE();
  }

  int64_t At(const std::vector<int64_t>& values, size_t i) const {
    if (i < values.size()) return values[i];
    TVM_FFI_THROW(ValueError) << "[mlx_tvm_ffi.metal] kernel '" << name_
                              << "': geometry: expected more than " << i << " sizes, got "
                              << values.size() << ".";
    TVM_FFI_UNREACHABLE();
  }

  const std::string name_;
  const std::vector<Parameter> parameters_;
  const std::vector<Launch> launches_;
  Geometry geometry_;
};

// Below: from what Python builds. Indices are checked here, since plans come from files too.

using Record = ffi::Array<ffi::Any>;

size_t Index(const ffi::Any& index, size_t size) {
  const auto i = index.cast<int64_t>();
  if (i >= 0 && static_cast<uint64_t>(i) < size) return static_cast<size_t>(i);
  TVM_FFI_THROW(ValueError) << "[mlx_tvm_ffi.metal] plan: expected an index below " << size
                            << ", got " << i << ".";
  TVM_FFI_UNREACHABLE();
}

std::string ToString(const ffi::Any& bytes) {
  const auto b = bytes.cast<ffi::Bytes>();
  return {b.data(), b.size()};
}

Parameter ToParameter(const std::string& name, const Record& record) {
  const auto dtype = record[1].cast<DLDataType>();
  if (record[0].cast<bool>()) return {true, dtype, {}};
  return {false, dtype, ToScalar(name, dtype)};
}

// name, format, payload, fast math, constants (name, index, type, bytes), bytes of threadgroup
// arguments
std::shared_ptr<MetalKernel> ToKernel(const Record& record) {
  MetalFunction f;
  f.name = record[0].cast<std::string>();
  f.format = ParsePayloadFormat(f.name, record[1].cast<std::string>());
  f.payload = ToString(record[2]);
  CheckPayload(f.name, f.format, f.payload);
  f.fast_math = record[3].cast<bool>();
  for (const auto& constant : record[4].cast<ffi::Array<Record>>()) {
    f.constants.push_back({constant[0].cast<std::string>(), constant[1].cast<uint32_t>(),
                           constant[2].cast<uint32_t>(), ToString(constant[3])});
  }
  const auto memory = record[5].cast<ffi::Array<int64_t>>();
  for (const int64_t bytes : memory)
    f.threadgroup_memory_bytes.push_back(static_cast<uint32_t>(bytes));
  return std::make_shared<MetalKernel>(std::move(f));
}

// tensor, bytes of a scalar, scalars (from the geometry, index, dtype)
Slot ToSlot(const std::string& name, const Record& record,
            const std::vector<Parameter>& parameters) {
  Slot slot{0, {}, record[1].cast<size_t>()};
  for (const auto& scalar : record[2].cast<ffi::Array<Record>>()) {
    const bool from_geometry = scalar[0].cast<bool>();
    const size_t index =
        from_geometry ? Index(scalar[1], SIZE_MAX) : Index(scalar[1], parameters.size());
    slot.scalars.push_back({from_geometry, index, ToScalar(name, scalar[2].cast<DLDataType>())});
  }
  if (slot.scalars.empty()) slot.tensor = Index(record[0], parameters.size());
  return slot;
}

// kernel, slots, grid in threads, sizes
Launch ToLaunch(const std::string& name, const Record& record,
                const std::vector<Parameter>& parameters,
                const std::vector<std::shared_ptr<MetalKernel>>& kernels) {
  Launch launch;
  launch.kernel = kernels[Index(record[0], kernels.size())];
  for (const auto& slot : record[1].cast<ffi::Array<Record>>()) {
    launch.slots.push_back(ToSlot(name, slot, parameters));
  }
  if (launch.slots.size() > kMetalSlots) {
    TVM_FFI_THROW(ValueError) << "[mlx_tvm_ffi.metal] kernel '" << name
                              << "': buffers: expected at most " << kMetalSlots << ", got "
                              << launch.slots.size() << ".";
  }
  launch.grid_in_threads = record[2].cast<bool>();
  const auto sizes = record[3].cast<Record>();
  for (size_t i = 0; i < 6; ++i) launch.sizes[i] = Index(sizes[static_cast<int64_t>(i)], SIZE_MAX);
  return launch;
}

ffi::Function MakeProgram(const std::string& name, const ffi::Array<Record>& parameters,
                          const ffi::Array<Record>& kernels, const ffi::Array<Record>& launches,
                          const ffi::Any& geometry) {
  std::vector<Parameter> parsed;
  for (const Record& parameter : parameters) parsed.push_back(ToParameter(name, parameter));
  std::vector<std::shared_ptr<MetalKernel>> made;
  for (const Record& kernel : kernels) made.push_back(ToKernel(kernel));
  std::vector<Launch> steps;
  for (const Record& launch : launches) steps.push_back(ToLaunch(name, launch, parsed, made));
  auto program = std::make_shared<Program>(name, std::move(parsed), std::move(steps), geometry);
  return ffi::Function::FromPacked(
      [program](ffi::PackedArgs args, ffi::Any*) { program->Call(args); });
}

}  // namespace

TVM_FFI_STATIC_INIT_BLOCK() {
  ffi::reflection::GlobalDef().def("mlx_tvm_ffi.metal.program", MakeProgram);
}

}  // namespace mlx_tvm_ffi
