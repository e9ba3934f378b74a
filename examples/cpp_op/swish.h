// x * sigmoid(beta * x), an op of MLX whose kernels are tvm-ffi functions.
#ifndef SWISH_H_
#define SWISH_H_

#include <mlx/array.h>
#include <mlx/utils.h>

/*! \brief Lazy, differentiable by `x`, float32. */
mlx::core::array Swish(const mlx::core::array& x, float beta,
                       const mlx::core::StreamOrDevice& stream);

#endif  // SWISH_H_
