#include "csrc/loss/linear_loss.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "csrc/testing/linear_problem.h"
#include "csrc/testing/loss_backend.h"
#include "csrc/testing/naive_gemm.h"

namespace tandem {
namespace {

// Everything that a call writes.
struct Outputs {
  explicit Outputs(const Shape& shape)
      : logprobs(shape.n, kNaN),
        lse(shape.n, kNaN),
        entropy(shape.n, kNaN),
        hidden(shape.n, shape.h, shape.dtype),
        weight(shape.v, shape.h, DType::kFloat32),
        metrics(kNumPolicyMetrics, kNaN) {}

  TokenLogprobs logprobs_view() { return {logprobs.data(), lse.data(), entropy.data()}; }
  LinearGradients gradients(bool accumulate) { return {hidden.view(), weight.view(), accumulate}; }

  std::vector<float> logprobs, lse, entropy;
  Matrix hidden, weight;
  std::vector<double> metrics;
};

class Runner {
 public:
  Runner(const Problem& problem, LinearPlan plan, int64_t num_tokens = 0)
      : plan_(plan),
        memory_(LinearWorkspaceBytes(problem.rows(), plan, KernelsUnderTest(), num_tokens) + 256,
                static_cast<char>(0xFF)) {
    backend.kernels = &KernelsUnderTest();
    backend.gemm = &gemm;
    backend.execution = {SerialFor(), nullptr};
    backend.is_host_memory = true;
  }

  Workspace workspace() {
    const auto address = reinterpret_cast<uintptr_t>(memory_.data());
    return {memory_.data() + (256 - address % 256) % 256,
            static_cast<int64_t>(memory_.size()) - 256};
  }

  Status Forward(const Problem& p, Outputs* out) {
    return LinearLogprobsForward(p.rows(), out->logprobs_view(), plan_, workspace(), backend);
  }

  Status Backward(const Problem& p, bool accumulate, Outputs* out) {
    const TokenLogprobGradients upstream = {out->lse.data(), out->entropy.data(),
                                            p.grad_logprobs.data(), p.grad_entropy.data()};
    return LinearLogprobsBackward(p.rows(), upstream, out->gradients(accumulate), plan_,
                                  workspace(), backend);
  }

  NaiveGemm gemm;
  LinearBackend backend;

 private:
  LinearPlan plan_;
  std::vector<char> memory_;
};

double Largest(const std::vector<double>& values) {
  double largest = 1e-30;
  for (double value : values) largest = std::max(largest, std::abs(value));
  return largest;
}

void ExpectNear(const Matrix& got, const std::vector<double>& want, double relative) {
  const double tolerance = relative * Largest(want);
  for (int64_t i = 0; i < got.rows; ++i) {
    for (int64_t j = 0; j < got.cols; ++j) {
      ASSERT_NEAR(got.at(i, j), want[i * got.cols + j], tolerance) << i << ", " << j;
    }
  }
}

void ExpectNear(const std::vector<float>& got, const std::vector<double>& want, double tolerance) {
  ASSERT_EQ(got.size(), want.size());
  for (size_t i = 0; i < got.size(); ++i) ASSERT_NEAR(got[i], want[i], tolerance) << i;
}

struct Case {
  const char* name;
  Shape shape;
  DType logits_dtype;
  double value_tolerance;     // absolute
  double gradient_tolerance;  // relative to the largest element
};

class LinearLossTest : public testing::TestWithParam<Case> {};

TEST_P(LinearLossTest, ForwardAndBackwardMeetTheReferenceInEveryChunkSize) {
  const Case& c = GetParam();
  Problem p(c.shape);
  p.targets[2] = kIgnoreIndex;
  p.grad_logprobs[4] = 0;
  p.grad_entropy[4] = 0;
  p.vocab_size = c.shape.v - 5;
  for (int64_t& target : p.targets) target = std::min(target, p.vocab_size - 1);
  const Reference want = Expected(p);
  Outputs first(c.shape);
  for (int64_t chunk : {c.shape.n, int64_t{1}, int64_t{7}, int64_t{64}}) {
    Outputs out(c.shape);
    Runner runner(p, {chunk, c.logits_dtype});
    ASSERT_TRUE(runner.Forward(p, &out).ok());
    const Status status = runner.Backward(p, false, &out);
    ASSERT_TRUE(status.ok()) << status.message();
    ExpectNear(out.logprobs, want.logprobs, c.value_tolerance);
    ExpectNear(out.entropy, want.entropy, c.value_tolerance);
    ExpectNear(out.hidden, want.hidden, c.gradient_tolerance);
    ExpectNear(out.weight, want.weight, c.gradient_tolerance);
    out.hidden.ExpectGapsUntouched();
    out.weight.ExpectGapsUntouched();
    if (chunk == c.shape.n) first = out;
    EXPECT_EQ(out.logprobs, first.logprobs) << chunk;
    EXPECT_EQ(out.entropy, first.entropy) << chunk;
    EXPECT_EQ(out.hidden.bytes, first.hidden.bytes) << chunk;
  }
}

INSTANTIATE_TEST_SUITE_P(
    Dtypes, LinearLossTest,
    testing::Values(
        Case{"float32", {37, 257, 24, DType::kFloat32}, DType::kFloat32, 5e-6, 2e-6},
        Case{"bfloat16", {37, 257, 24, DType::kBFloat16}, DType::kFloat32, 5e-6, 8e-3},
        Case{"bfloat16_slab", {37, 257, 24, DType::kBFloat16}, DType::kBFloat16, 0.12, 5e-2},
        Case{"float16", {37, 257, 24, DType::kFloat16}, DType::kFloat32, 5e-6, 1e-3},
        Case{"float16_slab", {37, 257, 24, DType::kFloat16}, DType::kFloat16, 2e-2, 1e-2},
        Case{"one_row_chunks_of_a_wide_head",
             {9, 1000, 5, DType::kFloat32},
             DType::kFloat32,
             5e-6,
             2e-6}),
    [](const auto& info) { return std::string(info.param.name); });

TEST(LinearLogprobs, AccumulateAddsToTheWeightsGradientAndOverwritingDoesNotReadIt) {
  const Problem p({11, 33, 6});
  const Reference want = Expected(p);
  for (bool accumulate : {true, false}) {
    Outputs out(p.shape);
    std::vector<double> total = want.weight;
    if (accumulate) {
      for (int64_t j = 0; j < p.shape.v; ++j) {
        for (int64_t k = 0; k < p.shape.h; ++k) {
          out.weight.set(j, k, 0.25 * j);
          total[j * p.shape.h + k] += 0.25 * j;
        }
      }
    }
    Runner runner(p, {4});
    ASSERT_TRUE(runner.Forward(p, &out).ok());
    ASSERT_TRUE(runner.Backward(p, accumulate, &out).ok());
    ExpectNear(out.weight, total, 2e-6);
  }
}

TEST(LinearLogprobs, ChunksWithoutGradientGiveZerosAndNoProduct) {
  Problem p({12, 33, 6});
  for (int64_t i = 0; i < 4; ++i) p.targets[i] = kIgnoreIndex;
  for (int64_t i = 8; i < 12; ++i) p.grad_logprobs[i] = p.grad_entropy[i] = 0;
  const Reference want = Expected(p);
  Outputs skipped(p.shape);
  Runner runner(p, {4});
  ASSERT_TRUE(runner.Forward(p, &skipped).ok());
  runner.gemm.num_products = 0;
  ASSERT_TRUE(runner.Backward(p, false, &skipped).ok());
  EXPECT_EQ(runner.gemm.num_products, 3);
  ExpectNear(skipped.hidden, want.hidden, 2e-6);
  ExpectNear(skipped.weight, want.weight, 2e-6);

  Outputs device = skipped;
  runner.backend.is_host_memory = false;  // the host cannot look: everything is multiplied
  ASSERT_TRUE(runner.Backward(p, false, &device).ok());
  EXPECT_EQ(runner.gemm.num_products, 3 + 9);
  EXPECT_EQ(device.hidden.bytes, skipped.hidden.bytes);
  EXPECT_EQ(device.weight.bytes, skipped.weight.bytes);
}

TEST(LinearLogprobs, AllMaskedOverwritesTheWeightsGradientWithZerosWhateverHiddenHolds) {
  Problem p({5, 33, 6});
  std::fill(p.targets.begin(), p.targets.end(), kIgnoreIndex);
  Outputs out(p.shape);
  Runner runner(p, {2});
  ASSERT_TRUE(runner.Forward(p, &out).ok());
  for (int64_t k = 0; k < 6; ++k) p.hidden.set(3, k, kNaN);
  ASSERT_TRUE(runner.Backward(p, false, &out).ok());
  ExpectNear(out.weight, std::vector<double>(33 * 6), 0);
  ExpectNear(out.hidden, std::vector<double>(5 * 6), 0);
}

// Rows of different chunks without gradient, by their target and by their upstream gradients.
TEST(LinearLogprobs, AMaskedRowsHiddenStateDoesNoHarmToTheWeightsGradient) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    Problem p({9, 33, 6, dtype});
    p.targets[0] = p.targets[4] = kIgnoreIndex;
    p.grad_logprobs[8] = p.grad_entropy[8] = 0;
    const Reference want = Expected(p);
    Outputs out(p.shape);
    Runner runner(p, {4});
    ASSERT_TRUE(runner.Forward(p, &out).ok());
    for (const int64_t row : {0, 4, 8}) p.hidden.set(row, 2, row == 4 ? kNaN : INFINITY);
    ASSERT_TRUE(runner.Backward(p, false, &out).ok());
    ExpectNear(out.weight, want.weight, dtype == DType::kFloat32 ? 2e-6 : 8e-3);
    ExpectNear(out.hidden, want.hidden, dtype == DType::kFloat32 ? 2e-6 : 8e-3);
  }
}

TEST(LinearLogprobs, PaddingOfTheWeightMayHoldAnything) {
  Problem p({7, 33, 6});
  p.vocab_size = 20;
  for (int64_t& target : p.targets) target %= 20;
  const Reference want = Expected(p);
  for (int64_t j = 20; j < 33; ++j) p.weight.set(j, 1, j % 2 == 0 ? kNaN : INFINITY);
  Outputs out(p.shape);
  Runner runner(p, {3});
  ASSERT_TRUE(runner.Forward(p, &out).ok());
  ASSERT_TRUE(runner.Backward(p, false, &out).ok());
  for (int64_t i = 0; i < 7; ++i) EXPECT_NEAR(out.logprobs[i], want.logprobs[i], 1e-5);
  ExpectNear(out.hidden, want.hidden, 2e-6);
  ExpectNear(out.weight, want.weight, 2e-6);
}

TEST(LinearLogprobs, NoRowsGiveAZeroGradientOfTheWeight) {
  const Problem p({0, 33, 6});
  Outputs out(p.shape);
  Runner runner(p, {2});
  ASSERT_TRUE(runner.Forward(p, &out).ok());
  ASSERT_TRUE(runner.Backward(p, false, &out).ok());
  ExpectNear(out.weight, std::vector<double>(33 * 6), 0);
}

TEST(LinearLogprobs, WrongArgumentsAreErrorsThatNameThem) {
  const Problem p({5, 33, 6});
  Outputs out(p.shape);
  Runner runner(p, {2});
  Workspace small = runner.workspace();
  small.bytes -= 1;
  Status status = LinearLogprobsForward(p.rows(), out.logprobs_view(), {2}, small, runner.backend);
  EXPECT_NE(status.message().find("workspace"), std::string::npos) << status.message();
  status =
      LinearLogprobsForward(p.rows(), out.logprobs_view(), {0}, runner.workspace(), runner.backend);
  EXPECT_NE(status.message().find("chunk_rows"), std::string::npos) << status.message();
  LinearRows rows = p.rows();
  rows.weight.cols -= 1;
  status =
      LinearLogprobsForward(rows, out.logprobs_view(), {2}, runner.workspace(), runner.backend);
  EXPECT_NE(status.message().find("weight"), std::string::npos) << status.message();
  status = LinearLogprobsForward(p.rows(), out.logprobs_view(), {2, DType::kBFloat16},
                                 runner.workspace(), runner.backend);
  EXPECT_NE(status.message().find("logits_dtype"), std::string::npos) << status.message();
}

// CUDA does not look at targets: there the log-probability is -inf.
TEST(LinearLogprobs, ATargetBeyondTheVocabularyIsNoTokens) {
  Problem p({5, 33, 6});
  p.targets[2] = 33;
  Outputs out(p.shape);
  Runner runner(p, {2});
  const Status status = runner.Forward(p, &out);
  if (status.ok()) {
    EXPECT_EQ(out.logprobs[2], -INFINITY);
  } else {
    EXPECT_NE(status.message().find("targets"), std::string::npos) << status.message();
  }
}

// Rows with 0, 1, 2, 3, 0, ... tokens.
struct Tokens {
  Tokens(int64_t num_rows, bool is_shared, uint32_t seed = 7) {
    offsets.push_back(0);
    for (int64_t i = 0; i < num_rows; ++i)
      offsets.push_back(offsets.back() + (is_shared ? i % 4 : 1));
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    for (int64_t t = 0; t < offsets.back(); ++t) {
      const bool counts = t % 5 != 3;
      prev.push_back(counts ? -3.0f + normal(random) : kNaN);
      reference.push_back(counts ? -3.0f + normal(random) : kNaN);
      generation.push_back(counts ? -3.0f + normal(random) : kNaN);
      advantages.push_back(counts ? normal(random) : kNaN);
      weights.push_back(counts ? 1.0f : 0.0f);
      shares.push_back(counts ? 0.05f : 0.0f);
    }
    view.tokens.num_tokens = offsets.back();
    view.tokens.prev_logprobs = prev.data();
    view.tokens.reference_logprobs = reference.data();
    view.tokens.generation_logprobs = generation.data();
    view.tokens.advantages = advantages.data();
    view.tokens.shares = shares.data();
    view.tokens.weights = weights.data();
    if (is_shared) view.tokens.row_offsets = view.host_row_offsets = offsets.data();
  }
  Tokens(const Tokens&) = delete;

  std::vector<int64_t> offsets;
  std::vector<float> prev, reference, generation, advantages, weights, shares;
  LinearPolicyTokens view;
};

PolicyLossParams AllTerms() {
  PolicyLossParams params;
  params.dual_clip = 3.0f;
  params.correction = CorrectionKind::kTis;
  params.correction_high = 2.0f;
  params.kl_coef = 0.1f;
  params.kl_input_clamp = params.kl_output_clamp = std::numeric_limits<float>::infinity();
  params.entropy_coef = 0.03f;
  return params;
}

// The same by forward, loss and backward.
Status TwoPasses(const Problem& p, const PolicyLossParams& params, const Tokens& tokens,
                 Outputs* out) {
  Runner runner(p, {p.shape.n});
  const LossKernels& kernels = KernelsUnderTest();
  if (Status status = runner.Forward(p, out); !status.ok()) return status;
  std::vector<char> memory(kernels.policy_loss_workspace_bytes(tokens.view.tokens.num_tokens, 0) +
                           256);
  void* aligned = memory.data();
  size_t space = memory.size();
  std::align(256, memory.size() - 256, aligned, space);
  Problem upstream = p;
  Status status = kernels.policy_loss(
      params, {tokens.view.tokens, p.shape.n, out->logprobs.data(), out->entropy.data()},
      {upstream.grad_logprobs.data(), upstream.grad_entropy.data(), out->metrics.data(), false},
      {aligned, static_cast<int64_t>(memory.size()) - 256}, {SerialFor(), nullptr});
  return status.ok() ? runner.Backward(upstream, false, out) : status;
}

void ExpectSameMetrics(const std::vector<double>& got, const std::vector<double>& want) {
  for (int i = 0; i < kNumPolicyMetrics; ++i) {
    if (std::isinf(want[i])) {
      EXPECT_EQ(got[i], want[i]) << i;
    } else {
      EXPECT_NEAR(got[i], want[i], 1e-9 * std::max(1.0, std::abs(want[i]))) << i;
    }
  }
}

TEST(LinearPolicyLoss, OnePassEqualsTwoPassesInEveryChunkSize) {
  for (bool is_shared : {false, true}) {
    const Problem p({37, 101, 8});
    const Tokens tokens(p.shape.n, is_shared);
    Outputs want(p.shape);
    const Status reference = TwoPasses(p, AllTerms(), tokens, &want);
    ASSERT_TRUE(reference.ok()) << reference.message();
    std::vector<double> hidden, weight;
    for (int64_t i = 0; i < 37 * 8; ++i) hidden.push_back(want.hidden.at(i / 8, i % 8));
    for (int64_t i = 0; i < 101 * 8; ++i) weight.push_back(want.weight.at(i / 8, i % 8));
    for (int64_t chunk : {int64_t{1}, int64_t{7}, int64_t{64}, p.shape.n}) {
      Outputs out(p.shape);
      Runner runner(p, {chunk}, tokens.view.tokens.num_tokens);
      const Status status = LinearPolicyLoss(p.rows(), AllTerms(), tokens.view, out.logprobs_view(),
                                             out.gradients(false), out.metrics.data(), {chunk},
                                             runner.workspace(), runner.backend);
      ASSERT_TRUE(status.ok()) << status.message();
      EXPECT_EQ(out.logprobs, want.logprobs);
      EXPECT_EQ(out.entropy, want.entropy);
      ExpectNear(out.hidden, hidden, 1e-6);
      ExpectNear(out.weight, weight, 1e-6);
      ExpectSameMetrics(out.metrics, want.metrics);
    }
  }
}

TEST(LinearPolicyLoss, GradientsOfALogprobObjectiveMeetTheReference) {
  Problem p({21, 101, 8});
  const Tokens tokens(p.shape.n, true);
  PolicyLossParams params;
  params.ratio = RatioKind::kNone;
  params.surrogate = SurrogateKind::kUnclipped;
  params.entropy_coef = 0.4f;
  for (int64_t i = 0; i < p.shape.n; ++i) {
    p.grad_logprobs[i] = p.grad_entropy[i] = 0;
    for (int64_t t = tokens.offsets[i]; t < tokens.offsets[i + 1]; ++t) {
      if (tokens.weights[t] == 0) continue;
      p.grad_logprobs[i] -= tokens.advantages[t] * tokens.shares[t];
      p.grad_entropy[i] -= params.entropy_coef * tokens.shares[t];
    }
  }
  const Reference want = Expected(p);
  Outputs out(p.shape);
  Runner runner(p, {6}, tokens.view.tokens.num_tokens);
  const Status status = LinearPolicyLoss(p.rows(), params, tokens.view, {nullptr, nullptr, nullptr},
                                         out.gradients(false), out.metrics.data(), {6},
                                         runner.workspace(), runner.backend);
  ASSERT_TRUE(status.ok()) << status.message();
  ExpectNear(out.hidden, want.hidden, 3e-6);
  ExpectNear(out.weight, want.weight, 3e-6);
}

TEST(LinearPolicyLoss, NoRowsGiveTheMetricsOfNoTokens) {
  const Problem p({0, 33, 6});
  const Tokens tokens(0, false);
  Outputs out(p.shape);
  Runner runner(p, {4});
  const Status status =
      LinearPolicyLoss(p.rows(), AllTerms(), tokens.view, out.logprobs_view(), out.gradients(false),
                       out.metrics.data(), {4}, runner.workspace(), runner.backend);
  ASSERT_TRUE(status.ok()) << status.message();
  EXPECT_EQ(out.metrics[kLoss], 0);
  EXPECT_EQ(out.metrics[kRatioMin], std::numeric_limits<double>::infinity());
  ExpectNear(out.weight, std::vector<double>(33 * 6), 0);
}

TEST(LinearPolicyLoss, RefusesSequencesAndOffsetsOfTheDeviceAlone) {
  const Problem p({8, 33, 6});
  Tokens tokens(8, true);
  Outputs out(p.shape);
  Runner runner(p, {4}, tokens.view.tokens.num_tokens);
  const auto run = [&](const PolicyLossParams& params) {
    return LinearPolicyLoss(p.rows(), params, tokens.view, out.logprobs_view(),
                            out.gradients(false), out.metrics.data(), {4}, runner.workspace(),
                            runner.backend)
        .message();
  };
  PolicyLossParams params = AllTerms();
  params.ratio = RatioKind::kSequence;
  EXPECT_NE(run(params).find("two passes"), std::string::npos);
  tokens.view.host_row_offsets = nullptr;
  EXPECT_NE(run(AllTerms()).find("host_row_offsets"), std::string::npos);
}

}  // namespace
}  // namespace tandem
