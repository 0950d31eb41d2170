// Operators of policy_loss.h, namespace `tandem`, through torch's stable ABI. Checks, memory and
// calls only; autograd formulas and fake kernels stand in rl/ops/policy_loss.py.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <tuple>
#include <vector>

#include "csrc/bindings/backend.h"
#include "csrc/bindings/checks.h"
#include "csrc/bindings/policy_arguments.h"
#include "csrc/loss/policy_loss.h"

namespace tandem {
namespace {

using torch::stable::detail::StableLibrary;
using OptionalTensor = std::optional<Tensor>;

int64_t NumSequences(const OptionalTensor& sequence_offsets) {
  if (!sequence_offsets.has_value()) return 0;
  Check(sequence_offsets->dim() == 1 && sequence_offsets->numel() > 0,
        "sequence_offsets: want [S + 1]");
  return sequence_offsets->numel() - 1;
}

std::tuple<Tensor, Tensor, Tensor> PolicyLossOp(
    const Tensor& logprobs, const Tensor& entropy, OptionalTensor prev_logprobs,
    OptionalTensor reference_logprobs, const Tensor& generation_logprobs, const Tensor& advantages,
    const Tensor& shares, const Tensor& weights, OptionalTensor nll_coefs,
    OptionalTensor row_offsets, OptionalTensor sequence_offsets, OptionalTensor sequence_weights,
    std::vector<int64_t> kinds, std::vector<double> numbers) {
  const PolicyLossParams params = ParamsOf(kinds, numbers);
  PolicyLossInputs inputs;
  inputs.num_rows = logprobs.numel();
  inputs.logprobs = FloatsOf(logprobs, inputs.num_rows, logprobs, "logprobs");
  inputs.entropy = FloatsOf(entropy, inputs.num_rows, logprobs, "entropy");
  inputs.tokens = TokensOf({prev_logprobs, reference_logprobs, generation_logprobs, advantages,
                            shares, weights, nll_coefs, row_offsets},
                           inputs.num_rows, logprobs);
  PolicyLossTokens& tokens = inputs.tokens;
  const int64_t count = NumSequences(sequence_offsets);
  tokens.sequence_offsets =
      IntegersOrNull(sequence_offsets, count + 1, logprobs, "sequence_offsets");
  tokens.sequence_weights = FloatsOrNull(sequence_weights, count, logprobs, "sequence_weights");
  tokens.num_sequences = count;
  CheckOffsets(row_offsets, tokens.num_tokens, "row_offsets");
  CheckOffsets(sequence_offsets, tokens.num_tokens, "sequence_offsets");

  const Backend backend = BackendOf(logprobs);
  const Tensor memory =
      NewWorkspace(logprobs, backend.kernels.policy_loss_workspace_bytes(tokens.num_tokens, count));
  Tensor grad_logprobs = torch::stable::new_empty(logprobs, {inputs.num_rows}, ScalarType::Float);
  Tensor grad_entropy = torch::stable::new_empty(logprobs, {inputs.num_rows}, ScalarType::Float);
  Tensor metrics = torch::stable::new_empty(logprobs, {kNumPolicyMetrics}, ScalarType::Double);
  PolicyLossOutputs outputs;
  outputs.grad_logprobs = grad_logprobs.mutable_data_ptr<float>();
  outputs.grad_entropy = grad_entropy.mutable_data_ptr<float>();
  outputs.metrics = metrics.mutable_data_ptr<double>();
  RaiseUnlessOk(
      backend.kernels.policy_loss(params, inputs, outputs, WorkspaceOf(memory), backend.execution));
  return {grad_logprobs, grad_entropy, metrics};
}

Tensor SequenceReduceOp(const Tensor& values, OptionalTensor weights,
                        const Tensor& sequence_offsets, bool mean) {
  const int64_t num_tokens = values.numel();
  const int64_t count = NumSequences(sequence_offsets);
  const float* columns = FloatsOf(values, num_tokens, values, "values");
  const float* factors = FloatsOrNull(weights, num_tokens, values, "weights");
  const int64_t* offsets = IntegersOf(sequence_offsets, count + 1, values, "sequence_offsets");
  CheckOffsets(sequence_offsets, num_tokens, "sequence_offsets");
  const Backend backend = BackendOf(values);
  Tensor out = torch::stable::new_empty(values, {count}, ScalarType::Float);
  RaiseUnlessOk(backend.kernels.sequence_reduce(columns, factors, offsets, count, mean,
                                                out.mutable_data_ptr<float>(), backend.execution));
  return out;
}

void Implement(StableLibrary& library) {
  library.impl("policy_loss", TORCH_BOX(&PolicyLossOp));
  library.impl("sequence_reduce", TORCH_BOX(&SequenceReduceOp));
}

}  // namespace
}  // namespace tandem

STABLE_TORCH_LIBRARY_FRAGMENT(tandem, library) {
  library.def(
      "policy_loss(Tensor logprobs, Tensor entropy, Tensor? prev_logprobs, "
      "Tensor? reference_logprobs, Tensor generation_logprobs, Tensor advantages, Tensor shares, "
      "Tensor weights, Tensor? nll_coefs, Tensor? row_offsets, Tensor? sequence_offsets, "
      "Tensor? sequence_weights, int[] kinds, float[] numbers) -> (Tensor, Tensor, Tensor)");
  library.def(
      "sequence_reduce(Tensor values, Tensor? weights, Tensor sequence_offsets, bool mean) "
      "-> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(tandem, CPU, library) { tandem::Implement(library); }
STABLE_TORCH_LIBRARY_IMPL(tandem, CUDA, library) { tandem::Implement(library); }
