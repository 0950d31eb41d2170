// Operators of linear_loss.h, namespace `tandem`, through torch's stable ABI. Checks, memory and
// calls only; autograd formulas and fake kernels stand in rl/ops/linear_logprobs.py.
//
// The weight may be float32 beside 16-bit hidden states (a trainer's master weights): it is then
// cast once per call, and its gradient is that of the float32 weight.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <memory>
#include <optional>
#include <tuple>
#include <vector>

#include "csrc/bindings/backend.h"
#include "csrc/bindings/checks.h"
#include "csrc/bindings/policy_arguments.h"
#include "csrc/bindings/torch_gemm.h"
#include "csrc/loss/linear_loss.h"

namespace tandem {
namespace {

using torch::stable::detail::StableLibrary;
using OptionalTensor = std::optional<Tensor>;

// What all operators of this file say beside their tensors.
struct LinearOptions {
  double temperature;
  std::optional<int64_t> vocab_size;
  int64_t chunk_rows;
  bool float32_logits;
};

Tensor NewFloats(const Tensor& like, int64_t count) {
  return torch::stable::new_empty(like, {count}, ScalarType::Float);
}

Tensor NewWeightGradient(const Tensor& weight) {
  Check(weight.dim() == 2, "weight: want 2 dimensions, got ", weight.dim());
  return torch::stable::new_empty(weight, {weight.size(0), weight.size(1)}, ScalarType::Float);
}

// What is written while `other` is still read must not be the same memory. Matrices with gaps may
// lie in each other's, and are taken unless they begin together.
void CheckApart(const Tensor& written, const Tensor& other, const char* name) {
  if (written.numel() == 0 || other.numel() == 0) return;
  const auto begin = reinterpret_cast<uintptr_t>(written.const_data_ptr());
  const auto other_begin = reinterpret_cast<uintptr_t>(other.const_data_ptr());
  const auto bytes = [](const Tensor& tensor) {
    return static_cast<uintptr_t>(tensor.numel()) * tensor.element_size();
  };
  const bool are_dense = written.is_contiguous() && other.is_contiguous();
  const bool overlap = begin < other_begin + bytes(other) && other_begin < begin + bytes(written);
  Check(are_dense ? !overlap : begin != other_begin, "grad_weight: want memory apart from ", name);
}

// The call's arguments as csrc takes them, and the tensors that stand behind them.
class LinearCall {
 public:
  LinearCall(const Tensor& hidden, const Tensor& weight, const Tensor& targets,
             const LinearOptions& options, int64_t num_tokens = 0)
      : hidden_(hidden), weight_(Cast(weight, hidden)), backend_(BackendOf(hidden)) {
    rows_.hidden = MatrixOf(hidden, "hidden");
    rows_.weight = MatrixOf(weight_, "weight");
    rows_.targets = IntegersOf(targets, rows_.hidden.rows, hidden, "targets");
    rows_.temperature = PositiveFloat(options.temperature, "temperature");
    if (options.vocab_size.has_value()) {
      Check(*options.vocab_size > 0, "vocab_size: want a number > 0, got ", *options.vocab_size);
      rows_.vocab_size = *options.vocab_size;
    }
    plan_ = {options.chunk_rows, options.float32_logits ? DType::kFloat32 : rows_.hidden.dtype};
    Check(plan_.chunk_rows > 0, "chunk_rows: want a number > 0, got ", plan_.chunk_rows);
    memory_ =
        NewWorkspace(hidden, LinearWorkspaceBytes(rows_, plan_, backend_.kernels, num_tokens));
    MakeGemm();
  }

  int64_t num_rows() const { return rows_.hidden.rows; }
  const LinearRows& rows() const { return rows_; }
  const LinearPlan& plan() const { return plan_; }
  Workspace workspace() const { return WorkspaceOf(*memory_); }
  LinearBackend backend() const {
    return {&backend_.kernels, gemm_.get(), backend_.execution, hidden_.is_cpu()};
  }
  Tensor NewRows() const { return NewFloats(hidden_, num_rows()); }

  // grad_weight: [V, H] float32.
  LinearGradients Gradients(const Tensor& grad_hidden, const Tensor& grad_weight,
                            bool accumulate) const {
    CheckDevice(grad_weight, hidden_, "grad_weight");
    CheckShape(grad_weight, rows_.weight.rows, rows_.weight.cols, "grad_weight");
    Check(grad_weight.scalar_type() == ScalarType::Float, "grad_weight: want float32, got ",
          NameOf(grad_weight.scalar_type()));
    CheckApart(grad_weight, weight_, "weight");
    CheckApart(grad_weight, hidden_, "hidden");
    return {MutableMatrixOf(grad_hidden, "grad_hidden"),
            MutableMatrixOf(grad_weight, "grad_weight"), accumulate};
  }

 private:
  static Tensor Cast(const Tensor& weight, const Tensor& hidden) {
    CheckDevice(weight, hidden, "weight");
    const ScalarType wanted = hidden.scalar_type();
    if (weight.scalar_type() == wanted) return weight;
    Check(weight.scalar_type() == ScalarType::Float,
          "weight: want float32 or the dtype of hidden, got ", NameOf(weight.scalar_type()));
    return torch::stable::to(weight, wanted);
  }

  void MakeGemm() {
    if (backend_.cuda == nullptr) {
      gemm_ = std::make_unique<TorchGemm>();
      return;
    }
    scratch_ = NewWorkspace(hidden_, backend_.cuda->gemm_scratch_bytes);
    Gemm* gemm = nullptr;
    RaiseUnlessOk(backend_.cuda->make_gemm(WorkspaceOf(*scratch_), &gemm));
    gemm_.reset(gemm);
  }

  const Tensor& hidden_;
  Tensor weight_;
  Backend backend_;
  LinearRows rows_;
  LinearPlan plan_;
  OptionalTensor memory_;
  OptionalTensor scratch_;
  std::unique_ptr<Gemm> gemm_;
};

TokenLogprobs Outputs(const Tensor& logprobs, const Tensor& lse, const Tensor& entropy) {
  return {logprobs.mutable_data_ptr<float>(), lse.mutable_data_ptr<float>(),
          entropy.mutable_data_ptr<float>()};
}

std::tuple<Tensor, Tensor, Tensor> LogprobsOp(const Tensor& hidden, const Tensor& weight,
                                              const Tensor& targets, double temperature,
                                              std::optional<int64_t> vocab_size, int64_t chunk_rows,
                                              bool float32_logits) {
  const LinearCall call(hidden, weight, targets,
                        {temperature, vocab_size, chunk_rows, float32_logits});
  Tensor logprobs = call.NewRows();
  Tensor entropy = call.NewRows();
  Tensor lse = call.NewRows();
  RaiseUnlessOk(LinearLogprobsForward(call.rows(), Outputs(logprobs, lse, entropy), call.plan(),
                                      call.workspace(), call.backend()));
  return {logprobs, entropy, lse};
}

Tensor LogprobsBackwardInPlaceOp(const Tensor& hidden, const Tensor& weight, const Tensor& targets,
                                 const Tensor& lse, const Tensor& entropy,
                                 OptionalTensor grad_logprobs, OptionalTensor grad_entropy,
                                 double temperature, std::optional<int64_t> vocab_size,
                                 int64_t chunk_rows, bool float32_logits, Tensor grad_weight,
                                 bool accumulate) {
  const LinearCall call(hidden, weight, targets,
                        {temperature, vocab_size, chunk_rows, float32_logits});
  const int64_t count = call.num_rows();
  const TokenLogprobGradients upstream = {
      FloatsOf(lse, count, hidden, "lse"), FloatsOf(entropy, count, hidden, "entropy"),
      FloatsOrNull(grad_logprobs, count, hidden, "grad_logprobs"),
      FloatsOrNull(grad_entropy, count, hidden, "grad_entropy")};
  Tensor grad_hidden = torch::stable::new_empty(hidden, {hidden.size(0), hidden.size(1)});
  RaiseUnlessOk(LinearLogprobsBackward(call.rows(), upstream,
                                       call.Gradients(grad_hidden, grad_weight, accumulate),
                                       call.plan(), call.workspace(), call.backend()));
  return grad_hidden;
}

std::tuple<Tensor, Tensor> LogprobsBackwardOp(const Tensor& hidden, const Tensor& weight,
                                              const Tensor& targets, const Tensor& lse,
                                              const Tensor& entropy, OptionalTensor grad_logprobs,
                                              OptionalTensor grad_entropy, double temperature,
                                              std::optional<int64_t> vocab_size, int64_t chunk_rows,
                                              bool float32_logits) {
  Tensor grad_weight = NewWeightGradient(weight);
  Tensor grad_hidden = LogprobsBackwardInPlaceOp(
      hidden, weight, targets, lse, entropy, grad_logprobs, grad_entropy, temperature, vocab_size,
      chunk_rows, float32_logits, grad_weight, false);
  return {grad_hidden, grad_weight};
}

// Offsets of the tokens where the host can read them: themselves on the CPU.
const int64_t* HostOffsets(const OptionalTensor& row_offsets, const OptionalTensor& host,
                           int64_t num_rows) {
  Check(row_offsets.has_value() || !host.has_value(),
        "host_row_offsets: want them with row_offsets only");
  if (!row_offsets.has_value()) return nullptr;
  if (!host.has_value()) {
    Check(row_offsets->is_cpu(), "host_row_offsets: want a copy of row_offsets on the CPU");
    return row_offsets->const_data_ptr<int64_t>();
  }
  Check(host->is_cpu(), "host_row_offsets: want a tensor on the CPU");
  return IntegersOf(*host, num_rows + 1, *host, "host_row_offsets");
}

std::tuple<Tensor, Tensor, Tensor, Tensor> PolicyLossInPlaceOp(
    const Tensor& hidden, const Tensor& weight, const Tensor& targets, double temperature,
    std::optional<int64_t> vocab_size, OptionalTensor prev_logprobs,
    OptionalTensor reference_logprobs, const Tensor& generation_logprobs, const Tensor& advantages,
    const Tensor& shares, const Tensor& weights, OptionalTensor nll_coefs,
    OptionalTensor row_offsets, OptionalTensor host_row_offsets, std::vector<int64_t> kinds,
    std::vector<double> numbers, int64_t chunk_rows, bool float32_logits, Tensor grad_weight,
    bool accumulate) {
  const PolicyLossParams params = ParamsOf(kinds, numbers);
  const LinearCall call(hidden, weight, targets,
                        {temperature, vocab_size, chunk_rows, float32_logits},
                        generation_logprobs.numel());
  LinearPolicyTokens tokens;
  tokens.tokens = TokensOf({prev_logprobs, reference_logprobs, generation_logprobs, advantages,
                            shares, weights, nll_coefs, row_offsets},
                           call.num_rows(), hidden);
  tokens.host_row_offsets = HostOffsets(row_offsets, host_row_offsets, call.num_rows());
  CheckOffsets(row_offsets, tokens.tokens.num_tokens, "row_offsets");
  CheckOffsets(host_row_offsets, tokens.tokens.num_tokens, "host_row_offsets");
  Tensor logprobs = call.NewRows();
  Tensor entropy = call.NewRows();
  Tensor metrics = torch::stable::new_empty(hidden, {kNumPolicyMetrics}, ScalarType::Double);
  Tensor grad_hidden = torch::stable::new_empty(hidden, {hidden.size(0), hidden.size(1)});
  const TokenLogprobs out = {logprobs.mutable_data_ptr<float>(), nullptr,
                             entropy.mutable_data_ptr<float>()};
  RaiseUnlessOk(LinearPolicyLoss(
      call.rows(), params, tokens, out, call.Gradients(grad_hidden, grad_weight, accumulate),
      metrics.mutable_data_ptr<double>(), call.plan(), call.workspace(), call.backend()));
  return {grad_hidden, logprobs, entropy, metrics};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> PolicyLossOp(
    const Tensor& hidden, const Tensor& weight, const Tensor& targets, double temperature,
    std::optional<int64_t> vocab_size, OptionalTensor prev_logprobs,
    OptionalTensor reference_logprobs, const Tensor& generation_logprobs, const Tensor& advantages,
    const Tensor& shares, const Tensor& weights, OptionalTensor nll_coefs,
    OptionalTensor row_offsets, OptionalTensor host_row_offsets, std::vector<int64_t> kinds,
    std::vector<double> numbers, int64_t chunk_rows, bool float32_logits) {
  Tensor grad_weight = NewWeightGradient(weight);
  const auto [grad_hidden, logprobs, entropy, metrics] = PolicyLossInPlaceOp(
      hidden, weight, targets, temperature, vocab_size, prev_logprobs, reference_logprobs,
      generation_logprobs, advantages, shares, weights, nll_coefs, row_offsets, host_row_offsets,
      kinds, numbers, chunk_rows, float32_logits, grad_weight, false);
  return {grad_hidden, grad_weight, logprobs, entropy, metrics};
}

void Implement(StableLibrary& library) {
  library.impl("linear_logprobs_fwd", TORCH_BOX(&LogprobsOp));
  library.impl("linear_logprobs_bwd", TORCH_BOX(&LogprobsBackwardOp));
  library.impl("linear_logprobs_bwd_", TORCH_BOX(&LogprobsBackwardInPlaceOp));
  library.impl("linear_policy_loss", TORCH_BOX(&PolicyLossOp));
  library.impl("linear_policy_loss_", TORCH_BOX(&PolicyLossInPlaceOp));
}

}  // namespace
}  // namespace tandem

#define TANDEM_LINEAR_ROWS "Tensor hidden, Tensor weight, Tensor targets, "
#define TANDEM_LINEAR_UPSTREAM \
  "Tensor lse, Tensor entropy, Tensor? grad_logprobs, Tensor? grad_entropy, "
#define TANDEM_LINEAR_SCALE "float temperature, int? vocab_size, "
#define TANDEM_LINEAR_TOKENS                                                                   \
  "Tensor? prev_logprobs, Tensor? reference_logprobs, Tensor generation_logprobs, "            \
  "Tensor advantages, Tensor shares, Tensor weights, Tensor? nll_coefs, Tensor? row_offsets, " \
  "Tensor? host_row_offsets, int[] kinds, float[] numbers, "
#define TANDEM_LINEAR_PLAN "int chunk_rows, bool float32_logits"
#define TANDEM_LINEAR_INTO ", Tensor(a!) grad_weight, bool accumulate"

STABLE_TORCH_LIBRARY_FRAGMENT(tandem, library) {
  library.def("linear_logprobs_fwd(" TANDEM_LINEAR_ROWS TANDEM_LINEAR_SCALE TANDEM_LINEAR_PLAN
              ") -> (Tensor, Tensor, Tensor)");
  library.def("linear_logprobs_bwd(" TANDEM_LINEAR_ROWS TANDEM_LINEAR_UPSTREAM
                  TANDEM_LINEAR_SCALE TANDEM_LINEAR_PLAN ") -> (Tensor, Tensor)");
  library.def("linear_logprobs_bwd_(" TANDEM_LINEAR_ROWS TANDEM_LINEAR_UPSTREAM TANDEM_LINEAR_SCALE
                  TANDEM_LINEAR_PLAN TANDEM_LINEAR_INTO ") -> Tensor");
  library.def("linear_policy_loss(" TANDEM_LINEAR_ROWS TANDEM_LINEAR_SCALE
                  TANDEM_LINEAR_TOKENS TANDEM_LINEAR_PLAN
              ") -> (Tensor, Tensor, Tensor, Tensor, Tensor)");
  library.def("linear_policy_loss_(" TANDEM_LINEAR_ROWS TANDEM_LINEAR_SCALE TANDEM_LINEAR_TOKENS
                  TANDEM_LINEAR_PLAN TANDEM_LINEAR_INTO ") -> (Tensor, Tensor, Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(tandem, CPU, library) { tandem::Implement(library); }
STABLE_TORCH_LIBRARY_IMPL(tandem, CUDA, library) { tandem::Implement(library); }
