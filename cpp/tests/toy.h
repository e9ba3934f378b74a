// A framework that is not MLX, as its kernels see it: its encoder records commands, which run when
// the framework commits, and may be touched on the stream's dispatch queue only.
#ifndef MLX_TVM_FFI_TESTS_TOY_H_
#define MLX_TVM_FFI_TESTS_TOY_H_

#include <functional>
#include <vector>

// A device type that nobody else uses here.
inline constexpr int kToyDevice = 12;  // kDLExtDev

struct ToyEncoder {
  std::vector<std::function<void()>> commands;
};

#endif  // MLX_TVM_FFI_TESTS_TOY_H_
