// Tokens for tests of policy_loss.h, and its formulas once more in float64, written for reading:
// one loss as a function of the log-probabilities, whose gradient the tests take by central
// differences.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

#include "csrc/loss/policy_loss.h"

namespace tandem {

inline constexpr double kInf = std::numeric_limits<double>::infinity();
inline constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

// Columns of T tokens over R rows. Empty columns are not handed over.
struct PolicyProblem {
  std::vector<float> logprobs, entropy;                                                    // [R]
  std::vector<float> prev, reference, generation, advantages, shares, weights, nll_coefs;  // [T]
  std::vector<int64_t> row_offsets;
  std::vector<int64_t> sequence_offsets;
  std::vector<float> sequence_weights;

  int64_t num_tokens() const { return static_cast<int64_t>(weights.size()); }
  int64_t num_rows() const { return static_cast<int64_t>(logprobs.size()); }

  PolicyLossInputs inputs() const {
    const auto pointer = [](const auto& column) {
      return column.empty() ? nullptr : column.data();
    };
    PolicyLossInputs inputs;
    inputs.num_rows = num_rows();
    inputs.logprobs = logprobs.data();
    inputs.entropy = entropy.data();
    PolicyLossTokens& tokens = inputs.tokens;
    tokens.num_tokens = num_tokens();
    tokens.row_offsets = pointer(row_offsets);
    tokens.prev_logprobs = pointer(prev);
    tokens.reference_logprobs = pointer(reference);
    tokens.generation_logprobs = generation.data();
    tokens.advantages = advantages.data();
    tokens.shares = shares.data();
    tokens.weights = weights.data();
    tokens.nll_coefs = pointer(nll_coefs);
    tokens.sequence_offsets = pointer(sequence_offsets);
    tokens.sequence_weights = pointer(sequence_weights);
    tokens.num_sequences = static_cast<int64_t>(sequence_weights.size());
    return inputs;
  }
};

// Log-probabilities around -2; those of the other models differ from them by `spread`.
inline PolicyProblem RandomProblem(int64_t num_tokens, uint32_t seed, float spread = 0.3f) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal;
  std::uniform_real_distribution<float> uniform;
  PolicyProblem problem;
  for (int64_t i = 0; i < num_tokens; ++i) {
    const float logprob = -2.0f + 0.5f * normal(generator);
    const float prev = logprob + spread * normal(generator);
    problem.logprobs.push_back(logprob);
    problem.entropy.push_back(2.0f * uniform(generator));
    problem.prev.push_back(prev);
    problem.reference.push_back(logprob + spread * normal(generator));
    problem.generation.push_back(prev + 0.5f * spread * normal(generator));
    problem.advantages.push_back(normal(generator));
    problem.shares.push_back(0.1f + uniform(generator));
    problem.weights.push_back(i % 5 == 3 ? 0.0f : 0.5f + uniform(generator));
    problem.nll_coefs.push_back(i % 3 == 0 ? 0.2f * uniform(generator) : 0.0f);
  }
  return problem;
}

// Sequences of the given lengths; those of length 0 and those without a counted token included.
inline void CutSequences(const std::vector<int64_t>& lengths, PolicyProblem* problem) {
  problem->sequence_offsets = {0};
  for (size_t s = 0; s < lengths.size(); ++s) {
    problem->sequence_offsets.push_back(problem->sequence_offsets.back() + lengths[s]);
    problem->sequence_weights.push_back(0.5f + 0.25f * static_cast<float>(s % 3));
  }
}

// The formulas. `x` are the log-probabilities, `base` the same as constants: what stands behind a
// stop-gradient looks at base.
class PolicyReference {
 public:
  PolicyReference(const PolicyProblem& problem, const PolicyLossParams& params)
      : p_(problem), params_(params), base_(problem.logprobs.begin(), problem.logprobs.end()) {
    row_of_.resize(problem.weights.size());
    sequence_of_.resize(problem.weights.size());
    for (size_t i = 0; i < row_of_.size(); ++i) row_of_[i] = static_cast<int64_t>(i);
    const auto& offsets = problem.row_offsets;
    for (size_t row = 0; row + 1 < offsets.size(); ++row) {
      for (int64_t i = offsets[row]; i < offsets[row + 1]; ++i) {
        row_of_[static_cast<size_t>(i)] = static_cast<int64_t>(row);
      }
    }
    const auto& sequences = problem.sequence_offsets;
    for (size_t s = 0; s + 1 < sequences.size(); ++s) {
      for (int64_t i = sequences[s]; i < sequences[s + 1]; ++i) {
        sequence_of_[static_cast<size_t>(i)] = s;
      }
    }
  }

  double Loss(const std::vector<double>& x) const {
    std::vector<double> metrics(kNumPolicyMetrics);
    Walk(x, &metrics);
    return metrics[kLoss];
  }

  std::vector<double> Metrics() const {
    std::vector<double> metrics(kNumPolicyMetrics, 0.0);
    metrics[kRatioMin] = metrics[kRatioClampedMin] = kInf;
    metrics[kRatioMax] = metrics[kRatioClampedMax] = -kInf;
    Walk(base_, &metrics);
    if (params_.ratio == RatioKind::kSequence) {
      for (size_t s = 0; s < p_.sequence_weights.size(); ++s) {
        bool is_outside = false;
        metrics[kCorrection] +=
            p_.sequence_weights[s] * Truncated(SequenceLogWeight(s), &is_outside);
      }
    }
    return metrics;
  }

  // d loss / d logprobs by central differences, [R].
  std::vector<double> GradLogprobs() const {
    constexpr double kStep = 1e-6;
    std::vector<double> gradient(base_.size());
    std::vector<double> x = base_;
    for (size_t row = 0; row < x.size(); ++row) {
      x[row] = base_[row] + kStep;
      const double above = Loss(x);
      x[row] = base_[row] - kStep;
      gradient[row] = (above - Loss(x)) / (2 * kStep);
      x[row] = base_[row];
    }
    return gradient;
  }

  std::vector<double> GradEntropy() const {
    std::vector<double> gradient(base_.size(), 0.0);
    for (size_t i = 0; i < row_of_.size(); ++i) {
      if (p_.weights[i] > 0) gradient[RowOf(i)] -= double{params_.entropy_coef} * p_.shares[i];
    }
    return gradient;
  }

 private:
  size_t RowOf(size_t i) const { return static_cast<size_t>(row_of_[i]); }
  double Prev(size_t i) const { return p_.prev.empty() ? base_[RowOf(i)] : double{p_.prev[i]}; }
  double LogRatio(size_t i, const std::vector<double>& x) const {
    return std::clamp(x[RowOf(i)] - Prev(i), -20.0, 20.0);
  }
  double LowBound() const { return IsUnclipped() ? -kInf : 1.0 - params_.clip_low; }
  double HighBound() const { return IsUnclipped() ? kInf : 1.0 + params_.clip_high; }
  bool IsUnclipped() const { return params_.surrogate == SurrogateKind::kUnclipped; }

  double SequenceMean(size_t s, const std::vector<double>& x) const {
    double sum = 0;
    int count = 0;
    for (size_t i = 0; i < p_.weights.size(); ++i) {
      if (sequence_of_[i] != s || !(p_.weights[i] > 0)) continue;
      sum += LogRatio(i, x);
      ++count;
    }
    return count == 0 ? 0.0 : sum / count;
  }

  double SequenceLogWeight(size_t s) const {
    double sum = 0;
    for (size_t i = 0; i < p_.weights.size(); ++i) {
      if (sequence_of_[i] == s && p_.weights[i] > 0) sum += Prev(i) - p_.generation[i];
    }
    return sum;
  }

  double Truncated(double log_weight, bool* is_outside) const {
    double weight = std::exp(log_weight);
    if (!(weight <= std::numeric_limits<float>::max())) weight = 0;
    if (params_.correction == CorrectionKind::kOff || params_.correction == CorrectionKind::kRaw) {
      return weight;
    }
    const double low = params_.correction_low;
    const double high = params_.correction_high;
    *is_outside = weight < low || weight > high;
    if (*is_outside && params_.correction == CorrectionKind::kIcePop) return 0;
    return std::min(std::max(weight, low), high);
  }

  double Ratio(size_t i, const std::vector<double>& x) const {
    return std::exp(params_.ratio == RatioKind::kSequence ? SequenceMean(sequence_of_[i], x)
                                                          : LogRatio(i, x));
  }

  double FactorOf(size_t i, const std::vector<double>& x) const {
    if (params_.ratio == RatioKind::kOnPolicy) return std::exp(x[RowOf(i)] - base_[RowOf(i)]);
    return params_.ratio == RatioKind::kNone ? x[RowOf(i)] : Ratio(i, x);
  }

  double Surrogate(size_t i, const std::vector<double>& x) const {
    const double advantage = p_.advantages[i];
    const auto clamp = [&](double ratio) {
      return std::min(std::max(ratio, LowBound()), HighBound());
    };
    if (params_.surrogate == SurrogateKind::kCispo) {
      return -advantage * clamp(FactorOf(i, base_)) * x[RowOf(i)];
    }
    const double factor = FactorOf(i, x);
    const double loss = std::max(-advantage * factor, -advantage * clamp(factor));
    const bool is_dual = params_.surrogate == SurrogateKind::kClip && params_.dual_clip > 0;
    return is_dual && advantage < 0 ? std::min(loss, -advantage * params_.dual_clip) : loss;
  }

  static double Estimate(KlKind kind, double log_ratio) {
    if (kind == KlKind::kK1) return -log_ratio;
    if (kind == KlKind::kK2) return log_ratio * log_ratio / 2;
    return std::expm1(log_ratio) - log_ratio;
  }

  double Kl(size_t i, const std::vector<double>& x) const {
    const double log_ratio = p_.reference[i] - x[RowOf(i)];
    const double bound = params_.kl_input_clamp;
    const std::vector<double>& weighed = std::abs(log_ratio) > bound ? base_ : x;
    const double own = params_.kl_importance_weight ? double{p_.generation[i]} : base_[RowOf(i)];
    double weight = std::exp(weighed[RowOf(i)] - own);
    if (!(weight <= std::numeric_limits<float>::max())) weight = 0;
    const double estimate =
        weight * Estimate(params_.kl, std::min(std::max(log_ratio, -bound), bound));
    const double limit = params_.kl_output_clamp;
    return std::min(std::max(estimate, -limit), limit);
  }

  void AddRatios(size_t i, double ratio, std::vector<double>* metrics) const {
    std::vector<double>& m = *metrics;
    const double weight = p_.weights[i];
    const double advantage = p_.advantages[i];
    const double clamped = std::min(std::max(ratio, LowBound()), HighBound());
    const bool is_cispo = params_.surrogate == SurrogateKind::kCispo;
    const bool is_clip = params_.surrogate == SurrogateKind::kClip;
    m[kRatio] += weight * ratio;
    m[kRatioClamped] += weight * clamped;
    m[kRatioMin] = std::min(m[kRatioMin], ratio);
    m[kRatioMax] = std::max(m[kRatioMax], ratio);
    m[kRatioClampedMin] = std::min(m[kRatioClampedMin], clamped);
    m[kRatioClampedMax] = std::max(m[kRatioClampedMax], clamped);
    if (ratio < LowBound() && (is_cispo || advantage < 0)) m[kClipLow] += weight;
    if (ratio > HighBound() && (is_cispo || advantage > 0)) m[kClipHigh] += weight;
    if (is_clip && params_.dual_clip > 0 && advantage < 0 && ratio > params_.dual_clip) {
      m[kDualClip] += weight;
    }
  }

  void AddGenerator(size_t i, std::vector<double>* metrics) const {
    std::vector<double>& m = *metrics;
    const double weight = p_.weights[i];
    const double gap = p_.generation[i] - Prev(i);
    const double logprob = base_[RowOf(i)];
    m[kMultProbError] += weight * std::exp(std::abs(gap));
    m[kGenerationKl] += weight * Estimate(params_.kl, -gap);
    m[kPolicyKl] += weight * Estimate(params_.kl, gap);
    const double mixture = std::log((1.0 + std::exp(gap)) / 2);  // less prev
    m[kJsDivergence] +=
        weight * 0.5 *
        (std::expm1(-mixture) + mixture + std::expm1(gap - mixture) - (gap - mixture));
    m[kApproxEntropy] += weight * -std::exp(logprob - p_.generation[i]) * logprob;
  }

  void Walk(const std::vector<double>& x, std::vector<double>* metrics) const {
    std::vector<double>& m = *metrics;
    const bool by_sequence = params_.ratio == RatioKind::kSequence;
    for (size_t i = 0; i < p_.weights.size(); ++i) {
      if (!(p_.weights[i] > 0)) continue;
      const double logprob = x[RowOf(i)];
      const double entropy = p_.entropy[RowOf(i)];
      bool is_outside = false;
      const double correction =
          Truncated(by_sequence ? SequenceLogWeight(sequence_of_[i]) : Prev(i) - p_.generation[i],
                    &is_outside);
      const double kl = p_.reference.empty() ? 0.0 : Kl(i, x);
      const double nll = p_.nll_coefs.empty() ? 0.0 : -p_.nll_coefs[i] * logprob;
      const double applied = params_.correction == CorrectionKind::kOff ? 1.0 : correction;
      m[kLoss] += p_.shares[i] * (applied * Surrogate(i, x) + params_.kl_coef * kl -
                                  params_.entropy_coef * entropy) +
                  nll;
      m[kKlPenalty] += p_.shares[i] * kl;
      m[kNll] += nll;
      m[kEntropy] += p_.weights[i] * entropy;
      if (!by_sequence) m[kCorrection] += p_.weights[i] * correction;
      if (is_outside) m[kOutside] += p_.weights[i];
      if (std::abs(logprob - Prev(i)) > 20) m[kClampedLogRatios] += 1;
      AddRatios(i, Ratio(i, x), metrics);
      AddGenerator(i, metrics);
    }
  }

  const PolicyProblem& p_;
  const PolicyLossParams params_;
  const std::vector<double> base_;
  std::vector<int64_t> row_of_;
  std::vector<size_t> sequence_of_;
};

}  // namespace tandem
