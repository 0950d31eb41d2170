// Conversions of 16-bit floats: every bit pattern, ties, and the ends of the range.
#include "csrc/common/scalar_types.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>

namespace tandem {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

uint16_t HalfOf(float value) {
  Float16 half;
  StoreFloat(value, &half);
  return half.bits;
}

uint16_t BrainOf(float value) {
  BFloat16 brain;
  StoreFloat(value, &brain);
  return brain.bits;
}

// What a half means, from its definition.
double MeaningOf(uint16_t bits) {
  const double sign = (bits & 0x8000) != 0 ? -1.0 : 1.0;
  const int exponent = (bits >> 10) & 0x1F;
  const int mantissa = bits & 0x3FF;
  if (exponent == 0) return sign * std::ldexp(mantissa, -24);
  return sign * std::ldexp(1024 + mantissa, exponent - 25);
}

TEST(Float16, EveryFiniteValueIsReadAndStoredExactly) {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const auto half = static_cast<uint16_t>(bits);
    if ((half & 0x7C00) == 0x7C00) continue;
    const float value = ToFloat(Float16{half});
    ASSERT_EQ(static_cast<double>(value), MeaningOf(half)) << bits;
    ASSERT_EQ(std::signbit(value), (half & 0x8000) != 0) << bits;
    ASSERT_EQ(HalfOf(value), half) << bits;
  }
}

TEST(Float16, InfinityAndNaNStayWhatTheyAre) {
  for (uint32_t sign = 0; sign <= 0x8000; sign += 0x8000) {
    const auto infinity = static_cast<uint16_t>(sign | 0x7C00);
    EXPECT_EQ(ToFloat(Float16{infinity}), sign != 0 ? -kInf : kInf);
    EXPECT_EQ(HalfOf(sign != 0 ? -kInf : kInf), infinity);
    for (uint32_t payload = 1; payload < 0x400; ++payload) {
      const float value = ToFloat(Float16{static_cast<uint16_t>(infinity | payload)});
      ASSERT_TRUE(std::isnan(value)) << payload;
      ASSERT_TRUE(std::isnan(ToFloat(Float16{HalfOf(value)}))) << payload;
    }
  }
  EXPECT_TRUE(std::isnan(ToFloat(Float16{HalfOf(BitCast<float>(0x7F800001u))})));
}

TEST(Float16, BetweenTwoNeighboursTheNearerIsTakenAndTheEvenOneAtATie) {
  for (uint32_t bits = 0; bits < 0x7BFF; ++bits) {
    const auto lower = static_cast<uint16_t>(bits);
    const auto upper = static_cast<uint16_t>(bits + 1);
    const auto even = static_cast<uint16_t>((bits & 1) != 0 ? bits + 1 : bits);
    // 11 bits and one more: the middle is a float32.
    const auto middle = static_cast<float>((MeaningOf(lower) + MeaningOf(upper)) / 2.0);
    ASSERT_EQ(HalfOf(middle), even) << bits;
    ASSERT_EQ(HalfOf(-middle), even | 0x8000) << bits;
    ASSERT_EQ(HalfOf(std::nextafter(middle, 0.0f)), lower) << bits;
    ASSERT_EQ(HalfOf(std::nextafter(middle, kInf)), upper) << bits;
  }
}

TEST(Float16, BeyondItsRangeIsInfinityAndBelowItIsZero) {
  EXPECT_EQ(HalfOf(65504.0f), 0x7BFF);
  EXPECT_EQ(HalfOf(std::nextafter(65520.0f, 0.0f)), 0x7BFF);
  EXPECT_EQ(HalfOf(65520.0f), 0x7C00);
  EXPECT_EQ(HalfOf(-1e30f), 0xFC00);
  EXPECT_EQ(HalfOf(std::ldexp(1.0f, -25)), 0x0000);
  EXPECT_EQ(HalfOf(std::nextafter(std::ldexp(1.0f, -25), 1.0f)), 0x0001);
  EXPECT_EQ(HalfOf(-1e-30f), 0x8000);
}

TEST(BFloat16, EveryValueIsTheUpperHalfOfAFloatAndStoredExactly) {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const auto brain = static_cast<uint16_t>(bits);
    const float value = ToFloat(BFloat16{brain});
    ASSERT_EQ(BitCast<uint32_t>(value), bits << 16);
    if (std::isnan(value)) {
      ASSERT_TRUE(std::isnan(ToFloat(BFloat16{BrainOf(value)}))) << bits;
    } else {
      ASSERT_EQ(BrainOf(value), brain) << bits;
    }
  }
}

TEST(BFloat16, BetweenTwoNeighboursTheNearerIsTakenAndTheEvenOneAtATie) {
  for (uint32_t bits = 0; bits < 0x7F80; ++bits) {
    const auto even = (bits & 1) != 0 ? bits + 1 : bits;
    for (const uint32_t sign : {0u, 0x8000u}) {
      const uint32_t middle = (sign | bits) << 16 | 0x8000u;
      ASSERT_EQ(BrainOf(BitCast<float>(middle)), sign | even) << bits;
      ASSERT_EQ(BrainOf(BitCast<float>(middle - 1)), sign | bits) << bits;
      ASSERT_EQ(BrainOf(BitCast<float>(middle + 1)), sign | (bits + 1)) << bits;
    }
  }
}

TEST(BFloat16, NoPayloadTurnsANaNIntoANumber) {
  for (const uint32_t bits : {0x7F800001u, 0x7F80FFFFu, 0x7FFFFFFFu, 0xFFFFFFFFu, 0xFF800001u}) {
    EXPECT_TRUE(std::isnan(ToFloat(BFloat16{BrainOf(BitCast<float>(bits))}))) << bits;
  }
}

}  // namespace
}  // namespace tandem
