// Kernels that do little, each in its own way: what a test of arrays, direct calls and ops needs of
// a library.
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/map.h>
#include <tvm/ffi/container/shape.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/container/tuple.h>
#include <tvm/ffi/dtype.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/string.h>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace {

namespace ffi = tvm::ffi;
using ffi::Array;
using ffi::Tensor;
using ffi::TensorView;

// --- Tensors as they arrive.

int64_t ItemBytes(DLDataType dtype) { return dtype.bits * dtype.lanes / 8; }

char* Bytes(const DLTensor& tensor) { return static_cast<char*>(tensor.data) + tensor.byte_offset; }

// Calls visit(offset of an element in elements, its number in row order).
void EachElement(const DLTensor& tensor, const std::function<void(int64_t, int64_t)>& visit) {
  int64_t number = 0;
  std::function<void(int, int64_t)> walk = [&](int dim, int64_t offset) {
    if (dim == tensor.ndim) return visit(offset, number++);
    for (int64_t i = 0; i < tensor.shape[dim]; ++i) {
      walk(dim + 1, offset + i * tensor.strides[dim]);
    }
  };
  walk(0, 0);
}

// Any layout to any layout of the same number of elements.
void CopyElements(const DLTensor& from, const DLTensor& to) {
  int64_t bytes = ItemBytes(from.dtype);
  std::vector<const char*> sources;
  EachElement(from,
              [&](int64_t offset, int64_t) { sources.push_back(Bytes(from) + offset * bytes); });
  EachElement(to, [&](int64_t offset, int64_t number) {
    std::memcpy(Bytes(to) + offset * bytes, sources.at(static_cast<size_t>(number)),
                static_cast<size_t>(bytes));
  });
}

void CopyPointer(DLTensor* from, DLTensor* to) { CopyElements(*from, *to); }
void CopyObject(Tensor from, Tensor to) {
  CopyElements(*from.GetDLTensorPtr(), *to.GetDLTensorPtr());
}
void CopyView(TensorView from, TensorView to) {
  DLTensor source{from.data_ptr(),
                  from.device(),
                  from.ndim(),
                  from.dtype(),
                  const_cast<int64_t*>(from.shape().data()),
                  const_cast<int64_t*>(from.strides().data()),
                  static_cast<uint64_t>(from.byte_offset())};
  DLTensor target{to.data_ptr(),
                  to.device(),
                  to.ndim(),
                  to.dtype(),
                  const_cast<int64_t*>(to.shape().data()),
                  const_cast<int64_t*>(to.strides().data()),
                  static_cast<uint64_t>(to.byte_offset())};
  CopyElements(source, target);
}

// (dtype as code, bits and lanes; shape; strides; device; whether there is data)
using Description = ffi::Tuple<ffi::Shape, ffi::Shape, ffi::Shape, DLDevice, bool>;

Description Describe(DLTensor* tensor) {
  size_t ndim = static_cast<size_t>(tensor->ndim);
  return Description(ffi::Shape({tensor->dtype.code, tensor->dtype.bits, tensor->dtype.lanes}),
                     ffi::Shape(std::vector<int64_t>(tensor->shape, tensor->shape + ndim)),
                     ffi::Shape(std::vector<int64_t>(tensor->strides, tensor->strides + ndim)),
                     tensor->device, tensor->data != nullptr);
}

int64_t Address(DLTensor* tensor) { return reinterpret_cast<int64_t>(Bytes(*tensor)); }

// --- Arithmetic on row-contiguous float32.

float* Floats(TensorView tensor) {
  return reinterpret_cast<float*>(static_cast<char*>(tensor.data_ptr()) + tensor.byte_offset());
}

void AddOne(TensorView x, TensorView y) {
  for (int64_t i = 0; i < x.numel(); ++i) Floats(y)[i] = Floats(x)[i] + 1;
}

void Increment(TensorView x) {
  for (int64_t i = 0; i < x.numel(); ++i) Floats(x)[i] += 1;
}

void Scale(TensorView x, TensorView y, double factor) {
  for (int64_t i = 0; i < x.numel(); ++i) Floats(y)[i] = Floats(x)[i] * static_cast<float>(factor);
}

void Add(TensorView a, TensorView b, TensorView sum) {
  for (int64_t i = 0; i < a.numel(); ++i) Floats(sum)[i] = Floats(a)[i] + Floats(b)[i];
}

// sum = a + b and difference = a - b.
void SumAndDifference(TensorView a, TensorView b, TensorView sum, TensorView difference) {
  for (int64_t i = 0; i < a.numel(); ++i) {
    float x = Floats(a)[i], y = Floats(b)[i];
    Floats(sum)[i] = x + y;
    Floats(difference)[i] = x - y;
  }
}

// Parameters in an order of its own, for arg_spec: y = x * factor + b, and the scale is given back
// in another output.
void Mixed(double factor, TensorView y, void* stream, TensorView b, TensorView given,
           TensorView x) {
  for (int64_t i = 0; i < x.numel(); ++i) {
    Floats(y)[i] = Floats(x)[i] * static_cast<float>(factor) + Floats(b)[i];
  }
  Floats(given)[0] = stream == nullptr ? static_cast<float>(factor) : -1.0f;
}

void Fill(TensorView y, double value) {
  for (int64_t i = 0; i < y.numel(); ++i) Floats(y)[i] = static_cast<float>(value);
}

// --- Results.

Tensor Same(Tensor x) { return x; }

Tensor Allocate(const DLTensor& like, DLDataType dtype) {
  DLTensor prototype = like;
  prototype.dtype = dtype;
  return Tensor::FromEnvAlloc(
      TVMFFIEnvTensorAlloc,
      ffi::Shape(std::vector<int64_t>(prototype.shape, prototype.shape + prototype.ndim)),
      prototype.dtype, prototype.device);
}

Tensor Fresh(Tensor x) {
  Tensor y = Allocate(*x.GetDLTensorPtr(), x.dtype());
  CopyElements(*x.GetDLTensorPtr(), *y.GetDLTensorPtr());
  return y;
}

// Of memory that no framework knows.
struct HeapMemory {
  void AllocData(DLTensor* tensor) { tensor->data = new char[ffi::GetDataSize(*tensor) + 1]; }
  void FreeData(DLTensor* tensor) { delete[] static_cast<char*>(tensor->data); }
};

Tensor Foreign(Tensor x) {
  Tensor y = Tensor::FromNDAlloc(HeapMemory(), x.shape(), x.dtype(), x.device());
  CopyElements(*x.GetDLTensorPtr(), *y.GetDLTensorPtr());
  return y;
}

// Memory of an other dtype than MLX has.
Tensor Float8(Tensor x) {
  return Tensor::FromNDAlloc(HeapMemory(), x.shape(), DLDataType{kDLFloat8_e4m3fn, 8, 1},
                             x.device());
}
Tensor AllocateFloat8(Tensor x) {
  return Allocate(*x.GetDLTensorPtr(), DLDataType{kDLFloat8_e4m3fn, 8, 1});
}
Tensor AllocateElsewhere(Tensor x) {
  DLTensor prototype = *x.GetDLTensorPtr();
  prototype.device = {kDLVulkan, 0};
  return Allocate(prototype, x.dtype());
}

// A result with the address of its memory as the kernel knew it.
using Addressed = ffi::Tuple<Tensor, int64_t>;
Addressed WithAddress(const Tensor& x) {
  return Addressed(x, reinterpret_cast<int64_t>(Bytes(*x.GetDLTensorPtr())));
}
Addressed FreshAndAddress(Tensor x) { return WithAddress(Fresh(std::move(x))); }
Addressed ForeignAndAddress(Tensor x) { return WithAddress(Foreign(std::move(x))); }

Tensor FirstFresh(Array<Tensor> tensors) { return Fresh(tensors[0]); }
Tensor LastFresh(Tensor, Tensor x) { return Fresh(std::move(x)); }
Array<Tensor> Float8List(Tensor x) { return {Float8(std::move(x))}; }
Tensor AllocateShape(Tensor x, Array<int64_t> shape) {
  std::vector<int64_t> dims(shape.begin(), shape.end());
  DLTensor prototype = *x.GetDLTensorPtr();
  prototype.shape = dims.data();
  prototype.ndim = static_cast<int32_t>(dims.size());
  return Allocate(prototype, x.dtype());
}

Array<Tensor> List(Tensor x) { return {x, Fresh(x), Foreign(x)}; }
ffi::Map<ffi::String, Tensor> Dictionary(Tensor x) { return {{"same", x}, {"fresh", Fresh(x)}}; }
int64_t Count(Array<Tensor> tensors) {
  int64_t count = 0;
  for (const Tensor& tensor : tensors) count += tensor.numel();
  return count;
}
int64_t CountNested(Array<Array<Tensor>> rows) {
  int64_t count = 0;
  for (const Array<Tensor>& row : rows) count += Count(row);
  return count;
}
int64_t CountValues(ffi::Map<ffi::String, Tensor> tensors) {
  int64_t count = 0;
  for (const auto& entry : tensors) count += entry.second.numel();
  return count;
}

// x + 1 and x + 2 in memory from the environment, allocated in that order and returned in the
// other.
Array<Tensor> Swapped(Tensor x) {
  Tensor one = Allocate(*x.GetDLTensorPtr(), x.dtype());
  Tensor two = Allocate(*x.GetDLTensorPtr(), x.dtype());
  for (int64_t i = 0; i < x.numel(); ++i) {
    static_cast<float*>(one.data_ptr())[i] = static_cast<float*>(x.data_ptr())[i] + 1;
    static_cast<float*>(two.data_ptr())[i] = static_cast<float*>(x.data_ptr())[i] + 2;
  }
  return {two, one};
}

// The transpose of a square matrix, as a view of memory from the environment.
Tensor FreshTransposed(Tensor x) {
  struct View {
    Tensor base;
    std::vector<int64_t> dims;
    DLManagedTensorVersioned managed;
  };
  Tensor y = Fresh(std::move(x));
  auto* view = new View{y, {y.size(1), y.size(0), y.stride(1), y.stride(0)}, {}};
  view->managed.version = {DLPACK_MAJOR_VERSION, DLPACK_MINOR_VERSION};
  view->managed.manager_ctx = view;
  view->managed.deleter = [](DLManagedTensorVersioned* self) {
    delete static_cast<View*>(self->manager_ctx);
  };
  view->managed.flags = 0;
  view->managed.dl_tensor = *y.GetDLTensorPtr();
  view->managed.dl_tensor.shape = view->dims.data();
  view->managed.dl_tensor.strides = view->dims.data() + 2;
  return Tensor::FromDLPackVersioned(&view->managed);
}

Array<Tensor> Twice(Tensor x) {
  Tensor y = Fresh(x);
  return {y, y};
}

// y = x + 1 by way of scratch memory.
void ThroughScratch(Tensor x, TensorView y) {
  Tensor scratch = Fresh(x);
  Increment(scratch);
  std::memcpy(y.data_ptr(), scratch.data_ptr(), static_cast<size_t>(y.numel()) * sizeof(float));
}

// --- What a kernel was given.

std::mutex recorded_mutex;
Array<ffi::Any> recorded_values;

void Record(TensorView x, TensorView y, ffi::AnyView value) {
  AddOne(x, y);
  std::lock_guard<std::mutex> lock(recorded_mutex);
  recorded_values.push_back(ffi::Any(value));
}

Tensor FreshAndRecorded(Tensor x) {
  Tensor y = Fresh(std::move(x));
  std::lock_guard<std::mutex> lock(recorded_mutex);
  recorded_values.push_back(reinterpret_cast<int64_t>(y.data_ptr()));
  return y;
}

Array<ffi::Any> Recorded() {
  std::lock_guard<std::mutex> lock(recorded_mutex);
  return std::exchange(recorded_values, Array<ffi::Any>());
}

ffi::String TypeKey(ffi::AnyView value) { return ffi::String(value.GetTypeKey()); }

// A parameter of each type that attributes have.
void Typed(TensorView x, TensorView y, bool flag, int64_t integer, double number, ffi::String text,
           ffi::Bytes bytes, ffi::Optional<int64_t> nothing, DLDataType dtype, DLDevice device,
           Array<Array<int64_t>> nested) {
  if (!flag || nothing.has_value() || dtype.code != kDLBfloat || device.device_type != kDLCPU) {
    TVM_FFI_THROW(ValueError) << "an attribute arrived wrong";
  }
  float sum = static_cast<float>(integer) + static_cast<float>(number) +
              static_cast<float>(text.size()) + static_cast<float>(bytes.size());
  for (const Array<int64_t>& row : nested) {
    for (int64_t value : row) sum += static_cast<float>(value);
  }
  for (int64_t i = 0; i < x.numel(); ++i) Floats(y)[i] = Floats(x)[i] + sum;
}

int64_t ThreadNumber() {
  return static_cast<int64_t>(std::hash<std::thread::id>()(std::this_thread::get_id()) >> 1);
}

void WriteThreadNumber(TensorView y) { *static_cast<int64_t*>(y.data_ptr()) = ThreadNumber(); }

// The environment that kernels of this thread see: (allocator, CUDA stream 0).
ffi::Tuple<int64_t, int64_t> Environment() {
  return ffi::Tuple<int64_t, int64_t>(
      reinterpret_cast<int64_t>(TVMFFIEnvGetDLPackManagedTensorAllocator()),
      reinterpret_cast<int64_t>(TVMFFIEnvGetStream(kDLCUDA, 0)));
}

// --- Errors.

void Fail(TensorView, TensorView, ffi::String kind, ffi::String message) {
  throw ffi::Error(std::string(kind), std::string(message), "");
}

void FailDirectly(TensorView, ffi::String kind, ffi::String message) {
  throw ffi::Error(std::string(kind), std::string(message), "");
}

void ThrowStandard(TensorView, TensorView) { throw std::out_of_range("a vector's number"); }

void ThrowNumber(TensorView, TensorView) { throw 42; }

std::mutex kept_mutex;
std::vector<Tensor> kept;

void Keep(Tensor x) {
  std::lock_guard<std::mutex> lock(kept_mutex);
  kept.push_back(std::move(x));
}
void KeepInput(Tensor x, TensorView y) {
  AddOne(x, y);
  Keep(std::move(x));
}
void KeepOutput(TensorView x, Tensor y) {
  AddOne(x, y);
  Keep(std::move(y));
}
void KeepAndFail(TensorView, Tensor y) {
  Keep(std::move(y));
  TVM_FFI_THROW(ValueError) << "kept and failed";
}
Tensor FreshAndKept(Tensor x) {
  Tensor y = Fresh(std::move(x));
  Keep(y);
  return y;
}
Array<Tensor> Kept() {
  std::lock_guard<std::mutex> lock(kept_mutex);
  std::vector<Tensor> all = std::exchange(kept, {});
  return Array<Tensor>(all.begin(), all.end());
}

// --- A gate: a kernel that waits behind it keeps its stream busy for as long as a test likes.

struct Gate {
  std::mutex mutex;
  std::condition_variable changed;
  bool open = true;
  int waiting = 0;
};
Gate gate;

constexpr std::chrono::seconds kLimit{30};

void CloseGate() {
  std::lock_guard<std::mutex> lock(gate.mutex);
  gate.open = false;
}

void OpenGate() {
  std::lock_guard<std::mutex> lock(gate.mutex);
  gate.open = true;
  gate.changed.notify_all();
}

void PassGate() {
  std::unique_lock<std::mutex> lock(gate.mutex);
  ++gate.waiting;
  gate.changed.notify_all();
  bool opened = gate.changed.wait_for(lock, kLimit, [] { return gate.open; });
  --gate.waiting;
  if (!opened) TVM_FFI_THROW(TimeoutError) << "nobody opened the gate";
}

// Returns once a kernel waits behind the gate.
void AwaitWaiter() {
  std::unique_lock<std::mutex> lock(gate.mutex);
  if (!gate.changed.wait_for(lock, kLimit, [] { return gate.waiting > 0; })) {
    TVM_FFI_THROW(TimeoutError) << "no kernel came to the gate";
  }
}

// y = x + 1, read and written only after the gate has opened.
void AddOneBehindGate(TensorView x, TensorView y) {
  PassGate();
  AddOne(x, y);
}

void FailBehindGate(TensorView, TensorView) {
  PassGate();
  TVM_FFI_THROW(ValueError) << "failed behind the gate";
}

// Whether a kernel waits behind the gate now.
bool HasWaiter() {
  std::lock_guard<std::mutex> lock(gate.mutex);
  return gate.waiting > 0;
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(copy_pointer, CopyPointer)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(copy_object, CopyObject)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(copy_view, CopyView)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(describe, Describe)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(address, Address)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(add_one, AddOne)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(increment, Increment)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(scale, Scale)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(add, Add)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(sum_and_difference, SumAndDifference)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(mixed, Mixed)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(fill, Fill)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(same, Same)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(fresh, Fresh)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(foreign, Foreign)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(float8, Float8)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(allocate_float8, AllocateFloat8)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(allocate_elsewhere, AllocateElsewhere)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(allocate_shape, AllocateShape)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(fresh_and_address, FreshAndAddress)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(foreign_and_address, ForeignAndAddress)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(first_fresh, FirstFresh)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(last_fresh, LastFresh)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(float8_list, Float8List)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(list, List)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(dictionary, Dictionary)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(count, Count)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(count_nested, CountNested)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(count_values, CountValues)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(swapped, Swapped)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(fresh_transposed, FreshTransposed)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(twice, Twice)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(through_scratch, ThroughScratch)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(record, Record)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(fresh_and_recorded, FreshAndRecorded)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(recorded, Recorded)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(type_key, TypeKey)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(typed, Typed)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(thread_number, ThreadNumber)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(write_thread_number, WriteThreadNumber)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(environment, Environment)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(fail, Fail)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(fail_directly, FailDirectly)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(throw_standard, ThrowStandard)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(throw_number, ThrowNumber)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(keep, Keep)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(keep_input, KeepInput)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(keep_output, KeepOutput)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(keep_and_fail, KeepAndFail)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(fresh_and_kept, FreshAndKept)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(kept, Kept)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(close_gate, CloseGate)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(open_gate, OpenGate)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(await_waiter, AwaitWaiter)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(has_waiter, HasWaiter)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(add_one_behind_gate, AddOneBehindGate)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(fail_behind_gate, FailBehindGate)
