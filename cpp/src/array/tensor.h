/*!
 * \file tensor.h
 * \brief mx::array <-> DLPack: dtypes, tensors lent to kernels, tensors that kernels allocate.
 */
#ifndef MLX_TVM_FFI_ARRAY_TENSOR_H_
#define MLX_TVM_FFI_ARRAY_TENSOR_H_

#include <dlpack/dlpack.h>
#include <mlx/array.h>
#include <mlx_tvm_ffi/op.h>

#include <string>
#include <vector>

#include "backend/backend.h"

namespace mlx_tvm_ffi {

/*! \brief The DLPack dtype of an MLX dtype. */
MLX_TVM_FFI_API DLDataType ToDLPack(mx::Dtype dtype);

/*! \throws tvm::ffi::Error NotImplementedError for a dtype that MLX does not have. */
mx::Dtype FromDLPack(DLDataType dtype);

/*!
 * \brief Fills `tensor` from an array that has memory; shape and strides (elements) go to `dims`, 2
 * * ndim long, which the tensor then points into.
 */
void FillTensor(const mx::array& array, const mx::Device& device, const Backend& backend,
                int64_t* dims, DLTensor* tensor);

/*!
 * \brief Lends `array`, which has memory, to a direct call, as a managed tensor from a pool. It
 * owns a handle of the array until its deleter runs, on any thread; then the backend's Finish is
 * told.
 */
MLX_TVM_FFI_API DLManagedTensorVersioned* Lend(const mx::array& array, const mx::Device& device,
                                               Backend& backend);

/*! \brief Lends the memory that `tensor` describes and `owner` keeps alive; shape and strides are
 * copied. */
DLManagedTensorVersioned* LendMemory(const DLTensor& tensor, std::shared_ptr<void> owner);

/*!
 * \brief The array of a tensor that a kernel returned. Memory that was lent or allocated here comes
 * back as itself; CPU memory of others is copied.
 * \throws tvm::ffi::Error NotImplementedError for what MLX cannot hold.
 */
MLX_TVM_FFI_API mx::array ToArray(const DLTensor& tensor);

/*! \brief Copies a CPU tensor of any layout into row-contiguous memory at `to`. */
void CopyRows(const DLTensor& tensor, void* to);

/*! \brief The name of a dtype, also of one that tvm-ffi has no name for. */
std::string NameOf(DLDataType dtype);

/*! \brief tvm-ffi's environment allocator: gives MLX memory. See DLPackManagedTensorAllocator for
 * its contract. */
MLX_TVM_FFI_API int AllocateTensor(DLTensor* prototype, DLManagedTensorVersioned** out,
                                   void* error_context,
                                   void (*set_error)(void*, const char*, const char*));

/*! \brief While alive, gets the allocations on `device` that kernels make on this thread: those of
 * a kernel that runs as an op. */
class AllocationHook {
 public:
  explicit AllocationHook(mx::Device device);
  AllocationHook(const AllocationHook&) = delete;
  AllocationHook& operator=(const AllocationHook&) = delete;
  virtual ~AllocationHook();
  virtual DLManagedTensorVersioned* Allocate(mx::Shape shape, mx::Dtype dtype) = 0;
  const mx::Device& device() const { return device_; }

 private:
  mx::Device device_;
  AllocationHook* outer_;
};

}  // namespace mlx_tvm_ffi

#endif  // MLX_TVM_FFI_ARRAY_TENSOR_H_
