// Special values of row_stats.h: infinities, NaN, targets that are not there, padding, thresholds,
// offsets beyond 2^31, and errors.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "csrc/common/simt_qualifiers.h"
#include "csrc/loss/row_stats.h"
#include "csrc/testing/logits_under_test.h"

namespace tandem {
namespace {

// One float32 row, forward and backward out of place.
struct OneRow {
  OneRow(const std::vector<float>& logits, int64_t target, float g, float h = 0.0f)
      : grad(logits.size(), 9.0f), result(1) {
    const auto cols = static_cast<int64_t>(logits.size());
    const LogitRows rows{{logits.data(), 1, cols, cols, DType::kFloat32}, &target};
    result = Forward({rows}, Serially());
    const MatrixView out{grad.data(), 1, cols, cols, DType::kFloat32};
    Backward(rows, {result.lse.data(), result.entropy.data(), &g, &h}, out, Serially());
  }
  std::vector<float> grad;
  Results result;
};

TEST(RowSpecialValues, ATargetAtMinusInfinityHasLogprobMinusInfinityAndNoGradientOfItsOwn) {
  const OneRow row({1.0f, -kInf, 2.0f}, 1, 1.0f);
  EXPECT_EQ(row.result.logprobs[0], -kInf);
  EXPECT_EQ(row.grad[1], 0.0f);
  EXPECT_NEAR(row.grad[0], -1.0 / (1.0 + std::exp(1.0)), 1e-6);
}

TEST(RowSpecialValues, ARowOfMinusInfinityIsVisibleAndHasNoGradient) {
  for (const size_t cols : {1, 100, 5000}) {
    const OneRow row(std::vector<float>(cols, -kInf), 0, 1.0f, 0.5f);
    EXPECT_EQ(row.result.lse[0], -kInf);
    EXPECT_TRUE(std::isnan(row.result.logprobs[0]));
    EXPECT_TRUE(std::isnan(row.result.entropy[0]));
    for (const float value : row.grad) EXPECT_EQ(value, 0.0f);
  }
}

TEST(RowSpecialValues, RunsOfMinusInfinityOnEitherSideAddNothing) {
  std::vector<float> logits(3 * 4096, -kInf);
  logits[5000] = 1.0f;
  const OneRow row(logits, 5000, 1.0f, 1.0f);
  EXPECT_EQ(row.result.logprobs[0], 0.0f);
  EXPECT_EQ(row.result.entropy[0], 0.0f);
  for (const float value : row.grad) EXPECT_EQ(value, 0.0f);
}

TEST(RowSpecialValues, TheSmallestFiniteLogitsAreStillARow) {
  const OneRow row(std::vector<float>(130, std::numeric_limits<float>::lowest()), 7, 1.0f);
  EXPECT_NEAR(row.result.logprobs[0], -std::log(130.0), 1e-6);
  EXPECT_NEAR(row.result.entropy[0], std::log(130.0), 1e-6);
}

TEST(RowSpecialValues, OppositeEndsOfTheRangeDoNotMakeANaN) {
  const float huge = std::numeric_limits<float>::max();
  std::vector<float> logits(200, -huge);
  logits[150] = huge;
  const OneRow row(logits, 150, 1.0f, 1.0f);
  EXPECT_EQ(row.result.logprobs[0], 0.0f);
  EXPECT_EQ(row.result.entropy[0], 0.0f);
}

TEST(RowSpecialValues, NoLogprobIsAboveZero) {
  for (int exponent = -10; exponent <= 10; ++exponent) {
    std::vector<float> logits(300, 0.0f);
    logits[123] = 20.0f + std::ldexp(1.1f, exponent);
    EXPECT_LE(OneRow(logits, 123, 1.0f).result.logprobs[0], 0.0f);
  }
}

TEST(RowSpecialValues, ANaNAnywhereReachesEveryOutput) {
  for (const size_t position : {size_t{0}, size_t{4095}, size_t{9000}}) {
    for (const float rest : {0.5f, -kInf}) {
      std::vector<float> logits(9001, rest);
      logits[position] = kQuietNaN;
      const OneRow row(logits, 1, 1.0f);
      EXPECT_TRUE(std::isnan(row.result.logprobs[0]));
      EXPECT_TRUE(std::isnan(row.result.lse[0]));
      EXPECT_TRUE(std::isnan(row.result.entropy[0]));
    }
  }
}

TEST(RowSpecialValues, TheLargestPayloadOfANaNAndInfinityAreNaN) {
  for (const float bad : {BitCast<float>(0x7FFFFFFFu), BitCast<float>(0xFFFFFFFFu), kInf}) {
    const OneRow row({bad, 1.0f, -kInf}, 1, 1.0f);
    EXPECT_TRUE(std::isnan(row.result.logprobs[0]));
    EXPECT_TRUE(std::isnan(row.result.lse[0]));
    EXPECT_TRUE(std::isnan(row.result.entropy[0]));
  }
}

TEST(RowSpecialValues, ANaNInOneShardReachesTheWhole) {
  for (const float bad : {kQuietNaN, kInf}) {
    const std::vector<float> logits = {1.0f, 2.0f, -kInf, bad};
    const int64_t target = 0;
    LogitRows first{{logits.data(), 1, 2, 2, DType::kFloat32}, &target};
    LogitRows second{{logits.data() + 2, 1, 2, 2, DType::kFloat32}, &target};
    second.vocab_start = 2;
    const Results got = Forward({first, second}, Serially());
    EXPECT_TRUE(std::isnan(got.lse[0]));
    EXPECT_TRUE(std::isnan(got.logprobs[0]));
    EXPECT_TRUE(std::isnan(got.entropy[0]));
  }
}

TEST(RowSpecialValues, ATokenWithoutGradientWritesAnExactZeroRowWhateverTheLogitsHold) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    Logits x(2, 301, 303, dtype);
    for (int64_t j = 0; j < 301; ++j) {
      for (int64_t i = 0; i < 2; ++i) x.Set(i, j, j % 2 == 0 ? kQuietNaN : kInf);
    }
    const std::vector<int64_t> targets = {0, kIgnoreIndex};
    const std::vector<float> g = {0.0f, 1.0f}, h = {0.0f, 1.0f}, nan = {kQuietNaN, kQuietNaN};
    Backward({x.view(), targets.data()}, {nan.data(), nan.data(), g.data(), h.data()},
             x.mutable_view(), Serially());
    for (int64_t i = 0; i < 2; ++i) {
      for (int64_t j = 0; j < 301; ++j) ASSERT_EQ(x.Get(i, j), 0.0);
    }
    EXPECT_TRUE(x.GapsAreIntact());
  }
}

TEST(RowSpecialValues, MissingGradientsAreZeros) {
  Logits x(1, 100, 100, DType::kFloat32), with_zeros = x, with_null = x;
  x.Randomize(1, 2.0f);
  const int64_t target = 3;
  const LogitRows rows{x.view(), &target};
  const Results saved = Forward({rows}, Serially());
  const float one = 1.0f, zero = 0.0f;
  Backward(rows, {saved.lse.data(), saved.entropy.data(), &one, &zero}, with_zeros.mutable_view(),
           Serially());
  Backward(rows, {saved.lse.data(), nullptr, &one, nullptr}, with_null.mutable_view(), Serially());
  EXPECT_EQ(with_zeros.bytes, with_null.bytes);
  Backward(rows, {saved.lse.data(), nullptr, nullptr, nullptr}, with_null.mutable_view(),
           Serially());
  for (int64_t j = 0; j < 100; ++j) EXPECT_EQ(with_null.Get(0, j), 0.0);
}

TEST(RowSpecialValues, TheEntropyMayBeLeftOut) {
  Logits x(1, 100, 100, DType::kFloat32);
  x.Randomize(1, 2.0f);
  const int64_t target = 3;
  const Results want = Forward({{x.view(), &target}}, Serially());
  GatheredStats stats(1, 1);
  StatsOf({x.view(), &target}, stats.of_shard(0), Serially());
  Results got(1);
  const TokenLogprobs out{got.logprobs.data(), got.lse.data(), nullptr};
  ASSERT_TRUE(
      KernelsUnderTest().stats_finish(stats.all(), 1, &target, kIgnoreIndex, out, Serially()).ok());
  EXPECT_EQ(got.logprobs, want.logprobs);
  EXPECT_EQ(got.lse, want.lse);
}

TEST(RowSpecialValues, AnotherIgnoreIndexIsTheCallers) {
  Logits x(2, 10, 10, DType::kFloat32);
  x.Randomize(1, 2.0f);
  const std::vector<int64_t> targets = {7, 3};
  LogitRows rows{x.view(), targets.data()};
  rows.ignore_index = 7;
  const Results got = Forward({rows}, Serially());
  EXPECT_EQ(got.logprobs[0], 0.0f);
  EXPECT_LT(got.logprobs[1], 0.0f);
}

// A float32 row of which only some columns count, against the reference of the same row with -inf
// in the others.
void ExpectRowLike(const std::vector<double>& counted, const LogitRows& rows) {
  const auto cols = rows.logits.cols;
  const Results got = Forward({rows}, Serially());
  const int64_t target = rows.targets[0];
  const Reference want = ReferenceOf(counted, target, rows.temperature, 1.5, -0.25);
  if (std::isinf(want.logprob)) {
    EXPECT_EQ(got.logprobs[0], -kInf);
  } else {
    EXPECT_NEAR(got.logprobs[0], want.logprob, 3e-6);
  }
  EXPECT_NEAR(got.lse[0], want.lse, 3e-6);
  EXPECT_NEAR(got.entropy[0], want.entropy, 5e-6);
  std::vector<float> grad(static_cast<size_t>(cols), 9.0f);
  const float g = 1.5f, h = -0.25f;
  Backward(rows, {got.lse.data(), got.entropy.data(), &g, &h},
           {grad.data(), 1, cols, cols, DType::kFloat32}, Serially());
  for (size_t j = 0; j < grad.size(); ++j) {
    if (want.grad[j] == 0.0) {
      EXPECT_EQ(grad[j], 0.0f) << j;
    } else {
      EXPECT_NEAR(grad[j], want.grad[j], 5e-6) << j;
    }
  }
}

TEST(RowPadding, ColumnsFromVocabSizeOnCountAsMinusInfinityWhateverTheyHold) {
  for (const auto& [cols, padded] : {std::pair<int64_t, int64_t>{5, 8}, {999, 1024}, {0, 16}}) {
    Logits x(1, padded, padded, DType::kFloat32);
    x.Randomize(9, 3.0f);
    for (int64_t j = cols; j < padded; ++j) x.Set(0, j, j % 2 == 0 ? kQuietNaN : 1e30f);
    std::vector<double> counted = RowOf(x, 0);
    for (int64_t j = cols; j < padded; ++j) counted[static_cast<size_t>(j)] = -kInf;
    // A real column, and one in the padding.
    for (const int64_t target : {cols / 2, cols}) {
      if (cols == 0) continue;
      LogitRows rows{x.view(), &target};
      rows.vocab_size = cols;
      ExpectRowLike(counted, rows);
    }
    if (cols != 0) continue;
    LogitRows rows{x.view(), &cols};
    rows.vocab_size = 0;
    GatheredStats stats(1, 1);
    StatsOf(rows, stats.of_shard(0), Serially());
    EXPECT_EQ(stats.values, (std::vector<float>{-kInf, 0.0f, 0.0f, -kInf}));
  }
}

TEST(RowPadding, ANaNOfTheRowDoesNotReachItsGradient) {
  Logits x(1, 16, 16, DType::kFloat32);
  x.Set(0, 2, kQuietNaN);
  const int64_t target = 1;
  LogitRows rows{x.view(), &target};
  rows.vocab_size = 9;
  const Results got = Forward({rows}, Serially());
  std::vector<float> grad(16, 9.0f);
  const float g = 1.5f;
  Backward(rows, {got.lse.data(), nullptr, &g, nullptr}, {grad.data(), 1, 16, 16, DType::kFloat32},
           Serially());
  for (size_t j = 0; j < 9; ++j) EXPECT_TRUE(std::isnan(grad[j])) << j;
  for (size_t j = 9; j < 16; ++j) EXPECT_EQ(grad[j], 0.0f) << j;
}

TEST(RowPadding, ItIsCountedFromTheStartOfTheVocabulary) {
  Logits x(1, 20, 20, DType::kFloat32);
  x.Randomize(9, 3.0f);
  const int64_t target = 3;
  std::vector<LogitRows> shards;
  for (const int64_t start : {0, 10}) {
    LogitRows shard{x.view(), &target};
    shard.logits.data = static_cast<const float*>(shard.logits.data) + start;
    shard.logits.cols = 10;
    shard.vocab_start = start;
    shard.vocab_size = 13;
    shards.push_back(shard);
  }
  const Results got = Forward(shards, Serially());
  std::vector<double> counted = RowOf(x, 0);
  counted.resize(13);
  const Reference want = ReferenceOf(counted, target, 1.0, 0.0, 0.0);
  EXPECT_NEAR(got.logprobs[0], want.logprob, 2e-6);
  EXPECT_NEAR(got.entropy[0], want.entropy, 2e-6);
}

TEST(RowThresholds, LogitsBelowThemCountAsMinusInfinityAndTiesStay) {
  for (const int64_t cols : {7, 64, 1000}) {
    Logits x(1, cols, cols, DType::kFloat32);
    x.Randomize(9, 1.0f);  // so that the tie weighs something
    x.Set(0, cols / 2, 1.25f);
    const float threshold = 1.25f;
    std::vector<double> counted = RowOf(x, 0);
    for (double& value : counted) value = value < threshold ? -kInf : value;
    const int64_t largest = std::max_element(counted.begin(), counted.end()) - counted.begin();
    const int64_t smallest = std::min_element(counted.begin(), counted.end()) - counted.begin();
    for (const int64_t target : {largest, smallest, cols / 2}) {
      LogitRows rows{x.view(), &target, 0.7f};
      rows.thresholds = &threshold;
      ExpectRowLike(counted, rows);
    }
  }
}

TEST(RowThresholds, ANaNIsNotBelowOne) {
  const std::vector<float> logits = {1.0f, kQuietNaN, 3.0f};
  const int64_t target = 0;
  const float threshold = 2.0f;
  LogitRows rows{{logits.data(), 1, 3, 3, DType::kFloat32}, &target};
  rows.thresholds = &threshold;
  EXPECT_TRUE(std::isnan(Forward({rows}, Serially()).lse[0]));
}

TEST(RowTargets, OneThatNoShardHoldsHasLogprobMinusInfinity) {
  Logits x(1, 10, 10, DType::kFloat32);
  x.Randomize(9, 3.0f);
  for (const int64_t target : {3, 999}) {
    LogitRows rows{x.view(), &target};
    rows.vocab_start = 100;
    const Results got = Forward({rows}, Serially());
    EXPECT_EQ(got.logprobs[0], -kInf);
    EXPECT_TRUE(std::isfinite(got.lse[0]));
  }
}

TEST(RowShards, WithoutColumnsAreTheEmptyElement) {
  const std::vector<int64_t> targets = {1, kIgnoreIndex};
  const LogitRows rows{{nullptr, 2, 0, 0, DType::kFloat32}, targets.data()};
  GatheredStats stats(1, 2);
  StatsOf(rows, stats.of_shard(0), Serially());
  EXPECT_EQ(stats.values, (std::vector<float>{-kInf, -kInf, 0.0f, 0.0f, 0.0f, 0.0f, -kInf, -kInf}));
}

TEST(RowOffsets, RowsBeyondTwoToThe31ElementsAreReached) {
  const RowsFarApart x({0.5f, -1.0f, 2.0f, 0.0f, 1.0f});
  if (x.data == nullptr) GTEST_SKIP() << "no address space for " << x.bytes << " bytes";
  const std::vector<int64_t> targets(x.kRows, 2);
  const std::vector<float> g(x.kRows, 1.0f);
  const LogitRows rows{x.view(), targets.data()};
  const Results got = Forward({rows}, Serially());
  Backward(rows, {got.lse.data(), nullptr, g.data(), nullptr},
           {x.data, x.kRows, x.cols, x.kStride, DType::kFloat32}, Serially());
  EXPECT_EQ(got.logprobs.back(), got.logprobs.front());
  EXPECT_NEAR(x.last()[2], 1.0 - std::exp(got.logprobs.back()), 1e-6);
  EXPECT_TRUE(std::equal(x.last(), x.last() + x.cols, x.data));
}

class RowErrors : public testing::Test {
 protected:
  std::string MessageOfStats() {
    GatheredStats stats(1, 1);
    WorkspaceMemory memory(KernelsUnderTest().logits_stats_workspace_bytes(1, 2));
    return KernelsUnderTest()
        .logits_stats(rows, stats.of_shard(0), memory.workspace(), Serially())
        .message();
  }
  std::string MessageOfGradient(const MatrixView& out) {
    const float one = 1.0f;
    return KernelsUnderTest()
        .logits_gradient(rows, {&one, nullptr, &one, nullptr}, out, Serially())
        .message();
  }

  std::vector<float> logits = {2.0f, 0.0f};
  int64_t target = 1;
  LogitRows rows{{logits.data(), 1, 2, 2, DType::kFloat32}, &target};
};

TEST_F(RowErrors, ATemperatureThatIsNotPositiveAndFinite) {
  for (const float temperature : {0.0f, -1.0f, kInf, kQuietNaN}) {
    rows.temperature = temperature;
    EXPECT_EQ(MessageOfStats().rfind("temperature: want a finite number > 0", 0), 0u);
    EXPECT_EQ(MessageOfGradient({logits.data(), 1, 2, 2, DType::kFloat32}).rfind("temperature", 0),
              0u);
  }
}

TEST_F(RowErrors, ShapesThatCannotBe) {
  rows.logits.cols = -1;
  EXPECT_EQ(MessageOfStats().rfind("logits:", 0), 0u);
  rows.logits.cols = 3;
  EXPECT_EQ(MessageOfStats(), "logits: want row_stride >= 3 columns, got 2");
  rows.logits.cols = 2;
  rows.vocab_start = -1;
  EXPECT_EQ(MessageOfStats().rfind("vocab_start", 0), 0u);
}

TEST_F(RowErrors, AGradientOfAnotherShapeOrDtype) {
  EXPECT_EQ(MessageOfGradient({logits.data(), 1, 1, 2, DType::kFloat32}).rfind("grad_logits:", 0),
            0u);
  EXPECT_EQ(MessageOfGradient({logits.data(), 1, 2, 2, DType::kBFloat16}).rfind("grad_logits:", 0),
            0u);
}

TEST_F(RowErrors, TargetsThatNobodyCanHold) {
  if (kIsEmulated) GTEST_SKIP() << "devices do not read targets on the host";
  target = -1;
  EXPECT_EQ(MessageOfStats().rfind("targets: row 0 holds -1, want 0 <= target <", 0), 0u);
  target = 2;
  EXPECT_EQ(MessageOfStats(), "");  // another shard may hold it
  rows.vocab_size = 2;
  EXPECT_EQ(MessageOfStats(), "targets: row 0 holds 2, want 0 <= target < 2 or -100 (ignored)");
}

TEST_F(RowErrors, NoRowsAreFine) {
  rows = {{nullptr, 0, 8, 8, DType::kFloat32}, nullptr};
  EXPECT_EQ(MessageOfStats(), "");
  EXPECT_EQ(MessageOfGradient({nullptr, 0, 8, 8, DType::kFloat32}), "");
}

}  // namespace
}  // namespace tandem
