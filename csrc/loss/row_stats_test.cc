// Statistics, merge and gradient of rows against float64, over dtypes, sizes, layouts and shards.
// Special values and errors are in row_stats_special_test.cc.
#include "csrc/loss/row_stats.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "csrc/testing/logits_under_test.h"

namespace tandem {
namespace {

constexpr int64_t kRows = 5;

struct Case {
  DType dtype;
  int64_t cols;
  int64_t gap;
  float temperature;
};

std::string Name(const testing::TestParamInfo<Case>& info) {
  const Case& c = info.param;
  return std::string(NameOf(c.dtype)) + "_v" + std::to_string(c.cols) + "_gap" +
         std::to_string(c.gap) + "_t" + std::to_string(static_cast<int>(c.temperature * 100.0f));
}

std::vector<Case> AllCases() {
  std::vector<Case> cases;
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    for (const int64_t cols : {1, 7, 24, 257, 1000, 1024, 5000, 32001}) {
      cases.push_back({dtype, cols, 0, 1.0f});
      cases.push_back({dtype, cols, 3, 0.7f});
    }
    cases.push_back({dtype, 64, 64, 2.0f});
    cases.push_back({dtype, 4097, 15, 0.5f});
    cases.push_back({dtype, 49152, 0, 1.0f});
    cases.push_back({dtype, 151936, 1, 1.0f});
  }
  return cases;
}

// Half a unit in the last place of a stored gradient, relative.
double RoundingOf(DType dtype) {
  if (dtype == DType::kFloat32) return 0.0;
  return dtype == DType::kBFloat16 ? std::ldexp(1.0, -8) : std::ldexp(1.0, -11);
}

class RowStatsTest : public testing::TestWithParam<Case> {
 protected:
  void SetUp() override {
    const Case& c = GetParam();
    if (kIsEmulated && c.cols > 50000) GTEST_SKIP() << "too large for the emulator";
    // A masked vocabulary in row 1, large values in row 2.
    logits.Randomize(17, 4.0f);
    for (int64_t j = 0; j < c.cols; ++j) {
      if (j % 5 < 3 && j != targets[1]) logits.Set(1, j, -kInf);
      logits.Set(2, j, static_cast<float>(logits.Get(2, j)) + 80.0f);
    }
  }

  LogitRows rows() const { return {logits.view(), targets.data(), GetParam().temperature}; }

  Reference Want(int64_t i, const Logits& original) const {
    const auto row = static_cast<size_t>(i);
    return ReferenceOf(RowOf(original, i), targets[row], GetParam().temperature, g[row], h[row]);
  }

  // The largest logit over the temperature is rounded once to float32.
  double RoundingOfZ(int64_t i) const {
    if (GetParam().temperature == 1.0f) return 0.0;
    const std::vector<double> row = RowOf(logits, i);
    return 1.2e-7 * std::abs(*std::max_element(row.begin(), row.end())) / GetParam().temperature;
  }

  // What a gradient may be off beside the rounding of what is stored. p carries the error of the
  // saved lse, which has half a unit in its last place, and half floats end at 2^-25.
  double Absolute(int64_t i, const Reference& want) const {
    const auto row = static_cast<size_t>(i);
    const double scale = (std::abs(g[row]) + 3.0 * std::abs(h[row])) / GetParam().temperature;
    return (1e-6 + 1.2e-7 * std::abs(want.lse)) * scale +
           (GetParam().dtype == DType::kFloat16 ? 3e-8 : 0.0);
  }

  // The largest error of a row's gradient beyond the rounding of what is stored; infinite where a
  // zero is not exact.
  double WorstExcess(const Logits& original, const Logits& gradient, int64_t i,
                     const Reference& want) const {
    const bool is_ignored = targets[static_cast<size_t>(i)] == kIgnoreIndex;
    double worst = 0.0;
    for (int64_t j = 0; j < gradient.cols; ++j) {
      const double expected = want.grad[static_cast<size_t>(j)];
      const double got = gradient.Get(i, j);
      if ((is_ignored || std::isinf(original.Get(i, j))) && got != 0.0) return kInf;
      const double excess =
          std::abs(got - expected) - RoundingOf(gradient.dtype) * std::abs(expected);
      worst = std::isnan(excess) ? kInf : std::max(worst, excess);
    }
    return worst;
  }

  const int64_t last = GetParam().cols - 1;
  Logits logits{kRows, GetParam().cols, GetParam().cols + GetParam().gap, GetParam().dtype,
                GetParam().gap};
  const std::vector<int64_t> targets = {last, 0, last / 2, kIgnoreIndex, last / 3};
  const std::vector<float> g = {1.0f, -0.5f, 2.0f, 3.0f, 0.0f};
  const std::vector<float> h = {0.1f, -0.2f, 0.0f, 1.0f, 0.3f};
};

TEST_P(RowStatsTest, ForwardEqualsTheReference) {
  const Results got = Forward({rows()}, Serially());
  for (int64_t i = 0; i < kRows; ++i) {
    const auto row = static_cast<size_t>(i);
    const Reference want = Want(i, logits);
    const double z = RoundingOfZ(i);
    EXPECT_NEAR(got.logprobs[row], want.logprob, 1e-6 + 1e-7 * std::abs(want.logprob) + z) << i;
    EXPECT_NEAR(got.lse[row], want.lse, 1e-6 + 1.2e-7 * std::abs(want.lse) + z) << i;
    EXPECT_NEAR(got.entropy[row], want.entropy, 5e-6) << i;
  }
}

TEST_P(RowStatsTest, InPlaceGradientEqualsTheReferenceAndLeavesTheGapsAlone) {
  const Logits original = logits;
  const Results saved = Forward({rows()}, Serially());
  Backward(rows(), {saved.lse.data(), saved.entropy.data(), g.data(), h.data()},
           logits.mutable_view(), Serially());
  EXPECT_TRUE(logits.GapsAreIntact());
  for (int64_t i = 0; i < kRows; ++i) {
    const Reference want = Want(i, original);
    ASSERT_LE(WorstExcess(original, logits, i, want), Absolute(i, want)) << i;
  }
}

TEST_P(RowStatsTest, OutOfPlaceGradientIsTheSameToTheBit) {
  const Results saved = Forward({rows()}, Serially());
  const TokenLogprobGradients in{saved.lse.data(), saved.entropy.data(), g.data(), h.data()};
  Logits apart(kRows, logits.cols, logits.stride, logits.dtype, logits.offset);
  Backward(rows(), in, apart.mutable_view(), Serially());
  Backward(rows(), in, logits.mutable_view(), Serially());
  EXPECT_EQ(apart.bytes, logits.bytes);
}

TEST_P(RowStatsTest, ResultsAreTheSameToTheBitInEveryRunAndForEverySplit) {
  const Results first = Forward({rows()}, Serially());
  const TokenLogprobGradients in{first.lse.data(), first.entropy.data(), g.data(), h.data()};
  Logits gradient(kRows, logits.cols, logits.stride, logits.dtype, logits.offset);
  Backward(rows(), in, gradient.mutable_view(), Serially());
  for (const int64_t ranges : {1, 2, 7}) {
    const Results again = Forward({rows()}, InRanges(ranges));
    EXPECT_EQ(again.logprobs, first.logprobs);
    EXPECT_EQ(again.entropy, first.entropy);
    EXPECT_EQ(again.lse, first.lse);
    Logits repeated(kRows, logits.cols, logits.stride, logits.dtype, logits.offset);
    Backward(rows(), in, repeated.mutable_view(), InRanges(ranges));
    EXPECT_EQ(repeated.bytes, gradient.bytes);
  }
}

// Cuts the vocabulary before these columns.
std::vector<std::vector<int64_t>> Cuts(int64_t cols) {
  return {{cols / 2}, {0}, {cols}, {cols / 3, cols / 3}, {0, cols / 2 + 1}, {cols / 4, cols}};
}

TEST_P(RowStatsTest, ShardsMergeToTheWhole) {
  if (logits.cols > 6000 && logits.cols != 32001) GTEST_SKIP() << "smaller sizes show it";
  for (const std::vector<int64_t>& inner : Cuts(logits.cols)) {
    std::vector<int64_t> bounds = {0};
    bounds.insert(bounds.end(), inner.begin(), inner.end());
    bounds.push_back(logits.cols);
    std::vector<LogitRows> shards;
    for (size_t r = 0; r + 1 < bounds.size(); ++r) {
      LogitRows shard = rows();
      const auto* base = static_cast<const char*>(shard.logits.data);
      shard.logits.data = base + bounds[r] * SizeOf(logits.dtype);
      shard.logits.cols = bounds[r + 1] - bounds[r];
      shard.vocab_start = bounds[r];
      shards.push_back(shard);
    }
    const Results got = Forward(shards, Serially());
    Logits gradient(kRows, logits.cols, logits.stride, logits.dtype, logits.offset);
    for (const LogitRows& shard : shards) {
      MatrixView out = gradient.mutable_view();
      out.data = static_cast<char*>(out.data) + shard.vocab_start * SizeOf(logits.dtype);
      out.cols = shard.logits.cols;
      Backward(shard, {got.lse.data(), got.entropy.data(), g.data(), h.data()}, out, Serially());
    }
    EXPECT_TRUE(gradient.GapsAreIntact());
    for (int64_t i = 0; i < kRows; ++i) {
      const auto row = static_cast<size_t>(i);
      const Reference want = Want(i, logits);
      const double z = RoundingOfZ(i);
      EXPECT_NEAR(got.logprobs[row], want.logprob, 1.5e-6 + 1e-7 * std::abs(want.logprob) + z);
      EXPECT_NEAR(got.lse[row], want.lse, 1.5e-6 + 1.2e-7 * std::abs(want.lse) + z);
      EXPECT_NEAR(got.entropy[row], want.entropy, 5e-6);
      EXPECT_LE(WorstExcess(logits, gradient, i, want), Absolute(i, want)) << i;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Sizes, RowStatsTest, testing::ValuesIn(AllCases()), Name);

TEST(RowStatsTest, APeakedRowEqualsTheReferenceWhenItsLengthIsNoMultipleOfABlock) {
  for (const int64_t cols : {257, 1000, 1024}) {
    Logits x(3, cols, cols, DType::kFloat32);
    x.Randomize(3, 1.0f);
    const std::vector<int64_t> targets = {0, cols / 2, cols - 1};
    for (int64_t i = 0; i < 3; ++i) x.Set(i, targets[static_cast<size_t>(i)], 50.0f);
    const Results got = Forward({{x.view(), targets.data()}}, Serially());
    for (int64_t i = 0; i < 3; ++i) {
      const auto row = static_cast<size_t>(i);
      const Reference want = ReferenceOf(RowOf(x, i), targets[row], 1.0, 0.0, 0.0);
      EXPECT_NEAR(got.lse[row], want.lse, 1e-6);
      EXPECT_NEAR(got.logprobs[row], want.logprob, 1e-6);
      EXPECT_NEAR(got.entropy[row], want.entropy, 1e-6);
    }
  }
}

TEST(RowStatsTest, TheEntropyKeepsItsDigitsWhenLogitsAreLarge) {
  for (const float mean : {1e4f, -1e4f}) {
    Logits x(2, 5000, 5000, DType::kFloat32);
    x.Randomize(5, 4.0f, mean);
    const std::vector<int64_t> targets = {1, 2};
    const Results got = Forward({{x.view(), targets.data()}}, Serially());
    for (int64_t i = 0; i < 2; ++i) {
      const auto row = static_cast<size_t>(i);
      const Reference want = ReferenceOf(RowOf(x, i), targets[row], 1.0, 0.0, 0.0);
      EXPECT_NEAR(got.entropy[row], want.entropy, 5e-6);
      EXPECT_NEAR(got.logprobs[row], want.logprob, 3e-6);
    }
  }
}

TEST(RowStatsTest, StatisticsAreThoseOfTheHeader) {
  Logits x(1, 3, 3, DType::kFloat32);
  for (int64_t j = 0; j < 3; ++j) x.Set(0, j, static_cast<float>(2 * j));
  const int64_t target = 1;
  GatheredStats stats(1, 1);
  StatsOf({x.view(), &target, 2.0f}, stats.of_shard(0), Serially());
  const double e1 = std::exp(-1.0), e2 = std::exp(-2.0);
  EXPECT_FLOAT_EQ(stats.values[0], 2.0f);
  EXPECT_NEAR(stats.values[1], 1.0 + e1 + e2, 1e-6);
  EXPECT_NEAR(stats.values[2], -e1 - 2.0 * e2, 1e-6);
  EXPECT_FLOAT_EQ(stats.values[3], 1.0f);
}

}  // namespace
}  // namespace tandem
