// The code of a float against rounding in double precision, over the whole range of floats.
#include "csrc/refit/fp8.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

#include "csrc/refit/rounding.h"

namespace tandem {
namespace {

double Expected(float value) {
  const double rounded = RoundTo(value, kE4M3Format);
  return std::isinf(rounded) ? std::copysign(448.0, rounded) : rounded;
}

void ExpectRounded(uint32_t bits) {
  const float value = std::bit_cast<float>(bits);
  const uint8_t code = ToFp8E4M3(value);
  if (std::isnan(value)) {
    ASSERT_EQ(code, 0x7F) << "of NaN " << bits;
    return;
  }
  ASSERT_EQ(DecodeE4M3(code), Expected(value)) << "of " << value;
  ASSERT_EQ(code >> 7, bits >> 31) << "sign of " << value;
}

TEST(Fp8Test, RoundsToTheNearestCode) {
  // Every exponent with every pattern of the seven highest digits, and what decides a tie.
  for (uint32_t high = 0; high <= 0xFFFF; ++high) {
    for (const uint32_t low : {0x0000u, 0x0001u, 0x7FFFu, 0x8000u, 0x8001u, 0xFFFFu}) {
      ExpectRounded(high << 16 | low);
    }
  }
}

TEST(Fp8Test, PairsPutTheFirstValueIntoTheLowByte) {
  EXPECT_EQ(ToFp8E4M3Pair(1.0f, -448.0f), 0xFE38);
  EXPECT_EQ(ToFp8E4M3Pair(std::numeric_limits<float>::quiet_NaN(), 0.0f), 0x007F);
}

TEST(Fp8Test, ScalesAreFiniteAndPositiveForEveryMagnitude) {
  const float infinity = std::numeric_limits<float>::infinity();
  for (const float amax : {0.0f, 1e-45f, 1e-38f, 1e-12f, 1.0f, 448.0f, 3e38f, infinity}) {
    const Fp8Scale scale = Fp8ScaleOf(std::bit_cast<uint32_t>(amax));
    EXPECT_TRUE(std::isnormal(scale.scale)) << amax;
    EXPECT_TRUE(std::isnormal(scale.inverse)) << amax;
  }
  EXPECT_EQ(Fp8ScaleOf(std::bit_cast<uint32_t>(896.0f)).scale, 2.0f);
}

TEST(Fp8Test, NaNsHaveNoMagnitude) {
  EXPECT_EQ(MagnitudeBits(std::numeric_limits<float>::quiet_NaN()), 0u);
  EXPECT_EQ(MagnitudeBits(-2.0f), std::bit_cast<uint32_t>(2.0f));
  EXPECT_EQ(MagnitudeBits(-std::numeric_limits<float>::infinity()), 0x7F800000u);
}

}  // namespace
}  // namespace tandem
