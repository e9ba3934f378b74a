/*! \file What a compiled kernel gets to see of its dispatch. */
#ifndef MLX_TVM_FFI_TESTS_METAL_SIM_KERNEL_H_
#define MLX_TVM_FFI_TESTS_METAL_SIM_KERNEL_H_

#include <cstddef>
#include <cstdint>

namespace metal_sim {

inline constexpr int kMaxBuffers = 31;

struct Dispatch {
  const char* name;
  void* buffer[kMaxBuffers];                // with the offset added
  size_t length[kMaxBuffers];               // bytes from there on
  uint32_t threadgroup_bytes[kMaxBuffers];  // of threadgroup memory
  uint32_t grid[3];                         // threads
  uint32_t group[3];                        // threads per threadgroup
};

/*! \brief A function constant of a library: a variable that is set before a kernel runs. */
struct Constant {
  const char* name;
  unsigned long index;
  void* variable;
  size_t size;
};

using Kernel = void (*)(const Dispatch*);

}  // namespace metal_sim

#endif  // MLX_TVM_FFI_TESTS_METAL_SIM_KERNEL_H_
