#include "backend/cpu.h"

#include <mlx/backend/cpu/encoder.h>
#include <mlx/scheduler.h>
#include <mlx/transforms.h>
#include <mlx/version.h>
#include <tvm/ffi/error.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <exception>
#include <future>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "backend/backend.h"

namespace mlx_tvm_ffi {

namespace {

// The CPU stream whose thread this is, while a kernel runs as one of its tasks.
thread_local const mx::Stream* running_on = nullptr;

[[noreturn]] void ThrowNoMemory(const mx::array& array) {
  TVM_FFI_THROW(MemoryError) << "[mlx_tvm_ffi.allocate] memory: expected what the machine has, got "
                             << array.nbytes() << " bytes. Use smaller arrays.";
}

class CpuStream final : public MlxStream {
 public:
  using MlxStream::MlxStream;
  DLDevice device() const override { return {kDLCPU, 0}; }
  void* AcquireEncoder() override { return nullptr; }
};

class CpuBackend final : public Backend {
 public:
  DLDevice ToDLDevice(const mx::Device&) const override { return {kDLCPU, 0}; }

  StreamRef MakeInterface(const mx::Device& device, std::optional<mx::Stream> stream) override {
    return MakeStream(std::make_shared<CpuStream>(device, stream));
  }

  void Address(const mx::array& array, DLTensor* tensor) const override {
    tensor->data = const_cast<char*>(array.data<char>());
    tensor->byte_offset = 0;
  }

  void Allocate(mx::array& array, const mx::Stream&) override {
    // MLX's memory starts 8 bytes past an aligned address, where vector loads of compiled kernels
    // fault or are slow.
    constexpr size_t kAlignment = 64;
    size_t bytes = array.nbytes() + kAlignment;
    // Where there is no memory MLX goes on with null, and counts it as used.
    constexpr size_t kLargeBytes = size_t{1} << 30;
    if (bytes > kLargeBytes) {
      void* probe = std::malloc(bytes);
      if (probe == nullptr) ThrowNoMemory(array);
      std::free(probe);
    }
    auto memory = mx::allocator::malloc(bytes);
#if MLX_VERSION_NUMERIC >= 32004
    mx::allocator::Buffer buffer = memory.buffer();
#else
    mx::allocator::Buffer buffer = memory;
#endif
    if (buffer.ptr() == nullptr) ThrowNoMemory(array);
    size_t past = reinterpret_cast<std::uintptr_t>(buffer.raw_ptr()) % kAlignment;
    auto longest = std::max_element(array.shape().begin(), array.shape().end());
    bool is_column = array.size() <= 1 || array.size() == static_cast<size_t>(*longest);
    array.set_data(std::move(memory), array.size(), array.strides(), {true, true, is_column},
                   static_cast<int64_t>((kAlignment - past) % kAlignment));
  }

  void Evaluate(mx::Primitive& primitive, const std::vector<mx::array>& inputs,
                std::vector<mx::array>& outputs) override {
    primitive.eval_cpu(inputs, outputs);
  }

  void KeepScratch(mx::array array, const mx::Stream& stream) override {
    // A kernel that runs on the stream's thread is done with its scratch when it drops it.
    if (!IsRunning(stream)) mx::cpu::get_command_encoder(stream).add_temporary(std::move(array));
  }

  void Encode(const mx::Stream& stream, const std::vector<mx::array>&,
              std::vector<mx::array>& outputs, const std::shared_ptr<Launch>& launch) override {
    if (launch->at_once()) {
      WaitForGpus();
      WaitFor(stream);
      return launch->Run(InterfaceOf(stream));
    }
    if (failures_.load(std::memory_order_relaxed) != 0) MendTaskCount(stream);
    mx::cpu::get_command_encoder(stream).dispatch(
        [this, launch, stream, is_async = outputs[0].event().valid()]() {
          const mx::Stream* outer = std::exchange(running_on, &stream);
          struct Restore {
            const mx::Stream* outer;
            ~Restore() { running_on = outer; }
          } restore{outer};
          try {
            launch->Run(InterfaceOf(stream));
          } catch (...) {
            ++failures_;
            launch->Spoil();  // MLX counts the outputs as evaluated
            // An error that is set while mx.async_eval still schedules may keep it from signalling
            // its event, for which every reader of its arrays then waits for ever.
            if (is_async) std::this_thread::sleep_for(std::chrono::milliseconds(20));
            throw;
          }
        });
  }

  bool Ready(const mx::array& array) const override {
    // A buffer with a second owner may be in use by work that MLX has scheduled.
    bool ready =
        array.status() == mx::array::Status::available && array.data_shared_ptr().use_count() <= 1;
    std::atomic_thread_fence(std::memory_order_acquire);  // after what the last other owner did
    return ready;
  }

  void Prepare(mx::array& array) override {
    bool lazy = array.status() == mx::array::Status::unscheduled && array.has_primitive();
    if (lazy && IsRunning(array.primitive().stream())) {
      TVM_FFI_THROW(RuntimeError) << "[mlx_tvm_ffi.direct_call] argument: expected an array that "
                                     "is evaluated or of another "
                                  << "stream, got a lazy one of the stream that runs this kernel. "
                                     "It would wait for itself: "
                                  << "evaluate the array before.";
    }
    array.eval();
    if (array.data_shared_ptr().use_count() <= 1) return;
    // Kernels that wait for each other's streams would wait for ever.
    if (running_on != nullptr) return;
    for (const mx::Stream& stream : mx::get_streams()) {
      if (stream.device == mx::Device::cpu) WaitFor(stream);
    }
  }

  void Start(mx::array&) override {}

  void* EnvStream(const mx::Device&) override { return nullptr; }

  void Finish(mx::array&) noexcept override {}

 private:
  // A task that MLX cannot schedule, since an earlier one of its stream failed, may stay in its
  // count of running tasks for ever; from 10 such on it waits for one to end, for ever too. At most
  // one for each failure is taken out of the count.
  void MendTaskCount(const mx::Stream& stream) {
    constexpr int kMany = 8;
    int running = mx::scheduler::n_active_tasks();
    if (running < kMany) return;
    for (int n = std::min(failures_.exchange(0), running); n > 0; --n) {
      mx::scheduler::notify_task_completion(stream);
    }
  }

  // What the CPU waits for may not be committed before this evaluation ends.
  static void WaitForGpus() {
    for (const mx::Stream& stream : mx::get_streams()) {
      if (stream.device == mx::Device::cpu) continue;
      try {
        mx::synchronize(stream);
      } catch (const std::exception&) {
        // Another thread's stream: that thread commits it.
      }
    }
  }

  // As mx::synchronize, which would take the error of a kernel from those who wait for its results.
  static void WaitFor(const mx::Stream& stream) {
    if (IsRunning(stream)) return;  // its earlier tasks are done, and this one would never be
    auto done = std::make_shared<std::promise<void>>();
    auto set_done = [done] { done->set_value(); };
    try {
      mx::scheduler::enqueue(stream, set_done);
    } catch (const std::exception& error) {
      // On the main thread MLX hands a stream's error to whoever comes next: it is put back, from
      // another thread.
      std::thread([&, text = std::string(error.what())] {
        mx::scheduler::enqueue(stream, [text] { throw std::runtime_error(text); });
        mx::scheduler::enqueue(stream, set_done);
      }).join();
    }
    done->get_future().wait();
  }

  // Made once for each stream and thread: an interface holds no more than the stream's number.
  static const StreamRef& InterfaceOf(const mx::Stream& stream) {
    static thread_local std::vector<std::pair<mx::Stream, StreamRef>> interfaces;
    for (const auto& [known, interface] : interfaces) {
      if (known == stream) return interface;
    }
    return interfaces
        .emplace_back(stream, MakeStream(std::make_shared<CpuStream>(stream.device, stream)))
        .second;
  }

  std::atomic<int> failures_{0};  // kernels that raised, since the count was last mended
};

}  // namespace

bool IsRunning(const mx::Stream& stream) { return running_on != nullptr && *running_on == stream; }

void RegisterCpuBackend() { RegisterBackend(mx::Device::cpu, new CpuBackend); }

}  // namespace mlx_tvm_ffi
