// The policy loss of one token: value, derivatives, and what it adds to the metrics. One source for
// the CPU, CUDA and the emulator, without branches on a token's data: a loop over it becomes vector
// code. Sums, rows and sequences are the backends' business; formulas are explained in
// policy_loss.h.
#pragma once

#include <cstdint>

#include "csrc/common/simt_qualifiers.h"
#include "csrc/loss/policy_loss.h"

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

// NaN is kept: the order of the comparisons matters.
TANDEM_TOKEN_MATH float ClampTo(float x, float low, float high) {
  const float above = Select(x < low, low, x);
  return Select(above > high, high, above);
}

TANDEM_TOKEN_MATH float Magnitude(float x) {
  return BitCast<float>(BitCast<int32_t>(x) & 0x7FFFFFFF);
}

// e^x, relative error about 1e-7; 0 below -87.3, infinity from 88.3 on (0.4 before float32 must).
//
// x = k ln 2 + f with an integer k and |f| <= ln 2 / 2; e^f is a minimax polynomial whose constant
// and slope are held at 1. ln 2 has two parts, of which the product of the first with k is exact.
// Adding kRound = 1.5 * 2^23 rounds to an integer, which then stands in the low bits.
TANDEM_TOKEN_MATH float Exp(float x) {
  constexpr float kRound = 12582912.0f;
  constexpr float kLn2High = 0.693145751953125f;
  constexpr float kLn2Low = 1.42860682030941723212e-6f;
  const float shifted = x * 1.44269504088896340736f + kRound;
  const float k = shifted - kRound;
  const float f = (x - k * kLn2High) - k * kLn2Low;
  float p = 0.00138145394f;
  p = p * f + 0.00836874545f;
  p = p * f + 0.0416683890f;
  p = p * f + 0.166665211f;
  p = p * f + 0.499999940f;
  p = p * f + 1.0f;
  p = p * f + 1.0f;
  const float scale = BitCast<float>((BitCast<uint32_t>(shifted) + 127u) << 23);
  return Select(x < -87.3f, 0.0f, Select(x > 88.3f, kMathInfinity, p * scale));
}

// e^x - 1 - x, with its digits near 0 too; `exp` is e^x.
TANDEM_TOKEN_MATH float ExpMinusLine(float x, float exp) {
  float p = 1.0f / 3628800;
  p = p * x + 1.0f / 362880;
  p = p * x + 1.0f / 40320;
  p = p * x + 1.0f / 5040;
  p = p * x + 1.0f / 720;
  p = p * x + 1.0f / 120;
  p = p * x + 1.0f / 24;
  p = p * x + 1.0f / 6;
  p = p * x + 0.5f;
  const float near = p * x * x;
  const float far = (exp - 1.0f) - x;
  return Select(Magnitude(x) < 0.6f, near, far);
}

// log(1 + y) for y >= 0, with its digits near 0 too: 1 + y = 2^k m, and log m = 2 atanh(z).
TANDEM_TOKEN_MATH float LogOnePlus(float y) {
  const float u = 1.0f + y;
  const int32_t bits = BitCast<int32_t>(u);
  const int32_t k = (bits - 0x3F3504F3) >> 23;  // m in [sqrt(1/2), sqrt(2))
  const float m = BitCast<float>(bits - (k << 23));
  const float f = Select(k == 0, y, m - 1.0f);
  const float z = f / (2.0f + f);
  const float z2 = z * z;
  float p = 2.0f / 11;
  p = p * z2 + 2.0f / 9;
  p = p * z2 + 2.0f / 7;
  p = p * z2 + 2.0f / 5;
  p = p * z2 + 2.0f / 3;
  p = p * z2 + 2.0f;
  return static_cast<float>(k) * 0.69314718055994530942f + p * z;
}

// The Jensen-Shannon estimate of rl/algorithms/policy_metrics.py is log cosh(gap / 2); the two
// terms are e^g - 1 - g and e^-g - 1 + g, whose sum is 4 sinh^2(gap / 2).
TANDEM_TOKEN_MATH float LogCoshHalf(float gap, float term, float opposite_term) {
  const float far = 0.5f * Magnitude(gap) - 0.69314718055994530942f;
  const float near = 0.5f * LogOnePlus(0.25f * (term + opposite_term));
  return Select(Magnitude(gap) <= 20.0f, near, far);  // far also for NaN, which `near` would hide
}

// nan_to_num(x, 0, 0, 0).
TANDEM_TOKEN_MATH float FiniteOrZero(float x) {
  return Select(Magnitude(x) < kMathInfinity, x, 0.0f);
}

// PolicyLossParams as the formulas use them: what is off has bounds that do nothing.
struct PolicyLossBounds {
  RatioKind ratio;
  KlKind kl;
  bool is_cispo;
  bool corrects;       // the weights multiply the loss
  bool drops_outside;  // icepop
  bool weighs_kl;
  bool has_prev;
  float ratio_low;
  float ratio_high;
  float dual;
  float correction_low;
  float correction_high;
  float kl_coef;
  float kl_input_clamp;
  float kl_output_clamp;
  float entropy_coef;
};

inline PolicyLossBounds BoundsOf(const PolicyLossParams& params, bool has_prev) {
  const bool is_clipped = params.surrogate != SurrogateKind::kUnclipped;
  const bool is_bounded =
      params.correction == CorrectionKind::kTis || params.correction == CorrectionKind::kIcePop;
  const bool has_dual = params.surrogate == SurrogateKind::kClip && params.dual_clip > 0.0f;
  PolicyLossBounds bounds;
  bounds.ratio = params.ratio;
  bounds.kl = params.kl;
  bounds.is_cispo = params.surrogate == SurrogateKind::kCispo;
  bounds.corrects = params.correction != CorrectionKind::kOff;
  bounds.drops_outside = params.correction == CorrectionKind::kIcePop;
  bounds.weighs_kl = params.kl_importance_weight;
  bounds.has_prev = has_prev;
  bounds.ratio_low = is_clipped ? static_cast<float>(1.0 - params.clip_low) : -kMathInfinity;
  bounds.ratio_high = is_clipped ? static_cast<float>(1.0 + params.clip_high) : kMathInfinity;
  bounds.dual = has_dual ? params.dual_clip : kMathInfinity;
  bounds.correction_low = is_bounded ? params.correction_low : -kMathInfinity;
  bounds.correction_high = is_bounded ? params.correction_high : kMathInfinity;
  bounds.kl_coef = params.kl_coef;
  bounds.kl_input_clamp = params.kl_input_clamp;
  bounds.kl_output_clamp = params.kl_output_clamp;
  bounds.entropy_coef = params.entropy_coef;
  return bounds;
}

// One token's columns; fields of columns that are null: prev is the log-probability, others 0.
struct PolicyToken {
  float logprob;
  float entropy;
  float prev;
  float reference;
  float generation;
  float advantage;
  float share;
  float weight;
  float nll_coef;
};

// What the sequence of a token says with kSequence.
struct SequenceTerms {
  float ratio;       // exp(mean d)
  float correction;  // truncated
  float is_outside;  // 1 where the correction was out of bounds
  float gradient;    // d (sum of the sequence's shares * c * l) / d (one token's d)
};

// What a token says of the generator: sums, weighted, and what the loss needs of it.
struct GeneratorTerms {
  float correction;
  float outside;
  float mult_prob_error;
  float generation_kl;
  float policy_kl;
  float js_divergence;
  float approx_entropy;

  float factor;          // of the token's loss
  float sampling_ratio;  // exp(logprob - generation)
};

// What a token says of the loss: gradients, sums (the metrics among them weighted), extrema.
struct LossTerms {
  float grad_logprob;
  float grad_entropy;

  float loss;
  float kl_penalty;
  float nll;
  float entropy;
  float ratio;
  float ratio_clamped;
  float clip_low;
  float clip_high;
  float dual_clip;
  float clamped_log_ratios;

  float ratio_min;
  float ratio_max;
  float ratio_clamped_min;
  float ratio_clamped_max;
};

// A weight of the generator after its truncation.
struct TruncatedWeight {
  float weight;
  float is_outside;
};

TANDEM_TOKEN_MATH TruncatedWeight Truncate(const PolicyLossBounds& bounds, float weight) {
  const bool is_below = weight < bounds.correction_low;
  const bool is_above = weight > bounds.correction_high;
  const float is_outside = Select(is_below | is_above, 1.0f, 0.0f);
  const float clamped = ClampTo(weight, bounds.correction_low, bounds.correction_high);
  return {Select((is_below | is_above) & bounds.drops_outside, 0.0f, clamped), is_outside};
}

// The ratio's logarithm, clamped; `passes` is whether the gradient does.
struct LogRatio {
  float value;
  float passes;
  float is_clamped;
};

TANDEM_TOKEN_MATH LogRatio LogRatioOf(const PolicyLossBounds& bounds, float logprob, float prev) {
  const float d = Select(bounds.has_prev, logprob - prev, 0.0f);
  const float size = Magnitude(d);
  return {ClampTo(d, -kLogRatioClamp, kLogRatioClamp), Select(size <= kLogRatioClamp, 1.0f, 0.0f),
          Select(size > kLogRatioClamp, 1.0f, 0.0f)};
}

// l, its derivative by the factor, and (cispo) by the log-probability directly.
struct SurrogateTerms {
  float loss;
  float by_factor;
  float by_logprob;
};

TANDEM_TOKEN_MATH SurrogateTerms SurrogateOf(const PolicyLossBounds& bounds, float factor,
                                             float logprob, float advantage) {
  const float clamped = ClampTo(factor, bounds.ratio_low, bounds.ratio_high);
  const bool is_inside = (factor >= bounds.ratio_low) & (factor <= bounds.ratio_high);
  const float plain = -advantage * factor;
  const float clipped = -advantage * clamped;
  const float plain_slope = -advantage;
  const float clipped_slope = Select(is_inside, plain_slope, 0.0f);
  const float even_slope = 0.5f * (plain_slope + clipped_slope);
  const float larger = Select(plain > clipped, plain, clipped);
  const float larger_slope =
      Select(plain > clipped, plain_slope, Select(plain < clipped, clipped_slope, even_slope));
  const float ceiling = -advantage * bounds.dual;
  const bool is_capped = (advantage < 0.0f) & (larger >= ceiling);
  const float capped_slope = Select(larger > ceiling, 0.0f, 0.5f * larger_slope);
  const float by_factor = Select(is_capped, capped_slope, larger_slope);
  const float loss = Select(is_capped, ceiling, larger);
  return {Select(bounds.is_cispo, clipped * logprob, loss),
          Select(bounds.is_cispo, 0.0f, by_factor), Select(bounds.is_cispo, clipped, 0.0f)};
}

// An estimate of KL and its derivative by the policy's log-probability.
struct KlTerms {
  float value;
  float by_logprob;
};

TANDEM_TOKEN_MATH float KlEstimate(KlKind kind, float log_ratio, float exp_minus_line) {
  const float square = 0.5f * log_ratio * log_ratio;
  return Select(kind == KlKind::kK3, exp_minus_line,
                Select(kind == KlKind::kK2, square, -log_ratio));
}

TANDEM_TOKEN_MATH KlTerms KlOf(const PolicyLossBounds& bounds, const PolicyToken& token,
                               float sampling_ratio) {
  const float unclamped = token.reference - token.logprob;
  const float d = ClampTo(unclamped, -bounds.kl_input_clamp, bounds.kl_input_clamp);
  const float line = ExpMinusLine(d, Exp(d));
  const float estimate = KlEstimate(bounds.kl, d, line);
  const float slope_k3 = line + d;  // e^d - 1
  const float slope =
      Select(bounds.kl == KlKind::kK3, slope_k3, Select(bounds.kl == KlKind::kK2, d, -1.0f));
  const float weight = Select(bounds.weighs_kl, FiniteOrZero(sampling_ratio), 1.0f);
  const float value = weight * estimate;
  // False for NaN, whose gradient must not look like that of a clamped estimate.
  const bool is_clamped =
      (Magnitude(unclamped) > bounds.kl_input_clamp) | (Magnitude(value) > bounds.kl_output_clamp);
  return {ClampTo(value, -bounds.kl_output_clamp, bounds.kl_output_clamp),
          Select(is_clamped, 0.0f, value - weight * slope)};
}

// A column's value for the formulas: a token that does not count has numbers that do no harm.
TANDEM_TOKEN_MATH float Counted(float value, bool counts) { return Select(counts, value, 0.0f); }

// How far trainer and generator are apart. sequence: looked at with kIsSequence alone, here and
// below. The token's columns have gone through Counted.
template <bool kIsSequence>
TANDEM_TOKEN_MATH GeneratorTerms GeneratorTermsOf(const PolicyLossBounds& bounds,
                                                  const PolicyToken& token,
                                                  const SequenceTerms& sequence) {
  const float gap = token.generation - token.prev;
  const float exp_gap = Exp(gap);
  const float exp_opposite = Exp(-gap);
  const float line = ExpMinusLine(gap, exp_gap);
  const float opposite_line = ExpMinusLine(-gap, exp_opposite);
  const TruncatedWeight truncated = kIsSequence
                                        ? TruncatedWeight{sequence.correction, sequence.is_outside}
                                        : Truncate(bounds, FiniteOrZero(exp_opposite));
  GeneratorTerms terms;
  terms.factor = Select(bounds.corrects, truncated.weight, 1.0f);
  terms.sampling_ratio = Exp(token.logprob - token.generation);
  terms.correction = kIsSequence ? 0.0f : token.weight * truncated.weight;
  terms.outside = token.weight * truncated.is_outside;
  terms.mult_prob_error = token.weight * Select(gap < 0.0f, exp_opposite, exp_gap);
  terms.generation_kl = token.weight * KlEstimate(bounds.kl, -gap, opposite_line);
  terms.policy_kl = token.weight * KlEstimate(bounds.kl, gap, line);
  terms.js_divergence = token.weight * LogCoshHalf(gap, line, opposite_line);
  // The limit of x log x at 0, where the log-probability is -inf.
  const float product =
      Select(terms.sampling_ratio == 0.0f, 0.0f, terms.sampling_ratio * token.logprob);
  terms.approx_entropy = token.weight * -product;
  return terms;
}

// What a token's advantage is multiplied by, and the derivative of that by its log-probability.
struct Factor {
  float value;
  float by_logprob;
};

TANDEM_TOKEN_MATH Factor FactorOf(RatioKind kind, float ratio, float passes, float logprob) {
  const float other = Select(kind == RatioKind::kOnPolicy, 1.0f, logprob);
  return {Select(kind == RatioKind::kToken, ratio, other),
          Select(kind == RatioKind::kToken, ratio * passes, 1.0f)};
}

// d (share c l) / d (ratio of the sequence), which is summed over its tokens.
TANDEM_TOKEN_MATH float SequenceSlope(const PolicyLossBounds& bounds, float advantage, float share,
                                      const SequenceTerms& sequence) {
  const SurrogateTerms surrogate = SurrogateOf(bounds, sequence.ratio, 0.0f, advantage);
  return share * (Select(bounds.corrects, sequence.correction, 1.0f) * surrogate.by_factor);
}

// Terms of a sequence from sums over its counted tokens; `gradient` is still to be filled.
TANDEM_TOKEN_MATH SequenceTerms SequenceTermsOf(const PolicyLossBounds& bounds, double log_ratios,
                                                double log_weights, int64_t count) {
  const double mean = count == 0 ? 0.0 : log_ratios / static_cast<double>(count);
  const TruncatedWeight truncated =
      Truncate(bounds, FiniteOrZero(Exp(static_cast<float>(log_weights))));
  return {Exp(static_cast<float>(mean)), truncated.weight, truncated.is_outside, 0.0f};
}

// Sums, extrema and gradients of a token whose generator terms are known. kHasReference: whether
// there is a KL.
template <bool kIsSequence, bool kHasReference>
TANDEM_TOKEN_MATH LossTerms LossTermsOf(const PolicyLossBounds& bounds, const PolicyToken& token,
                                        const SequenceTerms& sequence, float correction,
                                        float sampling_ratio) {
  const bool counts = token.weight > 0.0f;
  LossTerms terms;
  const LogRatio d = LogRatioOf(bounds, token.logprob, token.prev);
  const float ratio = kIsSequence ? sequence.ratio : Exp(d.value);
  const Factor factor =
      kIsSequence ? Factor{ratio, 0.0f} : FactorOf(bounds.ratio, ratio, d.passes, token.logprob);
  const SurrogateTerms surrogate =
      SurrogateOf(bounds, factor.value, token.logprob, token.advantage);
  float loss = token.share * (correction * surrogate.loss);
  const float slope = surrogate.by_factor * factor.by_logprob + surrogate.by_logprob;
  float gradient = token.share * (correction * slope);
  if (kIsSequence) gradient += sequence.gradient * d.passes;

  terms.kl_penalty = 0.0f;
  if (kHasReference) {
    const KlTerms kl = KlOf(bounds, token, sampling_ratio);
    terms.kl_penalty = token.share * kl.value;
    // A coefficient of 0 only reports: infinity must not reach the loss through it.
    loss += Select(bounds.kl_coef != 0.0f, bounds.kl_coef * terms.kl_penalty, 0.0f);
    gradient +=
        Select(bounds.kl_coef != 0.0f, bounds.kl_coef * (token.share * kl.by_logprob), 0.0f);
  }
  terms.nll = Select(token.nll_coef != 0.0f, token.nll_coef * -token.logprob, 0.0f);
  const float bonus = bounds.entropy_coef * (token.share * token.entropy);
  terms.loss = loss - Select(bounds.entropy_coef != 0.0f, bonus, 0.0f) + terms.nll;
  terms.grad_logprob = Counted(gradient - token.nll_coef, counts);
  terms.grad_entropy = Counted(-bounds.entropy_coef * token.share, counts);

  const float clamped = ClampTo(ratio, bounds.ratio_low, bounds.ratio_high);
  const bool is_low =
      (ratio < bounds.ratio_low) & (bounds.is_cispo | (token.advantage < 0.0f)) & counts;
  const bool is_high =
      (ratio > bounds.ratio_high) & (bounds.is_cispo | (token.advantage > 0.0f)) & counts;
  const bool is_dual = (ratio > bounds.dual) & (token.advantage < 0.0f);
  terms.entropy = token.weight * token.entropy;
  terms.ratio = Counted(token.weight * ratio, counts);
  terms.ratio_clamped = Counted(token.weight * clamped, counts);
  terms.clip_low = Counted(token.weight, is_low);
  terms.clip_high = Counted(token.weight, is_high);
  terms.dual_clip = Counted(token.weight, is_dual);
  terms.clamped_log_ratios = d.is_clamped;
  terms.ratio_min = Select(counts, ratio, kMathInfinity);
  terms.ratio_max = Select(counts, ratio, -kMathInfinity);
  terms.ratio_clamped_min = Select(counts, clamped, kMathInfinity);
  terms.ratio_clamped_max = Select(counts, clamped, -kMathInfinity);
  return terms;
}

// Calls visit(metric, value) for each sum; extrema are not among them.
template <typename Visit>
TANDEM_TOKEN_MATH void VisitSums(const GeneratorTerms& terms, Visit&& visit) {
  visit(kCorrection, terms.correction);
  visit(kOutside, terms.outside);
  visit(kMultProbError, terms.mult_prob_error);
  visit(kGenerationKl, terms.generation_kl);
  visit(kPolicyKl, terms.policy_kl);
  visit(kJsDivergence, terms.js_divergence);
  visit(kApproxEntropy, terms.approx_entropy);
}

template <typename Visit>
TANDEM_TOKEN_MATH void VisitSums(const LossTerms& terms, Visit&& visit) {
  visit(kLoss, terms.loss);
  visit(kKlPenalty, terms.kl_penalty);
  visit(kNll, terms.nll);
  visit(kEntropy, terms.entropy);
  visit(kRatio, terms.ratio);
  visit(kRatioClamped, terms.ratio_clamped);
  visit(kClipLow, terms.clip_low);
  visit(kClipHigh, terms.clip_high);
  visit(kDualClip, terms.dual_clip);
  visit(kClampedLogRatios, terms.clamped_log_ratios);
}

// How two partial results of a metric become one, and the value that changes nothing.
SIMT_HD inline bool IsMinimum(int metric) {
  return metric == kRatioMin || metric == kRatioClampedMin;
}

SIMT_HD inline bool IsMaximum(int metric) {
  return metric == kRatioMax || metric == kRatioClampedMax;
}

SIMT_HD inline double NeutralMetric(int metric) {
  return IsMinimum(metric) ? kMathInfinity : (IsMaximum(metric) ? -kMathInfinity : 0.0f);
}

SIMT_HD inline double CombineMetric(int metric, double left, double right) {
  if (IsMinimum(metric)) return right < left ? right : left;
  if (IsMaximum(metric)) return right > left ? right : left;
  return left + right;
}

}  // namespace tandem
