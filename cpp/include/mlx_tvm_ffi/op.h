/*!
 * \file op.h
 * \brief tvm-ffi kernels as ops of MLX's graph, for authors of MLX ops in C++. Needs C++20 and MLX;
 * no Python.
 */
#ifndef MLX_TVM_FFI_OP_H_
#define MLX_TVM_FFI_OP_H_

#include <mlx/array.h>
#include <mlx/primitives.h>
#include <mlx/utils.h>
#include <mlx_tvm_ffi/stream.h>
#include <tvm/ffi/any.h>
#include <tvm/ffi/function.h>

#include <atomic>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace mlx_tvm_ffi {

namespace mx = mlx::core;

/*! \brief What an output is: its shape in elements, and its dtype. */
struct ShapeDtype {
  mx::Shape shape;
  mx::Dtype dtype;
};

/*! \brief Named values for a kernel's parameters that are not tensors, in the order of the call. */
using Attributes = std::vector<std::pair<std::string, tvm::ffi::Any>>;

/*! \brief How an op is mapped over a batch. */
enum class Vmap {
  kNone,        // an error that says how to add a rule
  kSequential,  // one kernel call for each element of the batch
  kBroadcast,   // one kernel call with the batch as leading dimension of every input and output
};

/*! \brief Whether a CUDA graph can hold what a kernel does. */
enum class Capture { kUnknown, kYes, kNo };

/*! \brief How a function becomes an op. */
struct Options {
  /*! \brief Name in messages and in the graph; no space in it. */
  std::string name = "kernel";
  /*!
   * \brief Order of the kernel's parameters: "args", "args.0", "rets", "rets.0", "attrs.NAME",
   * "ctx.stream". Empty: the inputs, the outputs, then the attributes in the order of the call.
   * Without "rets" the kernel returns its outputs.
   */
  std::vector<std::string> arg_spec = {};
  /*! \brief For each input whether the kernel needs it row-contiguous; empty: all; one value: for
   * every input. */
  std::vector<bool> contiguous = {};
  /*! \brief False: the kernel ignores byte_offset, so that an input with one is copied. */
  bool offsets = true;
  /*! \brief {output, input}: the output is written into the input's memory, if MLX may donate it,
   * else into a copy. */
  std::vector<std::pair<int, int>> aliases = {};
  /*! \brief False: never merge equal calls under compile, as for kernels that mutate state or draw
   * random numbers. */
  bool pure = true;
  /*! \brief False: never capture the kernel into a CUDA graph. */
  bool capture = true;
  Vmap vmap = Vmap::kNone;
};

/*!
 * \brief A function and its options, checked once and shared by every call. Any thread; immutable,
 * but for what was learned about capture.
 */
class MLX_TVM_FFI_API Kernel {
 public:
  /*! \throws tvm::ffi::Error TypeError or ValueError where function, name, arg_spec or aliases are
   * wrong. */
  Kernel(tvm::ffi::Function function, Options options);
  ~Kernel();

  /*! \brief One parameter, or run of parameters, of the kernel. */
  struct Slot {
    enum class Kind { kArgs, kArg, kRets, kRet, kAttribute, kStream } kind;
    size_t index = 0;       // of kArg and kRet
    std::string name = {};  // of kAttribute
  };

  const tvm::ffi::Function& function() const { return function_; }
  const Options& options() const { return options_; }
  const std::vector<Slot>& slots() const { return slots_; }
  /*! \brief True where the kernel returns its outputs instead of filling them. */
  bool returns_outputs() const { return returns_outputs_; }
  bool contiguous(size_t input) const;
  /*! \brief Whether a CUDA graph can hold the kernel: by option, or as its runs have shown. */
  Capture capture() const noexcept { return capture_.load(std::memory_order_relaxed); }
  /*! \brief Sets capture(); gives what it was. */
  Capture Learn(Capture capture) const noexcept {
    return capture_.exchange(capture, std::memory_order_relaxed);
  }
  /*! \brief Equal functions and options: calls of either on equal inputs and attributes are the
   * same node. */
  bool operator==(const Kernel& other) const;

  /*! \throws tvm::ffi::Error ValueError where counts or names do not fit the spec. */
  void CheckCall(size_t inputs, size_t outputs, const Attributes& attributes) const;

 private:
  tvm::ffi::Function function_;
  Options options_;
  std::vector<Slot> slots_;
  bool returns_outputs_ = true;
  mutable std::atomic<Capture> capture_;
  bool attributes_follow_ = false;  // default spec: attributes of any name, after the tensors
};

/*! \brief A kernel with its attributes: all that a run needs besides tensors and a stream.
 * Immutable; any thread. */
struct KernelCall {
  std::shared_ptr<const Kernel> kernel;
  Attributes attributes;
};

/*! \brief A call of a kernel as a node of MLX's graph. Derive from it to add gradients or a rule
 * for vmap. */
class MLX_TVM_FFI_API KernelPrimitive : public mx::Primitive {
 public:
  KernelPrimitive(mx::Stream stream, std::shared_ptr<const KernelCall> call,
                  std::shared_ptr<const std::vector<ShapeDtype>> outputs);
  ~KernelPrimitive() override;

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override;
  void eval_gpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override;
  std::vector<mx::array> jvp(const std::vector<mx::array>& primals,
                             const std::vector<mx::array>& tangents,
                             const std::vector<int>& argnums) override;
  std::vector<mx::array> vjp(const std::vector<mx::array>& primals,
                             const std::vector<mx::array>& cotangents,
                             const std::vector<int>& argnums,
                             const std::vector<mx::array>& outputs) override;
  /*! \brief By the kernel's option; the batch is the first axis of every output. */
  std::pair<std::vector<mx::array>, std::vector<int>> vmap(const std::vector<mx::array>& inputs,
                                                           const std::vector<int>& axes) override;
  const char* name() const override { return call_->kernel->options().name.c_str(); }
  bool is_equivalent(const mx::Primitive& other) const override;
  std::vector<mx::Shape> output_shapes(const std::vector<mx::array>& inputs) override;

  /*! \brief The same call with other outputs; a derived class returns its own type. */
  virtual std::shared_ptr<KernelPrimitive> Clone(
      std::shared_ptr<const std::vector<ShapeDtype>> outputs) const;

  /*! \throws tvm::ffi::Error ValueError where inputs, outputs or attributes do not fit the kernel.
   */
  void Check(const std::vector<mx::array>& inputs);

  const std::shared_ptr<const KernelCall>& call() const { return call_; }
  const std::shared_ptr<const std::vector<ShapeDtype>>& outputs() const { return outputs_; }

 private:
  std::shared_ptr<const KernelCall> call_;
  std::shared_ptr<const std::vector<ShapeDtype>> outputs_;
};

/*!
 * \brief Adds a call to the graph: the arrays that `primitive` makes of `inputs`, not yet
 * evaluated.
 * \throws tvm::ffi::Error ValueError where primitive, inputs, outputs or attributes do not fit.
 */
MLX_TVM_FFI_API std::vector<mx::array> Apply(const std::shared_ptr<KernelPrimitive>& primitive,
                                             std::vector<mx::array> inputs);

/*!
 * \brief A lazy call of `kernel`.
 * \param stream As ToStream takes it.
 */
MLX_TVM_FFI_API std::vector<mx::array> Call(const std::shared_ptr<const Kernel>& kernel,
                                            std::vector<mx::array> inputs,
                                            std::vector<ShapeDtype> outputs,
                                            Attributes attributes = {},
                                            const mx::StreamOrDevice& stream = {});

/*! \brief The same for a function used once: a Kernel made on the spot. */
MLX_TVM_FFI_API std::vector<mx::array> Call(const tvm::ffi::Function& function,
                                            std::vector<mx::array> inputs,
                                            std::vector<ShapeDtype> outputs, Options options = {},
                                            const mx::StreamOrDevice& stream = {});

/*! \brief Where an op goes: `stream`; by default this thread's innermost scope, else MLX's default.
 */
MLX_TVM_FFI_API mx::Stream ToStream(const mx::StreamOrDevice& stream = {});

/*! \brief The stream interface of an MLX stream, to open a StreamScope with. Any thread. */
MLX_TVM_FFI_API StreamRef ToStreamRef(const mx::Stream& stream);

}  // namespace mlx_tvm_ffi

#endif  // MLX_TVM_FFI_OP_H_
