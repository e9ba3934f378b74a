/*!
 * \file rules.h
 * \brief What an op has from Python: its outputs, gradients and vmap as callables, and the call as
 * a node that uses them.
 */
#ifndef MLX_TVM_FFI_PYTHON_RULES_H_
#define MLX_TVM_FFI_PYTHON_RULES_H_

#include <mlx_tvm_ffi/op.h>
#include <pybind11/pybind11.h>

#include <memory>
#include <utility>
#include <vector>

namespace mlx_tvm_ffi {

/*! \brief A Python object that any thread may drop, with or without Python's lock. */
class HeldObject {
 public:
  /*! \param object With Python's lock held. */
  explicit HeldObject(pybind11::object object) : object_(object.release().ptr()) {}
  HeldObject(const HeldObject&) = delete;
  HeldObject& operator=(const HeldObject&) = delete;
  ~HeldObject();

  /*! \brief Borrowed; with Python's lock held. */
  pybind11::handle get() const { return object_; }

 private:
  PyObject* object_;
};

/*! \brief Python's rules for an op; None where there is none. Immutable. */
struct Rules {
  HeldObject
      outputs;     // callable (*arrays, **attributes) -> specs, or None where the outputs are fixed
  HeldObject vjp;  // callable (primals, cotangents, outputs, **attributes) -> arrays
  HeldObject jvp;  // callable (primals, tangents, outputs, **attributes) -> arrays
  HeldObject vmap;     // callable (inputs, axes, **attributes) -> (outputs, axes)
  bool python_kernel;  // the kernel takes Python's lock
};

/*!
 * \brief Reads what a user says of outputs: something with .shape and .dtype, or a sequence of
 * those.
 * \throws TypeError or ValueError, naming `op`.
 */
std::vector<ShapeDtype> ReadOutputs(const std::string& op, pybind11::handle outputs);

/*! \brief A call of an op made in Python. */
class PyPrimitive final : public KernelPrimitive {
 public:
  PyPrimitive(mx::Stream stream, std::shared_ptr<const KernelCall> call,
              std::shared_ptr<const std::vector<ShapeDtype>> outputs,
              std::shared_ptr<const Rules> rules, std::shared_ptr<const HeldObject> keywords,
              int batches = 0);
  ~PyPrimitive() override;

  /*! \brief From now on Python kernels are an error: Python is about to go. */
  static void StopKernels();

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override;
  std::vector<mx::array> jvp(const std::vector<mx::array>& primals,
                             const std::vector<mx::array>& tangents,
                             const std::vector<int>& argnums) override;
  std::vector<mx::array> vjp(const std::vector<mx::array>& primals,
                             const std::vector<mx::array>& cotangents,
                             const std::vector<int>& argnums,
                             const std::vector<mx::array>& outputs) override;
  std::pair<std::vector<mx::array>, std::vector<int>> vmap(const std::vector<mx::array>& inputs,
                                                           const std::vector<int>& axes) override;
  std::vector<mx::Shape> output_shapes(const std::vector<mx::array>& inputs) override;
  bool is_equivalent(const mx::Primitive& other) const override;
  std::shared_ptr<KernelPrimitive> Clone(
      std::shared_ptr<const std::vector<ShapeDtype>> outputs) const override;

 private:
  std::shared_ptr<const Rules> rules_;
  std::shared_ptr<const HeldObject> keywords_;  // dict of attributes, or null for none
  int batches_;  // leading dimensions that vmap has added; the rules know nothing of them
};

}  // namespace mlx_tvm_ffi

#endif  // MLX_TVM_FFI_PYTHON_RULES_H_
