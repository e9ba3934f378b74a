/*!
 * \file encode.h
 * \brief Puts one dispatch of a Metal kernel on the current stream's encoder.
 */
#ifndef MLX_TVM_FFI_METAL_ENCODE_H_
#define MLX_TVM_FFI_METAL_ENCODE_H_

#include <mlx_tvm_ffi/stream.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "metal/kernel_info.h"

namespace mlx_tvm_ffi {

/*! \brief Buffer slots of Metal's argument table. */
inline constexpr uint32_t kMetalSlots = 31;

/*! \brief A constant that the function of a library is specialised with. */
struct FunctionConstant {
  /*! \brief Its name; empty: it goes by `index`. */
  std::string name;
  uint32_t index = 0;
  /*! \brief MTLDataType. */
  uint32_t type = 0;
  /*! \brief As that type has it. */
  std::string value;
};

/*! \brief A function and all that its pipeline is made from. */
struct MetalFunction {
  std::string name;
  PayloadFormat format = PayloadFormat::kMetal;
  std::string payload;
  bool fast_math = false;
  std::vector<FunctionConstant> constants;
  /*! \brief Bytes of the threadgroup arguments, by index. Not part of the pipeline. */
  std::vector<uint32_t> threadgroup_memory_bytes;
};

/*! \brief What one dispatch binds, by slot, and its size. Owns nothing. */
struct MetalDispatch {
  struct Slot {
    /*! \brief MTLBuffer, or null where `bytes` is bound (or nothing, for an empty array). */
    void* buffer = nullptr;
    /*! \brief Bytes into `buffer`. */
    uint64_t offset = 0;
    const void* bytes = nullptr;
    /*! \brief Bytes at `bytes`. */
    size_t size = 0;
  };
  std::array<Slot, kMetalSlots> slots{};
  uint32_t num_slots = 0;
  /*! \brief x, y, z: threads if grid_in_threads, else threadgroups. */
  std::array<uint64_t, 3> grid{1, 1, 1};
  /*! \brief x, y, z: threads of a threadgroup. */
  std::array<uint64_t, 3> group{1, 1, 1};
  bool grid_in_threads = false;
};

struct MetalPipeline;

/*!
 * \brief A function that can be dispatched. Pipelines are made at the first dispatch and belong to
 * the process: found by content, never by name, and never freed, since MLX's command buffers retain
 * nothing.
 */
struct MetalKernel {
  explicit MetalKernel(MetalFunction f) : function(std::move(f)) {}

  /*!
   * \brief Encodes on the current Metal stream, behind all that was encoded before.
   * \throws RuntimeError without Metal, or if it does not compile; ValueError for a threadgroup
   * that does not fit.
   * \note Any thread that has a stream.
   */
  void Encode(const MetalDispatch& dispatch);

  const MetalFunction function;
  /*! \brief The one used last. */
  std::atomic<const MetalPipeline*> pipeline{nullptr};
};

/*! \brief Offers what Encode does. The part of us that knows Metal calls it once, when it is
 * loaded. */
MLX_TVM_FFI_API void SetMetalEncoder(void (*encode)(MetalKernel&, const MetalDispatch&));

}  // namespace mlx_tvm_ffi

#endif  // MLX_TVM_FFI_METAL_ENCODE_H_
