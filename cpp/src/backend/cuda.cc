#include "backend/cuda.h"

#include <cuda.h>
#include <dlfcn.h>
#include <mlx/backend/cuda/device.h>
#include <mlx/ops.h>
#include <mlx/transforms.h>
#include <tvm/ffi/error.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "backend/backend.h"
#include "backend/reap.h"

namespace mlx_tvm_ffi {

namespace cu = mlx::core::cu;

namespace {

// Members of MLX's encoder without a getter. Explicit instantiation may name what is private; the
// build is for one exact MLX version, so they are where the headers say.
template <typename Name, auto kMember>
struct Reveal {
  friend constexpr auto Member(Name) { return kMember; }
};
#define MLX_TVM_FFI_REVEAL(Name, member) \
  struct Name {                          \
    friend constexpr auto Member(Name);  \
  };                                     \
  template struct Reveal<Name, &cu::CommandEncoder::member>
MLX_TVM_FFI_REVEAL(NodeCount, node_count_);
MLX_TVM_FFI_REVEAL(BytesInGraph, bytes_in_graph_);
MLX_TVM_FFI_REVEAL(Temporaries, temporaries_);
MLX_TVM_FFI_REVEAL(MaxOps, max_ops_per_graph_);
MLX_TVM_FFI_REVEAL(MaxMegabytes, max_mb_per_graph_);
#undef MLX_TVM_FFI_REVEAL

template <typename Name>
auto& Of(cu::CommandEncoder& encoder, Name name) {
  return encoder.*Member(name);
}

void Check(CUresult result, const char* call) {
  if (result == CUDA_SUCCESS) return;
  const char* name = nullptr;
  const char* text = nullptr;
  cuGetErrorName(result, &name);
  cuGetErrorString(result, &text);
  TVM_FFI_THROW(RuntimeError)
      << "[mlx_tvm_ffi.cuda] " << call << ": expected success, got "
      << (name == nullptr ? "an unknown error" : name) << " (" << (text == nullptr ? "" : text)
      << "). An earlier kernel may have failed: run with CUDA_LAUNCH_BLOCKING=1 to see which.";
}

// As MLX reads it: without graphs its encoder launches at once.
bool UsesGraphs() {
  static const bool graphs = [] {
    const char* value = std::getenv("MLX_USE_CUDA_GRAPHS");
    return value == nullptr || std::atoi(value) != 0;
  }();
  return graphs;
}

// Whether the encoder holds work that MLX has not launched yet.
bool HasNodes(cu::CommandEncoder& encoder) { return UsesGraphs() && Of(encoder, NodeCount()) > 0; }

// After this, what is launched on the encoder's stream comes after all that MLX was given so far.
void Flush(cu::CommandEncoder& encoder) {
  if (HasNodes(encoder)) encoder.commit();
}

mx::allocator::Data NoMemory() {
  static cu::CudaBuffer empty{nullptr, 0, -1};
  return {mx::allocator::Buffer(&empty), [](mx::allocator::Buffer) {}};
}

/*! \brief Functions and objects to keep until the device is done; destroyed where Python's lock may
 * be taken. */
struct Kept {
  std::vector<std::shared_ptr<void>> objects;
};

/*! \brief What this thread knows of one of its MLX streams. */
struct OwnStream {
  explicit OwnStream(const mx::Stream& own) : stream(own) {}

  mx::Stream stream;
  StreamRef interface;
  std::shared_ptr<Kept> kept = std::make_shared<Kept>();
  size_t kept_at = 0;  // in the encoder's temporaries, as long as it has not committed them
};

// Keeps `object` until the work encoded so far, and the op at hand, is done: with the encoder's
// temporaries.
void Keep(cu::CommandEncoder& encoder, OwnStream* own, std::shared_ptr<void> object) {
  auto& temporaries = Of(encoder, Temporaries());
  auto* mark = reinterpret_cast<mx::array::Data*>(own->kept.get());  // never followed
  if (own->kept_at >= temporaries.size() || temporaries[own->kept_at].get() != mark) {
    own->kept = std::make_shared<Kept>();
    mark = reinterpret_cast<mx::array::Data*>(own->kept.get());
    own->kept_at = temporaries.size();
    temporaries.emplace_back(
        mark, [kept = own->kept](mx::array::Data*) { Reap(std::move(kept->objects)); });
  }
  auto& objects = own->kept->objects;
  if (objects.empty() || objects.back() != object) objects.push_back(std::move(object));
}

/*!
 * \brief Records what a kernel launches, on a stream of its own: MLX's stays free for MLX, whose
 * memory comes and goes on it while a kernel asks for scratch. One for each thread and device.
 */
class Recorder {
 public:
  Recorder() {
    Check(cuStreamCreate(&stream_, CU_STREAM_NON_BLOCKING), "cuStreamCreate");
    Check(cuEventCreate(&event_, CU_EVENT_DISABLE_TIMING), "cuEventCreate");
  }
  Recorder(const Recorder&) = delete;
  Recorder& operator=(const Recorder&) = delete;
  ~Recorder() {
    Clear();
    cuEventDestroy(event_);
    cuStreamDestroy(stream_);
  }

  CUstream stream() const { return stream_; }
  CUgraph graph() const { return graph_; }

  void Begin() {
    if (graph_ == nullptr) Check(cuGraphCreate(&graph_, 0), "cuGraphCreate");
    // Into one graph again and again: cheaper than a new graph for each kernel.
    Check(cuStreamBeginCaptureToGraph(stream_, graph_, nullptr, nullptr, 0,
                                      CU_STREAM_CAPTURE_MODE_THREAD_LOCAL),
          "cuStreamBeginCaptureToGraph");
  }

  /*! \brief False where the kernel broke the capture; nothing is left of it then. */
  bool End() noexcept {
    CUgraph same = nullptr;
    if (cuStreamEndCapture(stream_, &same) == CUDA_SUCCESS) return true;
    Clear();
    return false;
  }

  void Clear() noexcept {
    if (graph_ != nullptr) cuGraphDestroy(std::exchange(graph_, nullptr));
  }

  /*! \brief What is launched on `after` from now on comes after what is on `before`. */
  void Order(CUstream before, CUstream after) {
    Check(cuEventRecord(event_, before), "cuEventRecord");
    Check(cuStreamWaitEvent(after, event_, 0), "cuStreamWaitEvent");
  }

 private:
  CUstream stream_ = nullptr;
  CUgraph graph_ = nullptr;
  CUevent event_ = nullptr;
};

/*! \brief The op whose kernel runs on this thread. */
struct RunningOp {
  const mx::Stream* stream;
  CUstream recording;                   // null where it runs straight
  std::vector<mx::array> touched = {};  // scratch, and arrays of direct calls made by the kernel
};

/*! \brief A scope that a user opened on this thread, and what direct calls in it were handed. */
struct OpenScope {
  mx::Stream stream;
  std::vector<mx::array> handed;
};

/*! \brief A direct call in progress: its stream, and how many arrays were handed over before it. */
struct DirectCall {
  mx::Stream stream;
  size_t lent_before;
};

struct ThreadState {
  std::vector<std::unique_ptr<OwnStream>> streams;
  std::vector<std::unique_ptr<Recorder>> recorders;  // by device
  RunningOp* op = nullptr;
  bool capturing = false;  // also while an op runs straight inside a captured one
  std::vector<OpenScope> scopes;
  // Direct calls: how many arrays are handed over, the calls in progress, and the arrays that came
  // back from them.
  size_t lent = 0;
  std::vector<DirectCall> calls;
  std::vector<mx::array> returned;
  std::exception_ptr late_error;

  static ThreadState& Get() {
    static thread_local ThreadState state;
    return state;
  }

  OwnStream& Of(const mx::Stream& stream);

  Recorder& RecorderOf(int device) {
    auto index = static_cast<size_t>(device);
    if (index >= recorders.size()) recorders.resize(index + 1);
    if (recorders[index] == nullptr) recorders[index] = std::make_unique<Recorder>();
    return *recorders[index];
  }
};

/*! \brief Makes `op` the one that runs on this thread, for as long as this lives. */
class RunScope {
 public:
  explicit RunScope(RunningOp* op) : outer_(std::exchange(ThreadState::Get().op, op)) {}
  RunScope(const RunScope&) = delete;
  RunScope& operator=(const RunScope&) = delete;
  ~RunScope() { ThreadState::Get().op = outer_; }

 private:
  RunningOp* outer_;
};

/*! \brief In a capture, lets this thread call what captures forbid: MLX allocates on a stream that
 * is not captured. */
class RelaxedScope {
 public:
  RelaxedScope() {
    if (capturing_) cuThreadExchangeStreamCaptureMode(&mode_);
  }
  RelaxedScope(const RelaxedScope&) = delete;
  RelaxedScope& operator=(const RelaxedScope&) = delete;
  ~RelaxedScope() {
    if (capturing_) cuThreadExchangeStreamCaptureMode(&mode_);
  }

 private:
  const bool capturing_ = ThreadState::Get().capturing;
  CUstreamCaptureMode mode_ = CU_STREAM_CAPTURE_MODE_RELAXED;
};

/*! \brief The stream that a kernel launches on now: the recorder's in a capture of that stream,
 * else MLX's own. */
CUstream LaunchStream(const mx::Stream& stream) {
  RunningOp* op = ThreadState::Get().op;
  if (op != nullptr && op->recording != nullptr && *op->stream == stream) return op->recording;
  cu::CommandEncoder& encoder = cu::get_command_encoder(stream);
  encoder.device().make_current();
  Flush(encoder);
  return encoder.stream();
}

/*! \brief An array whose event MLX signals behind all work so far, in place of MLX's Event, which
 * is not exported. */
class Marker final : public mx::Primitive {
 public:
  using mx::Primitive::Primitive;
  void eval_cpu(const std::vector<mx::array>&, std::vector<mx::array>&) override {}
  void eval_gpu(const std::vector<mx::array>&, std::vector<mx::array>& outputs) override {
    outputs[0].set_data(NoMemory());
  }
  const char* name() const override { return "MlxTvmFfiMarker"; }

  /*! \brief Commits what `stream` was given; `after` is waited for on the device, whatever stream
   * it comes from. */
  static mx::array Commit(const mx::Stream& stream, std::vector<mx::array> after = {}) {
    mx::array marker(mx::Shape{0}, mx::bool_, std::make_shared<Marker>(stream), std::move(after));
    mx::async_eval({marker});
    return marker;
  }
};

// Ends direct calls: what they were handed stays alive until the device is done, and says when that
// is.
void Submit(const mx::Stream& stream, std::vector<mx::array> arrays) noexcept {
  if (arrays.empty()) return;
  try {
    cu::CommandEncoder& encoder = cu::get_command_encoder(stream);
    for (const mx::array& array : arrays) encoder.add_temporary(array);
    mx::Event done = Marker::Commit(stream).event();
    for (const mx::array& array : arrays) {
      array.attach_event(done);
      array.set_status(mx::array::Status::evaluated);
    }
  } catch (...) {
    ThreadState::Get().late_error = std::current_exception();
  }
}

class CudaStream final : public MlxStream {
 public:
  CudaStream(mx::Device device, std::optional<mx::Stream> stream)
      : MlxStream(device, stream), device_(device) {}

  DLDevice device() const override { return {kDLCUDA, device_.index}; }
  void* AcquireEncoder() override { return LaunchStream(Resolve()); }
  void* GetDevice() override {
    CUdevice device = 0;
    Check(cuDeviceGet(&device, device_.index), "cuDeviceGet");
    return reinterpret_cast<void*>(static_cast<std::intptr_t>(device));
  }
  void Enter() override {
    ThreadState& state = ThreadState::Get();
    if (state.op == nullptr) state.scopes.push_back({Resolve(), {}});
  }
  void Leave() override {
    ThreadState& state = ThreadState::Get();
    if (state.op != nullptr || state.scopes.empty()) return;
    OpenScope scope = std::move(state.scopes.back());
    state.scopes.pop_back();
    Submit(scope.stream, std::move(scope.handed));
  }
  void Keep(std::shared_ptr<void> object) override {
    mx::Stream stream = Resolve();
    mlx_tvm_ffi::Keep(cu::get_command_encoder(stream), &ThreadState::Get().Of(stream),
                      std::move(object));
  }

 private:
  mx::Device device_;
};

OwnStream& ThreadState::Of(const mx::Stream& stream) {
  for (const auto& own : streams) {
    if (own->stream == stream) return *own;
  }
  OwnStream& own = *streams.emplace_back(std::make_unique<OwnStream>(stream));
  own.interface = MakeMlxStream(std::make_shared<CudaStream>(stream.device, stream));
  return own;
}

// Errors that a broken capture left in the runtime that kernels share: the next check of theirs is
// not about it.
void ForgetRuntimeErrors() {
  for (const char* name : {"libcudart.so.13", "libcudart.so.12"}) {
    void* runtime = dlopen(name, RTLD_LAZY | RTLD_NOLOAD);
    if (runtime == nullptr) continue;
    if (auto* forget = reinterpret_cast<int (*)()>(dlsym(runtime, "cudaGetLastError"))) forget();
    dlclose(runtime);
  }
}

bool OnHost(CUmemorytype type, const void* host, CUdeviceptr device) {
  if (type == CU_MEMORYTYPE_HOST) return true;
  if (type != CU_MEMORYTYPE_UNIFIED) return false;
  auto address = device != 0 ? device : reinterpret_cast<CUdeviceptr>(host);
  CUmemorytype real = CU_MEMORYTYPE_HOST;  // stays for memory that CUDA does not know
  cuPointerGetAttribute(&real, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, address);
  return real == CU_MEMORYTYPE_HOST;
}

// Why MLX's graph cannot hold this node; null if it can.
const char* ProblemOf(CUgraphNode node) {
  CUgraphNodeType type{};
  Check(cuGraphNodeGetType(node, &type), "cuGraphNodeGetType");
  switch (type) {
    case CU_GRAPH_NODE_TYPE_KERNEL:
    case CU_GRAPH_NODE_TYPE_MEMSET:
    case CU_GRAPH_NODE_TYPE_HOST:
    case CU_GRAPH_NODE_TYPE_GRAPH:
    case CU_GRAPH_NODE_TYPE_WAIT_EVENT:
    case CU_GRAPH_NODE_TYPE_EVENT_RECORD:
      return nullptr;
    case CU_GRAPH_NODE_TYPE_MEM_ALLOC:
    case CU_GRAPH_NODE_TYPE_MEM_FREE:
      return "allocates memory on the stream";
    case CU_GRAPH_NODE_TYPE_MEMCPY: {
      CUDA_MEMCPY3D copy{};
      Check(cuGraphMemcpyNodeGetParams(node, &copy), "cuGraphMemcpyNodeGetParams");
      bool host = OnHost(copy.srcMemoryType, copy.srcHost, copy.srcDevice) ||
                  OnHost(copy.dstMemoryType, copy.dstHost, copy.dstDevice);
      // A graph runs later: memory of the host may be gone by then. And MLX builds graphs with
      // copies anew each time.
      return host ? "copies from or to memory of the host" : "copies memory";
    }
    default:
      return "adds work that MLX's graph does not know";
  }
}

/*! \brief A recorded kernel that stands alone, in the terms of MLX's encoder; nothing where it does
 * not fit them. */
std::optional<CUDA_KERNEL_NODE_PARAMS> PlainKernel(CUgraphNode node) {
  CUDA_KERNEL_NODE_PARAMS params{};
  if (cuGraphKernelNodeGetParams(node, &params) != CUDA_SUCCESS) return std::nullopt;  // no kernel
  if (params.extra != nullptr) return std::nullopt;
  CUlaunchAttributeValue value{};
  Check(cuGraphKernelNodeGetAttribute(node, CU_LAUNCH_ATTRIBUTE_COOPERATIVE, &value),
        "cuGraphKernelNodeGetAttribute");
  if (value.cooperative != 0) return std::nullopt;
  Check(cuGraphKernelNodeGetAttribute(node, CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION, &value),
        "cuGraphKernelNodeGetAttribute");
  if (value.clusterDim.x > 1 || value.clusterDim.y > 1 || value.clusterDim.z > 1)
    return std::nullopt;
  if (params.func == nullptr)
    Check(cuKernelGetFunction(&params.func, params.kern), "cuKernelGetFunction");
  return params;
}

/*! \brief One op on MLX's encoder. */
class Encoding {
 public:
  Encoding(const mx::Stream& stream, const std::vector<mx::array>& inputs,
           const std::vector<mx::array>& outputs, Launch* launch)
      : state_(ThreadState::Get()),
        own_(state_.Of(stream)),
        encoder_(cu::get_command_encoder(stream)),
        inputs_(inputs),
        outputs_(outputs),
        launch_(launch),
        op_{&own_.stream, nullptr} {}

  void Run() {
    // The first op after a commit is launched at once: nothing has to come before it, and a graph
    // of one is slow.
    bool first = Of(encoder_, NodeCount()) == 0 && Of(encoder_, Temporaries()).empty();
    Capture capture = launch_->capture();
    if (state_.capturing || capture == Capture::kNo ||
        (capture == Capture::kYes && (first || !UsesGraphs()))) {
      RunStraight();
    } else {
      RunRecorded();
    }
  }

 private:
  void RunStraight() {
    Flush(encoder_);
    Keep(encoder_, &own_, launch_->KeepAlive());
    op_.recording = nullptr;
    RunScope scope(&op_);
    if (launch_->capture() == Capture::kYes) {
      launch_->Run(own_.interface);
    } else {
      // It may use the default stream, and streams that wait for that one: put their work in line.
      Recorder& recorder = RecorderOfDevice();
      recorder.Order(encoder_.stream(), CU_STREAM_LEGACY);
      launch_->Run(own_.interface);
      recorder.Order(CU_STREAM_LEGACY, encoder_.stream());
    }
    CountStraight();
  }

  Recorder& RecorderOfDevice() { return state_.RecorderOf(encoder_.device().cuda_device()); }

  // Towards the limits at which MLX commits. A straight launch is no node: it takes its share of
  // the other limit.
  void CountStraight() {
    if (!UsesGraphs()) {
      ++Of(encoder_, NodeCount());
      return;
    }
    size_t limit = (static_cast<size_t>(Of(encoder_, MaxMegabytes())) + 1) << 20;
    size_t bytes = limit / static_cast<size_t>(std::max(1, Of(encoder_, MaxOps()))) + 1;
    for (const mx::array& input : inputs_) bytes += input.data_size();
    Of(encoder_, BytesInGraph()) += bytes;
  }

  void RunRecorded() {
    Keep(encoder_, &own_, launch_->KeepAlive());
    Recorder& recorder = RecorderOfDevice();
    recorder.Begin();
    state_.capturing = true;
    std::exception_ptr error;
    {
      op_.recording = recorder.stream();
      RunScope scope(&op_);
      try {
        launch_->Run(own_.interface);
      } catch (...) {
        error = std::current_exception();
      }
    }
    state_.capturing = false;
    const char* problem = nullptr;
    if (!recorder.End()) {
      ForgetRuntimeErrors();
      problem = "does what a capture forbids (it waits for the device, or allocates)";
    } else {
      struct Discard {
        Recorder* recorder;
        ~Discard() {
          if (recorder != nullptr) recorder->Clear();
        }
      } discard{&recorder};
      if (error) std::rethrow_exception(error);
      std::array<CUgraphNode, 2> nodes{};
      size_t count = nodes.size();
      Check(cuGraphGetNodes(recorder.graph(), nodes.data(), &count), "cuGraphGetNodes");
      if (count == 1) {
        if (auto kernel = PlainKernel(nodes[0])) {
          AddKernel(*kernel);
          Check(cuGraphDestroyNode(nodes[0]), "cuGraphDestroyNode");
          discard.recorder = nullptr;
          launch_->Learn(Capture::kYes);
          return;
        }
      }
      if (count == 0) {
        if (AnyEmpty()) return;  // nothing to compute, so nothing was launched
        problem = "launches nothing on the stream that it is given";
      } else {
        problem = FirstProblem(recorder.graph());
      }
      if (problem == nullptr) {
        Declare();
        encoder_.add_graph_node(recorder.graph());
        launch_->Learn(Capture::kYes);
        return;
      }
    }
    Refuse(problem);
    RunStraight();
  }

  static const char* FirstProblem(CUgraph graph) {
    size_t count = 0;
    Check(cuGraphGetNodes(graph, nullptr, &count), "cuGraphGetNodes");
    std::vector<CUgraphNode> nodes(count);
    Check(cuGraphGetNodes(graph, nodes.data(), &count), "cuGraphGetNodes");
    for (CUgraphNode node : nodes) {
      if (const char* problem = ProblemOf(node)) return problem;
    }
    return nullptr;
  }

  bool AnyEmpty() const {
    auto empty = [](const mx::array& array) { return array.size() == 0; };
    return std::any_of(inputs_.begin(), inputs_.end(), empty) ||
           std::any_of(outputs_.begin(), outputs_.end(), empty);
  }

  void Refuse(const char* problem) {
    if (launch_->aliased()) {
      TVM_FFI_THROW(RuntimeError)
          << "[mlx_tvm_ffi.op " << launch_->name()
          << "] kernel: expected one that CUDA can capture, got one that " << problem
          << ". An op with aliases is not run twice: pass capture=False to mlx_tvm_ffi.op.";
    }
    if (launch_->Learn(Capture::kNo) != Capture::kNo) {
      std::fprintf(
          stderr,
          "[mlx_tvm_ffi.op %s] kernel: expected one that CUDA can capture, got one that %s. It "
          "runs straight on "
          "MLX's stream, now and from now on; pass capture=False to mlx_tvm_ffi.op to say so.\n",
          launch_->name(), problem);
    }
  }

  // Before the node, so that MLX orders it: after what wrote or reads this memory, before what
  // comes to it later.
  void Declare() {
    for (const mx::array& array : inputs_) encoder_.set_input_array(array);
    for (const mx::array& array : outputs_) encoder_.set_output_array(array);
    for (const mx::array& array : op_.touched) encoder_.set_output_array(array);
  }

  void AddKernel(const CUDA_KERNEL_NODE_PARAMS& kernel) {
    Declare();
    encoder_.add_kernel_node_raw(kernel.func,
                                 dim3(kernel.gridDimX, kernel.gridDimY, kernel.gridDimZ),
                                 dim3(kernel.blockDimX, kernel.blockDimY, kernel.blockDimZ), dim3(),
                                 kernel.sharedMemBytes, kernel.kernelParams);
  }

  ThreadState& state_;
  OwnStream& own_;
  cu::CommandEncoder& encoder_;
  const std::vector<mx::array>& inputs_;
  const std::vector<mx::array>& outputs_;
  Launch* launch_;
  RunningOp op_;
};

class CudaBackend final : public Backend {
 public:
  DLDevice ToDLDevice(const mx::Device& device) const override { return {kDLCUDA, device.index}; }

  StreamRef MakeInterface(const mx::Device& device, std::optional<mx::Stream> stream) override {
    return MakeMlxStream(std::make_shared<CudaStream>(device, stream));
  }

  void Address(const mx::array& array, DLTensor* tensor) const override {
    auto* buffer = static_cast<const cu::CudaBuffer*>(array.buffer().ptr());
    tensor->data = static_cast<char*>(buffer->data) + array.offset();
    tensor->byte_offset = 0;
  }

  // Device memory from MLX's own pool: owned, counted, donatable. MLX exports no function for it
  // (its allocator's malloc gives managed memory), but its unary primitives first give their output
  // memory, then find that an empty input leaves nothing to do.
  void Allocate(mx::array& array, const mx::Stream& stream) override {
    RelaxedScope relaxed;
    if (array.nbytes() == 0) {
      array.set_data(mx::allocator::malloc(0));
    } else if (array.has_primitive() && array.primitive().stream() == stream) {
      Unary(stream).eval_gpu(Hollow(), array);
    } else {
      mx::array memory(array.shape(), array.dtype(), std::make_shared<Marker>(stream), {});
      Unary(stream).eval_gpu(Hollow(), memory);
      array.copy_shared_buffer(memory);
    }
  }

  void Evaluate(mx::Primitive& primitive, const std::vector<mx::array>& inputs,
                std::vector<mx::array>& outputs) override {
    primitive.eval_gpu(inputs, outputs);
  }

  void KeepScratch(mx::array array, const mx::Stream& stream) override {
    cu::get_command_encoder(stream).add_temporary(array);
    RunningOp* op = ThreadState::Get().op;
    if (op != nullptr) op->touched.push_back(std::move(array));
  }

  void Encode(const mx::Stream& stream, const std::vector<mx::array>& inputs,
              std::vector<mx::array>& outputs, const std::shared_ptr<Launch>& launch) override {
    Encoding(stream, inputs, outputs, launch.get()).Run();
  }

  bool Ready(const mx::array& array) const override {
    if (array.is_available()) return true;
    return array.status() == mx::array::Status::evaluated &&
           array.event().stream() == CurrentStream();
  }

  void Prepare(mx::array& array) override {
    if (array.status() == mx::array::Status::unscheduled) mx::async_eval({array});
    if (array.is_available()) return;
    mx::Stream current = CurrentStream();
    mx::Stream stream = array.event().stream();
    if (stream.device != mx::Device::gpu) {
      array.wait();  // on the CPU memory may move, and pointers are taken before the device waits
    } else if (stream != current) {
      Marker::Commit(current, {array});
    }
  }

  void Start(mx::array& array) override {
    ThreadState& state = ThreadState::Get();
    if (state.op != nullptr) {
      state.op->touched.push_back(array);
    } else {
      ++state.lent;
    }
  }

  void* EnvStream(const mx::Device& device) override {
    ThreadState& state = ThreadState::Get();
    if (std::exception_ptr error = std::exchange(state.late_error, nullptr))
      std::rethrow_exception(error);
    mx::Stream current = CurrentMlxStream();
    if (current.device != device) current = mx::default_stream(device);
    void* launch_stream = LaunchStream(current);
    // It is asked for when the first array of the call has been handed over.
    if (state.op == nullptr && state.lent > 0) state.calls.push_back({current, state.lent - 1});
    return launch_stream;
  }

  void Finish(mx::array& array) noexcept override {
    ThreadState& state = ThreadState::Get();
    if (state.op != nullptr || state.lent == 0) return;
    --state.lent;
    if (state.calls.empty()) return;  // of a call on the stream of another framework
    state.returned.push_back(array);
    if (state.lent > state.calls.back().lent_before) return;
    mx::Stream stream = state.calls.back().stream;
    state.calls.pop_back();
    std::vector<mx::array> arrays = std::exchange(state.returned, {});
    if (state.scopes.empty() || state.scopes.back().stream != stream)
      return Submit(stream, std::move(arrays));
    std::vector<mx::array>& handed = state.scopes.back().handed;
    handed.insert(handed.end(), arrays.begin(), arrays.end());
    if (handed.size() >= kHanded) Submit(stream, std::exchange(handed, {}));
  }

 private:
  static constexpr size_t kHanded =
      256;  // a long scope must not hold on to all memory that it ever used

  static mx::Stream CurrentStream() {
    mx::Stream current = CurrentMlxStream();
    return current.device == mx::Device::gpu ? current : mx::default_stream(mx::Device::gpu);
  }

  static mx::UnaryPrimitive& Unary(const mx::Stream& stream) {
    static auto* primitive = new std::shared_ptr<mx::Primitive>(
        mx::negative(mx::array(mx::Shape{}, mx::float32, nullptr, {}), stream).primitive_ptr());
    return static_cast<mx::UnaryPrimitive&>(**primitive);
  }

  // No elements, and not contiguous: an output takes its size from its own shape then.
  static const std::vector<mx::array>& Hollow() {
    static auto* inputs = [] {
      mx::array hollow(mx::Shape{0}, mx::float32, nullptr, {});
      hollow.set_data(NoMemory(), 0, mx::Strides{1}, mx::array::Flags{false, false, false});
      hollow.set_status(mx::array::Status::available);
      return new std::vector<mx::array>{std::move(hollow)};
    }();
    return *inputs;
  }
};

}  // namespace

}  // namespace mlx_tvm_ffi

void MlxTvmFfiRegisterCuda() {
  mlx_tvm_ffi::RegisterBackend(mlx::core::Device::gpu, new mlx_tvm_ffi::CudaBackend);
}
