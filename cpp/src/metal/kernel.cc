#include <tvm/ffi/error.h>

#include <atomic>

#include "metal/encode.h"

namespace mlx_tvm_ffi {
namespace {

std::atomic<void (*)(MetalKernel&, const MetalDispatch&)> encoder{nullptr};

}  // namespace

void SetMetalEncoder(void (*encode)(MetalKernel&, const MetalDispatch&)) { encoder = encode; }

void MetalKernel::Encode(const MetalDispatch& dispatch) {
  auto* encode = encoder.load();
  if (encode != nullptr) return encode(*this, dispatch);
  TVM_FFI_THROW(RuntimeError)
      << "[mlx_tvm_ffi.metal] kernel '" << function.name
      << "': expected a Mac with Metal, got a build without it. Here kernels can be "
         "loaded and checked; they run on macOS.";
}

}  // namespace mlx_tvm_ffi
