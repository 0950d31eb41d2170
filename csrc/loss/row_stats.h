// Log-probability of one target token per row of logits, and the entropy of the row, in three
// steps, so that a vocabulary can be sharded between the first and the second:
//
//   LogitsStats     one read of a shard's logits            -> 16 bytes per row
//   (all-gather of those over the shards; none for a whole vocabulary)
//   StatsFinish     merge in the order of the shards        -> logprob, lse, entropy
//   LogitsGradient  one read and one write of the logits    -> gradient, in place if wanted
//
// With z = x / temperature, p = softmax(z) over the whole vocabulary, H = -sum_j p_j log p_j:
//   logprob = z[target] - lse          lse = log sum_j exp(z_j)
//   d loss / d x_j = (g * (1[j = target] - p_j) - h * p_j * (log p_j + H)) / temperature
// for upstream gradients g (of logprob) and h (of entropy).
//
// Statistics are float32 whatever the logits' dtype. The entropy is log s - t / s with the shifted
// sum t = sum (z - m) e^(z - m), which keeps its digits when logits are large. Every row is reduced
// in one fixed order: results depend neither on the number of threads nor on the size of the grid.
//
// Special values:
// - A target equal to ignore_index: logprob 0; entropy and lse still those of the row; the gradient
//   row is exactly 0.
// - A logit of -inf, below its threshold, or in a padded column: probability and gradient exactly
//   0; as the target, logprob -inf.
// - A target that no shard holds: logprob -inf. (The CPU backend refuses it where it can know.)
// - A whole row of -inf, or a shard without columns: the empty element of the merge. If all shards
//   are empty: lse -inf, logprob and entropy NaN (the caller's error, left visible).
// - A logit of NaN or +inf: logprob, entropy and lse NaN.
// - g == 0 and h == 0: the gradient row is exactly 0, whatever the logits hold.
#pragma once

#include <cstdint>

#include "csrc/common/execution.h"
#include "csrc/common/status.h"
#include "csrc/common/tensor_view.h"
#include "csrc/loss/logit_rows.h"

namespace tandem {

// All [N] float32. Of an empty row: {-inf, 0, 0}.
struct RowStats {
  float* max = nullptr;      // m = max_j z_j
  float* sum = nullptr;      // s = sum_j e^(z_j - m)
  float* shifted = nullptr;  // t = sum_j (z_j - m) e^(z_j - m)
  float* target = nullptr;   // z[target]; -inf where the target is not in this shard
};

// The statistics of R shards, rank after rank: those of rank r start at r * shard_stride floats.
struct ShardStats {
  const float* max = nullptr;
  const float* sum = nullptr;
  const float* shifted = nullptr;
  const float* target = nullptr;
  int64_t num_shards = 1;
  int64_t shard_stride = 0;
};

// All [N] float32; entropy may be null.
struct TokenLogprobs {
  float* logprobs = nullptr;
  float* lse = nullptr;
  float* entropy = nullptr;
};

// All [N] float32.
struct TokenLogprobGradients {
  const float* lse = nullptr;            // over the whole vocabulary
  const float* entropy = nullptr;        // the same; may be null when grad_entropy is
  const float* grad_logprobs = nullptr;  // or null for zeros
  const float* grad_entropy = nullptr;   // or null for zeros
};

// One backend's row kernels; workspace queries first.
namespace cpu {
int64_t LogitsStatsWorkspaceBytes(int64_t rows, int64_t cols);
Status LogitsStats(const LogitRows& rows, const RowStats& stats, const Workspace& workspace,
                   const Execution& execution);
Status StatsFinish(const ShardStats& stats, int64_t rows, const int64_t* targets,
                   int64_t ignore_index, const TokenLogprobs& out, const Execution& execution);
// grad_logits has the shape of rows.logits. With the same dtype it may be the same memory: each
// element is read before it is overwritten. From float32 logits it may also be of a 16-bit dtype,
// apart in memory: what a product in that dtype wants.
Status LogitsGradient(const LogitRows& rows, const TokenLogprobGradients& gradients,
                      const MatrixView& grad_logits, const Execution& execution);
}  // namespace cpu

namespace cuda {
int64_t LogitsStatsWorkspaceBytes(int64_t rows, int64_t cols);
Status LogitsStats(const LogitRows& rows, const RowStats& stats, const Workspace& workspace,
                   const Execution& execution);
Status StatsFinish(const ShardStats& stats, int64_t rows, const int64_t* targets,
                   int64_t ignore_index, const TokenLogprobs& out, const Execution& execution);
Status LogitsGradient(const LogitRows& rows, const TokenLogprobGradients& gradients,
                      const MatrixView& grad_logits, const Execution& execution);
}  // namespace cuda

}  // namespace tandem
