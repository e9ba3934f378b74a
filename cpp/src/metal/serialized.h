/*!
 * \file serialized.h
 * \brief Reads the bytes of a Metal module as TVM writes them into a library.
 */
#ifndef MLX_TVM_FFI_METAL_SERIALIZED_H_
#define MLX_TVM_FFI_METAL_SERIALIZED_H_

#include <string_view>

#include "metal/kernel_info.h"

namespace mlx_tvm_ffi {

/*!
 * \brief The kernels of a serialized module, each checked by the rules of kernel_info.h.
 *
 * The bytes are not trusted: nothing is read outside them, and what is allocated stays within a few
 * times their size.
 * \throws ValueError that names what is wrong and at which byte. Any thread.
 */
KernelSources ParseSerialized(std::string_view bytes);

}  // namespace mlx_tvm_ffi

#endif  // MLX_TVM_FFI_METAL_SERIALIZED_H_
