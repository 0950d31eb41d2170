// Rows of logits, whole or a shard of the vocabulary, as every row kernel takes them.
#pragma once

#include <cstdint>
#include <limits>

#include "csrc/common/tensor_view.h"

namespace tandem {

inline constexpr int64_t kIgnoreIndex = -100;

struct LogitRows {
  ConstMatrixView logits;            // [N, V]: columns vocab_start ... vocab_start + V - 1
  const int64_t* targets = nullptr;  // [N], ids over the whole vocabulary, or ignore_index
  float temperature = 1.0f;          // > 0, a run-time argument: one kernel for all
  int64_t ignore_index = kIgnoreIndex;
  int64_t vocab_start = 0;
  // Columns of ids from here on are padding: they count as -inf, whatever they hold.
  int64_t vocab_size = std::numeric_limits<int64_t>::max();
  // [N] or null. A logit below its row's threshold (before the temperature) counts as -inf: the
  // cut of top-k / top-p sampling. Ties at the threshold stay.
  const float* thresholds = nullptr;
};

}  // namespace tandem
