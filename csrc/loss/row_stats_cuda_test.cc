// What row_stats_cuda.cu promises beyond row_stats_test.cc: its bits depend neither on the grid,
// nor on alignment, and rows longer than a segment are whole. Runs under the emulator, and on a
// device.
#include "csrc/loss/row_stats_cuda.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "csrc/common/scalar_types.h"
#include "csrc/testing/unified_memory.h"

namespace tandem {
namespace {

// Knuth's 64-bit generator, the upper bits.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}
  float Uniform() {
    state_ = state_ * 6364136223846793005u + 1442695040888963407u;
    return static_cast<float>(state_ >> 40) / static_cast<float>(1 << 24);
  }

 private:
  uint64_t state_;
};

// Logits in [-12, 12) behind `offset` elements, which decide about the alignment.
template <typename T>
struct Problem {
  Problem(int64_t rows, int64_t cols, int64_t stride, int64_t offset)
      : rows(rows), cols(cols), stride(stride), storage(offset + rows * stride) {
    logits = storage.data() + offset;
    Random random(7);
    for (int64_t i = 0; i < rows; ++i) {
      for (int64_t j = 0; j < cols; ++j) {
        StoreFloat(24.0f * random.Uniform() - 12.0f, &logits[i * stride + j]);
      }
      targets.push_back(static_cast<int64_t>(random.Uniform() * static_cast<float>(cols - 1)));
      grad_logprobs.push_back(random.Uniform() - 0.5f);
      grad_entropy.push_back(random.Uniform() - 0.5f);
    }
  }

  LogitRows View() const {
    LogitRows view;
    view.logits = {logits, rows, cols, stride, sizeof(T) == 4 ? DType::kFloat32 : DType::kBFloat16};
    view.targets = targets.data();
    view.temperature = 0.7f;
    return view;
  }

  int64_t rows, cols, stride;
  UnifiedVector<T> storage;
  T* logits;
  UnifiedVector<int64_t> targets;
  UnifiedVector<float> grad_logprobs, grad_entropy;
};

struct Results {
  UnifiedVector<float> stats;  // max, sum, shifted, target: [4, N]
  UnifiedVector<float> logprobs, lse, entropy;
  std::vector<float> gradient;  // [N, V]

  bool operator==(const Results&) const = default;
};

void Check(const Status& status) { ASSERT_TRUE(status.ok()) << status.message(); }

template <typename T>
Results Run(const Problem<T>& problem, int64_t max_blocks) {
  const auto rows = static_cast<size_t>(problem.rows);
  const LogitRows view = problem.View();
  Results results;
  results.stats.resize(4 * rows);
  float* stats = results.stats.data();
  const RowStats out{stats, stats + rows, stats + 2 * rows, stats + 3 * rows};
  UnifiedVector<char> scratch(
      static_cast<size_t>(cuda::LogitsStatsWorkspaceBytes(problem.rows, problem.cols)));
  Check(cuda::LogitsStatsOnGrid(view, out, {scratch.data(), static_cast<int64_t>(scratch.size())},
                                {}, max_blocks));

  results.logprobs.resize(rows);
  results.lse.resize(rows);
  results.entropy.resize(rows);
  Check(cuda::StatsFinish({out.max, out.sum, out.shifted, out.target, 1, problem.rows},
                          problem.rows, problem.targets.data(), kIgnoreIndex,
                          {results.logprobs.data(), results.lse.data(), results.entropy.data()},
                          {}));

  Problem<T> copy(problem.rows, problem.cols, problem.stride,
                  problem.logits - problem.storage.data());
  const MatrixView gradient{copy.logits, copy.rows, copy.cols, copy.stride, view.logits.dtype};
  Check(cuda::LogitsGradientOnGrid(copy.View(),
                                   {results.lse.data(), results.entropy.data(),
                                    copy.grad_logprobs.data(), copy.grad_entropy.data()},
                                   gradient, {}, max_blocks));
  EXPECT_TRUE(WaitForKernels());
  for (int64_t i = 0; i < copy.rows; ++i) {
    for (int64_t j = 0; j < copy.cols; ++j) {
      results.gradient.push_back(ToFloat(copy.logits[i * copy.stride + j]));
    }
  }
  return results;
}

template <typename T>
class RowStatsCuda : public testing::Test {
  void SetUp() override {
    if (!HasDevice()) GTEST_SKIP() << "no CUDA device";
  }
};
using Types = testing::Types<float, BFloat16>;
TYPED_TEST_SUITE(RowStatsCuda, Types);

TYPED_TEST(RowStatsCuda, GridDoesNotMatter) {
  const Problem<TypeParam> problem(3, 40000, 40000, 0);
  const Results results = Run(problem, 1 << 20);
  for (const int64_t max_blocks : {1, 2, 5}) EXPECT_EQ(Run(problem, max_blocks), results);
}

TYPED_TEST(RowStatsCuda, AlignmentDoesNotMatter) {
  const Problem<TypeParam> aligned(3, 20001, 20008, 0);
  const Problem<TypeParam> odd_stride(3, 20001, 20001, 0);
  const Problem<TypeParam> odd_start(3, 20001, 20008, 3);
  const Results results = Run(aligned, 1 << 20);
  EXPECT_EQ(Run(odd_stride, 1 << 20), results);
  EXPECT_EQ(Run(odd_start, 1 << 20), results);
}

TYPED_TEST(RowStatsCuda, LongRowsEqualFloat64) {
  const Problem<TypeParam> problem(2, 70003, 70008, 0);  // three segments
  const Results results = Run(problem, 1 << 20);
  for (int64_t i = 0; i < problem.rows; ++i) {
    const auto logit = [&](int64_t j) {
      return static_cast<double>(ToFloat(problem.logits[i * problem.stride + j])) / 0.7f;
    };
    double max = logit(0);
    for (int64_t j = 0; j < problem.cols; ++j) max = std::max(max, logit(j));
    double sum = 0;
    double shifted = 0;
    for (int64_t j = 0; j < problem.cols; ++j) {
      sum += std::exp(logit(j) - max);
      shifted += (logit(j) - max) * std::exp(logit(j) - max);
    }
    const double lse = max + std::log(sum);
    const double entropy = std::log(sum) - shifted / sum;
    const int64_t target = problem.targets[static_cast<size_t>(i)];
    EXPECT_NEAR(results.lse[i], lse, 4e-6);
    EXPECT_NEAR(results.entropy[i], entropy, 1e-5);
    EXPECT_NEAR(results.logprobs[i], logit(target) - lse, 6e-6);
    double worst = 0;
    for (int64_t j = 0; j < problem.cols; ++j) {
      const double p = std::exp(logit(j) - lse);
      const double g = problem.grad_logprobs[i] * ((j == target) - p);
      const double h = problem.grad_entropy[i] * p * (std::log(p) + entropy);
      worst = std::max(worst, std::abs(results.gradient[i * problem.cols + j] - (g - h) / 0.7f));
    }
    EXPECT_LT(worst, sizeof(TypeParam) == 4 ? 2e-6 : 4e-3);
  }
}

TEST(RowStatsCudaChecks, WorkspaceAndShapes) {
  if (!HasDevice()) GTEST_SKIP() << "no CUDA device";
  const Problem<float> problem(2, 40000, 40000, 0);
  float stats[8];
  const RowStats out{stats, stats + 2, stats + 4, stats + 6};
  EXPECT_EQ(cuda::LogitsStatsWorkspaceBytes(2, 32768), 0);
  EXPECT_EQ(cuda::LogitsStatsWorkspaceBytes(2, 40000), 48);
  EXPECT_EQ(cuda::LogitsStats(problem.View(), out, {}, {}).code(), StatusCode::kInvalidArgument);
  LogitRows cold = problem.View();
  cold.temperature = 0.0f;
  EXPECT_EQ(cuda::LogitsStats(cold, out, {}, {}).code(), StatusCode::kInvalidArgument);
  const MatrixView narrow{problem.logits, 2, 39999, 40000, DType::kFloat32};
  EXPECT_EQ(cuda::LogitsGradient(problem.View(), {}, narrow, {}).code(),
            StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace tandem
