// float8 e4m3 (no infinities, largest value 448) as bits, and the scale of a block of them. Shared
// by CPU, CUDA and the emulator, so that they round alike.
#pragma once

#include <cstdint>

#include "csrc/common/simt_qualifiers.h"

namespace tandem {

inline constexpr float kFp8Max = 448.0f;
// A block's largest magnitude counts as at least this, so that no scale is 0 and no inverse
// infinite; and as at most the largest float, where it is infinite.
inline constexpr float kFp8MinAmax = 1e-12f;

// |value| as bits, which order as the magnitudes do; 0 for NaN, which must not set a scale.
SIMT_HD inline uint32_t MagnitudeBits(float value) {
  const uint32_t magnitude = BitCast<uint32_t>(value) & 0x7FFFFFFFu;
  // A mask and no choice: compilers then make vector code of a maximum over this.
  return magnitude & (0u - static_cast<uint32_t>(magnitude <= 0x7F800000u));
}

struct Fp8Scale {
  float scale;    // what a stored value is multiplied by to get the source back
  float inverse;  // what the source is multiplied by
};

SIMT_HD inline Fp8Scale Fp8ScaleOf(uint32_t amax_bits) {
  constexpr uint32_t kLargestFinite = 0x7F7FFFFFu;
  const float amax = BitCast<float>(amax_bits > kLargestFinite ? kLargestFinite : amax_bits);
  const float held = amax < kFp8MinAmax ? kFp8MinAmax : amax;
  return {held / kFp8Max, kFp8Max / held};
}

// Round to nearest even; beyond 448, infinity too, the largest value of that sign; NaN is 0x7F.
SIMT_HD inline uint8_t ToFp8E4M3(float value) {
  constexpr uint32_t kMaxBits = 0x43E00000u;        // 448
  constexpr uint32_t kMinNormalBits = 0x3C800000u;  // 2^-6
  constexpr uint32_t kExponentGap = (127u - 7u) << 3;
  const uint32_t bits = BitCast<uint32_t>(value);
  const uint32_t unsigned_bits = bits & 0x7FFFFFFFu;
  // The minimum stands between the caller's product and the sum below, so that no compiler fuses
  // the two into one rounding.
  const uint32_t magnitude = unsigned_bits < kMaxBits ? unsigned_bits : kMaxBits;
  // Below the normals the sum rounds to a multiple of 2^-9, whose count stands in its low bits.
  const uint32_t subnormal = BitCast<uint32_t>(BitCast<float>(magnitude) + 16384.0f) - 0x46800000u;
  const uint32_t normal = ((magnitude + 0x7FFFFu + ((magnitude >> 20) & 1u)) >> 20) - kExponentGap;
  const uint32_t code = magnitude < kMinNormalBits ? subnormal : normal;
  const uint32_t is_nan = unsigned_bits > 0x7F800000u ? 1u : 0u;
  return static_cast<uint8_t>(is_nan ? 0x7Fu : code | ((bits >> 24) & 0x80u));
}

// Two codes, that of `low` in the low byte, with the device's own instruction where it has one.
SIMT_HD inline uint16_t ToFp8E4M3Pair(float low, float high) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  uint16_t codes;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(high), "f"(low));
  return codes;
#else
  return static_cast<uint16_t>(ToFp8E4M3(low) | ToFp8E4M3(high) << 8);
#endif
}

}  // namespace tandem
