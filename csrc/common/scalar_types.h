// 16-bit floats as bits, with conversions that every backend shares: CPU, CUDA and the emulator
// round alike.
#pragma once

#include <cstdint>

#include "csrc/common/simt_qualifiers.h"

namespace tandem {

struct BFloat16 {
  uint16_t bits;
};

struct Float16 {
  uint16_t bits;
};

SIMT_HD inline float ToFloat(float x) { return x; }
SIMT_HD inline float ToFloat(BFloat16 x) {
  return BitCast<float>(static_cast<uint32_t>(x.bits) << 16);
}

// Subnormals are exact: they are scaled up as an integer would be.
SIMT_HD inline float ToFloat(Float16 x) {
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000u) << 16;
  const uint32_t magnitude = x.bits & 0x7FFFu;
  if (magnitude >= 0x7C00u) {  // infinity and NaN keep their payload
    return BitCast<float>(sign | 0x7F800000u | ((magnitude & 0x3FFu) << 13));
  }
  constexpr float kTwoToMinus24 = 5.9604644775390625e-8f;
  const float value = magnitude < 0x400u ? static_cast<float>(magnitude) * kTwoToMinus24
                                         : BitCast<float>((magnitude << 13) + 0x38000000u);
  return BitCast<float>(BitCast<uint32_t>(value) | sign);
}

SIMT_HD inline void StoreFloat(float value, float* out) { *out = value; }

// Round to nearest even; a NaN stays a NaN.
SIMT_HD inline void StoreFloat(float value, BFloat16* out) {
  const uint32_t bits = BitCast<uint32_t>(value);
  const uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
  out->bits = static_cast<uint16_t>(value != value ? 0x7FC0u : rounded);
}

// Round to nearest even; beyond 65519.99 infinity; a NaN stays a NaN.
SIMT_HD inline void StoreFloat(float value, Float16* out) {
  const uint32_t bits = BitCast<uint32_t>(value);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7FFFFFFFu;
  uint32_t half = 0;
  if (magnitude > 0x7F800000u) {
    half = 0x7E00u;
  } else if (magnitude >= 0x477FF000u) {
    half = 0x7C00u;
  } else if (magnitude < 0x38800000u) {
    // The sum rounds to a multiple of 2^-24, whose count stands in its low bits.
    const float shifted = BitCast<float>(magnitude) + 0.5f;
    half = BitCast<uint32_t>(shifted) - 0x3F000000u;
  } else {
    half = (magnitude - 0x38000000u + 0x0FFFu + ((magnitude >> 13) & 1u)) >> 13;
  }
  out->bits = static_cast<uint16_t>(sign | half);
}

}  // namespace tandem
