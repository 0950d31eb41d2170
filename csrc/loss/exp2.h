// 2^x for x <= 0 in float32, written so that compilers turn a loop over it into vector code.
#pragma once

#include <bit>
#include <cstdint>

#include "csrc/common/multiarch.h"

namespace tandem {

inline constexpr float kLog2E = 1.44269504088896340736f;
inline constexpr float kLn2 = 0.69314718055994530942f;

// At this exponent the result is exactly 0, and x * Exp2NonPositive(x) is too.
inline constexpr float kExp2Floor = -127.0f;

// Keeps -inf finite, so that its product with a zero probability is 0; NaN passes through (the
// order matters).
TANDEM_INLINE float ClampExponent(float x) { return x < kExp2Floor ? kExp2Floor : x; }

// Relative error below 2e-7 for x in [-126, 0]; x must have gone through ClampExponent.
//
// Adding kRound = 1.5 * 2^23 rounds x to an integer k, which stands in the low mantissa bits. What
// is left, x - k in [-1/2, 1/2], goes into a minimax polynomial of degree 5 for 2^(x - k); its
// constant is held at 1, so that 2^0 is exactly 1. NaN gives NaN.
TANDEM_INLINE float Exp2NonPositive(float x) {
  constexpr float kRound = 12582912.0f;
  const float shifted = x + kRound;
  const float fraction = x - (shifted - kRound);
  const uint32_t k = std::bit_cast<uint32_t>(shifted);
  const float scale = std::bit_cast<float>((k + 127u) << 23);
  float p = 0.00132647273f;
  p = p * fraction + 0.00967151299f;
  p = p * fraction + 0.0555073358f;
  p = p * fraction + 0.240222424f;
  p = p * fraction + 0.693147004f;
  p = p * fraction + 1.0f;
  return p * scale;
}

}  // namespace tandem
