// Log-probability of one target token per row of a logits matrix, and the entropy of the row,
// fused: one read of the logits forward, one read and one write backward, no [rows, cols]
// temporary.
//
// With z = logits / temperature, p = softmax(z) and H = -sum_j p_j log p_j:
//   logprob = z[target] - lse          lse = log sum_j exp(z_j)
//   d loss / d logits_j = (g * (1[j = target] - p_j) - h * p_j * (log p_j + H)) / temperature
// for upstream gradients g (of logprob) and h (of entropy).
//
// Statistics are float32 whatever the logits' dtype, and the entropy uses shifted sums, so it keeps
// its digits when logits are large. Every row is reduced in one fixed order: results do not depend
// on the number of threads.
//
// Special values:
// - A target equal to ignore_index: logprob 0; entropy and lse still those of the row; the gradient
//   row is exactly 0.
// - A logit of -inf: probability and gradient exactly 0; as the target, logprob -inf.
// - A whole row of -inf: lse -inf; logprob and entropy NaN (the caller's error, left visible).
// - A logit of NaN or +inf: logprob, entropy and lse NaN.
// - g == 0 and h == 0: the gradient row is exactly 0, whatever the logits hold.
#pragma once

#include <cstdint>

#include "csrc/common/parallel_for.h"
#include "csrc/common/status.h"
#include "csrc/common/tensor_view.h"

namespace tandem {

inline constexpr int64_t kIgnoreIndex = -100;

struct TokenLogprobRows {
  ConstMatrixView logits;            // [N, V]
  const int64_t* targets = nullptr;  // [N], each in [0, V) or ignore_index
  float temperature = 1.0f;          // > 0
  int64_t ignore_index = kIgnoreIndex;
};

struct TokenLogprobOutputs {
  float* logprobs = nullptr;  // [N]
  float* entropy = nullptr;   // [N]
  float* lse = nullptr;       // [N], kept for the backward
};

struct TokenLogprobGradients {
  const float* lse = nullptr;            // [N], of the forward
  const float* entropy = nullptr;        // [N], of the forward
  const float* grad_logprobs = nullptr;  // [N], or null for zeros
  const float* grad_entropy = nullptr;   // [N], or null for zeros
};

Status TokenLogprobForward(const TokenLogprobRows& rows, const TokenLogprobOutputs& outputs,
                           const ParallelFor& parallel);

// grad_logits has the shape and dtype of rows.logits and may be the same memory: each element is
// read before it is overwritten.
Status TokenLogprobBackward(const TokenLogprobRows& rows, const TokenLogprobGradients& gradients,
                            const MatrixView& grad_logits, const ParallelFor& parallel);

}  // namespace tandem
