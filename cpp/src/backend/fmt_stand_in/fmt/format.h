/*!
 * \file format.h
 * \brief MLX's CUDA headers include fmt, which MLX's wheels do not carry. They only name
 * fmt::format, in templates that we never instantiate: declaring it is enough.
 */
#ifndef MLX_TVM_FFI_BACKEND_FMT_FORMAT_H_
#define MLX_TVM_FFI_BACKEND_FMT_FORMAT_H_

#include <string>

namespace fmt {

template <typename... Args>
std::string format(const char* text, Args&&... args);

}  // namespace fmt

#endif  // MLX_TVM_FFI_BACKEND_FMT_FORMAT_H_
