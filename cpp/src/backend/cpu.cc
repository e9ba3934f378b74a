#include "backend/cpu.h"

#include <mlx/backend/cpu/encoder.h>
#include <mlx/scheduler.h>
#include <mlx/transforms.h>

#include <utility>

#include "backend/backend.h"

namespace mlx_tvm_ffi {

namespace {

// The CPU stream whose thread this is, while a kernel runs as one of its tasks.
thread_local const mx::Stream* running_on = nullptr;

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
    array.set_data(mx::allocator::malloc(array.nbytes() + kAlignment));
    size_t past = reinterpret_cast<std::uintptr_t>(array.data<char>()) % kAlignment;
    if (past == 0) return;
    mx::Strides strides = array.strides();
    array.copy_shared_buffer(array, strides, array.flags(), array.data_size(),
                             static_cast<int64_t>((kAlignment - past) / array.itemsize()));
  }

  void Evaluate(mx::Primitive& primitive, const std::vector<mx::array>& inputs,
                std::vector<mx::array>& outputs) override {
    primitive.eval_cpu(inputs, outputs);
  }

  void KeepScratch(mx::array array, const mx::Stream& stream) override {
    // A kernel that runs on the stream's thread is done with its scratch when it drops it.
    if (running_on == nullptr) mx::cpu::get_command_encoder(stream).add_temporary(std::move(array));
  }

  void Encode(const mx::Stream& stream, const std::vector<mx::array>&, std::vector<mx::array>&,
              const std::shared_ptr<Launch>& launch) override {
    mx::cpu::get_command_encoder(stream).dispatch(
        [launch, stream, interface = InterfaceOf(stream)]() {
          const mx::Stream* outer = std::exchange(running_on, &stream);
          struct Restore {
            const mx::Stream* outer;
            ~Restore() { running_on = outer; }
          } restore{outer};
          launch->Run(interface);
        });
  }

  bool Ready(const mx::array& array) const override {
    // A buffer with a second owner may be in use by work that MLX has scheduled.
    return array.status() == mx::array::Status::available &&
           array.data_shared_ptr().use_count() <= 1;
  }

  void Prepare(mx::array& array) override {
    array.eval();
    if (array.data_shared_ptr().use_count() <= 1) return;
    for (const mx::Stream& stream : mx::get_streams()) {
      // Waiting for the stream whose thread this is would never end; its earlier tasks are done
      // anyway.
      bool own = running_on != nullptr && *running_on == stream;
      if (stream.device == mx::Device::cpu && !own) mx::synchronize(stream);
    }
  }

  void Start(mx::array&) override {}

  void* EnvStream(const mx::Device&) override { return nullptr; }

  void Finish(mx::array&) noexcept override {}

 private:
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
};

}  // namespace

void RegisterCpuBackend() { RegisterBackend(mx::Device::cpu, new CpuBackend); }

}  // namespace mlx_tvm_ffi
