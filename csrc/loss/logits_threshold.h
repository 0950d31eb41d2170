// The cut that top-k / top-p sampling makes in each row of logits, so that log-probabilities can be
// taken over the same support as the sampler's (see LogitRows::thresholds).
#pragma once

#include <cstdint>

#include "csrc/common/execution.h"
#include "csrc/common/status.h"
#include "csrc/common/tensor_view.h"

namespace tandem {

struct ThresholdParams {
  int64_t top_k = 0;         // 0 = off
  float top_p = 1.0f;        // in (0, 1]; 1 = off
  float temperature = 1.0f;  // > 0; top-p looks at softmax(logits / temperature)
};

// thresholds [N] float32: the smallest logit that stays, -inf where nothing is cut. top-k first,
// then top-p over what it left: the fewest largest logits whose probabilities reach top_p, at least
// one. Ties at the threshold stay, so more than k may. NaN logits are not looked at.
namespace cpu {
int64_t LogitsThresholdWorkspaceBytes(int64_t rows, int64_t cols);
Status LogitsThreshold(const ConstMatrixView& logits, const ThresholdParams& params,
                       float* thresholds, const Workspace& workspace, const Execution& execution);
}  // namespace cpu

namespace cuda {
int64_t LogitsThresholdWorkspaceBytes(int64_t rows, int64_t cols);
Status LogitsThreshold(const ConstMatrixView& logits, const ThresholdParams& params,
                       float* thresholds, const Workspace& workspace, const Execution& execution);
}  // namespace cuda

}  // namespace tandem
