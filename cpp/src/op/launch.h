/*!
 * \file launch.h
 * \brief One run of a kernel as an op: its tensors bound, its arguments put in order, its errors
 * named.
 */
#ifndef MLX_TVM_FFI_OP_LAUNCH_H_
#define MLX_TVM_FFI_OP_LAUNCH_H_

#include <mlx_tvm_ffi/op.h>
#include <tvm/ffi/container/tensor.h>

#include <memory>
#include <vector>

#include "backend/backend.h"

namespace mlx_tvm_ffi {

class KernelLaunch final : public Launch {
 public:
  /*!
   * \param inputs, outputs Have memory. No handle of them is kept: that would block donation.
   * \param at_once As Launch has it.
   */
  KernelLaunch(std::shared_ptr<const KernelCall> call, Backend& backend, const mx::Stream& stream,
               const std::vector<mx::array>& inputs, const std::vector<mx::array>& outputs,
               bool at_once);
  ~KernelLaunch() override;

  void Run(const StreamRef& stream) override;
  void Spoil() noexcept override;
  std::shared_ptr<void> KeepAlive() const override;
  Capture capture() const override { return call_->kernel->capture(); }
  Capture Learn(Capture capture) const noexcept override { return call_->kernel->Learn(capture); }
  bool aliased() const override { return !call_->kernel->options().aliases.empty(); }
  bool at_once() const override { return at_once_; }
  const char* name() const override { return call_->kernel->options().name.c_str(); }

 private:
  /*! \brief A tensor's description, and its memory without a share in it: a share would block
   * donation. */
  struct Bound {
    DLTensor tensor;
    std::weak_ptr<mx::array::Data> data;
  };
  class Scratch;

  void Bind(const mx::array& array, const mx::Device& device, int64_t** dims);
  void Call();
  void TakeReturned(const tvm::ffi::Any& result) const;
  void CheckReturned(const DLTensor& returned, size_t output) const;
  void CopyReturned(const std::vector<tvm::ffi::Tensor>& returned) const;
  [[noreturn]] void ThrowKept(int tensor) const;

  std::shared_ptr<const KernelCall> call_;
  Backend& backend_;
  mx::Stream stream_;
  size_t inputs_;
  bool at_once_;
  mx::SmallVector<Bound, 4>
      tensors_;  // with room for most calls, so that a launch is one allocation
  mx::SmallVector<int64_t, 16> dims_;
};

}  // namespace mlx_tvm_ffi

#endif  // MLX_TVM_FFI_OP_LAUNCH_H_
