/*!
 * \file metal.cc
 * \brief The Metal backend. MLX keeps one concurrent encoder open per stream; kernels encode on it,
 * so MLX's hazard tracking is told what they touch, before they run.
 */
#include "backend/metal.h"

#include <mlx/allocator.h>
#include <mlx/backend/metal/metal.h>
#include <mlx/scheduler.h>
#include <mlx/transforms.h>
#include <tvm/ffi/error.h>

#include <algorithm>
#include <cstdio>
#include <memory>
#include <optional>
#include <stdexcept>
#include <utility>
#include <vector>

#include "backend/backend.h"
#include "backend/metal_encoder.h"
#include "backend/reap.h"

namespace mlx_tvm_ffi {
namespace {

using mx::metal::CommandEncoder;

// MLX waits for earlier work once more tasks than this are in flight.
constexpr int kMaxActiveTasks = 10;

// A scope looks for arrays that nobody else holds any more once it holds this many.
constexpr std::size_t kMinPruned = 32;

// Around what opens an encoder or a command buffer: Metal autoreleases both, and a direct call may
// run on a thread that has no pool. Never held while a kernel runs, which may have pools of its
// own.
NS::SharedPtr<NS::AutoreleasePool> MakePool() {
  return NS::TransferPtr(NS::AutoreleasePool::alloc()->init());
}

CommandEncoder& EncoderOf(const mx::Stream& stream) {
  try {
    return mx::metal::get_command_encoder(stream);
  } catch (const std::runtime_error& error) {
    TVM_FFI_THROW(RuntimeError)
        << "[mlx_tvm_ffi.AcquireEncoder] stream: expected one of this thread, got gpu stream "
        << stream.index << ": " << error.what()
        << " Use a stream on the thread that made it, or make it with "
           "mlx.core.new_thread_unsafe_stream.";
  }
}

/*! \brief What a command buffer uses and does not retain, kept until it is done. */
struct Kept {
  bool direct = false;  // a direct call is encoded in it
  std::vector<std::shared_ptr<mx::array::Data>> memory;
  std::vector<std::shared_ptr<void>> objects;
  NS::SharedPtr<MTL::Event> event;
};

/*! \brief An array that a direct call was handed, or memory that its kernel allocated. */
struct Lent {
  mx::array array;
  bool declared = false;  // to MLX's tracking, since the encoder was last acquired
  bool finished = false;  // its call has returned, while the encoder was held
};

/*! \brief One thread's view of one MLX stream. */
struct StreamState {
  StreamState(const mx::Stream& stream, StreamRef interface)
      : stream(stream), interface(std::move(interface)) {}

  const mx::Stream stream;
  const StreamRef interface;

  // Retained, because addresses repeat: what `kept` belongs to, and the encoder that starts after
  // all earlier work is done.
  NS::SharedPtr<MTL::CommandBuffer> buffer;
  NS::SharedPtr<MTL::ComputeCommandEncoder> ordered;
  std::shared_ptr<Kept> kept;
  NS::SharedPtr<MTL::Event> event;
  uint64_t event_value = 0;

  bool in_op = false;
  bool encoded = false;     // the op's kernel has had an encoder before
  int encoders = 0;         // acquired and not released
  int command_buffers = 0;  // the same
  int scopes = 0;

  // The direct call in progress.
  std::vector<Lent> lent;
  bool untracked = false;  // it works on memory that nobody declared
  int encoders_before = 0;

  // Direct calls in a scope: the arrays that get their event when it is left.
  std::vector<mx::array> pending;
  std::size_t prune_at = kMinPruned;
};

/*! \brief The streams that a thread has used, one or two as a rule, and its open scopes. */
struct ThreadState {
  std::vector<std::unique_ptr<StreamState>> streams;
  std::vector<StreamState*> scopes;  // null for that of an op's kernel
};

ThreadState& ThisThread() {
  static thread_local ThreadState state;
  return state;
}

StreamState& StateOf(const mx::Stream& stream);

// ---- What both kinds of call do.

Kept& KeptBy(StreamState& state, CommandEncoder& encoder) {
  MTL::CommandBuffer* buffer = encoder.get_command_buffer();
  if (state.buffer.get() != buffer || state.kept == nullptr) {
    state.buffer = NS::RetainPtr(buffer);
    state.kept = std::make_shared<Kept>();
    buffer->addCompletedHandler([kept = state.kept](MTL::CommandBuffer*) {
      kept->memory.clear();
      kept->event.reset();
      Reap(std::move(kept->objects));
    });
  }
  return *state.kept;
}

void KeepObject(StreamState& state, CommandEncoder& encoder, std::shared_ptr<void> object) {
  auto& objects = KeptBy(state, encoder).objects;
  if (objects.empty() || objects.back() != object) objects.push_back(std::move(object));
}

// What is encoded before this is done before what is encoded after it starts, reads included: MLX's
// fences follow writes alone.
void Order(StreamState& state, CommandEncoder& encoder) {
  if (!state.event) {
    state.event = NS::TransferPtr(mx::metal::device(state.stream.device).mtl_device()->newEvent());
  }
  KeptBy(state, encoder).event = state.event;
  EndEncoding(encoder);
  MTL::CommandBuffer* buffer = encoder.get_command_buffer();
  buffer->encodeSignalEvent(state.event.get(), ++state.event_value);
  buffer->encodeWait(state.event.get(), state.event_value);
}

// ---- Direct calls.

/*!
 * \brief An array whose memory an encoded, uncommitted call writes. It is lazy to MLX, so whoever
 * reads it makes MLX evaluate it, which commits and waits as for any array; there is nothing to
 * compute.
 */
class Encoded final : public mx::Primitive {
 public:
  Encoded(const mx::Stream& stream, mx::array memory)
      : Primitive(stream), memory_(std::move(memory)) {}
  void eval_cpu(const std::vector<mx::array>&, std::vector<mx::array>&) override {
    TVM_FFI_THROW(InternalError) << "[mlx_tvm_ffi.eval_cpu] device: expected gpu, got cpu.";
  }
  void eval_gpu(const std::vector<mx::array>&, std::vector<mx::array>& outputs) override {
    outputs[0].copy_shared_buffer(memory_);
  }
  const char* name() const override { return "MlxTvmFfiEncoded"; }

 private:
  mx::array memory_;
};

bool IsEncoded(const mx::array& array, const mx::Stream& stream) {
  if (array.status() != mx::array::Status::unscheduled || !array.has_primitive()) return false;
  const mx::Primitive& primitive = array.primitive();
  return typeid(primitive) == typeid(Encoded) && array.primitive().stream() == stream;
}

void MakeEncoded(mx::array array, const mx::Stream& stream) {
  mx::array memory(array.shape(), array.dtype(), nullptr, {});
  memory.copy_shared_buffer(array);
  memory.set_status(mx::array::Status::available);
  array.detach();
  array.attach_event(mx::Event{});
  array.primitive_ptr() = std::make_shared<Encoded>(stream, std::move(memory));
  array.set_status(mx::array::Status::unscheduled);
}

// Commits, and gives MLX's event for it to each array.
void Submit(StreamState& state, CommandEncoder& encoder, std::vector<mx::array>& arrays) {
  if (arrays.empty()) {
    auto pool = MakePool();
    encoder.end_encoding();
    encoder.commit();
    return;
  }
  mx::array& first = arrays.front();
  if (!IsEncoded(first, state.stream)) MakeEncoded(first, state.stream);
  mx::async_eval({first});
  for (mx::array& array : arrays) {
    if (array.id() == first.id()) continue;
    array.detach();
    array.attach_event(first.event());
    array.set_status(mx::array::Status::evaluated);
  }
}

// Lets go of arrays that nobody else holds, or that MLX has evaluated meanwhile.
void Prune(StreamState& state) {
  std::erase_if(state.pending, [&](const mx::array& array) {
    return OwnersOf(array) == 1 || !IsEncoded(array, state.stream);
  });
}

// Keeps what a direct call was handed; says that it is read and written, for which of both is not
// known.
void Declare(StreamState& state, CommandEncoder& encoder, bool on_encoder) {
  Kept& kept = KeptBy(state, encoder);
  for (Lent& lent : state.lent) {
    if (std::exchange(lent.declared, true)) continue;
    kept.memory.push_back(lent.array.data_shared_ptr());
    if (on_encoder) DeclareOutput(encoder, lent.array);
  }
  if (on_encoder) encoder.maybeInsertBarrier();
}

// At the outermost acquire of a direct call.
void BeginDirect(StreamState& state, CommandEncoder& encoder, bool on_encoder) {
  state.untracked = !on_encoder || state.lent.empty();
  const MTL::ComputeCommandEncoder* open = OpenEncoder(encoder);
  if (state.untracked || open == nullptr || open != state.ordered.get()) Order(state, encoder);
  if (on_encoder && OpenEncoder(encoder) == nullptr) {
    auto pool = MakePool();
    state.ordered = NS::RetainPtr(RawEncoder(encoder));
  }
  KeptBy(state, encoder).direct = true;
  for (Lent& lent : state.lent) lent.declared = false;
  Declare(state, encoder, on_encoder);
}

// At the outermost release.
void EndDirect(StreamState& state, CommandEncoder& encoder, bool on_encoder) {
  Declare(state, encoder, on_encoder);  // what the kernel allocated
  if (state.untracked) Order(state, encoder);
  const std::vector<Lent> all = state.lent;
  std::erase_if(state.lent, [](const Lent& lent) { return lent.finished; });

  if (state.scopes == 0) {
    std::vector<mx::array> arrays;
    for (const Lent& lent : all) arrays.push_back(lent.array);
    Submit(state, encoder, arrays);
    return;
  }
  for (const Lent& lent : all) {
    if (IsEncoded(lent.array, state.stream)) continue;
    MakeEncoded(lent.array, state.stream);
    state.pending.push_back(lent.array);
  }
  if (state.pending.size() >= state.prune_at) {
    Prune(state);
    state.prune_at = std::max(kMinPruned, 2 * state.pending.size());
  }
  if (!encoder.needs_commit()) return;
  auto pool = MakePool();
  encoder.end_encoding();  // from here on as MLX's eval does it
  mx::scheduler::notify_new_task(state.stream);
  encoder.commit([stream = state.stream] { mx::scheduler::notify_task_completion(stream); });
  if (mx::scheduler::n_active_tasks() > kMaxActiveTasks) mx::scheduler::wait_for_one();
}

// ---- The stream interface.

class MetalStream final : public MlxStream {
 public:
  using MlxStream::MlxStream;

  DLDevice device() const override { return {kDLMetal, 0}; }

  void* AcquireEncoder() override {
    StreamState& state = StateOf(Resolve());
    CommandEncoder& encoder = EncoderOf(state.stream);
    if (state.command_buffers != 0) {
      TVM_FFI_THROW(RuntimeError)
          << "[mlx_tvm_ffi.AcquireEncoder] command buffer: expected none acquired, got one. "
             "Release it before.";
    }
    if (state.encoders == 0) {
      if (!state.in_op) {
        BeginDirect(state, encoder, true);
      } else if (std::exchange(state.encoded, true)) {
        encoder.barrier();  // a kernel made of several functions: each sees what those before wrote
      }
      CountDispatches(encoder, 1);
    } else if (!state.in_op) {
      Declare(state, encoder, true);
    }
    void* raw = OpenEncoder(encoder);
    if (raw == nullptr) {
      auto pool = MakePool();
      raw = RawEncoder(encoder);
    }
    ++state.encoders;
    return raw;
  }

  void ReleaseEncoder() override {
    StreamState& state = StateOf(Resolve());
    if (state.encoders == 0) {
      TVM_FFI_THROW(RuntimeError)
          << "[mlx_tvm_ffi.ReleaseEncoder] encoder: expected an acquired one, got none. Release as "
             "often as you acquired.";
    }
    if (--state.encoders != 0 || state.in_op) return;
    EndDirect(state, EncoderOf(state.stream), true);
  }

  void Barrier() override {
    StreamState& state = StateOf(Resolve());
    if (state.encoders == 0) {
      TVM_FFI_THROW(RuntimeError)
          << "[mlx_tvm_ffi.Barrier] encoder: expected an acquired one, got none. Call it between "
             "AcquireEncoder and ReleaseEncoder.";
    }
    CommandEncoder& encoder = EncoderOf(state.stream);
    encoder.barrier();
    CountDispatches(encoder, 1);
  }

  void* GetDevice() override { return mx::metal::device(Resolve().device).mtl_device(); }

  void* AcquireCommandBuffer() override {
    StreamState& state = StateOf(Resolve());
    CommandEncoder& encoder = EncoderOf(state.stream);
    if (state.encoders != 0) {
      TVM_FFI_THROW(RuntimeError)
          << "[mlx_tvm_ffi.AcquireCommandBuffer] encoder: expected none acquired, got one. "
             "Release it before: a command buffer has one encoder at a time.";
    }
    if (state.command_buffers == 0) {
      if (state.in_op) {
        Order(state, encoder);
      } else {
        BeginDirect(state, encoder, false);
      }
    }
    ++state.command_buffers;
    return encoder.get_command_buffer();
  }

  void ReleaseCommandBuffer() override {
    StreamState& state = StateOf(Resolve());
    if (state.command_buffers == 0) {
      TVM_FFI_THROW(RuntimeError) << "[mlx_tvm_ffi.ReleaseCommandBuffer] command buffer: expected "
                                     "an acquired one, got none. Release as often as you acquired.";
    }
    if (--state.command_buffers != 0) return;
    CommandEncoder& encoder = EncoderOf(state.stream);
    CountDispatches(encoder, 1);
    if (state.in_op) {
      Order(state, encoder);
    } else {
      EndDirect(state, encoder, false);
    }
  }

  void Enter() override {
    StreamState& state = StateOf(Resolve());
    ThisThread().scopes.push_back(state.in_op ? nullptr : &state);
    if (!state.in_op) ++state.scopes;
  }

  void Leave() override {
    auto& scopes = ThisThread().scopes;
    StreamState* left = scopes.back();
    scopes.pop_back();
    if (left == nullptr) return;
    --left->scopes;
    if (!left->buffer) return;  // never used on this thread
    CommandEncoder& encoder = EncoderOf(left->stream);
    Prune(*left);
    auto arrays = std::exchange(left->pending, {});
    const bool uncommitted =
        left->buffer.get() == encoder.get_command_buffer() && left->kept->direct;
    if (arrays.empty() && !uncommitted) return;
    Submit(*left, encoder, arrays);
  }

  void Keep(std::shared_ptr<void> object) override {
    StreamState& state = StateOf(Resolve());
    KeepObject(state, EncoderOf(state.stream), std::move(object));
  }
};

StreamState& StateOf(const mx::Stream& stream) {
  auto& states = ThisThread().streams;
  for (auto& state : states) {
    if (state->stream == stream) return *state;
  }
  auto interface = MakeMlxStream(std::make_shared<MetalStream>(stream.device, stream));
  return *states.emplace_back(std::make_unique<StreamState>(stream, std::move(interface)));
}

// While an op's kernel runs. Ends what it acquired and did not release.
class OpScope {
 public:
  OpScope(StreamState& state, CommandEncoder& encoder)
      : state_(state),
        encoder_(encoder),
        in_op_(std::exchange(state.in_op, true)),
        encoded_(std::exchange(state.encoded, false)),
        encoders_(std::exchange(state.encoders, 0)),
        command_buffers_(std::exchange(state.command_buffers, 0)) {}
  ~OpScope() {
    if (state_.command_buffers != 0) Order(state_, encoder_);
    state_.command_buffers = command_buffers_;
    state_.encoders = encoders_;
    state_.encoded |= encoded_;
    state_.in_op = in_op_;
  }

 private:
  StreamState& state_;
  CommandEncoder& encoder_;
  const bool in_op_;
  const bool encoded_;
  const int encoders_;
  const int command_buffers_;
};

class MetalBackend final : public Backend {
 public:
  DLDevice ToDLDevice(const mx::Device& device) const override { return {kDLMetal, device.index}; }

  StreamRef MakeInterface(const mx::Device& device, std::optional<mx::Stream> stream) override {
    return MakeMlxStream(std::make_shared<MetalStream>(device, stream));
  }

  void Address(const mx::array& array, DLTensor* tensor) const override {
    tensor->data = const_cast<void*>(array.buffer().ptr());
    tensor->byte_offset = static_cast<uint64_t>(array.offset());
  }

  void Allocate(mx::array& array, const mx::Stream&) override {
    array.set_data(mx::allocator::malloc(array.nbytes()));
  }

  void Evaluate(mx::Primitive& primitive, const std::vector<mx::array>& inputs,
                std::vector<mx::array>& outputs) override {
    primitive.eval_gpu(inputs, outputs);
  }

  void KeepScratch(mx::array array, const mx::Stream& stream) override {
    EncoderOf(stream).add_temporary(std::move(array));
  }

  void Encode(const mx::Stream& stream, const std::vector<mx::array>& inputs,
              std::vector<mx::array>& outputs, const std::shared_ptr<Launch>& launch) override {
    StreamState& state = StateOf(stream);
    CommandEncoder& encoder = EncoderOf(stream);
    KeepObject(state, encoder, launch->KeepAlive());
    for (const mx::array& input : inputs) DeclareInput(encoder, input);
    for (const mx::array& output : outputs) DeclareOutput(encoder, output);
    encoder.maybeInsertBarrier();  // what is due, and shows the declarations to whoever comes next
    const std::shared_ptr<Kept> kept = state.kept;
    {
      OpScope scope(state, encoder);
      launch->Run(state.interface);
    }
    // MLX would add a handler to a committed buffer, which ends the process.
    if (state.kept != kept || state.buffer.get() != encoder.get_command_buffer()) {
      TVM_FFI_THROW(RuntimeError)
          << "[mlx_tvm_ffi.op] " << launch->name()
          << ": expected a kernel that encodes, got one that committed MLX's command buffer. "
             "Evaluate no arrays inside a kernel.";
    }
  }

  bool Ready(const mx::array& array) const override {
    const mx::Stream stream = CurrentMlxStream();
    return array.is_available() || IsEncoded(array, stream) ||
           (array.status() == mx::array::Status::evaluated && array.event().stream() == stream);
  }

  void Prepare(mx::array& array) override {
    const mx::Stream stream = CurrentMlxStream();
    StreamState& state = StateOf(stream);
    if (state.in_op || state.encoders != 0 || state.command_buffers != 0) {
      TVM_FFI_THROW(RuntimeError)
          << "[mlx_tvm_ffi.direct_call] array: expected an evaluated one while a kernel encodes, "
             "got one that is not. Evaluate it before.";
    }
    if (array.status() == mx::array::Status::unscheduled && !IsEncoded(array, stream)) {
      mx::async_eval({array});
    }
    if (Ready(array)) return;
    EncoderOf(stream).wait_event(array.event(), array.event().value());  // on the device, not here
  }

  void Start(mx::array& array) override {
    StreamState& state = StateOf(CurrentMlxStream());
    if (state.lent.empty()) state.encoders_before = state.encoders;
    state.lent.push_back({array});
  }

  void* EnvStream(const mx::Device& device) override {
    void* scoped = TVMFFIEnvGetStream(kDLMetal, device.index);
    return scoped != nullptr ? scoped : StateOf(CurrentMlxStream()).interface.get();
  }

  void Finish(mx::array& array) noexcept override {
    for (auto& state : ThisThread().streams) {
      auto& lent = state->lent;
      auto last = std::find_if(lent.rbegin(), lent.rend(), [&](const Lent& other) {
        return other.array.id() == array.id() && !other.finished;
      });
      if (last == lent.rend()) continue;
      if (state->encoders == 0 && state->command_buffers == 0) {
        lent.erase(std::next(last).base());
        return;
      }
      last->finished = true;  // gets its event at the release
      if (std::all_of(lent.begin(), lent.end(), [](const Lent& other) { return other.finished; })) {
        EndCall(*state);
      }
      return;
    }
  }

 private:
  // All arrays are back. Releases for a kernel that did not.
  static void EndCall(StreamState& state) noexcept {
    const bool on_encoder = state.encoders != 0;
    if (on_encoder && state.encoders == state.encoders_before) return;
    state.encoders = state.encoders_before;
    state.command_buffers = 0;
    if (state.encoders != 0) return;
    try {
      EndDirect(state, EncoderOf(state.stream), on_encoder);
    } catch (const std::exception& error) {
      std::fprintf(stderr, "[mlx_tvm_ffi.direct_call] %s\n", error.what());
    }
  }
};

}  // namespace

void RegisterMetalBackend() {
  if (mx::metal::is_available()) RegisterBackend(mx::Device::gpu, new MetalBackend);
}

}  // namespace mlx_tvm_ffi
