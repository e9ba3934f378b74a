// MLX's CommandEncoder: one concurrent encoder per command buffer as long as nothing ends it,
// barriers from the sets of what dispatches read and wrote, fences from one encoder to the next,
// buffers that nobody retains.
#include <unordered_map>
#include <unordered_set>

#include "standin.h"

namespace mlx_standin {

// Events of MLX on Metal (eval.cc).
MTL::SharedEvent* MetalEvent(const mx::Event& event);

namespace {

using Encoders = std::unordered_map<int, mx::metal::CommandEncoder>;

Encoders& OfThread() {
  thread_local Encoders encoders;
  return encoders;
}

Encoders& OfAnyThread() {
  static auto* encoders = new Encoders;
  return *encoders;
}

}  // namespace

void MakeEncoder(mx::Stream stream, bool any_thread) {
  mx::metal::Device& device = mx::metal::device(stream.device);
  (any_thread ? OfAnyThread() : OfThread())
      .try_emplace(stream.index, device, stream.index, device.residency_sets());
}

void DropEncodersOfThread() { OfThread().clear(); }

}  // namespace mlx_standin

namespace mlx::core::metal {

CommandEncoder& get_command_encoder(Stream stream) {
  for (auto* encoders : {&mlx_standin::OfThread(), &mlx_standin::OfAnyThread()}) {
    if (auto it = encoders->find(stream.index); it != encoders->end()) return it->second;
  }
  throw std::runtime_error("There is no Stream(gpu, " + std::to_string(stream.index) +
                           ") in current thread.");
}

CommandEncoder::CommandEncoder(Device& device, int, ResidencySets& residency_sets)
    : device_(device), residency_sets_(residency_sets) {
  auto pool = new_scoped_memory_pool();
  queue_ = NS::TransferPtr(device_.mtl_device()->newCommandQueue());
  buffer_ = NS::RetainPtr(queue_->commandBufferWithUnretainedReferences());
}

CommandEncoder::~CommandEncoder() {
  exiting_ = true;
  synchronize();
  auto pool = new_scoped_memory_pool();
  buffer_.reset();
  queue_.reset();
}

MTL::ComputeCommandEncoder* CommandEncoder::get_command_encoder() {
  if (!encoder_) {
    error_.check();
    encoder_ = NS::RetainPtr(buffer_->computeCommandEncoder(MTL::DispatchTypeConcurrent));
    fence_ = NS::TransferPtr(device_.mtl_device()->newFence());
  }
  return encoder_.get();
}

// A raw buffer is ordered across encoders, as read and written, and not inside one.
void CommandEncoder::set_buffer(const MTL::Buffer* buffer, int index, int64_t offset) {
  all_inputs_.insert(buffer);
  all_outputs_.insert(buffer);
  get_command_encoder()->setBuffer(buffer, static_cast<NS::UInteger>(offset),
                                   static_cast<NS::UInteger>(index));
}

void CommandEncoder::set_input_array(const array& input, int index, int64_t offset) {
  auto* buffer = static_cast<MTL::Buffer*>(const_cast<void*>(input.buffer().ptr()));
  bool first = all_inputs_.insert(buffer).second;
  if (first) buffer_sizes_ += input.data_size();  // elements, as in MLX
  next_inputs_.insert(buffer);
  if (prev_outputs_.count(buffer)) needs_barrier_ = true;  // read after write
  get_command_encoder()->setBuffer(buffer, static_cast<NS::UInteger>(input.offset() + offset),
                                   static_cast<NS::UInteger>(index));
}

void CommandEncoder::set_output_array(array& output, int index, int64_t offset) {
  set_input_array(output, index, offset);  // write after write
  register_output_array(output);
}

void CommandEncoder::register_output_array(const array& output) {
  auto* buffer = static_cast<MTL::Resource*>(const_cast<void*>(output.buffer().ptr()));
  all_outputs_.insert(buffer);
  if (concurrent_) {
    concurrent_outputs_.insert(buffer);
    return;
  }
  next_outputs_.insert(buffer);
  if (prev_inputs_.count(buffer)) needs_barrier_ = true;  // write after read
}

void CommandEncoder::add_temporary(array temporary) {
  temporaries_.push_back(std::move(temporary));
}

void CommandEncoder::add_temporaries(std::vector<array> temporaries) {
  for (array& temporary : temporaries) add_temporary(std::move(temporary));
}

void CommandEncoder::maybeInsertBarrier() {
  if (needs_barrier_) {
    barrier();
    needs_barrier_ = false;
    prev_inputs_.clear();
    prev_outputs_.clear();
  }
  prev_inputs_.merge(next_inputs_);
  prev_outputs_.merge(next_outputs_);
  next_inputs_.clear();
  next_outputs_.clear();
}

void CommandEncoder::dispatch_threadgroups(MTL::Size grid, MTL::Size group) {
  maybeInsertBarrier();
  buffer_ops_++;
  get_command_encoder()->dispatchThreadgroups(grid, group);
}

void CommandEncoder::dispatch_threads(MTL::Size grid, MTL::Size group) {
  maybeInsertBarrier();
  buffer_ops_++;
  get_command_encoder()->dispatchThreads(grid, group);
}

void CommandEncoder::barrier() { get_command_encoder()->memoryBarrier(MTL::BarrierScopeBuffers); }

// The encoder waits for the fences of the encoders that wrote what it uses, and its own fence
// stands for all that it wrote, until its command buffer is done. Temporaries stay inside one
// encoder: no fence for them.
#if MLX_VERSION_NUMERIC >= 32004
void CommandEncoder::end_encoding(bool wait_in_flight) {
#else
void CommandEncoder::end_encoding() {
  constexpr bool wait_in_flight = false;
#endif
  if (!encoder_) return;
  for (const array& temporary : temporaries_) {
    all_inputs_.erase(temporary.buffer().ptr());
    all_outputs_.erase(temporary.buffer().ptr());
  }
  std::vector<NS::SharedPtr<MTL::Fence>> waited;
  {
    std::lock_guard lock(outputs_mtx_);
    std::unordered_set<MTL::Fence*> fences;
    for (auto& [buffer, fence] : prev_ce_outputs_) {
      bool used = wait_in_flight || all_inputs_.count(buffer);
      if (!used || !fences.insert(fence.get()).second) continue;
      encoder_->waitForFence(fence.get());
      waited.push_back(fence);
    }
    for (const void* buffer : all_outputs_) prev_ce_outputs_[buffer] = fence_;
  }
  encoder_->updateFence(fence_.get());
  auto done = [this, fence = std::move(fence_), waited = std::move(waited),
               outputs = std::move(all_outputs_),
               temporaries = std::move(temporaries_)](MTL::CommandBuffer*) {
    std::lock_guard lock(outputs_mtx_);
    for (const void* buffer : outputs) {
      auto it = prev_ce_outputs_.find(buffer);
      if (it != prev_ce_outputs_.end() && it->second.get() == fence.get()) {
        prev_ce_outputs_.erase(it);
      }
    }
  };
  buffer_->addCompletedHandler(std::move(done));
  encoder_->endEncoding();
  encoder_.reset();
  needs_barrier_ = false;
  concurrent_ = false;
  temporaries_.clear();
  all_outputs_.clear();
  all_inputs_.clear();
  prev_inputs_.clear();
  prev_outputs_.clear();
  next_inputs_.clear();
  next_outputs_.clear();
  concurrent_outputs_.clear();
}

void CommandEncoder::signal_event(Event event, uint64_t value) {
  end_encoding();
  buffer_->encodeSignalEvent(mlx_standin::MetalEvent(event), value);
  signal_events_.emplace_back(std::move(event), value);
}

void CommandEncoder::wait_event(Event event, uint64_t value) {
  end_encoding();
  buffer_->encodeWait(mlx_standin::MetalEvent(event), value);
  wait_events_.push_back(std::move(event));
}

bool CommandEncoder::needs_commit() const {
  auto [max_ops, max_mb] = device_.get_max_ops_mb_per_buffer();
  return buffer_ops_ > max_ops || (buffer_sizes_ >> 20) > static_cast<size_t>(max_mb);
}

// An error of the command buffer, or of an event that it waited for, is kept for the stream's next
// encoder and handed on to the events that it signals, which Metal leaves unsignalled then.
void CommandEncoder::commit(std::function<void()> completion) {
  auto done = [this, completion = std::move(completion), waits = std::move(wait_events_),
               signals = std::move(signal_events_)](MTL::CommandBuffer* buffer) mutable {
    if (completion) completion();
    for (Event& event : waits) {
      if (error_.store_if_valid(event.load_error())) break;
    }
    bool failed = buffer->status() == MTL::CommandBufferStatusError;
    if (failed && !error_.valid()) {
      std::string reason = buffer->error()->localizedDescription()->utf8String();
      error_.set_message(std::make_shared<std::string>(
          "[METAL] Command buffer execution failed: " + reason + "."));
    }
    for (auto& [event, value] : signals) {
      if (error_.valid()) event.set_error(error_);
      if (failed) mlx_standin::MetalEvent(event)->setSignaledValue(value);
    }
  };
  wait_events_.clear();
  signal_events_.clear();
  buffer_->addCompletedHandler(std::move(done));
  buffer_->commit();
  buffer_ = NS::RetainPtr(queue_->commandBufferWithUnretainedReferences());
  buffer_ops_ = 0;
  buffer_sizes_ = 0;
}

void CommandEncoder::synchronize() {
  auto pool = new_scoped_memory_pool();
  auto committed = buffer_;
  end_encoding();
  commit();
  committed->waitUntilCompleted();
  if (!exiting_) error_.check();
}

}  // namespace mlx::core::metal
