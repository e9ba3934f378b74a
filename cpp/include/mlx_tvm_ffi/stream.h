/*!
 * \file stream.h
 * \brief The stream interface: how a kernel gets the framework's encoder, device and dispatch queue.
 *
 * Needs tvm-ffi's headers only. The first part is C11: two tables of functions. The second part is a C++17
 * wrapper over them. Nothing here holds state: scopes and defaults live in libmlx_tvm_ffi_stream, which
 * publishes its table as the global function "mlx_tvm_ffi.stream_api" of tvm-ffi's registry. A kernel
 * library built with this header needs neither MLX nor a link to that library.
 *
 * Words: an encoder is an MTLComputeCommandEncoder on Metal, the cudaStream_t that the framework captures or
 * launches on with CUDA, and null on the CPU, where a kernel computes on the thread that it is called on.
 */
#ifndef MLX_TVM_FFI_STREAM_H_
#define MLX_TVM_FFI_STREAM_H_

#include <tvm/ffi/c_api.h>
#include <tvm/ffi/extra/c_env_api.h>

#ifdef __cplusplus
extern "C" {
#endif

/*! \brief Version of the tables below. A table only ever grows at its end; a longer one has a higher version. */
#define MLX_TVM_FFI_STREAM_VERSION 1

typedef struct mtf_stream mtf_stream;

/*!
 * \brief What a framework implements for a stream of its own.
 *
 * Functions that return int give 0, or -1 with the error in tvm-ffi's error slot of this thread. All but
 * retain, release and device are called on the thread that runs the kernel.
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
   * \brief The framework's open encoder: never null on a GPU, null on the CPU. Borrowed until the matching
   * release_encoder; the caller must not end it and must not commit its command buffer. A nested call gives
   * the same encoder.
   */
  int (*acquire_encoder)(mtf_stream* self, void** encoder);
  /*! \brief Balances acquire_encoder. Never ends the framework's encoder. */
  int (*release_encoder)(mtf_stream* self);
  /*! \brief Dispatches encoded after this see what was written by those before. Between acquire and release. */
  int (*barrier)(mtf_stream* self);
  /*! \brief id<MTLDevice>, the CUdevice as an integer, or null on the CPU. Borrowed, for the stream's life. */
  int (*get_device)(mtf_stream* self, void** device);
  /*! \brief A dispatch_queue_t that encoding must happen on, or null: encode on the calling thread. Borrowed. */
  int (*get_dispatch_queue)(mtf_stream* self, void** queue);
  /*!
   * \brief The MTLCommandBuffer, with no encoder open on it, ordered after all earlier work: for blit or serial
   * encoders of the caller's own, each ended before release_command_buffer. The caller must not commit it.
   * NotImplementedError where a device has no command buffers.
   */
  int (*acquire_command_buffer)(mtf_stream* self, void** command_buffer);
  /*! \brief Balances acquire_command_buffer; later work is ordered after what was encoded in between. */
  int (*release_command_buffer)(mtf_stream* self);
} mtf_stream_table;

/*! \brief A stream of some framework, reference counted through its table. */
struct mtf_stream {
  const mtf_stream_table* table;
  void* context;
};

/*! \brief A scope, in memory of the caller that stays put until it is left. Its members are private. */
typedef struct mtf_scope {
  mtf_stream* stream;
  struct mtf_scope* outer;
  void* previous_env_stream;
  void* thread;
} mtf_scope;

/*! \brief Scopes and defaults: what libmlx_tvm_ffi_stream publishes. Same rules for size, version and int. */
typedef struct mtf_stream_api {
  uint32_t size;
  uint32_t version;
  /*!
   * \brief The stream that a kernel on `device` uses now, retained for the caller: on Metal tvm-ffi's environment
   * stream, if set; else this thread's innermost scope for the device; else the process default. RuntimeError
   * where there is none. Any thread.
   */
  int (*current)(DLDevice device, mtf_stream** stream);
  /*! \brief This thread's innermost scope, of whatever device, retained for the caller; null without one. */
  int (*innermost)(mtf_stream** stream);
  /*!
   * \brief Makes `stream` (null: none) the process default of `device`, and hands the previous one (or null) with
   * its reference to the caller. Any thread.
   */
  int (*exchange_default)(DLDevice device, mtf_stream* stream, mtf_stream** previous);
  /*!
   * \brief Opens a scope on this thread: retains `stream` and sets tvm-ffi's environment stream of its device (CUDA:
   * the encoder; Metal: the mtf_stream itself).
   */
  int (*enter)(mtf_stream* stream, mtf_scope* scope);
  /*! \brief Leaves the innermost scope and restores what enter replaced. RuntimeError on another thread or out of order. */
  int (*leave)(mtf_scope* scope);
} mtf_stream_api;

#ifdef __cplusplus
}  // extern "C"
#endif

#endif  // MLX_TVM_FFI_STREAM_H_
