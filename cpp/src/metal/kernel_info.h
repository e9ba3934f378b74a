/*!
 * \file kernel_info.h
 * \brief What a Metal kernel is made of, and the rules that it has to keep before anything is
 * launched.
 */
#ifndef MLX_TVM_FFI_METAL_KERNEL_INFO_H_
#define MLX_TVM_FFI_METAL_KERNEL_INFO_H_

#include <tvm/ffi/c_api.h>

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace mlx_tvm_ffi {

/*! \brief How TVM calls a kernel: buffers first, then scalars, then one int64 per launch argument.
 */
struct KernelInfo {
  /*! \brief Each scalar takes 8 bytes of one packed argument, bound after the buffers. */
  enum class Scalar : uint8_t { kInt32, kUInt32, kInt64, kUInt64, kFloat32 };
  /*! \brief What a launch argument sets. The first six index {grid, threadgroup} x {x, y, z}. */
  enum class Launch : uint8_t { kGridX, kGridY, kGridZ, kGroupX, kGroupY, kGroupZ, kDynamicMemory };

  uint32_t num_buffers = 0;
  std::vector<Scalar> scalars;
  std::vector<Launch> launch;

  /*! \return Arguments of a call. */
  [[nodiscard]] size_t num_args() const { return num_buffers + scalars.size() + launch.size(); }
};

/*! \brief Code of a kernel: a whole translation unit of Metal source, or a compiled library. */
enum class PayloadFormat : uint8_t { kMetal, kMetallib };

/*! \brief One kernel of a module: `payload` has a function of the name that the module has it
 * under. */
struct KernelSource {
  KernelInfo info;
  PayloadFormat format = PayloadFormat::kMetal;
  std::string payload;
};

/*! \brief A module's kernels by name. */
using KernelSources = std::map<std::string, KernelSource, std::less<>>;

/*!
 * \brief Checks a kernel's parameters and puts them in order.
 * \param kernel The kernel's name, for messages.
 * \param arg_types The buffers (opaque handles), then the scalars.
 * \param launch_tags TVM's names: "blockIdx.x", "threadIdx.y", "tirx.use_dyn_shared_memory" ...
 * \throws ValueError if Metal cannot bind them. Any thread.
 */
KernelInfo MakeKernelInfo(std::string_view kernel, const std::vector<DLDataType>& arg_types,
                          const std::vector<std::string>& launch_tags);

/*! \return The scalar that `dtype` stands for. \throws ValueError for one that no kernel gets. */
KernelInfo::Scalar ToScalar(std::string_view kernel, DLDataType dtype);

/*! \return The format that `name` ("metal", "metallib") stands for. \throws ValueError for others.
 */
PayloadFormat ParsePayloadFormat(std::string_view kernel, std::string_view name);

/*! \brief \throws ValueError if `payload` is not what `declared` says. Reads its first bytes and
 * its encoding. */
void CheckPayload(std::string_view kernel, PayloadFormat declared, std::string_view payload);

}  // namespace mlx_tvm_ffi

#endif  // MLX_TVM_FFI_METAL_KERNEL_INFO_H_
