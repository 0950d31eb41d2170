// Operators of row_stats.h and logits_threshold.h, namespace `tandem`, through torch's stable ABI:
// one library for every torch build from 2.10 on. Checks and calls only; autograd formulas and fake
// kernels stand in rl/ops/native_logprobs.py.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <optional>
#include <tuple>

#include "csrc/bindings/backend.h"
#include "csrc/bindings/checks.h"
#include "csrc/loss/logits_threshold.h"
#include "csrc/loss/row_stats.h"

namespace tandem {
namespace {

using OptionalTensor = std::optional<Tensor>;

// What all row operators say about their rows beside logits and targets.
struct RowOptions {
  double temperature;
  const OptionalTensor& thresholds;
  int64_t vocab_start;
  std::optional<int64_t> vocab_size;
};

LogitRows Rows(const Tensor& logits, const Tensor& targets, const RowOptions& options) {
  LogitRows rows;
  rows.logits = MatrixOf(logits, "logits");
  rows.targets = IntegersOf(targets, rows.logits.rows, logits, "targets");
  rows.temperature = PositiveFloat(options.temperature, "temperature");
  rows.thresholds = FloatsOrNull(options.thresholds, rows.logits.rows, logits, "thresholds");
  Check(options.vocab_start >= 0, "vocab_start: want a number >= 0, got ", options.vocab_start);
  rows.vocab_start = options.vocab_start;
  if (options.vocab_size.has_value()) {
    Check(*options.vocab_size > 0, "vocab_size: want a number > 0, got ", *options.vocab_size);
    rows.vocab_size = *options.vocab_size;
  }
  return rows;
}

Tensor NewFloats(const Tensor& like, int64_t count) {
  return torch::stable::new_empty(like, {count}, ScalarType::Float);
}

Tensor StatsOf(const LogitRows& rows, const Tensor& logits, const Backend& backend) {
  const int64_t count = rows.logits.rows;
  Tensor stats = torch::stable::new_empty(logits, {4, count}, ScalarType::Float);
  float* floats = stats.mutable_data_ptr<float>();
  const Tensor memory =
      NewWorkspace(logits, backend.kernels.logits_stats_workspace_bytes(count, rows.logits.cols));
  RaiseUnlessOk(backend.kernels.logits_stats(
      rows, {floats, floats + count, floats + 2 * count, floats + 3 * count}, WorkspaceOf(memory),
      backend.execution));
  return stats;
}

// stats: [num_shards, 4, N] or, of one shard, [4, N]; contiguous.
std::tuple<Tensor, Tensor, Tensor> Finish(const Tensor& stats, int64_t num_shards,
                                          const Tensor& targets, const Backend& backend) {
  const int64_t count = targets.size(0);
  const float* floats = stats.const_data_ptr<float>();
  const ShardStats shards = {floats,     floats + count, floats + 2 * count, floats + 3 * count,
                             num_shards, 4 * count};
  Tensor logprobs = NewFloats(stats, count);
  Tensor entropy = NewFloats(stats, count);
  Tensor lse = NewFloats(stats, count);
  RaiseUnlessOk(backend.kernels.stats_finish(
      shards, count, targets.const_data_ptr<int64_t>(), kIgnoreIndex,
      {logprobs.mutable_data_ptr<float>(), lse.mutable_data_ptr<float>(),
       entropy.mutable_data_ptr<float>()},
      backend.execution));
  return {logprobs, entropy, lse};
}

Tensor LogitsStatsOp(const Tensor& logits, const Tensor& targets, double temperature,
                     OptionalTensor thresholds, int64_t vocab_start,
                     std::optional<int64_t> vocab_size) {
  const LogitRows rows = Rows(logits, targets, {temperature, thresholds, vocab_start, vocab_size});
  return StatsOf(rows, logits, BackendOf(logits));
}

std::tuple<Tensor, Tensor, Tensor> StatsFinishOp(const Tensor& stats, const Tensor& targets) {
  Check(stats.scalar_type() == ScalarType::Float, "stats: want float32, got ",
        NameOf(stats.scalar_type()));
  Check(stats.dim() == 3 && stats.size(0) > 0 && stats.size(1) == 4,
        "stats: want [R, 4, N] with R > 0");
  Check(stats.is_contiguous(), "stats: want a contiguous tensor");
  IntegersOf(targets, stats.size(2), stats, "targets");
  return Finish(stats, stats.size(0), targets, BackendOf(stats));
}

std::tuple<Tensor, Tensor, Tensor> TokenLogprobsOp(const Tensor& logits, const Tensor& targets,
                                                   double temperature, OptionalTensor thresholds,
                                                   std::optional<int64_t> vocab_size) {
  LogitRows rows = Rows(logits, targets, {temperature, thresholds, 0, vocab_size});
  // No other shard can hold a target: the CPU kernels then refuse one that is not here.
  rows.vocab_size = std::min(rows.vocab_size, rows.logits.cols);
  const Backend backend = BackendOf(logits);
  return Finish(StatsOf(rows, logits, backend), 1, targets, backend);
}

void GradientInto(const Tensor& logits, const Tensor& targets,
                  const std::tuple<const Tensor&, const Tensor&>& lse_and_entropy,
                  const std::tuple<const OptionalTensor&, const OptionalTensor&>& upstream,
                  const RowOptions& options, const Tensor& grad_logits) {
  const LogitRows rows = Rows(logits, targets, options);
  const int64_t count = rows.logits.rows;
  const auto& [lse, entropy] = lse_and_entropy;
  const auto& [grad_logprobs, grad_entropy] = upstream;
  const TokenLogprobGradients gradients = {
      FloatsOf(lse, count, logits, "lse"), FloatsOf(entropy, count, logits, "entropy"),
      FloatsOrNull(grad_logprobs, count, logits, "grad_logprobs"),
      FloatsOrNull(grad_entropy, count, logits, "grad_entropy")};
  const MatrixView out = MutableMatrixOf(grad_logits, "logits");
  const Backend backend = BackendOf(logits);
  RaiseUnlessOk(backend.kernels.logits_gradient(rows, gradients, out, backend.execution));
}

void LogitsGradientInPlaceOp(Tensor logits, const Tensor& targets, const Tensor& lse,
                             const Tensor& entropy, OptionalTensor grad_logprobs,
                             OptionalTensor grad_entropy, double temperature,
                             OptionalTensor thresholds, int64_t vocab_start,
                             std::optional<int64_t> vocab_size) {
  GradientInto(logits, targets, {lse, entropy}, {grad_logprobs, grad_entropy},
               {temperature, thresholds, vocab_start, vocab_size}, logits);
}

Tensor LogitsGradientOp(const Tensor& logits, const Tensor& targets, const Tensor& lse,
                        const Tensor& entropy, OptionalTensor grad_logprobs,
                        OptionalTensor grad_entropy, double temperature, OptionalTensor thresholds,
                        int64_t vocab_start, std::optional<int64_t> vocab_size) {
  MatrixOf(logits, "logits");
  Tensor grad_logits = torch::stable::new_empty(logits, {logits.size(0), logits.size(1)});
  GradientInto(logits, targets, {lse, entropy}, {grad_logprobs, grad_entropy},
               {temperature, thresholds, vocab_start, vocab_size}, grad_logits);
  return grad_logits;
}

Tensor TokenLogprobsBackwardOp(const Tensor& logits, const Tensor& targets, const Tensor& lse,
                               const Tensor& entropy, OptionalTensor grad_logprobs,
                               OptionalTensor grad_entropy, double temperature,
                               OptionalTensor thresholds, std::optional<int64_t> vocab_size) {
  return LogitsGradientOp(logits, targets, lse, entropy, grad_logprobs, grad_entropy, temperature,
                          thresholds, 0, vocab_size);
}

void TokenLogprobsBackwardInPlaceOp(Tensor logits, const Tensor& targets, const Tensor& lse,
                                    const Tensor& entropy, OptionalTensor grad_logprobs,
                                    OptionalTensor grad_entropy, double temperature,
                                    OptionalTensor thresholds, std::optional<int64_t> vocab_size) {
  LogitsGradientInPlaceOp(logits, targets, lse, entropy, grad_logprobs, grad_entropy, temperature,
                          thresholds, 0, vocab_size);
}

Tensor LogitsThresholdOp(const Tensor& logits, int64_t top_k, double top_p, double temperature) {
  const ConstMatrixView view = MatrixOf(logits, "logits");
  Check(top_k >= 0, "top_k: want a number >= 0, got ", top_k);
  Check(top_p > 0 && top_p <= 1, "top_p: want a number in (0, 1], got ", top_p);
  const ThresholdParams params = {top_k, static_cast<float>(top_p),
                                  PositiveFloat(temperature, "temperature")};
  const Backend backend = BackendOf(logits);
  const Tensor memory =
      NewWorkspace(logits, backend.kernels.logits_threshold_workspace_bytes(view.rows, view.cols));
  Tensor thresholds = NewFloats(logits, view.rows);
  RaiseUnlessOk(backend.kernels.logits_threshold(view, params, thresholds.mutable_data_ptr<float>(),
                                                 WorkspaceOf(memory), backend.execution));
  return thresholds;
}

#define TANDEM_GRADIENT_ARGUMENTS                                       \
  "Tensor targets, Tensor lse, Tensor entropy, Tensor? grad_logprobs, " \
  "Tensor? grad_entropy, float temperature, Tensor? thresholds=None, "

void Implement(torch::stable::detail::StableLibrary& library) {
  library.impl("token_logprobs_fwd", TORCH_BOX(&TokenLogprobsOp));
  library.impl("token_logprobs_bwd", TORCH_BOX(&TokenLogprobsBackwardOp));
  library.impl("token_logprobs_bwd_", TORCH_BOX(&TokenLogprobsBackwardInPlaceOp));
  library.impl("logits_stats", TORCH_BOX(&LogitsStatsOp));
  library.impl("stats_finish", TORCH_BOX(&StatsFinishOp));
  library.impl("logits_gradient", TORCH_BOX(&LogitsGradientOp));
  library.impl("logits_gradient_", TORCH_BOX(&LogitsGradientInPlaceOp));
  library.impl("logits_threshold", TORCH_BOX(&LogitsThresholdOp));
}

}  // namespace
}  // namespace tandem

// The one place where the namespace is defined; other files add to it (_FRAGMENT).
STABLE_TORCH_LIBRARY(tandem, library) {
  library.def(
      "token_logprobs_fwd(Tensor logits, Tensor targets, float temperature, "
      "Tensor? thresholds=None, int? vocab_size=None) -> (Tensor, Tensor, Tensor)");
  library.def("token_logprobs_bwd(Tensor logits, " TANDEM_GRADIENT_ARGUMENTS
              "int? vocab_size=None) -> Tensor");
  library.def("token_logprobs_bwd_(Tensor(a!) logits, " TANDEM_GRADIENT_ARGUMENTS
              "int? vocab_size=None) -> ()");
  library.def(
      "logits_stats(Tensor logits, Tensor targets, float temperature, Tensor? thresholds=None, "
      "int vocab_start=0, int? vocab_size=None) -> Tensor");
  library.def("stats_finish(Tensor stats, Tensor targets) -> (Tensor, Tensor, Tensor)");
  library.def("logits_gradient(Tensor logits, " TANDEM_GRADIENT_ARGUMENTS
              "int vocab_start=0, int? vocab_size=None) -> Tensor");
  library.def("logits_gradient_(Tensor(a!) logits, " TANDEM_GRADIENT_ARGUMENTS
              "int vocab_start=0, int? vocab_size=None) -> ()");
  library.def(
      "logits_threshold(Tensor logits, int top_k, float top_p, float temperature) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(tandem, CPU, library) { tandem::Implement(library); }
STABLE_TORCH_LIBRARY_IMPL(tandem, CUDA, library) { tandem::Implement(library); }
