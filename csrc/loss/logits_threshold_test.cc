// The cut of top-k and top-p against a sort, over dtypes and sizes, and its special values.
#include "csrc/loss/logits_threshold.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "csrc/testing/logits_under_test.h"

namespace tandem {
namespace {

std::vector<float> CutsOf(const Logits& x, const ThresholdParams& params,
                          const Execution& execution) {
  const LossKernels& kernels = KernelsUnderTest();
  WorkspaceMemory memory(kernels.logits_threshold_workspace_bytes(x.rows, x.cols));
  std::vector<float> cuts(static_cast<size_t>(x.rows), 123.0f);
  const Status status =
      kernels.logits_threshold(x.view(), params, cuts.data(), memory.workspace(), execution);
  EXPECT_TRUE(status.ok()) << status.message();
  return cuts;
}

float CutOf(const std::vector<float>& row, const ThresholdParams& params) {
  const auto cols = static_cast<int64_t>(row.size());
  Logits x(1, cols, cols, DType::kFloat32);
  for (int64_t j = 0; j < cols; ++j) x.Set(0, j, row[static_cast<size_t>(j)]);
  return CutsOf(x, params, Serially())[0];
}

// The k-th largest of what is not NaN.
double KthLargest(std::vector<double> row, int64_t k) {
  std::erase_if(row, [](double x) { return std::isnan(x); });
  std::sort(row.begin(), row.end(), std::greater<>());
  return row[static_cast<size_t>(k - 1)];
}

// Probability of what lies above `cut` and of what does not lie below it, among what does not lie
// below `floor`.
struct Mass {
  double above = 0.0;
  double with_ties = 0.0;
};

Mass MassOf(const std::vector<double>& row, double cut, double floor, double temperature) {
  double max = -kInf;
  for (const double x : row) max = x > max ? x : max;
  Mass mass;
  double total = 0.0;
  for (const double x : row) {
    if (!(x >= floor)) continue;
    const double weight = std::exp((x - max) / temperature);
    total += weight;
    if (x > cut) mass.above += weight;
    if (x >= cut) mass.with_ties += weight;
  }
  return {mass.above / total, mass.with_ties / total};
}

struct Case {
  DType dtype;
  int64_t cols;
  int64_t gap;
};

std::string Name(const testing::TestParamInfo<Case>& info) {
  return std::string(NameOf(info.param.dtype)) + "_v" + std::to_string(info.param.cols) + "_gap" +
         std::to_string(info.param.gap);
}

std::vector<Case> AllCases() {
  std::vector<Case> cases;
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    for (const int64_t cols : {1, 2, 63, 257, 1000, 32001, 151936}) {
      cases.push_back({dtype, cols, cols % 7});
    }
  }
  return cases;
}

class LogitsThresholdTest : public testing::TestWithParam<Case> {
 protected:
  static constexpr int64_t kRows = 3;

  void SetUp() override {
    if (kIsEmulated && logits.cols > 50000) GTEST_SKIP() << "too large for the emulator";
    // Row 1 has -inf, NaN and ties, row 2 is far from zero.
    logits.Randomize(5, 3.0f);
    for (int64_t j = 0; j < logits.cols; ++j) {
      if (j % 3 == 1) logits.Set(1, j, -kInf);
      if (j % 7 == 2) logits.Set(1, j, kQuietNaN);
      if (j % 5 == 3) logits.Set(1, j, 1.5f);
      logits.Set(2, j, static_cast<float>(logits.Get(2, j)) - 50.0f);
    }
  }

  Logits logits{kRows, GetParam().cols, GetParam().cols + GetParam().gap, GetParam().dtype,
                GetParam().gap};
};

TEST_P(LogitsThresholdTest, TopKIsTheKthLargest) {
  for (const int64_t k : {1, 2, 20, 50, 500}) {
    if (k >= logits.cols / 2) continue;
    const std::vector<float> cuts = CutsOf(logits, {k, 1.0f, 0.7f}, Serially());
    for (int64_t i = 0; i < kRows; ++i) {
      EXPECT_EQ(cuts[static_cast<size_t>(i)], KthLargest(RowOf(logits, i), k)) << i << " " << k;
    }
  }
}

TEST_P(LogitsThresholdTest, TopPKeepsTheFewestThatReachIt) {
  for (const float temperature : {0.7f, 1.0f, 3.0f}) {
    for (const float p : {1e-6f, 0.1f, 0.5f, 0.9f, 0.999f}) {
      const std::vector<float> cuts = CutsOf(logits, {0, p, temperature}, Serially());
      for (int64_t i = 0; i < kRows; ++i) {
        const double cut = cuts[static_cast<size_t>(i)];
        const Mass mass = MassOf(RowOf(logits, i), cut, -kInf, temperature);
        EXPECT_LT(mass.above, p + 1e-6) << i << " " << p;
        EXPECT_GE(mass.with_ties, p - 1e-6) << i << " " << p;
      }
    }
  }
}

TEST_P(LogitsThresholdTest, TopPLooksAtWhatTopKLeft) {
  for (const int64_t k : {2, 20}) {
    if (k >= logits.cols / 2) continue;
    for (const float p : {0.3f, 0.9f}) {
      const std::vector<float> cuts = CutsOf(logits, {k, p, 1.0f}, Serially());
      for (int64_t i = 0; i < kRows; ++i) {
        const std::vector<double> row = RowOf(logits, i);
        const double cut = cuts[static_cast<size_t>(i)];
        const double floor = KthLargest(row, k);
        EXPECT_GE(cut, floor);
        const Mass mass = MassOf(row, cut, floor, 1.0);
        EXPECT_LT(mass.above, p + 1e-6) << i << " " << p;
        EXPECT_GE(mass.with_ties, p - 1e-6) << i << " " << p;
      }
    }
  }
}

TEST_P(LogitsThresholdTest, ACutIsALogitOfItsRow) {
  for (const ThresholdParams& params : {ThresholdParams{0, 0.8f}, ThresholdParams{30, 0.8f}}) {
    const std::vector<float> cuts = CutsOf(logits, params, Serially());
    for (int64_t i = 0; i < kRows; ++i) {
      const std::vector<double> row = RowOf(logits, i);
      const double cut = cuts[static_cast<size_t>(i)];
      EXPECT_TRUE(std::isinf(cut) || std::find(row.begin(), row.end(), cut) != row.end()) << cut;
    }
  }
}

TEST_P(LogitsThresholdTest, NothingIsCutWhenBothAreOff) {
  for (const int64_t k : {int64_t{0}, logits.cols, logits.cols + 1}) {
    for (const float cut : CutsOf(logits, {k, 1.0f, 1.0f}, Serially())) EXPECT_EQ(cut, -kInf);
  }
}

TEST_P(LogitsThresholdTest, ResultsAreTheSameToTheBitInEveryRunAndForEverySplit) {
  const ThresholdParams params{100, 0.95f, 0.7f};
  const std::vector<float> first = CutsOf(logits, params, Serially());
  for (const int64_t ranges : {1, 2, 7}) EXPECT_EQ(CutsOf(logits, params, InRanges(ranges)), first);
}

INSTANTIATE_TEST_SUITE_P(Sizes, LogitsThresholdTest, testing::ValuesIn(AllCases()), Name);

TEST(ThresholdSpecialValues, TiesStay) {
  const std::vector<float> row = {1.0f, 2.0f, 2.0f, 2.0f, 0.0f};
  EXPECT_EQ(CutOf(row, {1, 1.0f}), 2.0f);
  EXPECT_EQ(CutOf(row, {3, 1.0f}), 2.0f);
  EXPECT_EQ(CutOf(row, {4, 1.0f}), 1.0f);
  EXPECT_EQ(CutOf(row, {0, 0.05f}), 2.0f);
  // Of the four that top-k leaves, the three ties hold nearly all.
  EXPECT_EQ(CutOf(row, {4, 0.85f}), 2.0f);
  EXPECT_EQ(CutOf(row, {4, 0.95f}), 1.0f);
}

TEST(ThresholdSpecialValues, MinusInfinityWeighsNothing) {
  const std::vector<float> row = {-kInf, 3.0f, -kInf, 1.0f};
  EXPECT_EQ(CutOf(row, {2, 1.0f}), 1.0f);
  EXPECT_EQ(CutOf(row, {3, 1.0f}), -kInf);
  EXPECT_EQ(CutOf(row, {0, 0.5f}), 3.0f);
  EXPECT_EQ(CutOf(row, {0, 0.99f}), 1.0f);
  for (const size_t cols : {1, 10, 3000}) {
    const std::vector<float> nothing(cols, -kInf);
    EXPECT_EQ(CutOf(nothing, {0, 0.5f}), -kInf);
    EXPECT_EQ(CutOf(nothing, {1, 0.5f}), -kInf);
  }
}

TEST(ThresholdSpecialValues, NaNIsNotLookedAt) {
  EXPECT_EQ(CutOf({kQuietNaN, 3.0f, -kQuietNaN, 1.0f}, {1, 1.0f}), 3.0f);
  EXPECT_EQ(CutOf({kQuietNaN, 3.0f, -kQuietNaN, 1.0f}, {2, 1.0f}), 1.0f);
  EXPECT_EQ(CutOf({kQuietNaN, 3.0f, -kQuietNaN, 1.0f}, {3, 1.0f}), -kInf);
  EXPECT_EQ(CutOf({kQuietNaN, 3.0f, -kQuietNaN, 1.0f}, {0, 0.5f}), 3.0f);
  EXPECT_EQ(CutOf({kQuietNaN, kQuietNaN, kQuietNaN}, {1, 0.5f}), -kInf);
}

TEST(ThresholdSpecialValues, NegativeAndPositiveLogitsAreInOrder) {
  const std::vector<float> row = {-1.0f, -2.0f, 1e-40f, -1e-40f, 3e38f, -3e38f, 0.5f};
  const std::vector<float> sorted = {3e38f, 0.5f, 1e-40f, -1e-40f, -1.0f, -2.0f};
  for (size_t k = 1; k <= sorted.size(); ++k) {
    EXPECT_EQ(CutOf(row, {static_cast<int64_t>(k), 1.0f}), sorted[k - 1]) << k;
  }
}

TEST(ThresholdSpecialValues, TheTemperatureMattersToTopPAlone) {
  const std::vector<float> row = {2.0f, 1.0f, 0.0f};
  EXPECT_EQ(CutOf(row, {0, 0.8f, 0.25f}), 2.0f);
  EXPECT_EQ(CutOf(row, {0, 0.8f, 4.0f}), 0.0f);
  EXPECT_EQ(CutOf(row, {2, 1.0f, 4.0f}), 1.0f);
}

TEST(ThresholdOffsets, RowsBeyondTwoToThe31ElementsAreReached) {
  const RowsFarApart x({0.5f, -1.0f, 2.0f, 0.0f, 1.0f});
  if (x.data == nullptr) GTEST_SKIP() << "no address space for " << x.bytes << " bytes";
  const LossKernels& kernels = KernelsUnderTest();
  WorkspaceMemory memory(kernels.logits_threshold_workspace_bytes(x.kRows, x.cols));
  std::vector<float> cuts(x.kRows);
  const Status status =
      kernels.logits_threshold(x.view(), {3, 0.9f}, cuts.data(), memory.workspace(), Serially());
  ASSERT_TRUE(status.ok()) << status.message();
  // Of the three largest, the first two have 0.86 of the probability.
  EXPECT_EQ(cuts, std::vector<float>(x.kRows, 0.5f));
}

TEST(ThresholdErrors, NameTheArgument) {
  const Logits x(1, 2, 2, DType::kFloat32);
  WorkspaceMemory memory(KernelsUnderTest().logits_threshold_workspace_bytes(1, 2));
  float cut = 0.0f;
  const auto message = [&](const ThresholdParams& params) {
    return KernelsUnderTest()
        .logits_threshold(x.view(), params, &cut, memory.workspace(), Serially())
        .message();
  };
  EXPECT_EQ(message({-1, 1.0f, 1.0f}).rfind("top_k:", 0), 0u);
  for (const float p : {0.0f, -0.5f, 1.5f, kQuietNaN}) {
    EXPECT_EQ(message({0, p, 1.0f}).rfind("top_p:", 0), 0u);
  }
  for (const float temperature : {0.0f, -1.0f, kInf, kQuietNaN}) {
    EXPECT_EQ(message({0, 0.5f, temperature}).rfind("temperature:", 0), 0u);
  }
}

TEST(ThresholdErrors, NoRowsAreFine) {
  const ConstMatrixView none{nullptr, 0, 8, 8, DType::kFloat32};
  EXPECT_TRUE(KernelsUnderTest().logits_threshold(none, {5, 0.5f}, nullptr, {}, Serially()).ok());
}

}  // namespace
}  // namespace tandem
