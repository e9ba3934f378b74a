/*!
 * \file arguments.h
 * \brief Reads the arguments of a call of a Metal kernel.
 */
#ifndef MLX_TVM_FFI_METAL_ARGUMENTS_H_
#define MLX_TVM_FFI_METAL_ARGUMENTS_H_

#include <tvm/ffi/function.h>

#include <cstdint>
#include <string>

#include "metal/encode.h"
#include "metal/kernel_info.h"

namespace mlx_tvm_ffi {

/*! \brief The arguments of one call. Borrows all of it. Messages name the kernel and the argument.
 */
class KernelArguments {
 public:
  KernelArguments(const std::string& kernel, const tvm::ffi::PackedArgs& args)
      : kernel_(kernel), args_(args) {}

  /*! \brief \throws TypeError for another number of arguments. */
  void ExpectCount(size_t expected) const;

  /*! \brief The tensor that is argument `i`. \throws TypeError for others, ValueError if it is not
   * on Metal. */
  [[nodiscard]] const DLTensor* Tensor(size_t i) const;

  /*! \brief Binds argument `i`: a tensor with its offset, a bare handle (what TVM's host code
   * passes) at 0, None as nothing. \throws as Tensor does. */
  void Bind(size_t i, MetalDispatch::Slot* slot) const;

  /*! \brief The bits of a scalar, in the low bytes. \throws TypeError for another kind, ValueError
   * out of range. */
  [[nodiscard]] uint64_t Scalar(size_t i, KernelInfo::Scalar type) const;

  /*! \brief \throws as Scalar does. */
  [[nodiscard]] int64_t Int(size_t i, int64_t low, int64_t high) const;

  /*! \brief How messages about this call start. */
  [[nodiscard]] std::string Prefix() const;

 private:
  [[nodiscard]] const TVMFFIAny& At(size_t i) const;
  [[noreturn]] void Throw(size_t i, const char* expected) const;

  const std::string& kernel_;
  const tvm::ffi::PackedArgs& args_;
};

}  // namespace mlx_tvm_ffi

#endif  // MLX_TVM_FFI_METAL_ARGUMENTS_H_
