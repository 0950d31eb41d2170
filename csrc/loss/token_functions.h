// Elementary functions of policy_loss_math.h: exponentials and a logarithm without branches, for
// float or a type with its operators that holds several tokens.
#pragma once

#include <cstdint>
#include <limits>

#include "csrc/common/simt_qualifiers.h"

#ifdef __CUDACC__
#define TANDEM_TOKEN_MATH SIMT_DEVICE
#else
#include "csrc/common/multiarch.h"
#define TANDEM_TOKEN_MATH TANDEM_INLINE
#endif

namespace tandem {

inline constexpr float kMathInfinity = std::numeric_limits<float>::infinity();

// condition ? yes : no. Compilers make branches of a conditional expression, and then thread what
// follows through them until no vector code is possible; they leave bits alone. (Conditions below
// are joined by & and | for the same reason.)
TANDEM_TOKEN_MATH float Select(bool condition, float yes, float no) {
#ifdef __CUDACC__
  return condition ? yes : no;
#else
  const int32_t mask = -static_cast<int32_t>(condition);
  return BitCast<float>((BitCast<int32_t>(yes) & mask) | (BitCast<int32_t>(no) & ~mask));
#endif
}

TANDEM_TOKEN_MATH float Magnitude(float x) {
  return BitCast<float>(BitCast<int32_t>(x) & 0x7FFFFFFF);
}

// p 2^k for e^x = p 2^k, where k stands in the low bits of `shifted`: 0 below -87.3, infinity from
// 88.3 on (0.4 before float32 must).
TANDEM_TOKEN_MATH float ScaleExp(float x, float p, float shifted, float /*k*/) {
  const float scale = BitCast<float>((BitCast<uint32_t>(shifted) + 127u) << 23);
  return Select(x < -87.3f, 0.0f, Select(x > 88.3f, kMathInfinity, p * scale));
}

// Whether a condition holds in every lane, so that what is meant for the others need not be
// computed. One token alone computes both: a branch would cost more (see Select).
TANDEM_TOKEN_MATH bool IsEverywhere(bool /*condition*/) { return false; }

// Keeps what follows free of infinity - infinity; ScaleExp looks at x itself.
TANDEM_TOKEN_MATH float BoundExponent(float x) { return x; }

// x = 2^k m with m in [sqrt(1/2), sqrt(2)).
template <typename F>
struct Binary {
  F k;
  F m;
};

TANDEM_TOKEN_MATH Binary<float> Split(float x) {
  const int32_t bits = BitCast<int32_t>(x);
  const int32_t k = (bits - 0x3F3504F3) >> 23;
  return {static_cast<float>(k), BitCast<float>(bits - (k << 23))};
}

// NaN is kept: the order of the comparisons matters.
template <typename F>
TANDEM_TOKEN_MATH F ClampTo(F x, float low, float high) {
  const F above = Select(x < low, low, x);
  return Select(above > high, high, above);
}

// e^x, relative error about 1e-7.
//
// x = k ln 2 + f with an integer k and |f| <= ln 2 / 2; e^f is a minimax polynomial whose constant
// and slope are held at 1. ln 2 has two parts, of which the product of the first with k is exact.
// Adding kRound = 1.5 * 2^23 rounds to an integer, which then stands in the low bits.
template <typename F>
TANDEM_TOKEN_MATH F Exp(F exponent) {
  const F x = BoundExponent(exponent);
  constexpr float kRound = 12582912.0f;
  constexpr float kLn2High = 0.693145751953125f;
  constexpr float kLn2Low = 1.42860682030941723212e-6f;
  const F shifted = x * 1.44269504088896340736f + kRound;
  const F k = shifted - kRound;
  const F f = (x - k * kLn2High) - k * kLn2Low;
  F p = 0.00138145394f;
  p = p * f + 0.00836874545f;
  p = p * f + 0.0416683890f;
  p = p * f + 0.166665211f;
  p = p * f + 0.499999940f;
  p = p * f + 1.0f;
  p = p * f + 1.0f;
  return ScaleExp(x, p, shifted, k);
}

// Below this size e^x - 1 - x is a series, because the difference would lose its digits.
inline constexpr float kNear = 0.6f;

// e^x - 1 - x, with its digits near 0 too.
template <typename F>
TANDEM_TOKEN_MATH F ExpMinusLine(F x) {
  F p = 1.0f / 362880;
  p = p * x + 1.0f / 40320;
  p = p * x + 1.0f / 5040;
  p = p * x + 1.0f / 720;
  p = p * x + 1.0f / 120;
  p = p * x + 1.0f / 24;
  p = p * x + 1.0f / 6;
  p = p * x + 0.5f;
  const F near = p * x * x;
  const auto is_near = Magnitude(x) < kNear;
  if (IsEverywhere(is_near)) return near;
  return Select(is_near, near, (Exp(x) - 1.0f) - x);
}

// e^x and e^x - 1 - x of a number and of its opposite.
template <typename F>
struct OppositeExps {
  F exp;
  F exp_of_opposite;
  F line;
  F line_of_opposite;
};

// Near 0 the two lines are the even part of the series plus and minus the odd one, and the
// exponentials come of them.
template <typename F>
TANDEM_TOKEN_MATH OppositeExps<F> OppositeExpsOf(F x) {
  const F square = x * x;
  F even = 1.0f / 40320;
  even = even * square + 1.0f / 720;
  even = even * square + 1.0f / 24;
  even = even * square + 0.5f;
  even = even * square;
  F odd = 1.0f / 362880;
  odd = odd * square + 1.0f / 5040;
  odd = odd * square + 1.0f / 120;
  odd = odd * square + 1.0f / 6;
  odd = odd * square * x;
  const F line = even + odd;
  const F line_of_opposite = even - odd;
  const OppositeExps<F> near = {(line + x) + 1.0f, (line_of_opposite - x) + 1.0f, line,
                                line_of_opposite};
  const auto is_near = Magnitude(x) < kNear;
  if (IsEverywhere(is_near)) return near;
  const F exp = Exp(x);
  const F opposite = Exp(-x);
  return {Select(is_near, near.exp, exp), Select(is_near, near.exp_of_opposite, opposite),
          Select(is_near, line, (exp - 1.0f) - x),
          Select(is_near, line_of_opposite, (opposite - 1.0f) + x)};
}

// log(1 + y) for y >= 0, with its digits near 0 too: 1 + y = 2^k m, and log m = 2 atanh(z).
template <typename F>
TANDEM_TOKEN_MATH F LogOnePlus(F y) {
  const Binary<F> split = Split(1.0f + y);
  const F f = Select(split.k == 0.0f, y, split.m - 1.0f);
  const F z = f / (2.0f + f);
  const F z2 = z * z;
  F p = 2.0f / 11;
  p = p * z2 + 2.0f / 9;
  p = p * z2 + 2.0f / 7;
  p = p * z2 + 2.0f / 5;
  p = p * z2 + 2.0f / 3;
  p = p * z2 + 2.0f;
  return split.k * 0.69314718055994530942f + p * z;
}

// The Jensen-Shannon estimate of rl/algorithms/policy_metrics.py is log cosh(gap / 2): a series
// near 0; elsewhere the lines' sum is 4 sinh^2(gap / 2).
template <typename F>
TANDEM_TOKEN_MATH F LogCoshHalf(F gap, const OppositeExps<F>& exps) {
  const F square = gap * gap;
  F p = 31.0f / 14515200;
  p = p * square - 17.0f / 645120;
  p = p * square + 1.0f / 2880;
  p = p * square - 1.0f / 192;
  p = p * square + 0.125f;
  const F near = p * square;
  const auto is_near = Magnitude(gap) < kNear;
  if (IsEverywhere(is_near)) return near;
  const F middle = 0.5f * LogOnePlus(0.25f * (exps.line + exps.line_of_opposite));
  const F far = 0.5f * Magnitude(gap) - 0.69314718055994530942f;
  // far also for NaN, which `middle` would hide
  return Select(is_near, near, Select(Magnitude(gap) <= 20.0f, middle, far));
}

// nan_to_num(x, 0, 0, 0).
template <typename F>
TANDEM_TOKEN_MATH F FiniteOrZero(F x) {
  return Select(Magnitude(x) < kMathInfinity, x, 0.0f);
}

}  // namespace tandem
