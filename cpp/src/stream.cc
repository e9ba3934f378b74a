/*!
 * \file stream.cc
 * \brief Scopes and defaults: the one place with state. Depends on tvm-ffi only and exports
 * nothing; its table is found through tvm-ffi's registry.
 */
#include <mlx_tvm_ffi/stream.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

namespace mlx_tvm_ffi {
namespace {

bool Same(DLDevice a, DLDevice b) {
  return a.device_type == b.device_type && a.device_id == b.device_id;
}

std::string Name(DLDevice device) {
  std::ostringstream name;
  switch (device.device_type) {
    case kDLCPU:
      name << "cpu";
      break;
    case kDLCUDA:
      name << "cuda";
      break;
    case kDLMetal:
      name << "metal";
      break;
    case kDLROCM:
      name << "rocm";
      break;
    default:
      name << "device type " << device.device_type;
  }
  name << ':' << device.device_id;
  return name.str();
}

void CheckDevice(DLDevice device, const char* function) {
  // tvm-ffi indexes its environment streams with the id, unchecked.
  if (device.device_id < 0) {
    TVM_FFI_THROW(ValueError) << "[mlx_tvm_ffi." << function
                              << "] device: expected an id of 0 or more, got " << Name(device)
                              << ".";
  }
}

mtf_stream* Retained(mtf_stream* stream) {
  stream->table->retain(stream);
  return stream;
}

struct OpenScope {
  uint64_t serial;
  DLDevice device;
  StreamRef stream;
  bool sets_environment;
  TVMFFIStreamHandle previous;
};

// The scopes of a thread, innermost last. The scopes are kept here and not in the caller's memory:
// one that is never left, or left on another thread, must not leave a dangling pointer behind.
struct ThreadScopes {
  uint64_t thread = 0;
  uint64_t last_serial = 0;
  std::vector<OpenScope> open;
};

// A plain pointer, so that scopes can be looked up and left at any time, also after the thread's
// destructors.
thread_local ThreadScopes* scopes = nullptr;

// Frees at the end of a thread. Where scopes are still open they stay: releasing a stream then may
// be too late.
struct ScopesReaper {
  ~ScopesReaper() {
    if (scopes != nullptr && scopes->open.empty()) {
      delete scopes;
      scopes = nullptr;
    }
  }
};

ThreadScopes& ScopesOfThread() {
  if (scopes == nullptr) {
    static std::atomic<uint64_t> threads{0};
    static thread_local ScopesReaper reaper;
    (void)reaper;
    scopes = new ThreadScopes;
    scopes->thread = threads.fetch_add(1, std::memory_order_relaxed) + 1;
  }
  return *scopes;
}

struct Defaults {
  struct Default {
    DLDevice device;
    StreamRef stream;
  };
  std::mutex mutex;
  std::vector<Default> streams;

  // With the mutex held.
  StreamRef& Of(DLDevice device) {
    for (Default& entry : streams) {
      if (Same(entry.device, device)) return entry.stream;
    }
    return streams.emplace_back(Default{device, StreamRef()}).stream;
  }
};

// Leaked on purpose: streams may belong to a framework that is gone when static destructors run.
Defaults& DefaultsOfProcess() {
  static auto* defaults = new Defaults;
  return *defaults;
}

StreamRef Find(DLDevice device) {
  if (device.device_type == kDLMetal) {
    void* environment = TVMFFIEnvGetStream(device.device_type, device.device_id);
    if (environment != nullptr) return StreamRef::Share(static_cast<mtf_stream*>(environment));
  }
  if (scopes != nullptr) {
    for (auto scope = scopes->open.rbegin(); scope != scopes->open.rend(); ++scope) {
      if (Same(scope->device, device)) return scope->stream;
    }
  }
  Defaults& defaults = DefaultsOfProcess();
  std::lock_guard<std::mutex> lock(defaults.mutex);
  for (const Defaults::Default& entry : defaults.streams) {
    if (Same(entry.device, device)) return entry.stream;
  }
  return {};
}

int Current(DLDevice device, mtf_stream** stream) {
  return detail::Guard(
      [=] {
        CheckDevice(device, "CurrentStream");
        *stream = Find(device).release();
        if (*stream != nullptr) return;
        TVM_FFI_THROW(RuntimeError)
            << "[mlx_tvm_ffi.CurrentStream] device: expected one with a stream, got "
            << Name(device)
            << ", for which this thread has no scope and the process no default. Open a scope "
               "(mlx_tvm_ffi.stream; StreamScope in C++), or set a default "
               "(mlx_tvm_ffi.set_default_stream; ExchangeDefaultStream in C++).";
      });
}

int Innermost(mtf_stream** stream) {
  const bool open = scopes != nullptr && !scopes->open.empty();
  *stream = open ? Retained(scopes->open.back().stream.get()) : nullptr;
  return 0;
}

StreamRef CheckedDefault(DLDevice device, mtf_stream* stream, const char* function) {
  CheckDevice(device, function);
  StreamRef checked = StreamRef::Share(stream);
  if (checked && !Same(checked.device(), device)) {
    TVM_FFI_THROW(ValueError) << "[mlx_tvm_ffi." << function << "] stream: expected one of "
                              << Name(device) << ", got one of " << Name(checked.device()) << ".";
  }
  return checked;
}

int ExchangeDefault(DLDevice device, mtf_stream* stream, mtf_stream** previous) {
  return detail::Guard([=] {
    StreamRef next = CheckedDefault(device, stream, "ExchangeDefaultStream");
    Defaults& defaults = DefaultsOfProcess();
    std::lock_guard<std::mutex> lock(defaults.mutex);
    StreamRef& entry = defaults.Of(device);
    *previous = entry.release();
    entry = std::move(next);
  });
}

int OfferDefault(DLDevice device, mtf_stream* stream, int* taken) {
  return detail::Guard([=] {
    StreamRef next = CheckedDefault(device, stream, "OfferDefaultStream");
    Defaults& defaults = DefaultsOfProcess();
    std::lock_guard<std::mutex> lock(defaults.mutex);
    StreamRef& entry = defaults.Of(device);
    *taken = next && !entry ? 1 : 0;
    if (*taken != 0) entry = std::move(next);
  });
}

// Calls enter or leave of a stream, which it may not have.
int Notify(mtf_stream* stream, int (*mtf_stream_table::*member)(mtf_stream*)) {
  auto notify = detail::Member(stream->table, member);
  return notify == nullptr ? 0 : notify(stream);
}

// The stream of this thread's innermost scope, which it closes.
StreamRef Close() {
  OpenScope scope = std::move(scopes->open.back());
  scopes->open.pop_back();
  if (scope.sets_environment && TVMFFIEnvSetStream(scope.device.device_type, scope.device.device_id,
                                                   scope.previous, nullptr) != 0) {
    detail::LogRaised();
  }
  return std::move(scope.stream);
}

void EnterScope(mtf_stream* stream, mtf_scope* scope) {
  StreamRef owned = StreamRef::Share(stream);
  if (!owned) {
    TVM_FFI_THROW(ValueError) << "[mlx_tvm_ffi.StreamScope] stream: expected one, got null.";
  }
  const DLDevice device = owned.device();
  CheckDevice(device, "StreamScope");
  void* environment = nullptr;
  bool sets_environment = true;
  switch (device.device_type) {
    case kDLCUDA:
    case kDLROCM:
      environment = EncoderScope(owned).encoder();
      break;
    case kDLMetal:
      environment = stream;
      break;
    default:
      sets_environment = false;
  }
  ThreadScopes& thread = ScopesOfThread();
  const uint64_t serial = ++thread.last_serial;
  thread.open.push_back({serial, device, std::move(owned), sets_environment, nullptr});
  if (sets_environment && TVMFFIEnvSetStream(device.device_type, device.device_id, environment,
                                             &thread.open.back().previous) != 0) {
    thread.open.pop_back();
    detail::ThrowRaised("StreamScope");
  }
  if (Notify(stream, &mtf_stream_table::enter) != 0) {
    Close();
    detail::ThrowRaised("StreamScope");
  }
  *scope = {thread.thread, serial};
}

int Enter(mtf_stream* stream, mtf_scope* scope) {
  return detail::Guard([=] { EnterScope(stream, scope); });
}

void LeaveScope(mtf_scope* scope) {
  if (scope->serial == 0) {
    TVM_FFI_THROW(RuntimeError) << "[mlx_tvm_ffi.StreamScope] scope: expected an open one, got one "
                                   "that was left or never entered.";
  }
  if (scopes == nullptr || scopes->thread != scope->thread) {
    TVM_FFI_THROW(RuntimeError)
        << "[mlx_tvm_ffi.StreamScope] thread: expected the one that entered the scope, got "
           "another. Leave a scope on the thread that entered it.";
  }
  const uint64_t serial = std::exchange(*scope, mtf_scope{}).serial;
  const auto& open = scopes->open;
  const bool is_open = std::any_of(open.begin(), open.end(),
                                   [=](const OpenScope& open) { return open.serial == serial; });
  const bool is_innermost = is_open && open.back().serial == serial;
  for (bool last = !is_open; !last;) {
    last = open.back().serial == serial;
    StreamRef stream = Close();
    if (Notify(stream.get(), &mtf_stream_table::leave) == 0) continue;
    if (is_innermost) detail::ThrowRaised("StreamScope");
    detail::LogRaised();
  }
  if (!is_innermost) {
    TVM_FFI_THROW(RuntimeError)
        << "[mlx_tvm_ffi.StreamScope] scope: expected the innermost of this thread, got one "
        << (is_open ? "with others inside it, which were left too" : "that an outer one left")
        << ". Leave scopes in the reverse order of entering.";
  }
}

int Leave(mtf_scope* scope) {
  return detail::Guard([=] { LeaveScope(scope); });
}

constexpr mtf_stream_api kApi{sizeof(mtf_stream_api),
                              MLX_TVM_FFI_STREAM_VERSION,
                              Current,
                              Innermost,
                              ExchangeDefault,
                              OfferDefault,
                              Enter,
                              Leave};

int GetApi(void*, const TVMFFIAny*, int32_t, TVMFFIAny* result) {
  result->type_index = kTVMFFIOpaquePtr;
  result->zero_padding = 0;
  result->v_ptr = const_cast<mtf_stream_api*>(&kApi);
  return 0;
}

// Never overrides: with this library twice in a process, the copy that came first has the state.
void Publish() {
  const TVMFFIByteArray name{"mlx_tvm_ffi.stream_api", sizeof("mlx_tvm_ffi.stream_api") - 1};
  TVMFFIObjectHandle function = nullptr;
  if (TVMFFIFunctionCreate(nullptr, GetApi, nullptr, &function) != 0) {
    detail::LogRaised();
    return;
  }
  if (TVMFFIFunctionSetGlobal(&name, function, 0) != 0) {
    TVMFFIObjectHandle error = nullptr;
    TVMFFIErrorMoveFromRaised(&error);
    if (error != nullptr) TVMFFIObjectDecRef(error);
  }
  TVMFFIObjectDecRef(function);
}

TVM_FFI_STATIC_INIT_BLOCK() { Publish(); }

}  // namespace
}  // namespace mlx_tvm_ffi
