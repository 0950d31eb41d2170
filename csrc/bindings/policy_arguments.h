// The policy loss's tokens and parameters as operators take them: one argument per column in the
// order of PolicyLossTokens, and two lists of numbers (rl/ops/policy_loss.py: kinds, numbers).
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "csrc/bindings/checks.h"
#include "csrc/loss/policy_loss.h"

namespace tandem {

// Columns [T] over rows [R]; those of sequences are not here.
struct PolicyColumns {
  const std::optional<Tensor>& prev_logprobs;
  const std::optional<Tensor>& reference_logprobs;
  const Tensor& generation_logprobs;
  const Tensor& advantages;
  const Tensor& shares;
  const Tensor& weights;
  const std::optional<Tensor>& nll_coefs;
  const std::optional<Tensor>& row_offsets;
};

inline PolicyLossTokens TokensOf(const PolicyColumns& columns, int64_t num_rows,
                                 const Tensor& like) {
  PolicyLossTokens tokens;
  tokens.row_offsets = IntegersOrNull(columns.row_offsets, num_rows + 1, like, "row_offsets");
  const int64_t count =
      tokens.row_offsets == nullptr ? num_rows : columns.generation_logprobs.numel();
  tokens.num_tokens = count;
  tokens.prev_logprobs = FloatsOrNull(columns.prev_logprobs, count, like, "prev_logprobs");
  tokens.reference_logprobs =
      FloatsOrNull(columns.reference_logprobs, count, like, "reference_logprobs");
  tokens.generation_logprobs =
      FloatsOf(columns.generation_logprobs, count, like, "generation_logprobs");
  tokens.advantages = FloatsOf(columns.advantages, count, like, "advantages");
  tokens.shares = FloatsOf(columns.shares, count, like, "shares");
  tokens.weights = FloatsOf(columns.weights, count, like, "weights");
  tokens.nll_coefs = FloatsOrNull(columns.nll_coefs, count, like, "nll_coefs");
  return tokens;
}

// Offsets decide about addresses. They are looked at where that costs no wait: on the CPU.
inline void CheckOffsets(const std::optional<Tensor>& offsets, int64_t last, const char* name) {
  if (!offsets.has_value() || !offsets->is_cpu()) return;
  const int64_t* values = offsets->const_data_ptr<int64_t>();
  const int64_t count = offsets->numel();
  Check(values[0] == 0 && values[count - 1] == last, name, ": want offsets from 0 to ", last,
        ", got ", values[0], " to ", values[count - 1]);
  for (int64_t i = 1; i < count; ++i) {
    Check(values[i - 1] <= values[i], name, ": want offsets that do not decrease, got ",
          values[i - 1], " before ", values[i]);
  }
}

template <typename Enum>
Enum KindOf(int64_t value, Enum last, const char* name) {
  Check(value >= 0 && value <= static_cast<int64_t>(last), name, ": want 0 ... ",
        static_cast<int64_t>(last), ", got ", value);
  return static_cast<Enum>(value);
}

inline PolicyLossParams ParamsOf(const std::vector<int64_t>& kinds,
                                 const std::vector<double>& numbers) {
  Check(kinds.size() == 5, "kinds: want 5 numbers, got ", kinds.size());
  Check(numbers.size() == 9, "numbers: want 9 numbers, got ", numbers.size());
  const auto number = [&](size_t i) { return static_cast<float>(numbers[i]); };
  PolicyLossParams params;
  params.ratio = KindOf(kinds[0], RatioKind::kSequence, "ratio");
  params.surrogate = KindOf(kinds[1], SurrogateKind::kUnclipped, "surrogate");
  params.correction = KindOf(kinds[2], CorrectionKind::kIcePop, "correction");
  params.kl = KindOf(kinds[3], KlKind::kK3, "kl");
  params.kl_importance_weight = kinds[4] != 0;
  params.clip_low = number(0);
  params.clip_high = number(1);
  params.dual_clip = number(2);
  params.correction_low = number(3);
  params.correction_high = number(4);
  params.kl_coef = number(5);
  params.kl_input_clamp = number(6);
  params.kl_output_clamp = number(7);
  params.entropy_coef = number(8);
  return params;
}

}  // namespace tandem
