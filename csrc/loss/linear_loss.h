// The last layer and the loss behind it without the [N, V] logits: hidden states are multiplied by
// the head in chunks of rows, and a chunk's logits live in the workspace only.
//
//   LinearLogprobsForward    hidden, weight -> logprobs, lse, entropy          2 N V H operations
//   LinearLogprobsBackward   recomputes a chunk's logits, then both gradients  6 N V H
//   LinearPolicyLoss         loss and both gradients in one pass               6 N V H
//
// One pass is possible because a token-level loss needs nothing of other tokens. A ratio of whole
// sequences (RatioKind::kSequence) does: it takes the first two.
//
// The gradient of the weight is float32 and accumulates, so that a trainer can let it run straight
// into its own buffer. Chunks are walked in order: results do not depend on the machine's width.
#pragma once

#include <cstdint>

#include "csrc/common/execution.h"
#include "csrc/common/gemm.h"
#include "csrc/common/status.h"
#include "csrc/common/tensor_view.h"
#include "csrc/loss/loss_kernels.h"

namespace tandem {

struct LinearRows {
  ConstMatrixView hidden;            // [N, H]
  ConstMatrixView weight;            // [V, H], dtype of hidden
  const int64_t* targets = nullptr;  // [N]
  float temperature = 1.0f;
  int64_t ignore_index = kIgnoreIndex;
  // Rows of weight from here on are padding: what they hold does not matter.
  int64_t vocab_size = std::numeric_limits<int64_t>::max();
};

// How a call is run.
struct LinearPlan {
  int64_t chunk_rows = 0;  // rows whose logits exist at a time
  // dtype of the chunk's logits: float32 keeps the digits that bfloat16 would round away before the
  // softmax (2^-9 of a logit), and needs a second slab for the gradient, which is multiplied in the
  // dtype of hidden; the dtype of hidden halves the traffic and needs one slab.
  DType logits_dtype = DType::kFloat32;
};

// Both gradients of a linear layer.
struct LinearGradients {
  MatrixView hidden;       // [N, H], dtype of rows.hidden; overwritten
  MatrixView weight;       // [V, H] float32
  bool accumulate = true;  // add to what weight holds; false: it is overwritten, and not read
};

// A backend: its kernels, its matrix product, and where to run.
struct LinearBackend {
  const LossKernels* kernels = nullptr;
  Gemm* gemm = nullptr;
  Execution execution;
  // Whether its memory can be read here. Chunks without any gradient are then found, and their
  // products left out, as are rows without gradient whose hidden state is not finite; results are
  // the same where hidden states are finite. (Elsewhere such a row makes the gradient of the weight
  // NaN: leave it out of the call.)
  bool is_host_memory = false;
};

// The size of chunks is the caller's choice: from 4096 to 8192 rows on devices, where the float32
// gradient of the weight crosses memory once per chunk; on CPUs the slab should stay small.
// num_tokens: those of LinearPolicyLoss, 0 for the other functions.
int64_t LinearWorkspaceBytes(const LinearRows& rows, const LinearPlan& plan,
                             const LossKernels& kernels, int64_t num_tokens = 0);

Status LinearLogprobsForward(const LinearRows& rows, const TokenLogprobs& out,
                             const LinearPlan& plan, const Workspace& workspace,
                             const LinearBackend& backend);

Status LinearLogprobsBackward(const LinearRows& rows, const TokenLogprobGradients& upstream,
                              const LinearGradients& gradients, const LinearPlan& plan,
                              const Workspace& workspace, const LinearBackend& backend);

// tokens.row_offsets points to memory of the backend, and is also needed here on the host to cut
// chunks: host_row_offsets [N + 1], or null when row_offsets is.
struct LinearPolicyTokens {
  PolicyLossTokens tokens;
  const int64_t* host_row_offsets = nullptr;
};

// logprobs, lse and entropy [N] are written too where they are wanted (not null); metrics
// [kNumPolicyMetrics] are overwritten.
Status LinearPolicyLoss(const LinearRows& rows, const PolicyLossParams& params,
                        const LinearPolicyTokens& tokens, const TokenLogprobs& out,
                        const LinearGradients& gradients, double* metrics, const LinearPlan& plan,
                        const Workspace& workspace, const LinearBackend& backend);

}  // namespace tandem
