#include "csrc/loss/policy_loss.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "csrc/testing/loss_backend.h"
#include "csrc/testing/policy_problem.h"

namespace tandem {
namespace {

struct Result {
  std::vector<float> grad_logprobs, grad_entropy;
  std::vector<double> metrics;
};

template <typename T>
bool SameBits(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() &&
         (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0);
}

void ExpectSameBits(const Result& a, const Result& b) {
  EXPECT_TRUE(SameBits(a.grad_logprobs, b.grad_logprobs));
  EXPECT_TRUE(SameBits(a.grad_entropy, b.grad_entropy));
  EXPECT_TRUE(SameBits(a.metrics, b.metrics));
}

// Outputs and workspace start as garbage.
Status ComputeInto(const PolicyProblem& problem, const PolicyLossParams& params, bool accumulate,
                   const Execution& execution, Result* result) {
  const PolicyLossInputs inputs = problem.inputs();
  const LossKernels& kernels = KernelsUnderTest();
  const int64_t bytes =
      kernels.policy_loss_workspace_bytes(problem.num_tokens(), inputs.tokens.num_sequences);
  std::vector<double> memory(static_cast<size_t>(bytes / 8 + 1), kNaN);
  result->grad_logprobs.assign(problem.logprobs.size(), kNaN);
  result->grad_entropy.assign(problem.logprobs.size(), kNaN);
  const PolicyLossOutputs outputs = {result->grad_logprobs.data(), result->grad_entropy.data(),
                                     result->metrics.data(), accumulate};
  return kernels.policy_loss(params, inputs, outputs, {memory.data(), bytes}, execution);
}

Result Compute(const PolicyProblem& problem, const PolicyLossParams& params,
               const Execution& execution = {SerialFor(), nullptr}) {
  Result result;
  result.metrics.assign(kNumPolicyMetrics, kNaN);
  const Status status = ComputeInto(problem, params, false, execution, &result);
  EXPECT_TRUE(status.ok()) << status.message();
  return result;
}

// Sums of n float32 terms.
void ExpectMetricsNear(const std::vector<double>& got, const std::vector<double>& want,
                       double count, const std::string& what) {
  for (int metric = 0; metric < kNumPolicyMetrics; ++metric) {
    const double tolerance = 2e-6 * (std::abs(want[metric]) + count);
    if (std::isinf(want[metric])) {
      EXPECT_EQ(got[metric], want[metric]) << what << ": metric " << metric;
    } else {
      EXPECT_NEAR(got[metric], want[metric], tolerance) << what << ": metric " << metric;
    }
  }
}

void ExpectMatchesReference(const PolicyProblem& problem, const PolicyLossParams& params,
                            const std::string& what) {
  const Result got = Compute(problem, params);
  const PolicyReference reference(problem, params);
  const std::vector<double> grad_logprobs = reference.GradLogprobs();
  const std::vector<double> grad_entropy = reference.GradEntropy();
  for (size_t row = 0; row < grad_logprobs.size(); ++row) {
    EXPECT_NEAR(got.grad_logprobs[row], grad_logprobs[row],
                2e-6 * (1 + std::abs(grad_logprobs[row])))
        << what << ": row " << row;
    EXPECT_NEAR(got.grad_entropy[row], grad_entropy[row], 1e-7) << what << ": row " << row;
  }
  ExpectMetricsNear(got.metrics, reference.Metrics(), static_cast<double>(problem.num_tokens()),
                    what);
}

PolicyLossParams ParamsWith(RatioKind ratio, SurrogateKind surrogate) {
  PolicyLossParams params;
  params.ratio = ratio;
  params.surrogate = surrogate;
  params.dual_clip = 1.5f;
  params.correction_low = 0.7f;
  params.correction_high = 1.2f;
  params.kl_coef = 0.3f;
  params.entropy_coef = 0.05f;
  return params;
}

// The kinds of one objective, by number.
class EveryObjective : public testing::TestWithParam<std::tuple<int, int, int, int>> {};

TEST_P(EveryObjective, HasTheLossGradientsAndMetricsOfTheFormulas) {
  const auto [ratio, surrogate, correction, kl] = GetParam();
  PolicyLossParams params =
      ParamsWith(static_cast<RatioKind>(ratio), static_cast<SurrogateKind>(surrogate));
  params.correction = static_cast<CorrectionKind>(correction);
  params.kl = static_cast<KlKind>(kl);
  PolicyProblem problem = RandomProblem(45, 7);
  if (params.ratio == RatioKind::kSequence) CutSequences({1, 17, 0, 20, 7}, &problem);
  ExpectMatchesReference(problem, params, "plain");
  params.kl_importance_weight = true;
  params.kl_input_clamp = 0.4f;
  params.kl_output_clamp = 0.2f;
  ExpectMatchesReference(problem, params, "importance weights and clamps");
  problem.reference.clear();
  problem.nll_coefs.clear();
  ExpectMatchesReference(problem, params, "without reference");
  problem.prev.clear();
  params.entropy_coef = 0.0f;
  ExpectMatchesReference(problem, params, "without old log-probabilities");
}

INSTANTIATE_TEST_SUITE_P(Kinds, EveryObjective,
                         testing::Combine(testing::Range(0, 4), testing::Range(0, 3),
                                          testing::Range(0, 4), testing::Range(0, 3)));

TEST(PolicyLossTest, ManyTokensMatchTheFormulas) {
  const PolicyLossParams params = ParamsWith(RatioKind::kToken, SurrogateKind::kClip);
  const int64_t size = kIsEmulated ? 5000 : 100001;
  const PolicyProblem problem = RandomProblem(size, 3);
  const Result got = Compute(problem, params);
  ExpectMetricsNear(got.metrics, PolicyReference(problem, params).Metrics(),
                    std::sqrt(static_cast<double>(size)), "many tokens");
}

TEST(PolicyLossTest, SequencesLongerThanABlockMatchTheFormulas) {
  PolicyLossParams params = ParamsWith(RatioKind::kSequence, SurrogateKind::kClip);
  params.correction = CorrectionKind::kTis;
  params.correction_high = 1e4f;
  PolicyProblem problem = RandomProblem(9000, 5, 0.01f);
  CutSequences({4500, 1, 4499}, &problem);
  const Result got = Compute(problem, params);
  // Sequence by sequence, from sums of its own.
  for (size_t s = 0; s < 3; ++s) {
    double mean = 0;
    double log_weight = 0;
    int count = 0;
    const auto begin = static_cast<size_t>(problem.sequence_offsets[s]);
    const auto end = static_cast<size_t>(problem.sequence_offsets[s + 1]);
    for (size_t i = begin; i < end; ++i) {
      if (problem.weights[i] == 0) continue;
      mean += double{problem.logprobs[i]} - problem.prev[i];
      log_weight += double{problem.prev[i]} - problem.generation[i];
      ++count;
    }
    if (count == 0) continue;
    const double ratio = std::exp(mean / count);
    const double correction = std::min(std::max(std::exp(log_weight), 0.7), 1e4);
    double slope = 0;  // ratios stay within the bounds
    for (size_t i = begin; i < end; ++i) {
      if (problem.weights[i] > 0) slope -= problem.shares[i] * correction * problem.advantages[i];
    }
    for (size_t i = begin; i < end; i += 997) {
      if (problem.weights[i] == 0) continue;
      const double d = double{problem.reference[i]} - problem.logprobs[i];
      const double kl = std::expm1(d) - d - std::expm1(d);
      const double want = slope * ratio / count + problem.shares[i] * 0.3 * kl;
      EXPECT_NEAR(got.grad_logprobs[i] + problem.nll_coefs[i], want, 1e-5 * (1 + std::abs(want)));
    }
  }
}

TEST(PolicyLossTest, WhatATokenOfWeightZeroHoldsReachesNothing) {
  for (const RatioKind ratio :
       {RatioKind::kToken, RatioKind::kOnPolicy, RatioKind::kNone, RatioKind::kSequence}) {
    PolicyLossParams params = ParamsWith(ratio, SurrogateKind::kClip);
    params.correction = CorrectionKind::kRaw;
    PolicyProblem clean = RandomProblem(200, 11);
    if (ratio == RatioKind::kSequence) CutSequences({3, 1, 96, 100}, &clean);
    PolicyProblem dirty = clean;
    const float garbage[] = {kNaN, std::numeric_limits<float>::infinity(),
                             -std::numeric_limits<float>::infinity()};
    for (size_t i = 0; i < clean.weights.size(); ++i) {
      if (clean.weights[i] != 0) continue;
      for (auto* column : {&dirty.logprobs, &dirty.entropy, &dirty.prev, &dirty.reference,
                           &dirty.generation, &dirty.advantages, &dirty.shares, &dirty.nll_coefs}) {
        (*column)[i] = garbage[i % 3];
      }
    }
    const Result result = Compute(dirty, params);
    ExpectSameBits(result, Compute(clean, params));
    for (size_t i = 0; i < clean.weights.size(); ++i) {
      if (clean.weights[i] != 0) continue;
      EXPECT_EQ(result.grad_logprobs[i], 0.0f);
      EXPECT_EQ(result.grad_entropy[i], 0.0f);
    }
  }
}

// One token with round numbers: ratio 1, no KL, no entropy bonus.
PolicyProblem OneToken(float logprob, float prev, float advantage) {
  PolicyProblem problem;
  problem.logprobs = {logprob};
  problem.entropy = {0.5f};
  problem.prev = {prev};
  problem.generation = {prev};
  problem.advantages = {advantage};
  problem.shares = {1.0f};
  problem.weights = {1.0f};
  return problem;
}

TEST(PolicyLossTest, EqualArgumentsOfMaxGiveTheWholeGradientInsideTheBounds) {
  const Result got = Compute(OneToken(-1.0f, -1.0f, 2.0f), PolicyLossParams{});
  EXPECT_EQ(got.metrics[kLoss], -2.0);
  EXPECT_EQ(got.grad_logprobs[0], -2.0f);
}

TEST(PolicyLossTest, BoundsTakeTheGradientOnTheSideWhereTheyBind) {
  PolicyLossParams params;
  const float up = std::log(1.5f);
  const float down = std::log(0.5f);
  EXPECT_EQ(Compute(OneToken(up, 0, 1), params).grad_logprobs[0], 0.0f);
  EXPECT_NEAR(Compute(OneToken(up, 0, -1), params).grad_logprobs[0], 1.5f, 1e-6);
  EXPECT_NEAR(Compute(OneToken(down, 0, 1), params).grad_logprobs[0], -0.5f, 1e-6);
  EXPECT_EQ(Compute(OneToken(down, 0, -1), params).grad_logprobs[0], 0.0f);
  params.dual_clip = 1.4f;
  const Result dual = Compute(OneToken(up, 0, -1), params);
  EXPECT_EQ(dual.grad_logprobs[0], 0.0f);
  EXPECT_NEAR(dual.metrics[kLoss], 1.4, 1e-6);
  EXPECT_EQ(dual.metrics[kDualClip], 1.0);
  // With c = 1 the bound equals the loss at ratio 1: half of the gradient, as torch.minimum has it.
  params.dual_clip = 1.0f;
  EXPECT_EQ(Compute(OneToken(-1, -1, -3), params).grad_logprobs[0], 1.5f);
}

TEST(PolicyLossTest, LogRatiosBeyondTwentyAreClampedCountedAndLearnNothing) {
  PolicyLossParams params;
  params.surrogate = SurrogateKind::kUnclipped;
  PolicyProblem problem = OneToken(-1.0f, -26.0f, 1.0f);
  const Result far = Compute(problem, params);
  EXPECT_EQ(far.grad_logprobs[0], 0.0f);
  EXPECT_EQ(far.metrics[kClampedLogRatios], 1.0);
  EXPECT_NEAR(far.metrics[kRatio] / std::exp(20.0), 1.0, 1e-6);
  const Result edge = Compute(OneToken(-1.0f, -21.0f, 1.0f), params);
  EXPECT_EQ(edge.metrics[kClampedLogRatios], 0.0);
  EXPECT_NEAR(edge.grad_logprobs[0] / std::exp(20.0), -1.0, 1e-6);
}

TEST(PolicyLossTest, ALogprobOfMinusInfinityGivesFiniteNumbers) {
  const float minus_infinity = -std::numeric_limits<float>::infinity();
  PolicyLossParams params;
  params.kl_coef = 1.0f;
  params.kl_input_clamp = 20.0f;
  params.kl_output_clamp = 10.0f;
  PolicyProblem problem = OneToken(minus_infinity, -1.0f, 1.0f);
  problem.reference = {-1.0f};
  const Result got = Compute(problem, params);
  EXPECT_EQ(got.grad_logprobs[0], 0.0f);
  EXPECT_EQ(got.metrics[kClampedLogRatios], 1.0);
  EXPECT_NEAR(got.metrics[kLoss], 10.0, 1e-6);  // the KL, for the ratio is 2e-9
  EXPECT_EQ(got.metrics[kApproxEntropy], 0.0);
  for (const double metric : got.metrics) EXPECT_FALSE(std::isnan(metric));
  problem.prev.clear();
  params.ratio = RatioKind::kOnPolicy;
  params.surrogate = SurrogateKind::kUnclipped;
  EXPECT_EQ(Compute(problem, params).metrics[kRatio], 1.0);
}

TEST(PolicyLossTest, GeneratorWeightsThatAreNoFiniteNumberCountAsZero) {
  PolicyLossParams params;
  params.correction = CorrectionKind::kRaw;
  PolicyProblem problem = OneToken(-1.0f, -1.0f, 1.0f);
  for (const float generation : {-200.0f, -std::numeric_limits<float>::infinity(), kNaN}) {
    problem.generation = {generation};
    const Result got = Compute(problem, params);
    EXPECT_EQ(got.metrics[kCorrection], 0.0);
    EXPECT_EQ(got.metrics[kLoss], 0.0);
    EXPECT_EQ(got.grad_logprobs[0], 0.0f);
  }
}

TEST(PolicyLossTest, NaNOfACountedTokenIsLeftVisible) {
  PolicyProblem problem = RandomProblem(40, 13);
  problem.logprobs[9] = kNaN;
  const Result got = Compute(problem, ParamsWith(RatioKind::kToken, SurrogateKind::kClip));
  EXPECT_TRUE(std::isnan(got.metrics[kLoss]));
  EXPECT_TRUE(std::isnan(got.grad_logprobs[9]));
  EXPECT_FALSE(std::isnan(got.grad_logprobs[10]));
}

TEST(PolicyLossTest, NaNOfAReferenceIsNoClampedEstimate) {
  PolicyLossParams params;
  params.kl_coef = params.kl_input_clamp = params.kl_output_clamp = 10.0f;
  PolicyProblem problem = OneToken(-1.0f, -1.0f, 1.0f);
  problem.reference = {kNaN};
  for (const KlKind kl : {KlKind::kK1, KlKind::kK2, KlKind::kK3}) {
    params.kl = kl;
    const Result got = Compute(problem, params);
    EXPECT_TRUE(std::isnan(got.metrics[kLoss]) && std::isnan(got.grad_logprobs[0]));
  }
}

TEST(PolicyLossTest, NaNOfTheGeneratorIsLeftVisibleInItsDistances) {
  PolicyProblem problem = OneToken(-1.0f, -1.0f, 1.0f);
  problem.generation = {kNaN};
  const Result got = Compute(problem, PolicyLossParams());
  for (const int metric : {kMultProbError, kGenerationKl, kPolicyKl, kJsDivergence, kApproxEntropy})
    EXPECT_TRUE(std::isnan(got.metrics[metric])) << metric;
}

// Rows of 0 to 3 tokens, empty rows at both ends; the first offset is `first`.
PolicyProblem SharedRows(int64_t rows, int64_t first, PolicyProblem* unshared) {
  PolicyProblem problem;
  problem.row_offsets = {first};
  for (int64_t row = 0; row < rows; ++row) {
    const bool is_edge = row < 3 || row >= rows - 3;
    problem.row_offsets.push_back(problem.row_offsets.back() + (is_edge ? 0 : row * 7 % 4));
  }
  const int64_t num_tokens = problem.row_offsets.back() - first;
  *unshared = RandomProblem(num_tokens, 17);
  const std::vector<int64_t> offsets = problem.row_offsets;
  problem = *unshared;
  problem.row_offsets = offsets;
  problem.logprobs.assign(static_cast<size_t>(rows), -2.0f);
  problem.entropy.assign(static_cast<size_t>(rows), 1.0f);
  for (size_t row = 0; row < problem.logprobs.size(); ++row) {
    for (int64_t i = offsets[row] - first; i < offsets[row + 1] - first; ++i) {
      const auto token = static_cast<size_t>(i);
      problem.logprobs[row] = unshared->logprobs[static_cast<size_t>(offsets[row] - first)];
      unshared->logprobs[token] = problem.logprobs[row];
      unshared->entropy[token] = problem.entropy[row];
    }
  }
  return problem;
}

TEST(PolicyLossTest, ARowHasTheSummedGradientOfItsTokens) {
  const PolicyLossParams params = ParamsWith(RatioKind::kToken, SurrogateKind::kClip);
  for (const int64_t rows : {7, 40, 6000}) {
    PolicyProblem unshared;
    const PolicyProblem problem = SharedRows(rows, 0, &unshared);
    const Result got = Compute(problem, params);
    const Result tokens = Compute(unshared, params);
    for (size_t row = 0; row < problem.logprobs.size(); ++row) {
      float grad_logprob = 0.0f;
      float grad_entropy = 0.0f;
      for (int64_t i = problem.row_offsets[row]; i < problem.row_offsets[row + 1]; ++i) {
        grad_logprob += tokens.grad_logprobs[static_cast<size_t>(i)];
        grad_entropy += tokens.grad_entropy[static_cast<size_t>(i)];
      }
      EXPECT_EQ(got.grad_logprobs[row], grad_logprob);
      EXPECT_EQ(got.grad_entropy[row], grad_entropy);
    }
    ExpectMetricsNear(got.metrics, tokens.metrics, 0.0, "shared rows");
  }
}

TEST(PolicyLossTest, OffsetsOfRowsNeedNotBeginAtZero) {
  const PolicyLossParams params = ParamsWith(RatioKind::kToken, SurrogateKind::kClip);
  PolicyProblem unshared;
  const PolicyProblem problem = SharedRows(3000, 0, &unshared);
  const Result whole = Compute(problem, params);
  // The rows from 1000 on, with the columns as they stand.
  PolicyLossInputs inputs = problem.inputs();
  const int64_t first = 1000;
  inputs.num_rows -= first;
  inputs.logprobs += first;
  inputs.entropy += first;
  inputs.tokens.row_offsets += first;
  inputs.tokens.num_tokens -= inputs.tokens.row_offsets[0];
  Result part;
  part.grad_logprobs.assign(static_cast<size_t>(inputs.num_rows), kNaN);
  part.metrics.assign(kNumPolicyMetrics, kNaN);
  const int64_t bytes = KernelsUnderTest().policy_loss_workspace_bytes(inputs.tokens.num_tokens, 0);
  std::vector<double> memory(static_cast<size_t>(bytes / 8), kNaN);
  const Status status = KernelsUnderTest().policy_loss(
      params, inputs, {part.grad_logprobs.data(), nullptr, part.metrics.data(), false},
      {memory.data(), bytes}, {SerialFor(), nullptr});
  ASSERT_TRUE(status.ok()) << status.message();
  EXPECT_TRUE(SameBits(part.grad_logprobs, std::vector<float>(whole.grad_logprobs.begin() + first,
                                                              whole.grad_logprobs.end())));
}

TEST(PolicyLossTest, NoTokensGiveZerosAndNeutralExtrema) {
  PolicyProblem problem;
  for (const bool has_rows : {false, true}) {
    if (has_rows) {
      problem.logprobs.assign(5, -1.0f);
      problem.entropy.assign(5, kNaN);
      problem.row_offsets.assign(6, 0);
    }
    const Result got = Compute(problem, ParamsWith(RatioKind::kToken, SurrogateKind::kClip));
    EXPECT_TRUE(SameBits(got.grad_logprobs, std::vector<float>(problem.logprobs.size(), 0.0f)));
    EXPECT_TRUE(SameBits(got.grad_entropy, std::vector<float>(problem.logprobs.size(), 0.0f)));
    for (int metric = 0; metric < kNumPolicyMetrics; ++metric) {
      const bool is_min = metric == kRatioMin || metric == kRatioClampedMin;
      const bool is_max = metric == kRatioMax || metric == kRatioClampedMax;
      EXPECT_EQ(got.metrics[metric], is_min ? kInf : (is_max ? -kInf : 0.0));
    }
  }
}

TEST(PolicyLossTest, ASequenceWithoutCountedTokensStillHasAWeight) {
  PolicyProblem problem = OneToken(-1.0f, -1.0f, 1.0f);
  problem.weights = {0.0f};
  problem.logprobs = {kNaN};
  CutSequences({0, 1}, &problem);
  PolicyLossParams params;
  params.ratio = RatioKind::kSequence;
  const Result got = Compute(problem, params);
  EXPECT_EQ(got.metrics[kCorrection],
            double{problem.sequence_weights[0]} + problem.sequence_weights[1]);
  EXPECT_EQ(got.metrics[kLoss], 0.0);
  EXPECT_EQ(got.grad_logprobs[0], 0.0f);
}

// Runs the last of many small ranges first.
ParallelFor BackwardsFor() {
  return {[](void*, int64_t count, int64_t grain, RangeBody body, void* context) {
            for (int64_t end = count; end > 0; end -= std::min(end, grain)) {
              body(context, end - std::min(end, grain), end);
            }
          },
          nullptr};
}

TEST(PolicyLossTest, RepeatsAndThreadsGiveTheSameBits) {
  for (const RatioKind ratio : {RatioKind::kToken, RatioKind::kSequence}) {
    const PolicyLossParams params = ParamsWith(ratio, SurrogateKind::kClip);
    PolicyProblem problem = RandomProblem(kIsEmulated ? 5003 : 40003, 19);
    if (ratio == RatioKind::kSequence) {
      CutSequences({1000, 2003, problem.num_tokens() - 3003}, &problem);
    }
    const Result first = Compute(problem, params);
    ExpectSameBits(first, Compute(problem, params));
    ExpectSameBits(first, Compute(problem, params, {BackwardsFor(), nullptr}));
  }
}

// Tokens [begin, end) of a problem without sequences.
PolicyProblem Slice(const PolicyProblem& problem, int64_t begin, int64_t end) {
  PolicyProblem slice = problem;
  for (auto* column :
       {&slice.logprobs, &slice.entropy, &slice.prev, &slice.reference, &slice.generation,
        &slice.advantages, &slice.shares, &slice.weights, &slice.nll_coefs}) {
    *column = std::vector<float>(column->begin() + begin, column->begin() + end);
  }
  return slice;
}

TEST(PolicyLossTest, MetricsOfChunksAccumulate) {
  const PolicyLossParams params = ParamsWith(RatioKind::kToken, SurrogateKind::kClip);
  const PolicyProblem problem = RandomProblem(1000, 23);
  const Result whole = Compute(problem, params);
  Result chunk;
  chunk.metrics.assign(kNumPolicyMetrics, kNaN);
  bool accumulate = false;
  for (const int64_t begin : {0, 300, 999}) {
    const int64_t end = begin == 0 ? 300 : (begin == 300 ? 999 : 1000);
    const Status status =
        ComputeInto(Slice(problem, begin, end), params, accumulate, {SerialFor(), nullptr}, &chunk);
    ASSERT_TRUE(status.ok()) << status.message();
    accumulate = true;
    EXPECT_TRUE(
        SameBits(chunk.grad_logprobs, std::vector<float>(whole.grad_logprobs.begin() + begin,
                                                         whole.grad_logprobs.begin() + end)));
  }
  for (int metric = 0; metric < kNumPolicyMetrics; ++metric) {
    EXPECT_NEAR(chunk.metrics[metric], whole.metrics[metric],
                1e-12 * (1 + std::abs(whole.metrics[metric])));
  }
}

TEST(PolicyLossTest, BrokenArgumentsAreNamed) {
  PolicyProblem problem = RandomProblem(10, 29);
  Result result;
  result.metrics.assign(kNumPolicyMetrics, 0.0);
  PolicyLossParams params;
  const auto message = [&] {
    return ComputeInto(problem, params, false, {SerialFor(), nullptr}, &result).message();
  };
  problem.logprobs.push_back(0.0f);
  EXPECT_NE(message().find("num_tokens"), std::string::npos);
  problem.logprobs.pop_back();
  params.ratio = RatioKind::kSequence;
  EXPECT_NE(message().find("num_sequences"), std::string::npos);
  CutSequences({10}, &problem);
  problem.row_offsets = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10};
  EXPECT_NE(message().find("row_offsets"), std::string::npos);
  params.ratio = RatioKind::kToken;
  const Status status = KernelsUnderTest().policy_loss(
      params, problem.inputs(),
      {result.grad_logprobs.data(), nullptr, result.metrics.data(), false}, {nullptr, 0},
      {SerialFor(), nullptr});
  EXPECT_NE(status.message().find("workspace"), std::string::npos);
}

}  // namespace
}  // namespace tandem
