// Streams and devices: those of the GPU here, those of the CPU in MLX's library.
#include <map>
#include <mutex>

#include "standin.h"

namespace {

using mlx::core::Device;
using mlx::core::Stream;
using mlx_standin::Original;

// Numbers that MLX's library, which counts the CPU's streams from 0, does not reach.
constexpr int kFirstGpuStream = 100000;

struct GpuStreams {
  std::mutex mutex;
  std::vector<Stream> streams;
};

GpuStreams& All() {
  static auto* all = new GpuStreams;
  return *all;
}

std::optional<Stream>& DefaultOfThread() {
  thread_local std::optional<Stream> stream;
  return stream;
}

Stream NewGpuStream(bool any_thread) {
  Stream stream(0, Device::gpu);
  {
    std::lock_guard lock(All().mutex);
    stream.index = kFirstGpuStream + static_cast<int>(All().streams.size());
    All().streams.push_back(stream);
  }
  mlx_standin::MakeEncoder(stream, any_thread);
  return stream;
}

using Info = std::unordered_map<std::string, std::variant<std::string, size_t>>;

const Info& DeviceInfo() {
  static auto* info = new Info{{"device_name", std::string("Simulated Metal")},
                               {"architecture", std::string("applegpu_g13s")},
                               {"memory_size", size_t{16} << 30},
                               {"max_buffer_length", size_t{8} << 30},
                               {"max_recommended_working_set_size", size_t{12} << 30},
                               {"resource_limit", size_t{499000}}};
  return *info;
}

}  // namespace

namespace mlx::core {

namespace gpu {
bool is_available() { return true; }
int device_count() { return 1; }
const Info& device_info(int) { return DeviceInfo(); }
}  // namespace gpu

namespace metal {
bool is_available() { return true; }
const Info& device_info() { return DeviceInfo(); }
}  // namespace metal

Stream new_stream(Device device) {
  if (device == Device::gpu) return NewGpuStream(false);
  static auto* original = Original<Stream(Device)>("_ZN3mlx4core10new_streamENS0_6DeviceE");
  return original(device);
}

Stream new_thread_unsafe_stream(Device device) {
  if (device == Device::gpu) return NewGpuStream(true);
  static auto* original =
      Original<Stream(Device)>("_ZN3mlx4core24new_thread_unsafe_streamENS0_6DeviceE");
  return original(device);
}

Stream stream_from_thread_local_stream(ThreadLocalStream stream) {
  if (stream.device == Device::gpu) {
    thread_local std::map<int, Stream> streams;
    auto it = streams.find(stream.index);
    if (it == streams.end()) it = streams.emplace(stream.index, NewGpuStream(false)).first;
    return it->second;
  }
  static auto* original = Original<Stream(ThreadLocalStream)>(
      "_ZN3mlx4core31stream_from_thread_local_streamENS0_17ThreadLocalStreamE");
  return original(stream);
}

Stream default_stream(Device device) {
  if (device == Device::gpu) {
    auto& stream = DefaultOfThread();
    if (!stream) stream = NewGpuStream(false);
    return *stream;
  }
  static auto* original = Original<Stream(Device)>("_ZN3mlx4core14default_streamENS0_6DeviceE");
  return original(device);
}

#if MLX_VERSION_NUMERIC >= 32003
std::optional<Stream> peek_default_stream(Device device) {
  if (device == Device::gpu) return DefaultOfThread();
  static auto* original =
      Original<std::optional<Stream>(Device)>("_ZN3mlx4core19peek_default_streamENS0_6DeviceE");
  return original(device);
}
#endif

void set_default_stream(Stream stream) {
  if (stream.device == Device::gpu) {
    DefaultOfThread() = stream;
    return;
  }
  static auto* original = Original<void(Stream)>("_ZN3mlx4core18set_default_streamENS0_6StreamE");
  original(stream);
}

std::vector<Stream> get_streams() {
  static auto* original = Original<std::vector<Stream>()>("_ZN3mlx4core11get_streamsEv");
  std::vector<Stream> streams = original();
  std::lock_guard lock(All().mutex);
  streams.insert(streams.end(), All().streams.begin(), All().streams.end());
  return streams;
}

void synchronize(Stream stream) {
  if (stream.device == Device::gpu) return metal::get_command_encoder(stream).synchronize();
  static auto* original = Original<void(Stream)>("_ZN3mlx4core11synchronizeENS0_6StreamE");
  original(stream);
}

void clear_streams() {
  mlx_standin::DropEncodersOfThread();
  DefaultOfThread().reset();
  static auto* original = Original<void()>("_ZN3mlx4core13clear_streamsEv");
  original();
}

}  // namespace mlx::core
