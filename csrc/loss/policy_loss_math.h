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
  bool has_dual;
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
  bounds.has_dual = has_dual;
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

// The ratios of a token, apart because exponentials take long.
template <typename F>
struct BasicTokenRatios {
  F policy;    // e^d; not with kSequence
  F sampling;  // e^(logprob - generation)
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
};

using PolicyToken = BasicPolicyToken<float>;
using SequenceTerms = BasicSequenceTerms<float>;
using GeneratorTerms = BasicGeneratorTerms<float>;
using LossTerms = BasicLossTerms<float>;
using TokenRatios = BasicTokenRatios<float>;

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

// The ratio's logarithm.
template <typename F>
TANDEM_TOKEN_MATH F LogRatioOf(const PolicyLossBounds& bounds, F logprob, F prev) {
  return Select(bounds.has_prev, logprob - prev, 0.0f);
}

template <typename F>
TANDEM_TOKEN_MATH F ClampLogRatio(F log_ratio) {
  return ClampTo(log_ratio, -kLogRatioClamp, kLogRatioClamp);
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
  const auto is_outside = (factor < bounds.ratio_low) | (factor > bounds.ratio_high);
  const F slope = -advantage;
  const F plain = slope * factor;
  const F clipped = slope * clamped;
  const F even_slope = Select(is_outside & (plain == clipped), 0.5f * slope, slope);
  F by_factor = Select(is_outside & (plain < clipped), 0.0f, even_slope);
  F loss = Select(plain > clipped, plain, clipped);
  const F ceiling = slope * bounds.dual;
  const auto is_capped = (advantage < 0.0f) & (loss >= ceiling);
  const F capped_slope = Select(loss > ceiling, 0.0f, 0.5f * by_factor);
  by_factor = Select(bounds.has_dual, Select(is_capped, capped_slope, by_factor), by_factor);
  loss = Select(bounds.has_dual, Select(is_capped, ceiling, loss), loss);
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
                                  F sampling_ratio) {
  const F unclamped = token.reference - token.logprob;
  const F d = ClampTo(unclamped, -bounds.kl_input_clamp, bounds.kl_input_clamp);
  const F line = ExpMinusLine(d);
  const F estimate = KlEstimate(bounds.kl, d, line);
  const F slope_k3 = line + d;  // e^d - 1
  const F slope =
      Select(bounds.kl == KlKind::kK3, slope_k3, Select(bounds.kl == KlKind::kK2, d, -1.0f));
  const F weight = Select(bounds.weighs_kl, FiniteOrZero(sampling_ratio), 1.0f);
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

template <bool kIsSequence, typename F>
TANDEM_TOKEN_MATH BasicTokenRatios<F> RatiosOf(const PolicyLossBounds& bounds,
                                               const BasicPolicyToken<F>& token) {
  const F d = ClampLogRatio(LogRatioOf(bounds, token.logprob, token.prev));
  return {kIsSequence ? F(0.0f) : Exp(d), Exp(token.logprob - token.generation)};
}

// How far trainer and generator are apart. sequence: looked at with kIsSequence alone, here and
// below. Columns and sequence have gone through Counted, so that all sums of a token that does not
// count are 0.
template <bool kIsSequence, typename F>
TANDEM_TOKEN_MATH BasicGeneratorTerms<F> GeneratorTermsOf(const PolicyLossBounds& bounds,
                                                          const BasicPolicyToken<F>& token,
                                                          const BasicTokenRatios<F>& ratios,
                                                          const BasicSequenceTerms<F>& sequence) {
  const F gap = token.generation - token.prev;
  const OppositeExps<F> exps = OppositeExpsOf(gap);
  const TruncatedWeight<F> truncated =
      kIsSequence ? TruncatedWeight<F>{sequence.correction, sequence.is_outside}
                  : Truncate(bounds, FiniteOrZero(exps.exp_of_opposite));
  BasicGeneratorTerms<F> terms;
  terms.factor = Select(bounds.corrects, truncated.weight, 1.0f);
  terms.correction = kIsSequence ? 0.0f : token.weight * truncated.weight;
  terms.outside = token.weight * truncated.is_outside;
  terms.mult_prob_error = token.weight * Select(gap < 0.0f, exps.exp_of_opposite, exps.exp);
  terms.generation_kl = token.weight * KlEstimate(bounds.kl, -gap, exps.line_of_opposite);
  terms.policy_kl = token.weight * KlEstimate(bounds.kl, gap, exps.line);
  terms.js_divergence = token.weight * LogCoshHalf(gap, exps);
  // The limit of x log x at 0, where the log-probability is -inf.
  const F product = Select(ratios.sampling == 0.0f, 0.0f, ratios.sampling * token.logprob);
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
TANDEM_TOKEN_MATH Factor<F> FactorOf(RatioKind kind, F ratio, F passing_ratio, F logprob) {
  const F other = Select(kind == RatioKind::kOnPolicy, 1.0f, logprob);
  return {Select(kind == RatioKind::kToken, ratio, other),
          Select(kind == RatioKind::kToken, passing_ratio, 1.0f)};
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
                                                const BasicTokenRatios<F>& ratios,
                                                const BasicSequenceTerms<F>& sequence,
                                                F correction) {
  BasicLossTerms<F> terms;
  const F d = LogRatioOf(bounds, token.logprob, token.prev);
  const auto is_clamped = Magnitude(d) > kLogRatioClamp;  // then no gradient flows through it
  const F ratio = kIsSequence ? sequence.ratio : ratios.policy;
  const Factor<F> factor =
      kIsSequence ? Factor<F>{ratio, 0.0f}
                  : FactorOf(bounds.ratio, ratio, Select(is_clamped, 0.0f, ratio), token.logprob);
  const SurrogateTerms<F> surrogate =
      SurrogateOf(bounds, factor.value, token.logprob, token.advantage);
  F loss = token.share * (correction * surrogate.loss);
  const F slope = surrogate.by_factor * factor.by_logprob + surrogate.by_logprob;
  F gradient = token.share * (correction * slope);
  if (kIsSequence) gradient += Select(is_clamped, 0.0f, sequence.gradient);

  terms.kl_penalty = 0.0f;
  if (kHasReference) {
    const KlTerms<F> kl = KlOf(bounds, token, ratios.sampling);
    terms.kl_penalty = token.share * kl.value;
    // A coefficient of 0 only reports: infinity must not reach the loss through it.
    loss += Select(bounds.kl_coef != 0.0f, bounds.kl_coef * terms.kl_penalty, 0.0f);
    gradient +=
        Select(bounds.kl_coef != 0.0f, bounds.kl_coef * (token.share * kl.by_logprob), 0.0f);
  }
  terms.nll = Select(token.nll_coef != 0.0f, token.nll_coef * -token.logprob, 0.0f);
  const F bonus = bounds.entropy_coef * (token.share * token.entropy);
  terms.loss = loss - Select(bounds.entropy_coef != 0.0f, bonus, 0.0f) + terms.nll;
  // 0 + and 0 - make a 0 of a -0, which a token that does not count would leave.
  terms.grad_logprob = (0.0f + gradient) - token.nll_coef;
  terms.grad_entropy = 0.0f - bounds.entropy_coef * token.share;

  const F clamped = ClampTo(ratio, bounds.ratio_low, bounds.ratio_high);
  const auto is_low = (ratio < bounds.ratio_low) & (bounds.is_cispo | (token.advantage < 0.0f));
  const auto is_high = (ratio > bounds.ratio_high) & (bounds.is_cispo | (token.advantage > 0.0f));
  const auto is_dual = (ratio > bounds.dual) & (token.advantage < 0.0f);
  terms.entropy = token.weight * token.entropy;
  terms.ratio = token.weight * ratio;
  terms.ratio_clamped = token.weight * clamped;
  terms.clip_low = Select(is_low, token.weight, 0.0f);
  terms.clip_high = Select(is_high, token.weight, 0.0f);
  terms.dual_clip = Select(is_dual, token.weight, 0.0f);
  terms.clamped_log_ratios = Select(is_clamped, 1.0f, 0.0f);
  const auto counts = token.weight > 0.0f;
  terms.ratio_min = Select(counts, ratio, kMathInfinity);
  terms.ratio_max = Select(counts, ratio, -kMathInfinity);
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

// The extrema of clamped ratios are the clamped extrema, for a clamp keeps order; those of no token
// stay what they are.
TANDEM_TOKEN_MATH void FillClampedExtrema(const PolicyLossBounds& bounds, double* metrics) {
  const auto clamped = [&](double extremum) {
    const auto ratio = static_cast<float>(extremum);
    return Magnitude(ratio) < kMathInfinity ? ClampTo(ratio, bounds.ratio_low, bounds.ratio_high)
                                            : ratio;
  };
  metrics[kRatioClampedMin] = clamped(metrics[kRatioMin]);
  metrics[kRatioClampedMax] = clamped(metrics[kRatioMax]);
}

}  // namespace tandem
