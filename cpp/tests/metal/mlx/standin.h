/*!
 * \file Stands in for the Metal half of MLX, which its Linux library has not. Preloaded, it makes
 * that library run on Device::gpu: what MLX exports and calls through its symbol table is defined
 * here again (streams, the allocator, eval), and MLX's Metal classes are defined for the first
 * time, by the rules of MLX's own.
 */
#ifndef MLX_TVM_FFI_TESTS_METAL_MLX_STANDIN_H_
#define MLX_TVM_FFI_TESTS_METAL_MLX_STANDIN_H_

#include <dlfcn.h>
#include <mlx/backend/metal/device.h>
#include <mlx/mlx.h>
#include <mlx/primitives.h>

#include <optional>  // before MLX's headers, which forget it

namespace mlx_standin {

namespace mx = mlx::core;

/*! \brief MLX's own function behind one that is defined here again, by its mangled name. */
template <class F>
F* Original(const char* symbol) {
  return reinterpret_cast<F*>(dlsym(RTLD_NEXT, symbol));
}

/*! \brief Makes the encoder of a stream of the calling thread, or of all threads. */
void MakeEncoder(mx::Stream stream, bool any_thread);
void DropEncodersOfThread();

/*! \brief Lets MLX's primitives that tests use run on the GPU. */
void TeachPrimitives();

/*! \brief Sets MLX's limits on what one command buffer holds: dispatches, and millions of elements.
 * For tests. */
extern "C" void mlx_standin_set_limits(int max_ops, int max_mb);

}  // namespace mlx_standin

#endif  // MLX_TVM_FFI_TESTS_METAL_MLX_STANDIN_H_
