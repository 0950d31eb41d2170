// The policy-gradient loss of a micro-batch from its log-probabilities: the loss, its derivatives
// by log-probability and entropy, and the sums behind its metrics, in one pass over the tokens.
//
// Per token, with advantage A, old log-probability o (prev_logprobs, or the log-probability itself
// without gradient), generator's g, reference's f, share a, and d = clamp(logprob - o, +-20):
//
//   l = -A factor                                             unclipped
//   l = max(-A r, -A clamp(r, 1 - low, 1 + high)), dual clip  clip
//   l = -A stop(clamp(r, 1 - low, 1 + high)) logprob          cispo
//   loss = sum a (c l + kl_coef KL - entropy_coef H) - nll_coef logprob
//
// where factor is r = exp(d), exp(logprob - stop(logprob)) or logprob; c = exp(o - g), truncated; a
// weight that is no finite number is 0; KL is the weighted estimator k1 | k2 | k3 of rl/ops/kl.py.
// With kSequence, r = exp(mean d) and c = exp(sum (o - g)) over the counted tokens of the sequence,
// and each of them has 1 / number of the gradient through r.
//
// The plain torch form of the same is rl/algorithms/policy_gradient.py, against which this is
// tested. Gradients are those of torch where a formula has a corner: a clamp passes the gradient at
// its bounds, and not beyond; where max or min has equal arguments, half of each one's. Where torch
// makes a NaN of infinities that cancel, this does not: exp(logprob - stop(logprob)) is 1, and the
// ratio without prev_logprobs too, for a log-probability of -inf.
//
// Tokens of weight 0 (weights are not negative) are skipped before any arithmetic: what they hold
// (NaN included) is not read into any sum. Metric sums are float64 and added in one fixed order.
#pragma once

#include <cstdint>
#include <limits>

#include "csrc/common/execution.h"
#include "csrc/common/status.h"

namespace tandem {

enum class RatioKind : int32_t { kToken, kOnPolicy, kNone, kSequence };
enum class SurrogateKind : int32_t { kClip, kCispo, kUnclipped };
enum class CorrectionKind : int32_t { kOff, kRaw, kTis, kIcePop };
enum class KlKind : int32_t { kK1, kK2, kK3 };

struct PolicyLossParams {
  RatioKind ratio = RatioKind::kToken;
  SurrogateKind surrogate = SurrogateKind::kClip;
  float clip_low = 0.2f;   // ratios are clipped to at least 1 - clip_low
  float clip_high = 0.2f;  // and at most 1 + clip_high
  float dual_clip = 0.0f;  // 0 = none
  CorrectionKind correction = CorrectionKind::kOff;
  float correction_low = 0.0f;
  float correction_high = 0.0f;  // infinity = no bound
  KlKind kl = KlKind::kK3;
  float kl_coef = 0.0f;               // 0: KL is reported only
  bool kl_importance_weight = false;  // weigh estimates by p / p_generation instead of by 1
  // Bounds of |log-ratio| and |estimate|; infinity = none. No gradient flows from beyond them.
  float kl_input_clamp = std::numeric_limits<float>::infinity();
  float kl_output_clamp = std::numeric_limits<float>::infinity();
  float entropy_coef = 0.0f;
};

// T tokens that look at R rows of log-probabilities; all columns [T].
struct PolicyLossTokens {
  int64_t num_tokens = 0;
  // [R + 1]: tokens of row r are row_offsets[r] ... row_offsets[r + 1] - 1; null: token i has row
  // i. Several tokens share a row where rollouts share a prefix and its next token. They index the
  // columns as they stand, and need not begin at 0: num_tokens = row_offsets[R] - row_offsets[0].
  const int64_t* row_offsets = nullptr;
  const float* prev_logprobs = nullptr;  // or null: the log-probability itself, without gradient
  const float* reference_logprobs = nullptr;  // or null: no KL
  const float* generation_logprobs = nullptr;
  const float* advantages = nullptr;
  const float* shares = nullptr;     // factor of a token's loss in the sum
  const float* weights = nullptr;    // of a token in metric sums; 0 = the token does not count
  const float* nll_coefs = nullptr;  // or null
  // kSequence alone: tokens in the order of their sequences, [S + 1] from 0 to T, and rows are
  // tokens (row_offsets is null).
  const int64_t* sequence_offsets = nullptr;
  const float* sequence_weights = nullptr;  // [S], weight of a sequence in metric sums
  int64_t num_sequences = 0;
};

// What PolicyLoss sums up. Sums over tokens are weighted by `weights`, unless said otherwise.
enum PolicyMetric : int32_t {
  kLoss,       // what is differentiated
  kKlPenalty,  // sum of shares * KL, kl_coef left out
  kNll,        // sum of nll_coefs * -logprob
  kEntropy,
  kRatio,  // the true ratio exp(d) (or the sequence's), whatever the loss uses
  kRatioClamped,
  kRatioMin,  // extrema: +inf / -inf where no token counts
  kRatioMax,
  kRatioClampedMin,
  kRatioClampedMax,
  kClipLow,  // tokens whose gradient a bound takes away
  kClipHigh,
  kDualClip,
  kCorrection,     // the correction's weights; per sequence with kSequence
  kOutside,        // tokens whose weight is out of the bounds of tis / icepop
  kMultProbError,  // exp |generation - old|
  kGenerationKl,   // KL(generator || trainer) by the estimator `kl`, without weights and clamps
  kPolicyKl,       // KL(trainer || generator), the same
  kJsDivergence,
  kApproxEntropy,     // -exp(logprob - generation) logprob
  kClampedLogRatios,  // number of tokens with |logprob - o| > 20, unweighted
  kNumPolicyMetrics,
};

inline constexpr float kLogRatioClamp = 20.0f;

struct PolicyLossInputs {
  PolicyLossTokens tokens;
  int64_t num_rows = 0;             // R
  const float* logprobs = nullptr;  // [R]
  const float* entropy = nullptr;   // [R]
};

struct PolicyLossOutputs {
  float* grad_logprobs = nullptr;  // [R], d loss / d logprobs: the sum over a row's tokens
  float* grad_entropy = nullptr;   // [R], or null where nobody wants it
  double* metrics = nullptr;       // [kNumPolicyMetrics]
  bool accumulate = false;         // add to (or, extrema, combine with) what `metrics` holds
};

// The workspace holds partial sums of blocks of tokens, and values of sequences: results depend on
// neither threads nor grid. num_sequences is 0 but for kSequence.
namespace cpu {
int64_t PolicyLossWorkspaceBytes(int64_t num_tokens, int64_t num_sequences);
Status PolicyLoss(const PolicyLossParams& params, const PolicyLossInputs& inputs,
                  const PolicyLossOutputs& outputs, const Workspace& workspace,
                  const Execution& execution);
// out[s] = sum (or mean) over the tokens of sequence s of values * weights, [S] float32; weights
// may be null for ones. The mean divides by the number of tokens of nonzero weight, an empty
// sequence gives 0. Values of weight 0 are not read.
Status SequenceReduce(const float* values, const float* weights, const int64_t* sequence_offsets,
                      int64_t num_sequences, bool mean, float* out, const Execution& execution);
}  // namespace cpu

namespace cuda {
int64_t PolicyLossWorkspaceBytes(int64_t num_tokens, int64_t num_sequences);
Status PolicyLoss(const PolicyLossParams& params, const PolicyLossInputs& inputs,
                  const PolicyLossOutputs& outputs, const Workspace& workspace,
                  const Execution& execution);
Status SequenceReduce(const float* values, const float* weights, const int64_t* sequence_offsets,
                      int64_t num_sequences, bool mean, float* out, const Execution& execution);
}  // namespace cuda

}  // namespace tandem
