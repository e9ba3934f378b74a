// Evaluation: MLX's order of events around eval_gpu. What runs on the CPU goes to MLX's library,
// and is waited for.
#include <mlx/event.h>
#include <mlx/scheduler.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <set>
#include <unordered_map>
#include <unordered_set>

#include "standin.h"

namespace mlx_standin {

namespace {

constexpr int kMaxActiveTasks = 10;
// First word of our events. Those of MLX's library, which it uses while it evaluates on the CPU,
// have a small count there.
constexpr uint64_t kMark = 0x6d6c785f6d65746c;

struct EventState {
  uint64_t mark = kMark;
  NS::SharedPtr<MTL::SharedEvent> event;
  std::atomic<mx::Error*> error{nullptr};
};

}  // namespace

MTL::SharedEvent* MetalEvent(const mx::Event& event) {
  return event.cast<EventState>().event.get();
}

namespace {

// Ends a graph, so that its event comes after all outputs.
class Synchronizer final : public mx::Primitive {
 public:
  using Primitive::Primitive;
  void eval_cpu(const std::vector<mx::array>&, std::vector<mx::array>&) override {}
  void eval_gpu(const std::vector<mx::array>&, std::vector<mx::array>&) override {}
  const char* name() const override { return "Synchronizer"; }
};

void EvalOnCpu(mx::array& array) {
  static auto* original =
      Original<void(std::vector<mx::array>)>("_ZN3mlx4core4evalESt6vectorINS0_5arrayESaIS2_EE");
  original({array});
}

// What is used by the GPU stays until the command buffer is done: inputs and siblings, not the
// output itself, which has its reader or whoever waits for it.
void EvalOnGpu(mx::array& array) {
  auto pool = mx::metal::new_scoped_memory_pool();
  mx::Stream stream = array.primitive().stream();
  mx::metal::CommandEncoder& encoder = mx::metal::get_command_encoder(stream);
  MTL::CommandBuffer* buffer = encoder.get_command_buffer();
  std::vector<mx::array> outputs = array.outputs();
  {
    std::vector<mx::array> traced;  // a reference more, so that nothing is donated
    if (array.is_tracer()) traced = array.inputs();
    array.primitive().eval_gpu(array.inputs(), outputs);
  }
  std::unordered_set<std::shared_ptr<mx::array::Data>> keep;
  for (const mx::array& input : array.inputs()) keep.insert(input.data_shared_ptr());
  for (const mx::array& sibling : array.siblings()) keep.insert(sibling.data_shared_ptr());
  keep.erase(array.data_shared_ptr());
  if (encoder.needs_commit()) {
    encoder.end_encoding();
    mx::scheduler::notify_new_task(stream);
    encoder.commit(
        [stream, keep = std::move(keep)] { mx::scheduler::notify_task_completion(stream); });
  } else {
    buffer->addCompletedHandler([keep = std::move(keep)](MTL::CommandBuffer*) {});
  }
}

void Finalize(mx::Stream stream) {
  if (stream.device != mx::Device::gpu) return;
  auto pool = mx::metal::new_scoped_memory_pool();
  mx::metal::CommandEncoder& encoder = mx::metal::get_command_encoder(stream);
  encoder.end_encoding();
  encoder.commit();
}

void CheckEvaluable(const mx::array& array, bool async) {
  if (async && array.is_tracer()) {
    throw std::invalid_argument("[async_eval] Not allowed inside a graph transformation.");
  }
  if (array.has_primitive()) return;
  if (array.is_tracer()) {
    throw std::invalid_argument(
        "[eval] Attempting to eval an array during function transformations like compile or vmap "
        "is not allowed.");
  }
  throw std::runtime_error("[eval] Attempting to eval an array without a primitive.");
}

// The arrays to evaluate, inputs first.
std::vector<mx::array> Order(const mx::array& last, bool async) {
  std::vector<mx::array> order;
  std::unordered_set<uintptr_t> seen;
  std::vector<std::pair<mx::array, size_t>> stack{{last, 0}};
  while (!stack.empty()) {
    auto& [array, next] = stack.back();
    if (next < array.inputs().size()) {
      mx::array input = array.inputs()[next++];
      if (input.status() != mx::array::Status::unscheduled) continue;
      CheckEvaluable(input, async);
      if (!seen.insert(input.id()).second) continue;
      for (const mx::array& sibling : input.siblings()) seen.insert(sibling.id());
      stack.emplace_back(std::move(input), 0);
    } else {
      order.push_back(std::move(array));
      stack.pop_back();
    }
  }
  return order;
}

class Evaluation {
 public:
  // The array whose wait ends the evaluation.
  mx::array Run(std::vector<mx::array> outputs, bool async) {
    mx::Stream stream = mx::default_stream(mx::default_device());
    for (const mx::array& output : outputs) {
      if (output.status() != mx::array::Status::unscheduled || !output.has_primitive()) continue;
      stream = output.primitive().stream();
      break;
    }
    mx::array last({}, mx::bool_, std::make_shared<Synchronizer>(stream), std::move(outputs));
    last.attach_event(EventOf(stream));
    std::vector<mx::array> order = Order(last, async);
    NoteCrossings(order);
    try {
      for (mx::array& slot : order) {
        // Only the graph holds it now: what nobody else holds can be donated.
        mx::array array = std::exchange(slot, last);
        Eval(array, async);
      }
    } catch (...) {
      Abandon();
      throw;
    }
    for (mx::Stream open : open_) {
      if (auto it = events_.find(open.index); it != events_.end()) it->second.signal(open);
      Finalize(open);
    }
    return last;
  }

 private:
  mx::Event& EventOf(mx::Stream stream) {
    auto it = events_.find(stream.index);
    if (it == events_.end()) {
      it = events_.emplace(stream.index, mx::Event(stream)).first;
      it->second.set_value(1);
    }
    return it->second;
  }

  // Arrays that another stream reads in this evaluation.
  void NoteCrossings(const std::vector<mx::array>& order) {
    for (const mx::array& array : order) {
      for (const mx::array& input : array.inputs()) {
        if (input.status() != mx::array::Status::unscheduled) continue;
        if (input.primitive().stream() != array.primitive().stream()) {
          crossing_.emplace(input.id(), input.primitive().stream().index);
        }
      }
    }
  }

  void Eval(mx::array& array, bool async) {
    mx::Stream stream = array.primitive().stream();
    open_.insert(stream);
    if (async && stream.device == mx::Device::gpu) {
      array.attach_event(EventOf(stream));
      for (const mx::array& sibling : array.siblings()) sibling.attach_event(EventOf(stream));
    }
    if (stream.device == mx::Device::cpu) FlushForHost(array);
    for (const mx::array& input : array.inputs()) WaitFor(input, stream);
    if (stream.device == mx::Device::gpu) {
      EvalOnGpu(array);
    } else if (dynamic_cast<Synchronizer*>(&array.primitive()) == nullptr) {
      auto later = TakeEvents(array);
      EvalOnCpu(array);
      for (auto& [input, event] : later) input.attach_event(event);
    }
    if (mx::scheduler::n_active_tasks() > kMaxActiveTasks) {
      for (mx::Stream open : open_) Finalize(open);
      mx::scheduler::wait_for_one();
    }
    if (array.status() == mx::array::Status::unscheduled) {
      array.set_status(mx::array::Status::evaluated);
    }
    Announce(array, stream);
    for (const mx::array& sibling : array.siblings()) {
      if (sibling.status() == mx::array::Status::unscheduled) {
        sibling.set_status(mx::array::Status::evaluated);
      }
      Announce(sibling, stream);
    }
    if (!array.is_tracer()) array.detach();
  }

  void WaitFor(const mx::array& input, mx::Stream stream) {
    if (auto it = crossing_.find(input.id()); it != crossing_.end()) {
      auto fence = fences_.find(it->second);
      if (fence != fences_.end() && it->second != stream.index) fence->second.wait(stream);
    } else if (input.event().valid()) {
      if (input.event().is_signaled()) {
        input.detach_event();
      } else if (input.event().stream() != stream) {
        input.event().wait(stream);
      }
    }
  }

  // Waits for what earlier evaluations made. What this one made on the GPU is done, but its event
  // comes at the end: MLX's library must not see it.
  std::vector<std::pair<mx::array, mx::Event>> TakeEvents(mx::array& array) {
    std::vector<std::pair<mx::array, mx::Event>> taken;
    for (mx::array input : array.inputs()) {
      if (crossing_.count(input.id()) && input.event().valid()) {
        taken.emplace_back(input, input.event());
        input.attach_event(mx::Event{});
      } else {
        input.wait();
      }
    }
    return taken;
  }

  // For who reads it on another stream.
  void Announce(const mx::array& array, mx::Stream stream) {
    if (!crossing_.count(array.id())) return;
    auto it = fences_.find(stream.index);
    if (it == fences_.end()) it = fences_.emplace(stream.index, mx::Event(stream)).first;
    it->second.set_value(it->second.value() + 1);
    it->second.signal(stream);
  }

  // A kernel on the CPU starts when its inputs are there, so their work has to be committed.
  void FlushForHost(const mx::array& array) {
    std::set<int> streams;
    for (const mx::array& input : array.inputs()) {
      auto it = crossing_.find(input.id());
      if (it != crossing_.end()) streams.insert(it->second);
    }
    for (mx::Stream open : open_) {
      if (!streams.count(open.index)) continue;
      Finalize(open);
      if (auto it = fences_.find(open.index); it != fences_.end()) it->second.wait();
    }
  }

  // After an error nobody is left waiting, and what was encoded before is done.
  void Abandon() {
    for (auto& [index, event] : events_) {
      try {
        mx::Stream stream = event.stream();
        event.signal(stream);
        open_.insert(stream);
      } catch (...) {
      }
    }
    for (mx::Stream open : open_) {
      try {
        mx::synchronize(open);
      } catch (...) {
      }
    }
  }

  std::set<mx::Stream> open_;
  std::unordered_map<int, mx::Event> events_;
  std::unordered_map<int, mx::Event> fences_;
  std::unordered_map<uintptr_t, int> crossing_;
};

bool IsOurs(const mx::Event& event) { return !event.valid() || event.cast<uint64_t>() == kMark; }

bool AnyUnscheduled(const std::vector<mx::array>& arrays) {
  return std::any_of(arrays.begin(), arrays.end(), [](const mx::array& array) {
    return array.status() == mx::array::Status::unscheduled;
  });
}

}  // namespace
}  // namespace mlx_standin

namespace mlx::core {

using mlx_standin::EventState;

Event::Event(Stream stream) : stream_(stream) {
  auto state = std::make_shared<EventState>();
  state->event = NS::TransferPtr(metal::device(Device::gpu).mtl_device()->newSharedEvent());
  event_ = std::move(state);
}

void Event::wait() {
  check_error();
  cast<EventState>().event->waitUntilSignaledValue(value(), ~0ULL);
  check_error();
}

void Event::wait(Stream stream) {
  if (stream.device == Device::gpu) {
    metal::get_command_encoder(stream).wait_event(*this, value());
  } else {
    wait();
  }
}

void Event::signal(Stream stream) {
  if (stream.device == Device::gpu) {
    metal::get_command_encoder(stream).signal_event(*this, value());
  } else {
    cast<EventState>().event->setSignaledValue(value());
  }
}

bool Event::is_signaled() const { return cast<EventState>().event->signaledValue() >= value(); }

std::atomic<Error*>& Event::error() { return cast<EventState>().error; }

bool array::is_available() const {
  if (!mlx_standin::IsOurs(event())) {
    static auto* original =
        mlx_standin::Original<bool(const array*)>("_ZNK3mlx4core5array12is_availableEv");
    return original(this);
  }
  if (status() == Status::available) return true;
  if (status() != Status::evaluated || (event().valid() && !event().is_signaled())) return false;
  detach_event();
  set_status(Status::available);
  return true;
}

void array::wait() {
  if (!mlx_standin::IsOurs(event())) {
    static auto* original = mlx_standin::Original<void(array*)>("_ZN3mlx4core5array4waitEv");
    return original(this);
  }
  if (is_available()) return;
  if (event().valid()) {
    event().wait();
    detach_event();
  }
  set_status(Status::available);
}

void array::eval() {
  if (status() == Status::unscheduled) {
    mlx::core::eval({*this});
  } else {
    wait();
  }
}

void async_eval(std::vector<array> outputs) {
  mlx_standin::TeachPrimitives();
  if (mlx_standin::AnyUnscheduled(outputs)) mlx_standin::Evaluation().Run(std::move(outputs), true);
}

void eval(std::vector<array> outputs) {
  mlx_standin::TeachPrimitives();
  if (mlx_standin::AnyUnscheduled(outputs)) {
    mlx_standin::Evaluation().Run(std::move(outputs), false).wait();
  } else {
    for (array& output : outputs) output.wait();
  }
}

}  // namespace mlx::core
