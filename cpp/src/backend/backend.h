/*!
 * \file backend.h
 * \brief What a device has to offer: streams, encoders and buffers. Nothing here knows of Python,
 * attributes or transforms.
 */
#ifndef MLX_TVM_FFI_BACKEND_BACKEND_H_
#define MLX_TVM_FFI_BACKEND_BACKEND_H_

#include <mlx/array.h>
#include <mlx/primitives.h>
#include <mlx/stream.h>
#include <mlx_tvm_ffi/op.h>
#include <mlx_tvm_ffi/stream.h>

#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

namespace mlx_tvm_ffi {

/*! \brief A kernel with its arguments bound: what an op gives to a backend to run. */
class MLX_TVM_FFI_API Launch {
 public:
  virtual ~Launch() = default;
  /*!
   * \brief Runs the kernel on the calling thread, in a scope of `stream`.
   * \throws tvm::ffi::Error with the kernel's kind and message, its name put in front.
   * \note May be run again as long as no run has written to memory that the kernel reads.
   */
  virtual void Run(const StreamRef& stream) = 0;
  /*! \brief After a run on the CPU that failed: no output holds what looks like a result. */
  virtual void Spoil() noexcept = 0;
  /*! \brief What must stay alive until the device is done: the function and its attributes. */
  virtual std::shared_ptr<void> KeepAlive() const = 0;
  /*! \brief Whether the kernel can be captured into a CUDA graph, as far as is known. Any thread.
   */
  virtual Capture capture() const = 0;
  /*! \brief What a run has shown. Says what was known before. Any thread. */
  virtual Capture Learn(Capture capture) const noexcept = 0;
  /*! \brief True where an output shares an input's memory, so that a second run would see the
   * first. */
  virtual bool aliased() const = 0;
  /*! \brief True where the CPU must have run it when Encode returns: it needs a lock that those who
   * wait for it may hold. Encode is then called without that lock. */
  virtual bool at_once() const = 0;
  /*! \brief The kernel's name, for messages. */
  virtual const char* name() const = 0;
};

/*! \brief The stream interface of an MLX stream: the base of each backend's own. */
class MLX_TVM_FFI_API MlxStream : public StreamInterface {
 public:
  /*! \param stream The MLX stream, or nothing: the calling thread's current one, asked for at each
   * use. */
  explicit MlxStream(mx::Device device, std::optional<mx::Stream> stream)
      : device_(device), stream_(stream) {}

  /*! \brief The MLX stream to use now, on this thread. */
  mx::Stream Resolve() const;

 private:
  mx::Device device_;
  std::optional<mx::Stream> stream_;
};

/*! \brief What a device has to offer. */
class MLX_TVM_FFI_API Backend {
 public:
  virtual ~Backend() = default;

  /*! \brief The tvm-ffi device of an MLX device. */
  virtual DLDevice ToDLDevice(const mx::Device& device) const = 0;

  /*! \brief A new interface for `stream`; with nothing, one that follows each thread's current MLX
   * stream. */
  virtual StreamRef MakeInterface(const mx::Device& device, std::optional<mx::Stream> stream) = 0;

  /*! \brief Fills data and byte_offset (bytes) of an array that has memory. */
  virtual void Address(const mx::array& array, DLTensor* tensor) const = 0;

  /*! \brief Gives `array` row-contiguous memory of its own. Called on the thread that evaluates or
   * calls. */
  virtual void Allocate(mx::array& array, const mx::Stream& stream) = 0;

  // --- Ops: called inside eval_cpu or eval_gpu, on the thread that evaluates.

  /*! \brief Runs `primitive`'s eval_cpu or eval_gpu: for MLX's own primitives inside one of ours.
   */
  virtual void Evaluate(mx::Primitive& primitive, const std::vector<mx::array>& inputs,
                        std::vector<mx::array>& outputs) = 0;

  /*! \brief Keeps scratch memory until the work enqueued on `stream` so far, and the op at hand, is
   * done. Never for outputs. */
  virtual void KeepScratch(mx::array array, const mx::Stream& stream) = 0;

  /*!
   * \brief Runs or schedules `launch` on `stream`, ordered with MLX's own work. Outputs have
   * memory; inputs are as MLX gave them to eval, and no copy of them is kept: a copy would block
   * donation.
   */
  virtual void Encode(const mx::Stream& stream, const std::vector<mx::array>& inputs,
                      std::vector<mx::array>& outputs, const std::shared_ptr<Launch>& launch) = 0;

  // --- Direct calls: on the calling thread, for each array handed to a kernel.

  /*! \brief Whether `array` can be handed over without a wait. */
  virtual bool Ready(const mx::array& array) const = 0;

  /*! \brief Evaluates `array` and waits for what must be waited for. Called without Python's lock.
   */
  virtual void Prepare(mx::array& array) = 0;

  /*!
   * \brief `array`, ready now, is handed to a call that is about to start, or was allocated by a
   * kernel during one (and may become its result). Finish is its end.
   */
  virtual void Start(mx::array& array) = 0;

  /*! \brief The environment stream of a direct call (CUDA: the cudaStream_t; Metal: the mtf_stream;
   * CPU: null). */
  virtual void* EnvStream(const mx::Device& device) = 0;

  /*! \brief The call that `array` was handed to has returned. */
  virtual void Finish(mx::array& array) noexcept = 0;
};

/*! \brief The backend of a device. \throws tvm::ffi::Error RuntimeError where this build or machine
 * has none. */
MLX_TVM_FFI_API Backend& GetBackend(const mx::Device& device);

/*!
 * \brief Throws `error` again; where MLX says with it that a stream belongs to another thread,
 * after `where` and with the way out.
 */
[[noreturn]] MLX_TVM_FFI_API void Rethrow(const std::string& where,
                                          const std::runtime_error& error);

/*! \brief Adds a backend for a type of device: the one line by which a backend joins. Leaked on
 * purpose. */
MLX_TVM_FFI_API void RegisterBackend(mx::Device::DeviceType type, Backend* backend);

/*! \brief True where a backend is registered. */
MLX_TVM_FFI_API bool HasBackend(mx::Device::DeviceType type);

/*! \brief The MLX stream that work goes to now: this thread's innermost scope if it is MLX's, and
 * not the stream of a kernel that runs here; else MLX's default. */
MLX_TVM_FFI_API mx::Stream CurrentMlxStream();

/*! \brief Hands a backend's interface out, so that ToMlxStream knows it again: backends may live in
 * other libraries. */
MLX_TVM_FFI_API StreamRef MakeMlxStream(std::shared_ptr<MlxStream> stream);

/*! \brief The MLX stream behind an interface of ours; nothing for somebody else's. */
MLX_TVM_FFI_API std::optional<mx::Stream> ToMlxStream(const StreamRef& stream);

}  // namespace mlx_tvm_ffi

#endif  // MLX_TVM_FFI_BACKEND_BACKEND_H_
