/*!
 * \file reap.h
 * \brief Destroys, on a thread of its own, what device work kept alive: a function may take
 * Python's lock when it dies, which a device's completion thread must not.
 */
#ifndef MLX_TVM_FFI_BACKEND_REAP_H_
#define MLX_TVM_FFI_BACKEND_REAP_H_

#include <mlx_tvm_ffi/stream.h>

#include <memory>
#include <vector>

namespace mlx_tvm_ffi {

/*! \brief Takes `objects` over and destroys them soon. Any thread. */
MLX_TVM_FFI_API void Reap(std::vector<std::shared_ptr<void>> objects) noexcept;

/*!
 * \brief Waits until all that was taken over is destroyed; what comes later is leaked. For the end
 * of the process, before Python goes. Called without Python's lock.
 */
MLX_TVM_FFI_API void StopReaping() noexcept;

}  // namespace mlx_tvm_ffi

#endif  // MLX_TVM_FFI_BACKEND_REAP_H_
