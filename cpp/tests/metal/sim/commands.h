/*! \file Queues, command buffers and encoders, and how the GPU runs them. */
#ifndef MLX_TVM_FFI_TESTS_METAL_SIM_COMMANDS_H_
#define MLX_TVM_FFI_TESTS_METAL_SIM_COMMANDS_H_

#include <array>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "resources.h"

namespace metal_sim {

using Handler = void (^)(void*);

struct Argument {
  bool bound = false;
  Unretained<Buffer> buffer;
  NSUInteger offset = 0;
  std::vector<char> bytes;
};

struct Command {
  enum Kind { kDispatch, kBarrier, kCopy, kFill } kind;
  std::string name;
  // kDispatch
  Unretained<Pipeline> pipeline{};
  std::vector<Argument> arguments{};
  std::array<uint32_t, kMaxBuffers> threadgroup_bytes{};
  Size grid{}, group{};
  // kCopy, kFill
  Unretained<Buffer> source{}, target{};
  NSUInteger source_offset = 0, target_offset = 0, length = 0;
  int value = 0;
};

/*! \brief What a command buffer holds: encoders, and waits for and signals of events. */
struct Item {
  enum Kind { kSerial, kConcurrent, kBlit, kWait, kSignal } kind;
  // encoders
  int number = -1;
  std::vector<Command> commands{};
  std::vector<Unretained<Fence>> waits{}, updates{};
  // kWait, kSignal
  Event* event = nullptr;  // owned
  uint64_t value = 0;

  bool IsEncoder() const { return kind <= kBlit; }
};

class Queue;

class CommandBuffer final : public Labelled {
 public:
  CommandBuffer(Queue* queue, bool retains);
  ~CommandBuffer() override;

  void* NewEncoder(Item::Kind kind);
  void* Compute(NSUInteger dispatch_type);
  void* SerialCompute() { return NewEncoder(Item::kSerial); }
  void* Blit() { return NewEncoder(Item::kBlit); }
  void AddCompletedHandler(Handler handler);
  void AddScheduledHandler(Handler handler);
  void EncodeWait(void* event, uint64_t value);
  void EncodeSignal(void* event, uint64_t value);
  void Commit();
  void Enqueue() {}
  void WaitUntilCompleted();
  void WaitUntilScheduled() {}
  NSUInteger Status();
  void* ErrorId() { return ToId(error_); }
  double Time() { return 0; }
  bool RetainsReferences() { return retains_; }

  void EncoderEnded() { open_ = false; }
  void KeepAlive(Object* object);
  void Run();

 private:
  enum StatusValue : NSUInteger {
    kOpen = 0,
    kCommitted = 2,
    kScheduled = 3,
    kDone = 4,
    kFailed = 5
  };
  bool CheckOpen(const char* what, bool needs_no_encoder);
  void AddEvent(Item::Kind kind, void* event, uint64_t value);
  bool OrderEncoders(size_t begin, size_t end);
  bool RunEncoders(size_t begin, size_t end);
  bool RunEncoder(Item& encoder);
  bool RunCommand(const Item& encoder, Command& command, int epoch);
  bool RunDispatch(const Item& encoder, Command& command, int epoch);
  void Note(const Item& encoder, int epoch, const Command& command, const Buffer* buffer,
            bool write, size_t begin, size_t end);

  Queue* queue_;
  const bool retains_;
  bool open_ = false;  // an encoder is
  std::deque<Item> items_;
  std::vector<Handler> completed_, scheduled_;
  std::vector<Object*> kept_;
  EncoderSet before_commit_;

  std::mutex mutex_;
  std::condition_variable changed_;
  NSUInteger status_ = kOpen;
  bool finished_ = false;  // the completion handlers too
  Error* error_ = nullptr;
};

class Encoder final : public Labelled {
 public:
  Encoder(CommandBuffer* buffer, Item* item);
  ~Encoder() override;

  void SetPipeline(void* pipeline);
  void SetBuffer(void* buffer, NSUInteger offset, NSUInteger index);
  void SetBufferOffset(NSUInteger offset, NSUInteger index);
  void SetBytes(const void* bytes, NSUInteger length, NSUInteger index);
  void SetThreadgroupBytes(NSUInteger length, NSUInteger index);
  void DispatchThreads(Size grid, Size group) { AddDispatch(grid, group); }
  void DispatchGroups(Size groups, Size group);
  void Barrier(NSUInteger scope);
  void ResourceBarrier(void* const*, NSUInteger) { Barrier(0); }
  void WaitForFence(void* fence);
  void UpdateFence(void* fence);
  void UseResource(void*, NSUInteger) {}
  void UseResources(void* const*, NSUInteger, NSUInteger) {}
  void Copy(void* source, NSUInteger source_offset, void* target, NSUInteger target_offset,
            NSUInteger length);
  void Fill(void* target, NSUInteger offset, NSUInteger length, unsigned char value);
  void End();

 private:
  bool CheckLive(const char* what);
  void AddDispatch(Size grid, Size group);

  CommandBuffer* buffer_;  // owned
  Item* item_;
  bool ended_ = false;
  Unretained<Pipeline> pipeline_;
  std::vector<Argument> arguments_{kMaxBuffers};
  std::array<uint32_t, kMaxBuffers> threadgroup_bytes_{};
};

class Queue final : public Labelled {
 public:
  Queue();
  ~Queue() override;
  void* NewCommandBuffer() { return Make(true); }
  void* NewUnretainedCommandBuffer() { return Make(false); }
  void AddResidencySet(void*) {}
  void AddResidencySets(void* const*, NSUInteger) {}

  void Push(CommandBuffer* buffer);

  // Guarded by OrderMutex.
  EncoderSet run;      // every encoder that has run here
  EncoderSet ordered;  // encoders that later ones come after, by waits for events

 private:
  void* Make(bool retains);
  void Loop();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<CommandBuffer*> pending_;
  bool stop_ = false;
  std::thread thread_;
};

}  // namespace metal_sim

#endif  // MLX_TVM_FFI_TESTS_METAL_SIM_COMMANDS_H_
