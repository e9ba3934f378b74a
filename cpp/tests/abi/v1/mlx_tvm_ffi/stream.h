/*!
 * \file stream.h
 * \brief The stream interface: how a kernel gets the framework's encoder, device and dispatch
 * queue.
 *
 * Needs tvm-ffi's headers only. The first part is C11: two tables of functions. The second part is
 * a C++17 wrapper over them. Nothing here holds state: scopes and defaults live in
 * libmlx_tvm_ffi_stream, which publishes its table as the global function "mlx_tvm_ffi.stream_api"
 * of tvm-ffi's registry. A kernel library built with this header needs neither MLX nor a link to
 * that library.
 *
 * Words: an encoder is an MTLComputeCommandEncoder on Metal, the cudaStream_t that the framework
 * captures or launches on with CUDA, and null on the CPU, where a kernel computes on the thread
 * that it is called on.
 */
#ifndef MLX_TVM_FFI_STREAM_H_
#define MLX_TVM_FFI_STREAM_H_

#include <tvm/ffi/c_api.h>
#include <tvm/ffi/extra/c_env_api.h>

#ifdef __cplusplus
extern "C" {
#endif

/*!
 * \brief Version of the tables below. A table only ever grows at its end; a longer one has a higher
 * version.
 */
#define MLX_TVM_FFI_STREAM_VERSION 1

typedef struct mtf_stream mtf_stream;

/*!
 * \brief What a framework implements for a stream of its own.
 *
 * Functions that return int give 0, or -1 with the error in tvm-ffi's error slot of this thread.
 * All but retain, release and device are called on the thread that runs the kernel, or on the
 * dispatch queue. retain must not block.
 */
typedef struct mtf_stream_table {
  /*! \brief Bytes of this table as its maker knew it: a member past it is absent. */
  uint32_t size;
  /*! \brief MLX_TVM_FFI_STREAM_VERSION of its maker. */
  uint32_t version;
  /*! \brief One more owner. Any thread. */
  void (*retain)(mtf_stream* self);
  /*! \brief One owner less; the last one destroys the stream. Any thread. */
  void (*release)(mtf_stream* self);
  /*! \brief The device of this stream. Any thread. */
  int (*device)(mtf_stream* self, DLDevice* device);
  /*!
   * \brief The framework's open encoder: never null on a GPU, null on the CPU. Borrowed until the
   * matching release_encoder; the caller must not end it and must not commit its command buffer. A
   * nested call gives the same encoder. What is encoded sees what was written before the outermost
   * acquire, by the same kernel too.
   */
  int (*acquire_encoder)(mtf_stream* self, void** encoder);
  /*! \brief Balances acquire_encoder. Never ends the framework's encoder. */
  int (*release_encoder)(mtf_stream* self);
  /*! \brief Dispatches encoded after this see what was written by those before. Between acquire and
   * release. */
  int (*barrier)(mtf_stream* self);
  /*! \brief id<MTLDevice>, the CUdevice as an integer, or null on the CPU. Borrowed, for the
   * stream's life. */
  int (*get_device)(mtf_stream* self, void** device);
  /*! \brief A dispatch_queue_t that encoding must happen on, or null: encode on the calling thread.
   * Borrowed. */
  int (*get_dispatch_queue)(mtf_stream* self, void** queue);
  /*!
   * \brief The MTLCommandBuffer, with no encoder open on it, ordered after all earlier work: for
   * blit or serial encoders of the caller's own, each ended before release_command_buffer. The
   * caller must not commit it. NotImplementedError where a device has no command buffers.
   */
  int (*acquire_command_buffer)(mtf_stream* self, void** command_buffer);
  /*! \brief Balances acquire_command_buffer; later work is ordered after what was encoded in
   * between. */
  int (*release_command_buffer)(mtf_stream* self);
  /*!
   * \brief A scope of this stream was opened on this thread. May be null: nothing to do. Where it
   * fails, the scope is closed again.
   */
  int (*enter)(mtf_stream* self);
  /*! \brief A scope of this stream was left on this thread, in which it was opened. May be null:
   * nothing to do. */
  int (*leave)(mtf_stream* self);
  /*!
   * \brief Keeps `object` (a pipeline, a module) until the work encoded so far is done, then calls
   * `drop(object)` once, on any thread; also where it fails.
   */
  int (*keep)(mtf_stream* self, void* object, void (*drop)(void* object));
} mtf_stream_table;

/*! \brief A stream of some framework, reference counted through its table. */
struct mtf_stream {
  const mtf_stream_table* table;
  void* context;
};

/*! \brief Names a scope that enter opened, for the leave that closes it. Its members are private.
 */
typedef struct mtf_scope {
  uint64_t thread;
  uint64_t serial;
} mtf_scope;

/*! \brief Scopes and defaults: what libmlx_tvm_ffi_stream publishes. Same rules for size, version
 * and int. */
typedef struct mtf_stream_api {
  uint32_t size;
  uint32_t version;
  /*!
   * \brief The stream that a kernel on `device` uses now, retained for the caller: on Metal
   * tvm-ffi's environment stream, if set; else this thread's innermost scope for the device; else
   * the process default. RuntimeError where there is none. Any thread.
   */
  int (*current)(DLDevice device, mtf_stream** stream);
  /*! \brief This thread's innermost scope, of whatever device, retained for the caller; null
   * without one. */
  int (*innermost)(mtf_stream** stream);
  /*!
   * \brief Makes `stream` (null: none) the process default of `device`, and hands the previous one
   * (or null) with its reference to the caller. Any thread.
   */
  int (*exchange_default)(DLDevice device, mtf_stream* stream, mtf_stream** previous);
  /*!
   * \brief Makes `stream` the process default of `device` where there is none, and says whether it
   * did. Any thread.
   */
  int (*offer_default)(DLDevice device, mtf_stream* stream, int* taken);
  /*!
   * \brief Opens a scope on this thread: retains `stream` and sets tvm-ffi's environment stream of
   * its device (CUDA: the encoder; Metal: the mtf_stream itself).
   */
  int (*enter)(mtf_stream* stream, mtf_scope* scope);
  /*!
   * \brief Leaves a scope and restores what enter replaced. RuntimeError on another thread, which
   * changes nothing, and where scopes opened inside it are still open, which leaves those too.
   */
  int (*leave)(mtf_scope* scope);
} mtf_stream_api;

#ifdef __cplusplus
}  // extern "C"

#include <tvm/ffi/error.h>
#include <tvm/ffi/function.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <memory>
#include <stdexcept>
#include <utility>

/*! \brief Whether <dispatch/dispatch.h> may be used: on Apple, or where its user links libdispatch.
 */
#ifndef MLX_TVM_FFI_HAS_DISPATCH
#ifdef __APPLE__
#define MLX_TVM_FFI_HAS_DISPATCH 1
#else
#define MLX_TVM_FFI_HAS_DISPATCH 0
#endif
#endif
#if MLX_TVM_FFI_HAS_DISPATCH
#include <dispatch/dispatch.h>
#endif

/*! \brief Keeps a symbol to one shared library: two of them may be built with different versions of
 * this file. */
#if defined(__GNUC__)
#define MLX_TVM_FFI_API __attribute__((visibility("default")))
#define MLX_TVM_FFI_LOCAL __attribute__((visibility("hidden")))
#else
#define MLX_TVM_FFI_API
#define MLX_TVM_FFI_LOCAL
#endif

namespace mlx_tvm_ffi {
// Counts with MLX_TVM_FFI_STREAM_VERSION: the classes of two versions are different classes.
inline namespace v1 {

namespace detail {

/*! \brief Throws what a function that returned nonzero left in the error slot. */
[[noreturn]] inline void ThrowRaised(const char* function) {
  TVMFFIObjectHandle error = nullptr;
  TVMFFIErrorMoveFromRaised(&error);
  if (error == nullptr) {
    TVM_FFI_THROW(InternalError) << "[mlx_tvm_ffi." << function
                                 << "] error: expected one in tvm-ffi's error slot, got none. The "
                                    "stream's implementation returned -1 without raising.";
  }
  TVMFFIErrorSetRaised(error);
  TVMFFIObjectDecRef(error);
  TVM_FFI_CHECK_SAFE_CALL(-1);
  std::abort();  // not reached
}

/*! \brief Writes it to stderr instead, for destructors. */
inline void LogRaised() noexcept {
  TVMFFIObjectHandle error = nullptr;
  TVMFFIErrorMoveFromRaised(&error);
  if (error == nullptr) return;
  const TVMFFIErrorCell* cell = TVMFFIErrorGetCellPtr(error);
  std::fprintf(stderr, "%.*s: %.*s\n", static_cast<int>(cell->kind.size), cell->kind.data,
               static_cast<int>(cell->message.size), cell->message.data);
  TVMFFIObjectDecRef(error);
}

/*!
 * \brief Runs `function` behind a C interface: 0, or -1 with its exception in the error slot.
 * tvm::ffi::Error keeps its kind, std::invalid_argument is a ValueError, std::runtime_error a
 * RuntimeError.
 */
template <typename Function>
int Guard(Function&& function) noexcept {
  try {
    TVM_FFI_SAFE_CALL_BEGIN();
    try {
      function();
    } catch (const std::invalid_argument& error) {
      TVM_FFI_THROW(ValueError) << error.what();
    } catch (const std::runtime_error& error) {
      TVM_FFI_THROW(RuntimeError) << error.what();
    }
    TVM_FFI_SAFE_CALL_END();
  } catch (...) {
    TVMFFIErrorSetRaisedFromCStr("RuntimeError", "an exception that is no std::exception");
    return -1;
  }
}

/*! \brief A member of a table, which may be shorter than this file knows it; null where it is
 * absent. */
template <typename Table, typename Function>
Function Member(const Table* table, Function Table::* member) {
  const auto end = static_cast<std::size_t>(reinterpret_cast<const char*>(&(table->*member)) -
                                            reinterpret_cast<const char*>(table)) +
                   sizeof(Function);
  return end <= table->size ? table->*member : nullptr;
}

/*! \brief The same, NotImplementedError where it is absent. */
template <typename Table, typename Function>
Function RequiredMember(const Table* table, Function Table::* member, const char* name) {
  Function function = Member(table, member);
  if (function == nullptr) {
    TVM_FFI_THROW(NotImplementedError)
        << "[mlx_tvm_ffi." << name << "] table: expected one with this member, got version "
        << table->version << " without it. Update the framework that made it.";
  }
  return function;
}

/*! \brief Calls a member, and throws what it raises. */
template <typename Table, typename... Params, typename... Args>
void Call(const Table* table, int (*Table::*member)(Params...), const char* name, Args... args) {
  if (RequiredMember(table, member, name)(args...) != 0) ThrowRaised(name);
}

/*! \brief The published scopes and defaults. RuntimeError where libmlx_tvm_ffi_stream is not
 * loaded. */
MLX_TVM_FFI_LOCAL inline const mtf_stream_api* StreamApi() {
  static std::atomic<const mtf_stream_api*> found{nullptr};  // a hit stays right, a miss may not
  const mtf_stream_api* api = found.load(std::memory_order_acquire);
  if (api != nullptr) return api;
  const TVMFFIByteArray name{"mlx_tvm_ffi.stream_api", sizeof("mlx_tvm_ffi.stream_api") - 1};
  TVMFFIObjectHandle function = nullptr;
  TVM_FFI_CHECK_SAFE_CALL(TVMFFIFunctionGetGlobal(&name, &function));
  if (function == nullptr) {
    TVM_FFI_THROW(RuntimeError)
        << "[mlx_tvm_ffi.stream_api] library: expected libmlx_tvm_ffi_stream in this process, got "
           "none. Import mlx_tvm_ffi, or load that library, before a kernel asks for a stream.";
  }
  TVMFFIAny result{};
  const int failed = TVMFFIFunctionCall(function, nullptr, 0, &result);
  TVMFFIObjectDecRef(function);
  TVM_FFI_CHECK_SAFE_CALL(failed);
  api = static_cast<const mtf_stream_api*>(result.v_ptr);
  found.store(api, std::memory_order_release);
  return api;
}

}  // namespace detail

/*!
 * \brief Owns one reference to a stream, or is null.
 *
 * Methods throw tvm::ffi::Error: what the stream's framework raised, ValueError on a null
 * reference, NotImplementedError for what the framework does not have.
 * \note Copied and destroyed on any thread. Used on the thread that runs the kernel, or on the
 * dispatch queue.
 */
class StreamRef {
 public:
  StreamRef() = default;
  StreamRef(const StreamRef& other) noexcept : stream_(other.stream_) {
    if (stream_ != nullptr) stream_->table->retain(stream_);
  }
  StreamRef(StreamRef&& other) noexcept : stream_(other.release()) {}
  StreamRef& operator=(StreamRef other) noexcept {
    std::swap(stream_, other.stream_);
    return *this;
  }
  ~StreamRef() {
    if (stream_ != nullptr) stream_->table->release(stream_);
  }

  /*! \brief Takes over the caller's reference. */
  static StreamRef Steal(mtf_stream* stream) noexcept {
    StreamRef result;
    result.stream_ = stream;
    return result;
  }
  /*! \brief Adds a reference of its own. */
  static StreamRef Share(mtf_stream* stream) noexcept {
    if (stream != nullptr) stream->table->retain(stream);
    return Steal(stream);
  }

  explicit operator bool() const noexcept { return stream_ != nullptr; }
  /*! \brief Borrowed. */
  [[nodiscard]] mtf_stream* get() const noexcept { return stream_; }
  /*! \brief Hands the reference to the caller; this one is null after it. */
  [[nodiscard]] mtf_stream* release() noexcept { return std::exchange(stream_, nullptr); }

  /*! \brief The device that this stream is for. Any thread. */
  [[nodiscard]] DLDevice device() const {
    DLDevice device{};
    Call(&mtf_stream_table::device, "device", &device);
    return device;
  }
  /*!
   * \brief The framework's open encoder: never null on a GPU, null on the CPU. Borrowed until the
   * matching ReleaseEncoder; not to be ended, its command buffer not to be committed. What is
   * encoded sees what was written before the outermost acquire, by the same kernel too.
   * EncoderScope pairs the two.
   */
  [[nodiscard]] void* AcquireEncoder() const {
    void* encoder = nullptr;
    Call(&mtf_stream_table::acquire_encoder, "AcquireEncoder", &encoder);
    if (encoder == nullptr && device().device_type != kDLCPU) {
      ReleaseEncoder();
      TVM_FFI_THROW(InternalError)
          << "[mlx_tvm_ffi.AcquireEncoder] encoder: expected one, got null. "
             "The stream's implementation must give one on a GPU.";
    }
    return encoder;
  }
  /*! \brief Balances AcquireEncoder. */
  void ReleaseEncoder() const { Call(&mtf_stream_table::release_encoder, "ReleaseEncoder"); }
  /*! \brief Dispatches encoded after this see what was written by those before. Between acquire and
   * release. */
  void Barrier() const { Call(&mtf_stream_table::barrier, "Barrier"); }
  /*! \brief id<MTLDevice>, the CUdevice as an integer, or null on the CPU. Borrowed, for the
   * stream's life. */
  [[nodiscard]] void* GetDevice() const {
    void* device = nullptr;
    Call(&mtf_stream_table::get_device, "GetDevice", &device);
    return device;
  }
  /*! \brief A dispatch_queue_t that encoding must happen on (see EncodeOn), or null. Borrowed. */
  [[nodiscard]] void* GetDispatchQueue() const {
    void* queue = nullptr;
    Call(&mtf_stream_table::get_dispatch_queue, "GetDispatchQueue", &queue);
    return queue;
  }
  /*!
   * \brief The MTLCommandBuffer with no encoder open on it, ordered after all earlier work. The
   * caller ends its own encoders before ReleaseCommandBuffer and does not commit.
   * CommandBufferScope pairs the two.
   */
  [[nodiscard]] void* AcquireCommandBuffer() const {
    void* command_buffer = nullptr;
    Call(&mtf_stream_table::acquire_command_buffer, "AcquireCommandBuffer", &command_buffer);
    return command_buffer;
  }
  /*! \brief Balances AcquireCommandBuffer; later work is ordered after what was encoded in between.
   */
  void ReleaseCommandBuffer() const {
    Call(&mtf_stream_table::release_command_buffer, "ReleaseCommandBuffer");
  }
  /*! \brief Keeps `object` until the work encoded so far is done. It may die on any thread. */
  void Keep(std::shared_ptr<void> object) const {
    Check("Keep");
    auto keep = detail::RequiredMember(stream_->table, &mtf_stream_table::keep, "Keep");
    auto drop = [](void* kept) { delete static_cast<std::shared_ptr<void>*>(kept); };
    if (keep(stream_, new std::shared_ptr<void>(std::move(object)), drop) != 0) {
      detail::ThrowRaised("Keep");
    }
  }

 private:
  void Check(const char* name) const {
    if (stream_ == nullptr) {
      TVM_FFI_THROW(ValueError) << "[mlx_tvm_ffi." << name
                                << "] stream: expected one, got null. Test a StreamRef before use.";
    }
  }
  template <typename... Params, typename... Args>
  void Call(int (*mtf_stream_table::*member)(mtf_stream*, Params...), const char* name,
            Args... args) const {
    Check(name);
    detail::Call(stream_->table, member, name, stream_, args...);
  }

  mtf_stream* stream_ = nullptr;
};

/*!
 * \brief A stream as its framework implements it: derive, and hand it out with MakeStream.
 *
 * What each method gives is what StreamRef says of it. An exception becomes an error of the kernel
 * that called.
 * \note The destructor and device() run on any thread, the others on the thread that runs the
 * kernel.
 */
class StreamInterface {
 public:
  StreamInterface() = default;
  StreamInterface(const StreamInterface&) = delete;
  StreamInterface& operator=(const StreamInterface&) = delete;
  virtual ~StreamInterface() = default;

  [[nodiscard]] virtual DLDevice device() const = 0;
  virtual void* AcquireEncoder() = 0;
  virtual void ReleaseEncoder() {}
  virtual void Barrier() {}
  virtual void* GetDevice() { return nullptr; }
  virtual void* GetDispatchQueue() { return nullptr; }
  virtual void* AcquireCommandBuffer() {
    TVM_FFI_THROW(NotImplementedError) << "[mlx_tvm_ffi.AcquireCommandBuffer] device: expected one "
                                          "with command buffers, got device "
                                          "type "
                                       << device().device_type << ". Use AcquireEncoder.";
    return nullptr;
  }
  virtual void ReleaseCommandBuffer() {}
  /*! \brief A scope of this stream was opened on this thread. Where it throws, the scope is closed
   * again. */
  virtual void Enter() {}
  /*! \brief A scope of this stream was left on this thread, in which it was opened. */
  virtual void Leave() {}
  virtual void Keep(std::shared_ptr<void> object) {
    if (object != nullptr && device().device_type != kDLCPU) {
      TVM_FFI_THROW(NotImplementedError)
          << "[mlx_tvm_ffi.Keep] stream: expected one that keeps objects until its device is done, "
             "got one that does not. Keep the object alive until then yourself.";
    }
  }
};

namespace detail {

/*! \brief A StreamInterface behind the C table. */
class MLX_TVM_FFI_LOCAL StreamAdapter final : public mtf_stream {
 public:
  explicit StreamAdapter(std::shared_ptr<StreamInterface> implementation)
      : mtf_stream{&kTable, implementation.get()}, implementation_(std::move(implementation)) {}

  static StreamInterface* Implementation(mtf_stream* self) {
    return static_cast<StreamInterface*>(self->context);
  }
  static bool Made(const mtf_stream* stream) { return stream->table == &kTable; }

 private:
  static void Retain(mtf_stream* self) {
    static_cast<StreamAdapter*>(self)->references_.fetch_add(1, std::memory_order_relaxed);
  }
  static void Release(mtf_stream* self) {
    auto* adapter = static_cast<StreamAdapter*>(self);
    if (adapter->references_.fetch_sub(1, std::memory_order_acq_rel) == 1) delete adapter;
  }
  static int Device(mtf_stream* self, DLDevice* device) {
    return Guard([=] { *device = Implementation(self)->device(); });
  }
  template <void* (StreamInterface::*kMethod)()>
  static int Get(mtf_stream* self, void** result) {
    return Guard([=] { *result = (Implementation(self)->*kMethod)(); });
  }
  template <void (StreamInterface::*kMethod)()>
  static int Do(mtf_stream* self) {
    return Guard([=] { (Implementation(self)->*kMethod)(); });
  }

  static int Keep(mtf_stream* self, void* object, void (*drop)(void*)) {
    return Guard([=] { Implementation(self)->Keep(std::shared_ptr<void>(object, drop)); });
  }

  static constexpr mtf_stream_table kTable{sizeof(mtf_stream_table),
                                           MLX_TVM_FFI_STREAM_VERSION,
                                           Retain,
                                           Release,
                                           Device,
                                           Get<&StreamInterface::AcquireEncoder>,
                                           Do<&StreamInterface::ReleaseEncoder>,
                                           Do<&StreamInterface::Barrier>,
                                           Get<&StreamInterface::GetDevice>,
                                           Get<&StreamInterface::GetDispatchQueue>,
                                           Get<&StreamInterface::AcquireCommandBuffer>,
                                           Do<&StreamInterface::ReleaseCommandBuffer>,
                                           Do<&StreamInterface::Enter>,
                                           Do<&StreamInterface::Leave>,
                                           Keep};

  std::atomic<int64_t> references_{1};
  std::shared_ptr<StreamInterface> implementation_;
};

}  // namespace detail

/*! \brief Hands an implementation out. It lives until the last reference is gone. Any thread. */
inline StreamRef MakeStream(std::shared_ptr<StreamInterface> implementation) {
  if (implementation == nullptr) {
    TVM_FFI_THROW(ValueError) << "[mlx_tvm_ffi.MakeStream] implementation: expected one, got null.";
  }
  return StreamRef::Steal(new detail::StreamAdapter(std::move(implementation)));
}

/*!
 * \brief The implementation behind a stream that this same shared library made, else null.
 * Borrowed.
 */
[[nodiscard]] MLX_TVM_FFI_LOCAL inline StreamInterface* Implementation(const StreamRef& stream) {
  const bool made = stream && detail::StreamAdapter::Made(stream.get());
  return made ? detail::StreamAdapter::Implementation(stream.get()) : nullptr;
}

/*!
 * \brief The stream that a kernel on `device` uses now: on Metal tvm-ffi's environment stream, if
 * set; else the innermost scope of this thread for the device; else the default of the process.
 * \throws RuntimeError where there is none. Any thread.
 */
[[nodiscard]] inline StreamRef CurrentStream(DLDevice device) {
  mtf_stream* stream = nullptr;
  detail::Call(detail::StreamApi(), &mtf_stream_api::current, "CurrentStream", device, &stream);
  return StreamRef::Steal(stream);
}

/*! \brief The stream of this thread's innermost scope, of whatever device; null without one. */
[[nodiscard]] inline StreamRef InnermostStream() {
  mtf_stream* stream = nullptr;
  detail::Call(detail::StreamApi(), &mtf_stream_api::innermost, "InnermostStream", &stream);
  return StreamRef::Steal(stream);
}

/*! \brief Makes `stream` (null: none) the process default of `device`; gives the previous one. Any
 * thread. */
inline StreamRef ExchangeDefaultStream(DLDevice device, const StreamRef& stream) {
  mtf_stream* previous = nullptr;
  detail::Call(detail::StreamApi(), &mtf_stream_api::exchange_default, "ExchangeDefaultStream",
               device, stream.get(), &previous);
  return StreamRef::Steal(previous);
}

/*! \brief Makes `stream` the default of `device` where there is none; true if it did. Any thread.
 */
inline bool OfferDefaultStream(DLDevice device, const StreamRef& stream) {
  int taken = 0;
  detail::Call(detail::StreamApi(), &mtf_stream_api::offer_default, "OfferDefaultStream", device,
               stream.get(), &taken);
  return taken != 0;
}

/*!
 * \brief While it lives, `stream` is the current one of its device on this thread, and tvm-ffi's
 * environment stream of that device is set from it. Destroy it on the thread that made it,
 * innermost first; what goes wrong there is written to stderr.
 */
class [[nodiscard]] StreamScope final {
 public:
  explicit StreamScope(const StreamRef& stream) {
    detail::Call(detail::StreamApi(), &mtf_stream_api::enter, "StreamScope", stream.get(), &scope_);
  }
  ~StreamScope() {
    if (detail::StreamApi()->leave(&scope_) != 0) detail::LogRaised();
  }
  StreamScope(const StreamScope&) = delete;
  StreamScope& operator=(const StreamScope&) = delete;

 private:
  mtf_scope scope_{};
};

/*! \brief Holds a stream's encoder: acquired here, released when it dies. */
class [[nodiscard]] EncoderScope final {
 public:
  explicit EncoderScope(StreamRef stream)
      : stream_(std::move(stream)), encoder_(stream_.AcquireEncoder()) {}
  ~EncoderScope() {
    if (stream_.get()->table->release_encoder(stream_.get()) != 0) detail::LogRaised();
  }
  EncoderScope(const EncoderScope&) = delete;
  EncoderScope& operator=(const EncoderScope&) = delete;

  /*! \brief As StreamRef::AcquireEncoder gives it. */
  [[nodiscard]] void* encoder() const noexcept { return encoder_; }

 private:
  StreamRef stream_;
  void* encoder_;
};

/*! \brief Holds a stream's command buffer: acquired here, released when it dies. */
class [[nodiscard]] CommandBufferScope final {
 public:
  explicit CommandBufferScope(StreamRef stream)
      : stream_(std::move(stream)), command_buffer_(stream_.AcquireCommandBuffer()) {}
  ~CommandBufferScope() {
    if (stream_.get()->table->release_command_buffer(stream_.get()) != 0) detail::LogRaised();
  }
  CommandBufferScope(const CommandBufferScope&) = delete;
  CommandBufferScope& operator=(const CommandBufferScope&) = delete;

  /*! \brief As StreamRef::AcquireCommandBuffer gives it. */
  [[nodiscard]] void* command_buffer() const noexcept { return command_buffer_; }

 private:
  StreamRef stream_;
  void* command_buffer_;
};

/*!
 * \brief Runs `encode` where encoding for `stream` must happen: on its dispatch queue, waited for,
 * else on this thread.
 * \throws What `encode` throws; NotImplementedError for a dispatch queue on a system without them.
 * \note Acquire and release the encoder inside `encode`. Not to be called on the dispatch queue
 * itself.
 */
template <typename Function>
void EncodeOn(const StreamRef& stream, Function&& encode) {
  void* queue = stream.GetDispatchQueue();
  if (queue == nullptr) {
    std::forward<Function>(encode)();
    return;
  }
#if MLX_TVM_FFI_HAS_DISPATCH
  struct Work {
    Function& encode;
    std::exception_ptr error;
  } work{encode, nullptr};
  dispatch_sync_f(static_cast<dispatch_queue_t>(queue), &work, [](void* context) {
    auto* work = static_cast<Work*>(context);
    try {
      work->encode();
    } catch (...) {
      work->error = std::current_exception();
    }
  });
  if (work.error) std::rethrow_exception(work.error);
#else
  TVM_FFI_THROW(NotImplementedError)
      << "[mlx_tvm_ffi.EncodeOn] stream: expected no dispatch queue on this system, got one. Link "
         "libdispatch and define MLX_TVM_FFI_HAS_DISPATCH=1.";
#endif
}

}  // namespace v1
}  // namespace mlx_tvm_ffi
#endif  // __cplusplus

#endif  // MLX_TVM_FFI_STREAM_H_
