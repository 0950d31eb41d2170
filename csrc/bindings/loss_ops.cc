// torch operators of csrc/loss, namespace `tandem`, through the stable ABI: one library for every
// torch build from 2.10 on. Checks and calls only; autograd formulas and fake kernels are
// registered by rl/core/native.py.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <tuple>

#include "csrc/common/parallel_for.h"
#include "csrc/common/status.h"
#include "csrc/common/tensor_view.h"
#include "csrc/loss/token_logprob.h"

namespace tandem {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// torch's own thread pool.
ParallelFor TorchParallelFor() {
  return {[](void*, int64_t count, int64_t grain, RangeBody body, void* context) {
            torch::stable::parallel_for(
                0, count, grain, [&](int64_t begin, int64_t end) { body(context, begin, end); });
          },
          nullptr};
}

void RaiseUnlessOk(const Status& status) { STD_TORCH_CHECK(status.ok(), status.message()); }

void CheckLogits(const Tensor& logits, const char* name) {
  STD_TORCH_CHECK(logits.is_cpu(), name, ": want a CPU tensor");
  STD_TORCH_CHECK(logits.dim() == 2, name, ": want [N, V], got ", logits.dim(), " dimensions");
  const ScalarType dtype = logits.scalar_type();
  STD_TORCH_CHECK(dtype == ScalarType::Float || dtype == ScalarType::BFloat16, name,
                  ": want float32 or bfloat16, got another dtype");
  STD_TORCH_CHECK(logits.size(1) <= 1 || logits.stride(1) == 1, name,
                  ": want adjacent columns (stride 1), got stride ", logits.stride(1));
}

// Rows that share memory can be read, not written.
void CheckDistinctRows(const Tensor& logits, const char* name) {
  STD_TORCH_CHECK(logits.size(0) <= 1 || logits.stride(0) >= logits.size(1), name,
                  ": want rows that do not overlap, got row stride ", logits.stride(0), " for ",
                  logits.size(1), " columns");
}

void CheckVector(const Tensor& vector, ScalarType dtype, const char* dtype_name, int64_t rows,
                 const char* name) {
  STD_TORCH_CHECK(vector.is_cpu(), name, ": want a CPU tensor");
  STD_TORCH_CHECK(vector.scalar_type() == dtype, name, ": want ", dtype_name);
  STD_TORCH_CHECK(vector.dim() == 1 && vector.size(0) == rows, name, ": want [N] with N = ", rows,
                  " (the rows of logits)");
  STD_TORCH_CHECK(vector.is_contiguous(), name, ": want a contiguous tensor");
}

DType DTypeOf(const Tensor& tensor) {
  return tensor.scalar_type() == ScalarType::Float ? DType::kFloat32 : DType::kBFloat16;
}

TokenLogprobRows Rows(const Tensor& logits, const Tensor& targets, double temperature) {
  CheckLogits(logits, "logits");
  CheckVector(targets, ScalarType::Long, "int64", logits.size(0), "targets");
  return {
      {logits.const_data_ptr(), logits.size(0), logits.size(1), logits.stride(0), DTypeOf(logits)},
      targets.const_data_ptr<int64_t>(),
      static_cast<float>(temperature)};
}

const float* FloatsOrNull(const std::optional<Tensor>& vector, int64_t rows, const char* name) {
  if (!vector.has_value()) return nullptr;
  CheckVector(*vector, ScalarType::Float, "float32", rows, name);
  return vector->const_data_ptr<float>();
}

std::tuple<Tensor, Tensor, Tensor> Forward(const Tensor& logits, const Tensor& targets,
                                           double temperature) {
  const TokenLogprobRows rows = Rows(logits, targets, temperature);
  const auto vector = [&] {
    return torch::stable::new_empty(logits, {logits.size(0)}, ScalarType::Float);
  };
  Tensor logprobs = vector();
  Tensor entropy = vector();
  Tensor lse = vector();
  RaiseUnlessOk(
      TokenLogprobForward(rows,
                          {logprobs.mutable_data_ptr<float>(), entropy.mutable_data_ptr<float>(),
                           lse.mutable_data_ptr<float>()},
                          TorchParallelFor()));
  return {logprobs, entropy, lse};
}

void BackwardInto(const Tensor& logits, const Tensor& targets, const Tensor& lse,
                  const Tensor& entropy, const std::optional<Tensor>& grad_logprobs,
                  const std::optional<Tensor>& grad_entropy, double temperature,
                  const Tensor& grad_logits) {
  const TokenLogprobRows rows = Rows(logits, targets, temperature);
  const int64_t count = logits.size(0);
  const TokenLogprobGradients gradients = {FloatsOrNull(lse, count, "lse"),
                                           FloatsOrNull(entropy, count, "entropy"),
                                           FloatsOrNull(grad_logprobs, count, "grad_logprobs"),
                                           FloatsOrNull(grad_entropy, count, "grad_entropy")};
  const MatrixView out = {grad_logits.mutable_data_ptr(), grad_logits.size(0), grad_logits.size(1),
                          grad_logits.stride(0), DTypeOf(grad_logits)};
  RaiseUnlessOk(TokenLogprobBackward(rows, gradients, out, TorchParallelFor()));
}

Tensor Backward(const Tensor& logits, const Tensor& targets, const Tensor& lse,
                const Tensor& entropy, std::optional<Tensor> grad_logprobs,
                std::optional<Tensor> grad_entropy, double temperature) {
  CheckLogits(logits, "logits");
  Tensor grad_logits = torch::stable::new_empty(logits, {logits.size(0), logits.size(1)});
  BackwardInto(logits, targets, lse, entropy, grad_logprobs, grad_entropy, temperature,
               grad_logits);
  return grad_logits;
}

void BackwardInPlace(Tensor logits, const Tensor& targets, const Tensor& lse, const Tensor& entropy,
                     std::optional<Tensor> grad_logprobs, std::optional<Tensor> grad_entropy,
                     double temperature) {
  CheckLogits(logits, "logits");
  CheckDistinctRows(logits, "logits");
  BackwardInto(logits, targets, lse, entropy, grad_logprobs, grad_entropy, temperature, logits);
}

}  // namespace
}  // namespace tandem

STABLE_TORCH_LIBRARY(tandem, library) {
  library.def(
      "token_logprobs_fwd(Tensor logits, Tensor targets, float temperature) -> "
      "(Tensor, Tensor, Tensor)");
  library.def(
      "token_logprobs_bwd(Tensor logits, Tensor targets, Tensor lse, Tensor entropy, "
      "Tensor? grad_logprobs, Tensor? grad_entropy, float temperature) -> Tensor");
  library.def(
      "token_logprobs_bwd_(Tensor(a!) logits, Tensor targets, Tensor lse, Tensor entropy, "
      "Tensor? grad_logprobs, Tensor? grad_entropy, float temperature) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(tandem, CPU, library) {
  library.impl("token_logprobs_fwd", TORCH_BOX(&tandem::Forward));
  library.impl("token_logprobs_bwd", TORCH_BOX(&tandem::Backward));
  library.impl("token_logprobs_bwd_", TORCH_BOX(&tandem::BackwardInPlace));
}
