// What both backends ask of the arguments of PolicyLoss before they run. It looks at no tensor.
#pragma once

#include "csrc/common/execution.h"
#include "csrc/common/status.h"
#include "csrc/loss/policy_loss.h"

namespace tandem {

inline Status CheckColumns(const PolicyLossInputs& inputs) {
  const PolicyLossTokens& tokens = inputs.tokens;
  if (tokens.num_tokens < 0 || inputs.num_rows < 0) {
    return InvalidArgument("num_tokens, num_rows: want at least 0, got %lld and %lld",
                           static_cast<long long>(tokens.num_tokens),
                           static_cast<long long>(inputs.num_rows));
  }
  if (tokens.row_offsets == nullptr && tokens.num_tokens != inputs.num_rows) {
    return InvalidArgument(
        "num_tokens: want the number of rows, %lld, without row_offsets, got %lld",
        static_cast<long long>(inputs.num_rows), static_cast<long long>(tokens.num_tokens));
  }
  if (inputs.num_rows == 0 && tokens.num_tokens != 0) {
    return InvalidArgument("num_rows: want at least 1 for %lld tokens",
                           static_cast<long long>(tokens.num_tokens));
  }
  const bool has_columns = tokens.generation_logprobs != nullptr && tokens.advantages != nullptr &&
                           tokens.shares != nullptr && tokens.weights != nullptr &&
                           inputs.logprobs != nullptr && inputs.entropy != nullptr;
  if (tokens.num_tokens > 0 && !has_columns) {
    return InvalidArgument(
        "logprobs, entropy, generation_logprobs, advantages, shares, weights: none may be null");
  }
  return OkStatus();
}

inline Status CheckSequences(const PolicyLossParams& params, const PolicyLossTokens& tokens) {
  if (params.ratio != RatioKind::kSequence) return OkStatus();
  if (tokens.row_offsets != nullptr) {
    return InvalidArgument("row_offsets: want none with ratios of sequences: rows are tokens");
  }
  if (tokens.num_sequences < 0 || (tokens.num_sequences == 0 && tokens.num_tokens > 0)) {
    return InvalidArgument("num_sequences: want at least 1 with ratios of sequences, got %lld",
                           static_cast<long long>(tokens.num_sequences));
  }
  if (tokens.num_sequences > 0 &&
      (tokens.sequence_offsets == nullptr || tokens.sequence_weights == nullptr)) {
    return InvalidArgument(
        "sequence_offsets, sequence_weights: want both with ratios of sequences");
  }
  return OkStatus();
}

inline Status CheckPolicyLoss(const PolicyLossParams& params, const PolicyLossInputs& inputs,
                              const PolicyLossOutputs& outputs, const Workspace& workspace,
                              int64_t workspace_bytes) {
  if (Status status = CheckColumns(inputs); !status.ok()) return status;
  if (Status status = CheckSequences(params, inputs.tokens); !status.ok()) return status;
  if (outputs.metrics == nullptr || (inputs.num_rows > 0 && outputs.grad_logprobs == nullptr)) {
    return InvalidArgument("metrics, grad_logprobs: neither may be null");
  }
  if (workspace.data == nullptr || workspace.bytes < workspace_bytes) {
    return InvalidArgument("workspace: want %lld bytes, got %lld",
                           static_cast<long long>(workspace_bytes),
                           static_cast<long long>(workspace.bytes));
  }
  return OkStatus();
}

inline Status CheckSequenceReduce(const int64_t* sequence_offsets, int64_t num_sequences,
                                  const float* out) {
  if (num_sequences < 0) {
    return InvalidArgument("num_sequences: want at least 0, got %lld",
                           static_cast<long long>(num_sequences));
  }
  // An empty column may have no memory.
  if (num_sequences > 0 && (sequence_offsets == nullptr || out == nullptr)) {
    return InvalidArgument("sequence_offsets, out: neither may be null");
  }
  return OkStatus();
}

}  // namespace tandem
