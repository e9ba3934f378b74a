// Kernels that use CUDA in ways of their own: what tests/test_cuda.py needs of a library. Tensors
// are row-contiguous float32 unless said otherwise.
#include <cooperative_groups.h>
#include <cuda_runtime.h>
#include <mlx_tvm_ffi/stream.h>
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/container/tuple.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/function.h>

#include <atomic>
#include <cstdint>
#include <vector>

namespace {

namespace ffi = tvm::ffi;
using ffi::Tensor;
using ffi::TensorView;

void Check(cudaError_t error) {
  if (error != cudaSuccess) TVM_FFI_THROW(RuntimeError) << cudaGetErrorName(error);
}

cudaStream_t StreamOf(TensorView x) {
  DLDevice device = x.device();
  return static_cast<cudaStream_t>(TVMFFIEnvGetStream(device.device_type, device.device_id));
}

float* Floats(TensorView x) { return static_cast<float*>(x.data_ptr()); }
int Size(TensorView x) { return static_cast<int>(x.numel()); }
unsigned Blocks(int n) { return static_cast<unsigned>((n + 255) / 256); }

// How often kernels of this file ran, and how often into a capture.
std::atomic<int64_t> runs{0}, captures{0};

void Count(cudaStream_t stream) {
  cudaStreamCaptureStatus status{};
  Check(cudaStreamIsCapturing(stream, &status));
  ++runs;
  if (status == cudaStreamCaptureStatusActive) ++captures;
}

ffi::Tuple<int64_t, int64_t> TakeCounts() {
  return ffi::Tuple<int64_t, int64_t>(runs.exchange(0), captures.exchange(0));
}

__global__ void AddKernel(int n, const float* x, float* y, float value) {
  int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (i < n) y[i] = x[i] + value;
}

// Every block spins first, so that what is wrongly not ordered after it comes before it.
__global__ void SlowAddKernel(int n, const float* x, float* y, float value, int64_t microseconds) {
  int64_t start, now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
  do {
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  } while (now - start < microseconds * 1000);
  int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (i < n) y[i] = x[i] + value;
}

void Add(cudaStream_t stream, TensorView x, TensorView y, float value) {
  if (x.numel() == 0) return;
  AddKernel<<<Blocks(Size(x)), 256, 0, stream>>>(Size(x), Floats(x), Floats(y), value);
  Check(cudaGetLastError());
}

void AddOne(TensorView x, TensorView y) {
  Count(StreamOf(x));
  Add(StreamOf(x), x, y, 1);
}

void Increment(TensorView x) { AddOne(x, x); }

void AddOneOn(TensorView x, TensorView y, void* stream) {
  Count(static_cast<cudaStream_t>(stream));
  Add(static_cast<cudaStream_t>(stream), x, y, 1);
}

void SlowAddOne(TensorView x, TensorView y, int64_t microseconds) {
  Count(StreamOf(x));
  SlowAddKernel<<<Blocks(Size(x)), 256, 0, StreamOf(x)>>>(Size(x), Floats(x), Floats(y), 1,
                                                          microseconds);
  Check(cudaGetLastError());
}

// --- More than one plain kernel. All of them: y = x + 1.

void TwoKernels(TensorView x, TensorView y) {
  Count(StreamOf(x));
  Add(StreamOf(x), x, y, 3);
  Add(StreamOf(x), y, y, -2);
}

void ForkAndJoin(TensorView x, TensorView y) {
  cudaStream_t stream = StreamOf(x);
  Count(stream);
  static cudaStream_t other = [] {
    cudaStream_t created = nullptr;
    Check(cudaStreamCreateWithFlags(&created, cudaStreamNonBlocking));
    return created;
  }();
  static cudaEvent_t event = [] {
    cudaEvent_t created = nullptr;
    Check(cudaEventCreateWithFlags(&created, cudaEventDisableTiming));
    return created;
  }();
  int half = Size(x) / 2, rest = Size(x) - half;
  Check(cudaEventRecord(event, stream));
  Check(cudaStreamWaitEvent(other, event, 0));
  AddKernel<<<Blocks(rest), 256, 0, stream>>>(rest, Floats(x) + half, Floats(y) + half, 1);
  if (half > 0) AddKernel<<<Blocks(half), 256, 0, other>>>(half, Floats(x), Floats(y), 1);
  Check(cudaGetLastError());
  Check(cudaEventRecord(event, other));
  Check(cudaStreamWaitEvent(stream, event, 0));
}

__global__ void AccumulateKernel(int n, const float* x, float* y) {
  int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (i < n) y[i] += x[i] + 1;
}

void ClearAndAccumulate(TensorView x, TensorView y) {
  Count(StreamOf(x));
  Check(cudaMemsetAsync(Floats(y), 0, static_cast<size_t>(Size(y)) * sizeof(float), StreamOf(x)));
  AccumulateKernel<<<Blocks(Size(x)), 256, 0, StreamOf(x)>>>(Size(x), Floats(x), Floats(y));
  Check(cudaGetLastError());
}

__global__ void CooperativeKernel(int n, const float* x, float* y) {
  int stride = static_cast<int>(gridDim.x * blockDim.x);
  int first = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  for (int i = first; i < n; i += stride) y[n - 1 - i] = x[n - 1 - i] + 3;
  cooperative_groups::this_grid().sync();
  for (int i = first; i < n; i += stride) y[i] -= 2;
}

void Cooperative(TensorView x, TensorView y) {
  Count(StreamOf(x));
  int n = Size(x);
  const float* from = Floats(x);
  float* to = Floats(y);
  void* arguments[] = {&n, &from, &to};
  Check(cudaLaunchCooperativeKernel(reinterpret_cast<void*>(CooperativeKernel), dim3(4), dim3(128),
                                    arguments, 0, StreamOf(x)));
}

__global__ void ClusterKernel(int n, const float* x, float* y) {
  // Wrong without its cluster: each block counts the blocks of it.
  unsigned blocks = cooperative_groups::this_cluster().num_blocks();
  int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (i < n) y[i] = x[i] + static_cast<float>(blocks) - 1;
}

void Cluster(TensorView x, TensorView y) {
  Count(StreamOf(x));
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {2, 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3((Blocks(Size(x)) + 1) / 2 * 2);
  config.blockDim = dim3(256);
  config.stream = StreamOf(x);
  config.attrs = &attribute;
  config.numAttrs = 1;
  Check(cudaLaunchKernelEx(&config, ClusterKernel, Size(x), static_cast<const float*>(Floats(x)),
                           Floats(y)));
}

// By way of `buffers` scratch buffers of `elements` each, the last of which must hold x.
Tensor Scratch(TensorView like, int64_t elements) {
  return Tensor::FromEnvAlloc(TVMFFIEnvTensorAlloc, ffi::Shape({elements}), like.dtype(),
                              like.device());
}

void ThroughScratch(TensorView x, TensorView y, int64_t buffers, int64_t elements) {
  Count(StreamOf(x));
  std::vector<Tensor> held;
  TensorView from = x;
  for (int64_t i = 0; i < buffers; ++i) {
    held.push_back(Scratch(x, elements));
    AddKernel<<<Blocks(Size(x)), 256, 0, StreamOf(x)>>>(
        Size(x), Floats(from), static_cast<float*>(held.back().data_ptr()), 1);
    from = held.back();
  }
  AddKernel<<<Blocks(Size(x)), 256, 0, StreamOf(x)>>>(Size(x), Floats(from), Floats(y),
                                                      1 - static_cast<float>(buffers));
  Check(cudaGetLastError());
}

// By the stream interface, as a kernel library that knows no CUDA environment has it.
void ThroughInterface(TensorView x, TensorView y) {
  mlx_tvm_ffi::StreamRef stream = mlx_tvm_ffi::CurrentStream(x.device());
  mlx_tvm_ffi::EncoderScope scope(stream);
  auto cuda_stream = static_cast<cudaStream_t>(scope.encoder());
  Count(cuda_stream);
  TVM_FFI_CHECK(cuda_stream == StreamOf(x), ValueError) << "not the environment's stream";
  Add(cuda_stream, x, y, 1);
}

Tensor ReturnNew(TensorView x) {
  Tensor y = Tensor::FromEnvAlloc(TVMFFIEnvTensorAlloc, x.shape(), x.dtype(), x.device());
  AddOne(x, y);
  return y;
}

// --- What no graph can hold. All of them: y = x + 1.

void Synchronises(TensorView x, TensorView y) {
  Count(StreamOf(x));
  Add(StreamOf(x), x, y, 1);
  Check(cudaStreamSynchronize(StreamOf(x)));
}

void SynchronisesUnchecked(TensorView x, TensorView y) {
  Count(StreamOf(x));
  AddKernel<<<Blocks(Size(x)), 256, 0, StreamOf(x)>>>(Size(x), Floats(x), Floats(y), 1);
  cudaStreamSynchronize(StreamOf(x));
}

void Allocates(TensorView x, TensorView y) {
  Count(StreamOf(x));
  float* memory = nullptr;
  Check(cudaMalloc(&memory, static_cast<size_t>(Size(x)) * sizeof(float)));
  AddKernel<<<Blocks(Size(x)), 256, 0, StreamOf(x)>>>(Size(x), Floats(x), memory, 1);
  AddKernel<<<Blocks(Size(x)), 256, 0, StreamOf(x)>>>(Size(x), memory, Floats(y), 0);
  Check(cudaGetLastError());
  Check(cudaFree(memory));
}

void AllocatesOnStream(TensorView x, TensorView y) {
  Count(StreamOf(x));
  float* memory = nullptr;
  Check(cudaMallocAsync(&memory, static_cast<size_t>(Size(x)) * sizeof(float), StreamOf(x)));
  AddKernel<<<Blocks(Size(x)), 256, 0, StreamOf(x)>>>(Size(x), Floats(x), memory, 1);
  AddKernel<<<Blocks(Size(x)), 256, 0, StreamOf(x)>>>(Size(x), memory, Floats(y), 0);
  Check(cudaFreeAsync(memory, StreamOf(x)));
}

void UsesDefaultStream(TensorView x, TensorView y) {
  Count(StreamOf(x));
  SlowAddKernel<<<Blocks(Size(x)), 256>>>(Size(x), Floats(x), Floats(y), 1, 200);
  Check(cudaGetLastError());
}

__global__ void AddPointedKernel(int n, const float* x, float* y, const float* value) {
  int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (i < n) y[i] = x[i] + *value;
}

void CopiesFromHost(TensorView x, TensorView y) {
  Count(StreamOf(x));
  Tensor value = Scratch(x, 1);
  float one = 1;
  Check(cudaMemcpyAsync(value.data_ptr(), &one, sizeof(one), cudaMemcpyHostToDevice, StreamOf(x)));
  AddPointedKernel<<<Blocks(Size(x)), 256, 0, StreamOf(x)>>>(
      Size(x), Floats(x), Floats(y), static_cast<const float*>(value.data_ptr()));
  Check(cudaGetLastError());
  one = -1;  // what a copy that is made later would read
}

void CopiesOnDevice(TensorView x, TensorView y) {
  Count(StreamOf(x));
  size_t bytes = static_cast<size_t>(Size(x)) * sizeof(float);
  Check(cudaMemcpyAsync(Floats(y), Floats(x), bytes, cudaMemcpyDeviceToDevice, StreamOf(x)));
  Add(StreamOf(x), y, y, 1);
}

// --- Errors.

void FailAfterLaunch(TensorView x, TensorView y) {
  AddOne(x, y);
  TVM_FFI_THROW(ValueError) << "the kernel does not like this";
}

// --- What a kernel was given.

// cudaMemoryType of a tensor's memory: 2 device, 3 managed.
int64_t MemoryType(TensorView x) {
  cudaPointerAttributes attributes{};
  Check(cudaPointerGetAttributes(&attributes, x.data_ptr()));
  return attributes.type;
}

std::atomic<int64_t> output_type{-1}, scratch_type{-1}, output_address{0};

void RecordMemory(TensorView x, TensorView y) {
  output_type = MemoryType(y);
  Tensor scratch = Scratch(x, 1 << 20);
  scratch_type = MemoryType(scratch);
  output_address = reinterpret_cast<int64_t>(y.data_ptr());
  Add(StreamOf(x), x, y, 1);
}

ffi::Tuple<int64_t, int64_t, int64_t> RecordedMemory() {
  return ffi::Tuple<int64_t, int64_t, int64_t>(output_type, scratch_type, output_address);
}

int64_t Address(TensorView x) { return reinterpret_cast<int64_t>(x.data_ptr()); }

int64_t EnvironmentStream(TensorView x) { return reinterpret_cast<int64_t>(StreamOf(x)); }

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(take_counts, TakeCounts)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(add_one, AddOne)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(increment, Increment)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(add_one_on, AddOneOn)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(slow_add_one, SlowAddOne)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(two_kernels, TwoKernels)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(fork_and_join, ForkAndJoin)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(clear_and_accumulate, ClearAndAccumulate)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(cooperative, Cooperative)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(cluster, Cluster)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(through_scratch, ThroughScratch)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(through_interface, ThroughInterface)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(return_new, ReturnNew)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(synchronises, Synchronises)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(synchronises_unchecked, SynchronisesUnchecked)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(allocates, Allocates)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(allocates_on_stream, AllocatesOnStream)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(uses_default_stream, UsesDefaultStream)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(copies_from_host, CopiesFromHost)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(copies_on_device, CopiesOnDevice)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(fail_after_launch, FailAfterLaunch)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(memory_type, MemoryType)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(record_memory, RecordMemory)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(recorded_memory, RecordedMemory)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(address, Address)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(environment_stream, EnvironmentStream)
