#ifndef MLX_TVM_FFI_EXAMPLES_KERNEL_HELPERS_H_
#define MLX_TVM_FFI_EXAMPLES_KERNEL_HELPERS_H_

// What the examples' kernels on the CPU share.

#include <cmath>
#include <cstdint>
#include <cstring>

#include "tensor_checks.h"

// Branch-free float functions that compilers turn into vector code, which calls into libm prevent.

inline uint32_t Bits(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  return bits;
}

/*! \brief e^x to 2 units in the last place, for x in [-87, 88]; clamped outside. */
inline float Exp(float x) {
  x = x < -87.0f ? -87.0f : x;  // NaN stays NaN
  x = x > 88.0f ? 88.0f : x;
  // Adding 1.5 * 2^23 rounds to the nearest integer, which is then in the lowest bits.
  constexpr float kRound = 12582912.0f;
  const float rounded = x * 1.44269504f + kRound;
  const float n = rounded - kRound;
  // ln 2 in two parts, the first of which times n is exact.
  const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  float p = 1.0f / 5040;
  p = p * r + 1.0f / 720;
  p = p * r + 1.0f / 120;
  p = p * r + 1.0f / 24;
  p = p * r + 1.0f / 6;
  p = p * r + 1.0f / 2;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  const uint32_t power_bits = (Bits(rounded) - Bits(kRound) + 127) << 23;
  float power;  // 2^n
  std::memcpy(&power, &power_bits, sizeof(power));
  return p * power;
}

/*! \brief P(Z > |x|) = erfc(|x| / sqrt 2) / 2 of a standard normal Z, to 3e-7; its density at x. */
inline float NormalTail(float x, float* density) {
  // Abramowitz and Stegun, 7.1.26.
  const float a = std::fabs(x) * 0.707106781f;
  const float e = Exp(-a * a);
  const float t = 1.0f / (1.0f + 0.3275911f * a);
  float p = 1.061405429f;
  p = p * t - 1.453152027f;
  p = p * t + 1.421413741f;
  p = p * t - 0.284496736f;
  p = p * t + 0.254829592f;
  *density = e * 0.398942280f;
  return 0.5f * p * t * e;
}

/*! \brief The exact GELU, x * P(Z < x): not its tanh approximation. */
inline float Gelu(float x) {
  float density;
  const float tail = std::fabs(x) * NormalTail(x, &density);
  return x > 0.0f ? x - tail : -tail;
}

/*! \brief The derivative of Gelu. */
inline float GeluSlope(float x) {
  float density;
  const float tail = NormalTail(x, &density);
  return (x > 0.0f ? 1.0f - tail : tail) + x * density;
}

#endif  // MLX_TVM_FFI_EXAMPLES_KERNEL_HELPERS_H_
