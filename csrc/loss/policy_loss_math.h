// The policy loss of one token: value, derivatives, and what it adds to the metrics. One source for
// the CPU, CUDA and the emulator, without branches on a token's data. F is float, or a type with
// its operators that holds several tokens (policy_loss_avx512_cpu.cc). Sums, rows and sequences are
// the backends' business; formulas are explained in policy_loss.h.
#pragma once

#include <cstdint>

#include "csrc/loss/policy_loss.h"
#include "csrc/loss/token_functions.h"

namespace tandem {

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
template <typename F>
struct BasicPolicyToken {
  F logprob;
  F entropy;
  F prev;
  F reference;
  F generation;
  F advantage;
  F share;
  F weight;
  F nll_coef;
};

// What the sequence of a token says with kSequence.
template <typename F>
struct BasicSequenceTerms {
  F ratio;       // exp(mean d)
  F correction;  // truncated
  F is_outside;  // 1 where the correction was out of bounds
  F gradient;    // d (sum of the sequence's shares * c * l) / d (one token's d)
};

// The exponentials of a token, apart because they are what costs.
template <typename F>
struct BasicTokenExps {
  F gap;       // e^(generation - prev)
  F opposite;  // e^(prev - generation)
  F sampling;  // e^(logprob - generation)
  F ratio;     // e^d; not with kSequence
  F kl;        // e^(reference - logprob), clamped; with a reference
};

// What a token says of the generator: sums, weighted, and what the loss needs of it.
template <typename F>
struct BasicGeneratorTerms {
  F correction;
  F outside;
  F mult_prob_error;
  F generation_kl;
  F policy_kl;
  F js_divergence;
  F approx_entropy;

  F factor;  // of the token's loss
};

// What a token says of the loss: gradients, sums (the metrics among them weighted), extrema.
template <typename F>
struct BasicLossTerms {
  F grad_logprob;
  F grad_entropy;

  F loss;
  F kl_penalty;
  F nll;
  F entropy;
  F ratio;
  F ratio_clamped;
  F clip_low;
  F clip_high;
  F dual_clip;
  F clamped_log_ratios;

  F ratio_min;
  F ratio_max;
  F ratio_clamped_min;
  F ratio_clamped_max;
};

using PolicyToken = BasicPolicyToken<float>;
using SequenceTerms = BasicSequenceTerms<float>;
using GeneratorTerms = BasicGeneratorTerms<float>;
using LossTerms = BasicLossTerms<float>;
using TokenExps = BasicTokenExps<float>;

// A weight of the generator after its truncation.
template <typename F>
struct TruncatedWeight {
  F weight;
  F is_outside;
};

template <typename F>
TANDEM_TOKEN_MATH TruncatedWeight<F> Truncate(const PolicyLossBounds& bounds, F weight) {
  const auto is_below = weight < bounds.correction_low;
  const auto is_above = weight > bounds.correction_high;
  const F is_outside = Select(is_below | is_above, 1.0f, 0.0f);
  const F clamped = ClampTo(weight, bounds.correction_low, bounds.correction_high);
  return {Select((is_below | is_above) & bounds.drops_outside, 0.0f, clamped), is_outside};
}

// The ratio's logarithm, clamped; `passes` is whether the gradient does.
template <typename F>
struct LogRatio {
  F value;
  F passes;
  F is_clamped;
};

template <typename F>
TANDEM_TOKEN_MATH LogRatio<F> LogRatioOf(const PolicyLossBounds& bounds, F logprob, F prev) {
  const F d = Select(bounds.has_prev, logprob - prev, 0.0f);
  const F size = Magnitude(d);
  return {ClampTo(d, -kLogRatioClamp, kLogRatioClamp), Select(size <= kLogRatioClamp, 1.0f, 0.0f),
          Select(size > kLogRatioClamp, 1.0f, 0.0f)};
}

// l, its derivative by the factor, and (cispo) by the log-probability directly.
template <typename F>
struct SurrogateTerms {
  F loss;
  F by_factor;
  F by_logprob;
};

template <typename F>
TANDEM_TOKEN_MATH SurrogateTerms<F> SurrogateOf(const PolicyLossBounds& bounds, F factor, F logprob,
                                                F advantage) {
  const F clamped = ClampTo(factor, bounds.ratio_low, bounds.ratio_high);
  const auto is_inside = (factor >= bounds.ratio_low) & (factor <= bounds.ratio_high);
  const F plain = -advantage * factor;
  const F clipped = -advantage * clamped;
  const F plain_slope = -advantage;
  const F clipped_slope = Select(is_inside, plain_slope, 0.0f);
  const F even_slope = 0.5f * (plain_slope + clipped_slope);
  const F larger = Select(plain > clipped, plain, clipped);
  const F larger_slope =
      Select(plain > clipped, plain_slope, Select(plain < clipped, clipped_slope, even_slope));
  const F ceiling = -advantage * bounds.dual;
  const auto is_capped = (advantage < 0.0f) & (larger >= ceiling);
  const F capped_slope = Select(larger > ceiling, 0.0f, 0.5f * larger_slope);
  const F by_factor = Select(is_capped, capped_slope, larger_slope);
  const F loss = Select(is_capped, ceiling, larger);
  return {Select(bounds.is_cispo, clipped * logprob, loss),
          Select(bounds.is_cispo, 0.0f, by_factor), Select(bounds.is_cispo, clipped, 0.0f)};
}

// An estimate of KL and its derivative by the policy's log-probability.
template <typename F>
struct KlTerms {
  F value;
  F by_logprob;
};

template <typename F>
TANDEM_TOKEN_MATH F KlEstimate(KlKind kind, F log_ratio, F exp_minus_line) {
  const F square = 0.5f * log_ratio * log_ratio;
  return Select(kind == KlKind::kK3, exp_minus_line,
                Select(kind == KlKind::kK2, square, -log_ratio));
}

template <typename F>
TANDEM_TOKEN_MATH KlTerms<F> KlOf(const PolicyLossBounds& bounds, const BasicPolicyToken<F>& token,
                                  const BasicTokenExps<F>& exps) {
  const F unclamped = token.reference - token.logprob;
  const F d = ClampTo(unclamped, -bounds.kl_input_clamp, bounds.kl_input_clamp);
  const F line = ExpMinusLine(d, exps.kl);
  const F estimate = KlEstimate(bounds.kl, d, line);
  const F slope_k3 = line + d;  // e^d - 1
  const F slope =
      Select(bounds.kl == KlKind::kK3, slope_k3, Select(bounds.kl == KlKind::kK2, d, -1.0f));
  const F weight = Select(bounds.weighs_kl, FiniteOrZero(exps.sampling), 1.0f);
  const F value = weight * estimate;
  // False for NaN, whose gradient must not look like that of a clamped estimate.
  const auto is_clamped =
      (Magnitude(unclamped) > bounds.kl_input_clamp) | (Magnitude(value) > bounds.kl_output_clamp);
  return {ClampTo(value, -bounds.kl_output_clamp, bounds.kl_output_clamp),
          Select(is_clamped, 0.0f, value - weight * slope)};
}

// A column's value for the formulas: a token that does not count has numbers that do no harm.
template <typename F, typename Mask>
TANDEM_TOKEN_MATH F Counted(F value, Mask counts) {
  return Select(counts, value, 0.0f);
}

template <bool kIsSequence, bool kHasReference, typename F>
TANDEM_TOKEN_MATH BasicTokenExps<F> ExpsOf(const PolicyLossBounds& bounds,
                                           const BasicPolicyToken<F>& token) {
  const F gap = token.generation - token.prev;
  const F kl =
      ClampTo(token.reference - token.logprob, -bounds.kl_input_clamp, bounds.kl_input_clamp);
  BasicTokenExps<F> exps;
  exps.gap = Exp(gap);
  exps.opposite = Exp(-gap);
  exps.sampling = Exp(token.logprob - token.generation);
  exps.ratio = kIsSequence ? 0.0f : Exp(LogRatioOf(bounds, token.logprob, token.prev).value);
  exps.kl = kHasReference ? Exp(kl) : 0.0f;
  return exps;
}

// How far trainer and generator are apart. sequence: looked at with kIsSequence alone, here and
// below. The token's columns have gone through Counted.
template <bool kIsSequence, typename F>
TANDEM_TOKEN_MATH BasicGeneratorTerms<F> GeneratorTermsOf(const PolicyLossBounds& bounds,
                                                          const BasicPolicyToken<F>& token,
                                                          const BasicTokenExps<F>& exps,
                                                          const BasicSequenceTerms<F>& sequence) {
  const F gap = token.generation - token.prev;
  const ExpLines<F> lines = ExpMinusLines(gap, exps.gap, exps.opposite);
  const TruncatedWeight<F> truncated =
      kIsSequence ? TruncatedWeight<F>{sequence.correction, sequence.is_outside}
                  : Truncate(bounds, FiniteOrZero(exps.opposite));
  BasicGeneratorTerms<F> terms;
  terms.factor = Select(bounds.corrects, truncated.weight, 1.0f);
  terms.correction = kIsSequence ? 0.0f : token.weight * truncated.weight;
  terms.outside = token.weight * truncated.is_outside;
  terms.mult_prob_error = token.weight * Select(gap < 0.0f, exps.opposite, exps.gap);
  terms.generation_kl = token.weight * KlEstimate(bounds.kl, -gap, lines.of_opposite);
  terms.policy_kl = token.weight * KlEstimate(bounds.kl, gap, lines.of_x);
  terms.js_divergence = token.weight * LogCoshHalf(gap, lines.of_x, lines.of_opposite);
  // The limit of x log x at 0, where the log-probability is -inf.
  const F product = Select(exps.sampling == 0.0f, 0.0f, exps.sampling * token.logprob);
  terms.approx_entropy = token.weight * -product;
  return terms;
}

// What a token's advantage is multiplied by, and the derivative of that by its log-probability.
template <typename F>
struct Factor {
  F value;
  F by_logprob;
};

template <typename F>
TANDEM_TOKEN_MATH Factor<F> FactorOf(RatioKind kind, F ratio, F passes, F logprob) {
  const F other = Select(kind == RatioKind::kOnPolicy, 1.0f, logprob);
  return {Select(kind == RatioKind::kToken, ratio, other),
          Select(kind == RatioKind::kToken, ratio * passes, 1.0f)};
}

// d (share c l) / d (ratio of the sequence), which is summed over its tokens.
template <typename F>
TANDEM_TOKEN_MATH F SequenceSlope(const PolicyLossBounds& bounds, F advantage, F share,
                                  const BasicSequenceTerms<F>& sequence) {
  const SurrogateTerms<F> surrogate = SurrogateOf(bounds, sequence.ratio, 0.0f, advantage);
  return share * (Select(bounds.corrects, sequence.correction, 1.0f) * surrogate.by_factor);
}

// Terms of a sequence from sums over its counted tokens; `gradient` is still to be filled.
TANDEM_TOKEN_MATH SequenceTerms SequenceTermsOf(const PolicyLossBounds& bounds, double log_ratios,
                                                double log_weights, int64_t count) {
  const double mean = count == 0 ? 0.0 : log_ratios / static_cast<double>(count);
  const TruncatedWeight<float> truncated =
      Truncate(bounds, FiniteOrZero(Exp(static_cast<float>(log_weights))));
  return {Exp(static_cast<float>(mean)), truncated.weight, truncated.is_outside, 0.0f};
}

// Sums, extrema and gradients of a token whose generator terms are known. kHasReference: whether
// there is a KL.
template <bool kIsSequence, bool kHasReference, typename F>
TANDEM_TOKEN_MATH BasicLossTerms<F> LossTermsOf(const PolicyLossBounds& bounds,
                                                const BasicPolicyToken<F>& token,
                                                const BasicSequenceTerms<F>& sequence,
                                                const BasicTokenExps<F>& exps, F correction) {
  const auto counts = token.weight > 0.0f;
  BasicLossTerms<F> terms;
  const LogRatio<F> d = LogRatioOf(bounds, token.logprob, token.prev);
  const F ratio = kIsSequence ? sequence.ratio : exps.ratio;
  const Factor<F> factor =
      kIsSequence ? Factor<F>{ratio, 0.0f} : FactorOf(bounds.ratio, ratio, d.passes, token.logprob);
  const SurrogateTerms<F> surrogate =
      SurrogateOf(bounds, factor.value, token.logprob, token.advantage);
  F loss = token.share * (correction * surrogate.loss);
  const F slope = surrogate.by_factor * factor.by_logprob + surrogate.by_logprob;
  F gradient = token.share * (correction * slope);
  if (kIsSequence) gradient += sequence.gradient * d.passes;

  terms.kl_penalty = 0.0f;
  if (kHasReference) {
    const KlTerms<F> kl = KlOf(bounds, token, exps);
    terms.kl_penalty = token.share * kl.value;
    // A coefficient of 0 only reports: infinity must not reach the loss through it.
    loss += Select(bounds.kl_coef != 0.0f, bounds.kl_coef * terms.kl_penalty, 0.0f);
    gradient +=
        Select(bounds.kl_coef != 0.0f, bounds.kl_coef * (token.share * kl.by_logprob), 0.0f);
  }
  terms.nll = Select(token.nll_coef != 0.0f, token.nll_coef * -token.logprob, 0.0f);
  const F bonus = bounds.entropy_coef * (token.share * token.entropy);
  terms.loss = loss - Select(bounds.entropy_coef != 0.0f, bonus, 0.0f) + terms.nll;
  terms.grad_logprob = Counted(gradient - token.nll_coef, counts);
  terms.grad_entropy = Counted(-bounds.entropy_coef * token.share, counts);

  const F clamped = ClampTo(ratio, bounds.ratio_low, bounds.ratio_high);
  const auto is_low =
      (ratio < bounds.ratio_low) & (bounds.is_cispo | (token.advantage < 0.0f)) & counts;
  const auto is_high =
      (ratio > bounds.ratio_high) & (bounds.is_cispo | (token.advantage > 0.0f)) & counts;
  const auto is_dual = (ratio > bounds.dual) & (token.advantage < 0.0f);
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
template <typename F, typename Visit>
TANDEM_TOKEN_MATH void VisitSums(const BasicGeneratorTerms<F>& terms, Visit&& visit) {
  visit(kCorrection, terms.correction);
  visit(kOutside, terms.outside);
  visit(kMultProbError, terms.mult_prob_error);
  visit(kGenerationKl, terms.generation_kl);
  visit(kPolicyKl, terms.policy_kl);
  visit(kJsDivergence, terms.js_divergence);
  visit(kApproxEntropy, terms.approx_entropy);
}

template <typename F, typename Visit>
TANDEM_TOKEN_MATH void VisitSums(const BasicLossTerms<F>& terms, Visit&& visit) {
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
