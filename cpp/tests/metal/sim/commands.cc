#include "commands.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <map>
#include <random>
#include <set>

#include "report.h"

extern "C" {
void* _Block_copy(const void*);
void _Block_release(const void*);
}

namespace metal_sim {
namespace {

constexpr NSUInteger kMaxBytes = 4096;  // of setBytes
constexpr NSUInteger kMaxThreadgroupBytes = 32768;
constexpr std::chrono::seconds kDeadlock(10);

Handler CopyBlock(Handler handler) {
  return reinterpret_cast<Handler>(_Block_copy(reinterpret_cast<const void*>(handler)));
}
void ReleaseBlock(Handler handler) { _Block_release(reinterpret_cast<const void*>(handler)); }

struct Gpu {
  std::mutex mutex;
  std::condition_variable changed;
  bool held = false;
  int busy = 0;  // command buffers that are committed and not yet let go of
};

Gpu& GetGpu() {
  static auto* gpu = new Gpu;
  return *gpu;
}

// Guarded by OrderMutex.
std::mt19937& Random() {
  static auto* random = new std::mt19937(static_cast<unsigned>(GetSettings().seed.load()));
  return *random;
}

std::atomic<int> next_encoder{0};

// MLX's spinning fence kernels run one at a time here, so they keep their order.
bool IsFenceKernel(const Command& command) { return command.name.starts_with("fence_"); }

// The order of the dispatches commands[begin, end) of a concurrent encoder.
std::vector<size_t> DispatchOrder(const std::vector<Command>& commands, size_t begin, size_t end) {
  std::vector<size_t> order, fences;
  for (size_t i = begin; i < end; i++) order.push_back(i);
  Order mode = GetSettings().dispatches;
  if (mode == Order::kReverse) std::reverse(order.begin(), order.end());
  if (mode == Order::kRandom) {
    std::lock_guard lock(OrderMutex());
    std::shuffle(order.begin(), order.end(), Random());
  }
  for (size_t i : order) {
    if (IsFenceKernel(commands[i])) fences.push_back(i);
  }
  std::sort(fences.begin(), fences.end());
  auto next = fences.begin();
  for (size_t& i : order) {
    if (IsFenceKernel(commands[i])) i = *next++;
  }
  return order;
}

}  // namespace

void HoldGpu(bool hold) {
  {
    std::lock_guard lock(GetGpu().mutex);
    GetGpu().held = hold;
  }
  GetGpu().changed.notify_all();
}

void WaitUntilIdle() {
  std::unique_lock lock(GetGpu().mutex);
  GetGpu().changed.wait_for(lock, kDeadlock, [] { return GetGpu().held || GetGpu().busy == 0; });
}

// ---- Queue

Queue::Queue() : Labelled(GetClass("SimCommandQueue")), thread_([this] { Loop(); }) {}

Queue::~Queue() {
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
  if (thread_.get_id() == std::this_thread::get_id()) {
    thread_.detach();
  } else {
    thread_.join();
  }
}

void* Queue::Make(bool retains) {
  GetCounters().command_buffers++;
  return ToId((new CommandBuffer(this, retains))->Autorelease());
}

void Queue::Push(CommandBuffer* buffer) {
  {
    std::lock_guard lock(GetGpu().mutex);
    GetGpu().busy++;
  }
  {
    std::lock_guard lock(mutex_);
    pending_.push_back(buffer);
  }
  changed_.notify_all();
}

void Queue::Loop() {
  CountAsGpuThread();
  while (true) {
    CommandBuffer* buffer;
    {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] { return stop_ || !pending_.empty(); });
      if (pending_.empty()) return;
      buffer = pending_.front();
      pending_.pop_front();
    }
    {
      std::unique_lock lock(GetGpu().mutex);
      GetGpu().changed.wait(lock, [] { return !GetGpu().held; });
    }
    buffer->Run();
    buffer->Release();
    {
      std::lock_guard lock(GetGpu().mutex);
      GetGpu().busy--;
    }
    GetGpu().changed.notify_all();
  }
}

// ---- CommandBuffer, encoding

CommandBuffer::CommandBuffer(Queue* queue, bool retains)
    : Labelled(GetClass("SimCommandBuffer")), queue_(queue), retains_(retains) {}

CommandBuffer::~CommandBuffer() {
  for (Item& item : items_) {
    if (item.event) item.event->Release();
  }
  for (Object* object : kept_) object->Release();
  for (Handler handler : completed_) ReleaseBlock(handler);
  for (Handler handler : scheduled_) ReleaseBlock(handler);
  if (error_) error_->Release();
}

bool CommandBuffer::CheckOpen(const char* what, bool needs_no_encoder) {
  if (status_ >= kCommitted) Fault("%s after commit", what);
  if (needs_no_encoder && open_) Fault("%s while an encoder is open", what);
  return status_ < kCommitted;
}

void* CommandBuffer::NewEncoder(Item::Kind kind) {
  CheckOpen("a new encoder", true);
  open_ = true;
  items_.push_back(Item{kind});
  Item& item = items_.back();
  item.number = next_encoder++;
  (kind == Item::kBlit ? GetCounters().blit_encoders : GetCounters().compute_encoders)++;
  const char* names[] = {"serial", "concurrent", "blit"};
  Log("encoder %d %s", item.number, names[kind]);
  return ToId((new Encoder(this, &item))->Autorelease());
}

void* CommandBuffer::Compute(NSUInteger dispatch_type) {
  return NewEncoder(dispatch_type == 1 ? Item::kConcurrent : Item::kSerial);
}

void CommandBuffer::AddCompletedHandler(Handler handler) {
  GetCounters().handlers++;
  if (CheckOpen("addCompletedHandler", false)) completed_.push_back(CopyBlock(handler));
}

void CommandBuffer::AddScheduledHandler(Handler handler) {
  if (CheckOpen("addScheduledHandler", false)) scheduled_.push_back(CopyBlock(handler));
}

void CommandBuffer::AddEvent(Item::Kind kind, void* event, uint64_t value) {
  Item item{kind};
  item.event = FromId<Event>(event);
  item.event->Retain();
  item.value = value;
  items_.push_back(std::move(item));
}

void CommandBuffer::EncodeWait(void* event, uint64_t value) {
  GetCounters().event_waits++;
  Log("wait for event");
  if (CheckOpen("encodeWaitForEvent", true)) AddEvent(Item::kWait, event, value);
}

void CommandBuffer::EncodeSignal(void* event, uint64_t value) {
  GetCounters().event_signals++;
  Log("signal event");
  if (CheckOpen("encodeSignalEvent", true)) AddEvent(Item::kSignal, event, value);
}

void CommandBuffer::Commit() {
  GetCounters().commits++;
  Log("commit");
  if (!CheckOpen("commit", true)) return;
  {
    std::lock_guard lock(OrderMutex());
    before_commit_ = SeenByHost();
  }
  {
    std::lock_guard lock(mutex_);
    status_ = kCommitted;
  }
  Retain();
  queue_->Push(this);
}

void CommandBuffer::WaitUntilCompleted() {
  GetCounters().waits++;
  if (Status() < kCommitted) {
    Fault("deadlock: waitUntilCompleted before commit");
    return;
  }
  std::unique_lock lock(mutex_);
  if (!changed_.wait_for(lock, kDeadlock, [&] { return finished_; })) {
    Fault("deadlock: waitUntilCompleted on a command buffer that does not complete");
  }
}

NSUInteger CommandBuffer::Status() {
  std::lock_guard lock(mutex_);
  return status_;
}

void CommandBuffer::KeepAlive(Object* object) {
  if (!object || !retains_) return;
  object->Retain();
  kept_.push_back(object);
}

// ---- CommandBuffer, on the GPU

void CommandBuffer::Run() {
  Settings& settings = GetSettings();
  if (int64_t delay = settings.delay_us) usleep(static_cast<useconds_t>(delay));
  // Metal has a pool around its handlers.
  void* pool = reinterpret_cast<void* (*)(void*, SEL)>(
      GetClass("NSAutoreleasePool")->isa->Find(sel_registerName("alloc")))(nullptr, nullptr);
  {
    std::lock_guard lock(mutex_);
    status_ = kScheduled;
  }
  for (Handler handler : scheduled_) handler(ToId(this));
  bool good = true;
  if (settings.failures > 0) {
    settings.failures--;
    good = false;
  }
  for (size_t i = 0; i < items_.size() && good;) {
    Item& item = items_[i];
    if (item.kind == Item::kWait) {
      EncoderSet before = item.event->WaitOnGpu(item.value);
      std::lock_guard lock(OrderMutex());
      queue_->ordered.Add(before);
      i++;
    } else if (item.kind == Item::kSignal) {
      EncoderSet done;
      {
        std::lock_guard lock(OrderMutex());
        done = queue_->run;
        done.Add(queue_->ordered);
      }
      item.event->SignalFromGpu(item.value, done);
      i++;
    } else {
      size_t end = i;
      while (end < items_.size() && items_[end].IsEncoder()) end++;
      good = OrderEncoders(i, end) && RunEncoders(i, end);
      i = end;
    }
  }
  if (!good) error_ = new Error("simulated GPU fault");
  {
    std::lock_guard lock(OrderMutex());
    for (Item& item : items_) {
      if (item.IsEncoder()) SeenByHost().Add(item.number);
    }
  }
  {
    std::lock_guard lock(mutex_);
    status_ = good ? kDone : kFailed;
  }
  for (Handler handler : completed_) handler(ToId(this));
  for (Handler handler : completed_) ReleaseBlock(handler);
  completed_.clear();
  FromId(pool)->Release();
  Log("completed");
  {
    std::lock_guard lock(mutex_);
    finished_ = true;
  }
  changed_.notify_all();
}

// What is ordered before each of the encoders, from fences in program order.
bool CommandBuffer::OrderEncoders(size_t begin, size_t end) {
  std::lock_guard lock(OrderMutex());
  for (size_t i = begin; i < end; i++) {
    Item& encoder = items_[i];
    EncoderSet before = before_commit_;
    before.Add(queue_->ordered);
    for (auto& fence : encoder.waits) {
      if (!fence.Alive()) {
        Fault("a fence was released before execution");
        return false;
      }
      int updater = fence.object->updater;
      if (updater < 0) {
        Fault("deadlock: an encoder waits for a fence that nothing updates");
        return false;
      }
      before.Add(Before(updater));
      before.Add(updater);
    }
    for (auto& fence : encoder.updates) {
      if (!fence.Alive()) {
        Fault("a fence was released before execution");
        return false;
      }
      fence.object->updater = encoder.number;
    }
    Before(encoder.number) = before;
    queue_->run.Add(encoder.number);
    queue_->run.Add(before);
  }
  return true;
}

// Runs encoders in one of the orders that fences leave open.
bool CommandBuffer::RunEncoders(size_t begin, size_t end) {
  std::vector<size_t> left;
  for (size_t i = begin; i < end; i++) left.push_back(i);
  Order mode = GetSettings().encoders;
  while (!left.empty()) {
    size_t pick = 0;
    if (mode != Order::kEncoded) {
      std::lock_guard lock(OrderMutex());
      std::vector<size_t> ready;
      for (size_t i = 0; i < left.size(); i++) {
        const EncoderSet& before = Before(items_[left[i]].number);
        bool waits = std::any_of(left.begin(), left.end(), [&](size_t other) {
          return other != left[i] && before.Has(items_[other].number);
        });
        if (!waits) ready.push_back(i);
      }
      pick = mode == Order::kReverse ? ready.back() : ready[Random()() % ready.size()];
    }
    if (!RunEncoder(items_[left[pick]])) return false;
    left.erase(left.begin() + static_cast<ptrdiff_t>(pick));
  }
  return true;
}

bool CommandBuffer::RunEncoder(Item& encoder) {
  auto& commands = encoder.commands;
  int epoch = 0;
  for (size_t begin = 0; begin < commands.size(); epoch++) {
    size_t end = begin;
    while (end < commands.size() && commands[end].kind != Command::kBarrier) end++;
    if (encoder.kind == Item::kConcurrent) {
      for (size_t i : DispatchOrder(commands, begin, end)) {
        if (!RunCommand(encoder, commands[i], epoch)) return false;
      }
    } else {
      for (size_t i = begin; i < end; i++) {
        if (!RunCommand(encoder, commands[i], epoch)) return false;
      }
    }
    begin = end + 1;
  }
  return true;
}

void CommandBuffer::Note(const Item& encoder, int epoch, const Command& command,
                         const Buffer* buffer, bool write, size_t begin, size_t end) {
  if (!GetSettings().races) return;
  bool concurrent = encoder.kind == Item::kConcurrent;
  NoteAccess(buffer,
             {encoder.number, &command, epoch, concurrent, write, begin, end, command.name});
}

bool CommandBuffer::RunCommand(const Item& encoder, Command& command, int epoch) {
  if (command.kind == Command::kDispatch) return RunDispatch(encoder, command, epoch);
  bool copies = command.kind == Command::kCopy;
  if ((copies && !command.source.Alive()) || !command.target.Alive()) {
    Fault("%s: a buffer was released before execution", command.name.c_str());
    return false;
  }
  Buffer* target = command.target.object;
  char* to = target->contents + command.target_offset;
  if (copies) {
    Buffer* source = command.source.object;
    Note(encoder, epoch, command, source, false, command.source_offset,
         command.source_offset + command.length);
    memmove(to, source->contents + command.source_offset, command.length);
  } else {
    memset(to, command.value, command.length);
  }
  Note(encoder, epoch, command, target, true, command.target_offset,
       command.target_offset + command.length);
  return true;
}

bool CommandBuffer::RunDispatch(const Item& encoder, Command& command, int epoch) {
  const char* name = command.name.c_str();
  if (!command.pipeline.Alive()) {
    Fault("%s: its pipeline was released before execution", name);
    return false;
  }
  const Pipeline& pipeline = *command.pipeline.object;
  Dispatch dispatch{};
  dispatch.name = name;
  std::map<Buffer*, std::vector<char>> written;  // what it may write, as it was before
  for (int i = 0; i < kMaxBuffers; i++) {
    Argument& argument = command.arguments[static_cast<size_t>(i)];
    dispatch.threadgroup_bytes[i] = command.threadgroup_bytes[static_cast<size_t>(i)];
    if (!argument.bound) continue;
    if (!argument.buffer.object) {
      dispatch.buffer[i] = argument.bytes.data();
      dispatch.length[i] = argument.bytes.size();
      continue;
    }
    if (!argument.buffer.Alive()) {
      Fault("%s: buffer %d was released before execution", name, i);
      return false;
    }
    Buffer* buffer = argument.buffer.object;
    dispatch.buffer[i] = buffer->contents + argument.offset;
    dispatch.length[i] = buffer->length - argument.offset;
    // A read-only binding counts as a read of all behind its offset; one that may be written
    // counts as a write of the bytes that change.
    if (pipeline.OnlyReads(i)) {
      Note(encoder, epoch, command, buffer, false, argument.offset, buffer->length);
    }
    if (!pipeline.OnlyReads(i) && GetSettings().races) {
      written[buffer].assign(buffer->contents, buffer->contents + buffer->length);
    }
  }
  dispatch.grid[0] = static_cast<uint32_t>(command.grid.width);
  dispatch.grid[1] = static_cast<uint32_t>(command.grid.height);
  dispatch.grid[2] = static_cast<uint32_t>(command.grid.depth);
  dispatch.group[0] = static_cast<uint32_t>(command.group.width);
  dispatch.group[1] = static_cast<uint32_t>(command.group.height);
  dispatch.group[2] = static_cast<uint32_t>(command.group.depth);
  Log("run %s", name);
  pipeline.Run(dispatch);
  for (auto& [buffer, before] : written) {
    const char* after = buffer->contents;
    auto first = std::mismatch(before.begin(), before.end(), after).first;
    if (first == before.end()) continue;
    size_t begin = static_cast<size_t>(first - before.begin());
    size_t end = before.size();
    while (before[end - 1] == after[end - 1]) end--;
    Note(encoder, epoch, command, buffer, true, begin, end);
  }
  return true;
}

// ---- Encoder

Encoder::Encoder(CommandBuffer* buffer, Item* item)
    : Labelled(GetClass("SimCommandEncoder")), buffer_(buffer), item_(item) {
  buffer_->Retain();
}

Encoder::~Encoder() {
  if (!ended_) Fault("an encoder was released without endEncoding");
  buffer_->Release();
}

bool Encoder::CheckLive(const char* what) {
  if (ended_) Fault("%s after endEncoding", what);
  return !ended_;
}

void Encoder::SetPipeline(void* pipeline) {
  if (CheckLive("setComputePipelineState")) {
    pipeline_ = Unretained<Pipeline>(FromId<Pipeline>(pipeline));
  }
}

void Encoder::SetBuffer(void* buffer, NSUInteger offset, NSUInteger index) {
  if (!CheckLive("setBuffer")) return;
  if (index >= kMaxBuffers) return Fault("setBuffer: index %lu", index);
  auto* object = FromId<Buffer>(buffer);
  if (object && offset >= object->length) {
    Fault("setBuffer: offset %lu in a buffer of %lu bytes", offset, object->length);
    return;
  }
  arguments_[index] = Argument{object != nullptr, Unretained<Buffer>(object), offset, {}};
}

void Encoder::SetBufferOffset(NSUInteger offset, NSUInteger index) {
  if (!CheckLive("setBufferOffset")) return;
  if (index >= kMaxBuffers || !arguments_[index].buffer.object) {
    Fault("setBufferOffset: no buffer at index %lu", index);
    return;
  }
  arguments_[index].offset = offset;
}

void Encoder::SetBytes(const void* bytes, NSUInteger length, NSUInteger index) {
  if (!CheckLive("setBytes")) return;
  if (index >= kMaxBuffers || length == 0 || length > kMaxBytes) {
    Fault("setBytes: %lu bytes at index %lu", length, index);
    return;
  }
  auto* begin = static_cast<const char*>(bytes);
  arguments_[index] = Argument{true, {}, 0, std::vector<char>(begin, begin + length)};
}

void Encoder::SetThreadgroupBytes(NSUInteger length, NSUInteger index) {
  if (!CheckLive("setThreadgroupMemoryLength")) return;
  if (length % 16 || length > kMaxThreadgroupBytes || index >= kMaxBuffers) {
    Fault("setThreadgroupMemoryLength: %lu bytes at index %lu", length, index);
    return;
  }
  threadgroup_bytes_[index] = static_cast<uint32_t>(length);
}

void Encoder::DispatchGroups(Size groups, Size group) {
  AddDispatch(
      {groups.width * group.width, groups.height * group.height, groups.depth * group.depth},
      group);
}

void Encoder::AddDispatch(Size grid, Size group) {
  GetCounters().dispatches++;
  if (!CheckLive("dispatch")) return;
  if (!pipeline_.object) return Fault("dispatch: no pipeline state");
  if (!pipeline_.Alive()) return Fault("dispatch: its pipeline state was released");
  Pipeline& pipeline = *pipeline_.object;
  if (group.Volume() == 0 || group.Volume() > pipeline.MaxThreads()) {
    Fault("dispatch: threadgroup of %lux%lux%lu", group.width, group.height, group.depth);
    return;
  }
  if (grid.Volume() == 0) {
    return Fault("dispatch: empty grid of %lux%lux%lu", grid.width, grid.height, grid.depth);
  }
  Command command{Command::kDispatch, pipeline.function->name};
  command.pipeline = pipeline_;
  buffer_->KeepAlive(&pipeline);
  command.arguments.resize(kMaxBuffers);
  for (size_t i = 0; i < kMaxBuffers; i++) {
    if (!pipeline.Uses(static_cast<int>(i))) continue;
    command.arguments[i] = arguments_[i];
    buffer_->KeepAlive(arguments_[i].buffer.object);
    if (!arguments_[i].bound) {
      Fault("%s: nothing bound at index %zu", command.name.c_str(), i);
      return;
    }
  }
  command.threadgroup_bytes = threadgroup_bytes_;
  command.grid = grid;
  command.group = group;
  Log("encode %s in %d, grid %lux%lux%lu, group %lux%lux%lu", command.name.c_str(), item_->number,
      grid.width, grid.height, grid.depth, group.width, group.height, group.depth);
  item_->commands.push_back(std::move(command));
}

void Encoder::Barrier(NSUInteger) {
  GetCounters().barriers++;
  if (!CheckLive("memoryBarrier")) return;
  Log("encode barrier in %d", item_->number);
  item_->commands.push_back(Command{Command::kBarrier, "barrier"});
}

void Encoder::WaitForFence(void* fence) {
  GetCounters().fence_waits++;
  if (CheckLive("waitForFence")) item_->waits.emplace_back(FromId<Fence>(fence));
}

void Encoder::UpdateFence(void* fence) {
  GetCounters().fence_updates++;
  if (CheckLive("updateFence")) item_->updates.emplace_back(FromId<Fence>(fence));
}

void Encoder::Copy(void* source, NSUInteger source_offset, void* target, NSUInteger target_offset,
                   NSUInteger length) {
  if (!CheckLive("copyFromBuffer")) return;
  Command command{Command::kCopy, "blit copy"};
  command.source = Unretained<Buffer>(FromId<Buffer>(source));
  command.target = Unretained<Buffer>(FromId<Buffer>(target));
  command.source_offset = source_offset;
  command.target_offset = target_offset;
  command.length = length;
  buffer_->KeepAlive(command.source.object);
  buffer_->KeepAlive(command.target.object);
  item_->commands.push_back(std::move(command));
}

void Encoder::Fill(void* target, NSUInteger offset, NSUInteger length, unsigned char value) {
  if (!CheckLive("fillBuffer")) return;
  Command command{Command::kFill, "blit fill"};
  command.target = Unretained<Buffer>(FromId<Buffer>(target));
  command.target_offset = offset;
  command.length = length;
  command.value = value;
  buffer_->KeepAlive(command.target.object);
  item_->commands.push_back(std::move(command));
}

void Encoder::End() {
  if (!CheckLive("endEncoding")) return;
  ended_ = true;
  buffer_->EncoderEnded();
  if (item_->commands.empty()) GetCounters().empty_encoders++;
  Log("end encoding %d", item_->number);
}

namespace {

[[maybe_unused]] const bool registered = [] {
  objc_class* labelled = GetClass("SimLabelled");
  objc_class* queue = GetClass("SimCommandQueue", labelled);
  AddMethod<&Queue::NewCommandBuffer>(queue, "commandBuffer");
  AddMethod<&Queue::NewUnretainedCommandBuffer>(queue, "commandBufferWithUnretainedReferences");
  AddMethod<&Queue::AddResidencySet>(queue, "addResidencySet:");
  AddMethod<&Queue::AddResidencySets>(queue, "addResidencySets:count:");
  objc_class* buffer = GetClass("SimCommandBuffer", labelled);
  AddMethod<&CommandBuffer::Compute>(buffer, "computeCommandEncoderWithDispatchType:");
  AddMethod<&CommandBuffer::SerialCompute>(buffer, "computeCommandEncoder");
  AddMethod<&CommandBuffer::Blit>(buffer, "blitCommandEncoder");
  AddMethod<&CommandBuffer::AddCompletedHandler>(buffer, "addCompletedHandler:");
  AddMethod<&CommandBuffer::AddScheduledHandler>(buffer, "addScheduledHandler:");
  AddMethod<&CommandBuffer::EncodeWait>(buffer, "encodeWaitForEvent:value:");
  AddMethod<&CommandBuffer::EncodeSignal>(buffer, "encodeSignalEvent:value:");
  AddMethod<&CommandBuffer::Commit>(buffer, "commit");
  AddMethod<&CommandBuffer::Enqueue>(buffer, "enqueue");
  AddMethod<&CommandBuffer::WaitUntilCompleted>(buffer, "waitUntilCompleted");
  AddMethod<&CommandBuffer::WaitUntilScheduled>(buffer, "waitUntilScheduled");
  AddMethod<&CommandBuffer::Status>(buffer, "status");
  AddMethod<&CommandBuffer::ErrorId>(buffer, "error");
  AddMethod<&CommandBuffer::Time>(buffer, "GPUStartTime");
  AddMethod<&CommandBuffer::Time>(buffer, "GPUEndTime");
  AddMethod<&CommandBuffer::RetainsReferences>(buffer, "retainedReferences");
  objc_class* encoder = GetClass("SimCommandEncoder", labelled);
  AddMethod<&Encoder::SetPipeline>(encoder, "setComputePipelineState:");
  AddMethod<&Encoder::SetBuffer>(encoder, "setBuffer:offset:atIndex:");
  AddMethod<&Encoder::SetBufferOffset>(encoder, "setBufferOffset:atIndex:");
  AddMethod<&Encoder::SetBytes>(encoder, "setBytes:length:atIndex:");
  AddMethod<&Encoder::SetThreadgroupBytes>(encoder, "setThreadgroupMemoryLength:atIndex:");
  AddMethod<&Encoder::DispatchThreads>(encoder, "dispatchThreads:threadsPerThreadgroup:");
  AddMethod<&Encoder::DispatchGroups>(encoder, "dispatchThreadgroups:threadsPerThreadgroup:");
  AddMethod<&Encoder::Barrier>(encoder, "memoryBarrierWithScope:");
  AddMethod<&Encoder::ResourceBarrier>(encoder, "memoryBarrierWithResources:count:");
  AddMethod<&Encoder::WaitForFence>(encoder, "waitForFence:");
  AddMethod<&Encoder::UpdateFence>(encoder, "updateFence:");
  AddMethod<&Encoder::UseResource>(encoder, "useResource:usage:");
  AddMethod<&Encoder::UseResources>(encoder, "useResources:count:usage:");
  AddMethod<&Encoder::Copy>(encoder,
                            "copyFromBuffer:sourceOffset:toBuffer:destinationOffset:size:");
  AddMethod<&Encoder::Fill>(encoder, "fillBuffer:range:value:");
  AddMethod<&Encoder::End>(encoder, "endEncoding");
  return true;
}();

}  // namespace
}  // namespace metal_sim
