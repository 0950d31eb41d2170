// What policy_loss_cuda.cu promises beyond policy_loss_test.cc: the grid decides about no bit, and
// tokens have the very gradients of the CPU, where the compiler fuses no products and sums. Runs
// under the emulator.
#include "csrc/loss/policy_loss_cuda.h"

#include <gtest/gtest.h>

#include <cstring>
#include <vector>

#include "csrc/testing/policy_problem.h"

namespace tandem {
namespace {

struct Result {
  std::vector<float> grad_logprobs, grad_entropy;
  std::vector<double> metrics;
};

template <typename T>
bool SameBits(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
}

// run(inputs, outputs, workspace) on fresh memory.
template <typename Run>
Result ResultOf(const PolicyProblem& problem, int64_t bytes, Run&& run) {
  const size_t rows = problem.logprobs.size();
  Result result = {std::vector<float>(rows, kNaN), std::vector<float>(rows, kNaN),
                   std::vector<double>(kNumPolicyMetrics, kNaN)};
  std::vector<double> memory(static_cast<size_t>(bytes / 8 + 1), kNaN);
  const PolicyLossOutputs outputs = {result.grad_logprobs.data(), result.grad_entropy.data(),
                                     result.metrics.data(), false};
  const Status status = run(problem.inputs(), outputs, Workspace{memory.data(), bytes});
  EXPECT_TRUE(status.ok()) << status.message();
  return result;
}

Result OnCuda(const PolicyProblem& problem, const PolicyLossParams& params, int64_t max_blocks) {
  const auto num_sequences = static_cast<int64_t>(problem.sequence_weights.size());
  return ResultOf(problem, cuda::PolicyLossWorkspaceBytes(problem.num_tokens(), num_sequences),
                  [&](const auto& inputs, const auto& outputs, const Workspace& workspace) {
                    return cuda::PolicyLossOnGrid(params, inputs, outputs, workspace,
                                                  {SerialFor(), nullptr}, max_blocks);
                  });
}

Result OnCpu(const PolicyProblem& problem, const PolicyLossParams& params) {
  const auto num_sequences = static_cast<int64_t>(problem.sequence_weights.size());
  return ResultOf(problem, cpu::PolicyLossWorkspaceBytes(problem.num_tokens(), num_sequences),
                  [&](const auto& inputs, const auto& outputs, const Workspace& workspace) {
                    return cpu::PolicyLoss(params, inputs, outputs, workspace,
                                           {SerialFor(), nullptr});
                  });
}

PolicyLossParams Params() {
  PolicyLossParams params;
  params.correction = CorrectionKind::kTis;
  params.correction_high = 2.0f;
  params.dual_clip = 3.0f;
  params.kl_coef = 0.1f;
  params.kl_importance_weight = true;
  params.kl_input_clamp = 20.0f;
  params.kl_output_clamp = 10.0f;
  params.entropy_coef = 0.01f;
  return params;
}

TEST(PolicyLossCudaTest, TheGridDecidesAboutNoBit) {
  PolicyLossParams params = Params();
  PolicyProblem problem = RandomProblem(9001, 31);
  for (const RatioKind ratio : {RatioKind::kToken, RatioKind::kSequence}) {
    params.ratio = ratio;
    if (ratio == RatioKind::kSequence) CutSequences({4000, 1, 0, 5000}, &problem);
    const Result one = OnCuda(problem, params, 1);
    for (const int64_t max_blocks : {2, 3, 1000}) {
      const Result other = OnCuda(problem, params, max_blocks);
      EXPECT_TRUE(SameBits(one.grad_logprobs, other.grad_logprobs));
      EXPECT_TRUE(SameBits(one.grad_entropy, other.grad_entropy));
      EXPECT_TRUE(SameBits(one.metrics, other.metrics));
    }
  }
}

TEST(PolicyLossCudaTest, TokensHaveTheBitsOfTheCpu) {
  const PolicyProblem problem = RandomProblem(3000, 37);
  PolicyLossParams params = Params();
  for (const RatioKind ratio : {RatioKind::kToken, RatioKind::kOnPolicy, RatioKind::kNone}) {
    for (const SurrogateKind surrogate :
         {SurrogateKind::kClip, SurrogateKind::kCispo, SurrogateKind::kUnclipped}) {
      for (const KlKind kl : {KlKind::kK1, KlKind::kK2, KlKind::kK3}) {
        params.ratio = ratio;
        params.surrogate = surrogate;
        params.kl = kl;
        const Result device = OnCuda(problem, params, 1000);
        const Result host = OnCpu(problem, params);
        EXPECT_TRUE(SameBits(device.grad_logprobs, host.grad_logprobs));
        EXPECT_TRUE(SameBits(device.grad_entropy, host.grad_entropy));
        for (int metric = 0; metric < kNumPolicyMetrics; ++metric) {
          EXPECT_NEAR(device.metrics[metric], host.metrics[metric],
                      1e-12 * (1 + std::abs(host.metrics[metric])));
        }
      }
    }
  }
}

}  // namespace
}  // namespace tandem
