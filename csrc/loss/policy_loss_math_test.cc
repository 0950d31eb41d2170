// The elementary functions of policy_loss_math.h against float64.
#include "csrc/loss/policy_loss_math.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>

namespace tandem {
namespace {

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

TEST(PolicyLossMathTest, ExpHasTheDigitsOfFloat32) {
  double worst = 0;
  for (int i = -87000; i <= 88200; ++i) {
    const float x = static_cast<float>(i) * 1e-3f;
    worst = std::max(worst, std::abs(Exp(x) / std::exp(double{x}) - 1));
  }
  EXPECT_LT(worst, 1.5e-7);
  EXPECT_EQ(Exp(0.0f), 1.0f);
}

TEST(PolicyLossMathTest, ExpLeavesTheRangeOfFloat32AsItShould) {
  EXPECT_EQ(Exp(88.8f), kMathInfinity);
  EXPECT_EQ(Exp(kMathInfinity), kMathInfinity);
  EXPECT_EQ(Exp(-kMathInfinity), 0.0f);
  EXPECT_EQ(Exp(-110.0f), 0.0f);
  EXPECT_EQ(Exp(-1e30f), 0.0f);
  EXPECT_EQ(Exp(1e30f), kMathInfinity);
  EXPECT_TRUE(std::isnan(Exp(kNaN)));
}

TEST(PolicyLossMathTest, ExpMinusLineKeepsItsDigitsNearZero) {
  double worst = 0;
  for (int i = -30000; i <= 30000; ++i) {
    if (i == 0) continue;
    const float x = static_cast<float>(i) * 1e-3f;
    const float tiny = x * 1e-4f;
    for (const float value : {x, tiny}) {
      // expm1(x) - x loses digits in float64 too: long double has some to lose.
      const long double want = std::expm1(static_cast<long double>(value)) - value;
      const auto error = static_cast<double>(ExpMinusLine(value) / want - 1);
      const auto error_of_two =
          static_cast<double>(OppositeExpsOf(-value).line_of_opposite / want - 1);
      worst = std::max({worst, std::abs(error), std::abs(error_of_two)});
    }
  }
  EXPECT_LT(worst, 7e-7);
  EXPECT_EQ(ExpMinusLine(0.0f), 0.0f);
}

TEST(PolicyLossMathTest, OppositeExponentialsHaveTheDigitsOfFloat32) {
  double worst = 0;
  for (int i = -87000; i <= 87000; ++i) {
    const float x = static_cast<float>(i) * 1e-3f;
    const OppositeExps<float> exps = OppositeExpsOf(x);
    worst = std::max({worst, std::abs(exps.exp / std::exp(double{x}) - 1),
                      std::abs(exps.exp_of_opposite / std::exp(-double{x}) - 1)});
  }
  EXPECT_LT(worst, 2e-7);
  for (const float far : {90.0f, kMathInfinity}) {
    EXPECT_EQ(OppositeExpsOf(far).exp, kMathInfinity);
    EXPECT_EQ(OppositeExpsOf(far).exp_of_opposite, 0.0f);
    EXPECT_EQ(OppositeExpsOf(-far).exp, 0.0f);
  }
  const OppositeExps<float> none = OppositeExpsOf(kNaN);
  EXPECT_TRUE(std::isnan(none.exp) && std::isnan(none.exp_of_opposite) && std::isnan(none.line));
}

TEST(PolicyLossMathTest, LogOnePlusKeepsItsDigits) {
  double worst = 0;
  for (double y = 1e-12; y < 1e30; y *= 1.003) {
    const auto x = static_cast<float>(y);
    worst = std::max(worst, std::abs(LogOnePlus(x) / std::log1p(double{x}) - 1));
  }
  EXPECT_LT(worst, 3e-7);
  EXPECT_EQ(LogOnePlus(0.0f), 0.0f);
}

TEST(PolicyLossMathTest, TheJensenShannonEstimateIsLogCosh) {
  for (int i = -12000; i <= 12000; ++i) {
    const float gap = static_cast<float>(i) * 1e-2f;
    const float got = LogCoshHalf(gap, OppositeExpsOf(gap));
    const double half = std::abs(double{gap}) / 2;
    const double want = half - std::log(2.0) + std::log1p(std::exp(-2 * half));
    EXPECT_NEAR(got, want, 1e-6 * want + 1e-9) << gap;
  }
  EXPECT_TRUE(std::isnan(LogCoshHalf(kNaN, OppositeExpsOf(kNaN))));
}

TEST(PolicyLossMathTest, ClampsKeepNaNAndTheirBounds) {
  EXPECT_TRUE(std::isnan(ClampTo(kNaN, 0.0f, 1.0f)));
  EXPECT_EQ(ClampTo(2.0f, 0.0f, 1.0f), 1.0f);
  EXPECT_EQ(ClampTo(-kMathInfinity, 0.0f, 1.0f), 0.0f);
  EXPECT_EQ(ClampTo(0.5f, 0.0f, 1.0f), 0.5f);
  EXPECT_EQ(FiniteOrZero(kMathInfinity), 0.0f);
  EXPECT_EQ(FiniteOrZero(kNaN), 0.0f);
  EXPECT_EQ(FiniteOrZero(-3.0f), -3.0f);
}

}  // namespace
}  // namespace tandem
