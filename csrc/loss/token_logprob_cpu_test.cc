// The fused kernels against a plain double-precision reference, over the sizes, layouts and special
// values of the contract.
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "csrc/loss/token_logprob.h"

namespace tandem {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kQuietNaN = std::numeric_limits<float>::quiet_NaN();
constexpr float kPadding = 768.0f;  // exact in bfloat16

// Runs ranges out of order and one row at a time, as a pool with many threads might.
ParallelFor ScatteredFor() {
  return {[](void*, int64_t count, int64_t, RangeBody body, void* context) {
            for (int64_t i = count - 1; i >= 0; --i) body(context, i, i + 1);
          },
          nullptr};
}

// A logits matrix in either dtype, with padding between the rows that nobody may touch.
struct Logits {
  Logits(int64_t rows, int64_t cols, int64_t stride, DType dtype)
      : rows(rows), cols(cols), stride(stride), dtype(dtype) {
    bytes.resize(static_cast<size_t>(rows * stride * SizeOf(dtype)));
    for (int64_t i = 0; i < rows * stride; ++i) SetFlat(i, kPadding);
  }

  void SetFlat(int64_t i, float value) {
    const uint32_t bits = std::bit_cast<uint32_t>(value);
    const auto high = static_cast<uint16_t>(bits >> 16);
    if (dtype == DType::kFloat32) std::memcpy(&bytes[static_cast<size_t>(i * 4)], &value, 4);
    if (dtype == DType::kBFloat16) std::memcpy(&bytes[static_cast<size_t>(i * 2)], &high, 2);
  }
  float GetFlat(int64_t i) const {
    float value = 0.0f;
    uint16_t high = 0;
    if (dtype == DType::kFloat32) std::memcpy(&value, &bytes[static_cast<size_t>(i * 4)], 4);
    if (dtype == DType::kBFloat16) {
      std::memcpy(&high, &bytes[static_cast<size_t>(i * 2)], 2);
      value = std::bit_cast<float>(static_cast<uint32_t>(high) << 16);
    }
    return value;
  }
  void Set(int64_t i, int64_t j, float value) { SetFlat(i * stride + j, value); }
  double Get(int64_t i, int64_t j) const { return GetFlat(i * stride + j); }
  bool PaddingIsIntact() const {
    for (int64_t i = 0; i < rows; ++i) {
      for (int64_t j = cols; j < stride; ++j) {
        if (GetFlat(i * stride + j) != kPadding) return false;
      }
    }
    return true;
  }
  void Randomize(uint32_t seed, float sigma) {
    std::mt19937 generator(seed);
    std::normal_distribution<float> normal(0.0f, sigma);
    for (int64_t i = 0; i < rows; ++i) {
      for (int64_t j = 0; j < cols; ++j) Set(i, j, normal(generator));
    }
  }
  ConstMatrixView view() const { return {bytes.data(), rows, cols, stride, dtype}; }
  MatrixView mutable_view() { return {bytes.data(), rows, cols, stride, dtype}; }

  int64_t rows, cols, stride;
  DType dtype;
  std::vector<char> bytes;
};

struct Reference {
  double logprob, entropy, lse;
  std::vector<double> grad;
};

Reference ReferenceRow(const Logits& x, int64_t i, int64_t target, double temperature, double g,
                       double h) {
  double max = -std::numeric_limits<double>::infinity();
  for (int64_t j = 0; j < x.cols; ++j) max = std::max(max, x.Get(i, j) / temperature);
  double sum = 0.0;
  for (int64_t j = 0; j < x.cols; ++j) sum += std::exp(x.Get(i, j) / temperature - max);
  Reference ref{0.0, 0.0, max + std::log(sum), std::vector<double>(static_cast<size_t>(x.cols))};
  for (int64_t j = 0; j < x.cols; ++j) {
    const double log_p = x.Get(i, j) / temperature - ref.lse;
    if (std::exp(log_p) > 0.0) ref.entropy -= std::exp(log_p) * log_p;
  }
  const bool ignored = target == kIgnoreIndex;
  ref.logprob = ignored ? 0.0 : x.Get(i, target) / temperature - ref.lse;
  for (int64_t j = 0; j < x.cols && !ignored; ++j) {
    const double log_p = x.Get(i, j) / temperature - ref.lse;
    const double p = std::exp(log_p);
    if (std::isinf(x.Get(i, j))) continue;
    const double entropy_part = p > 0.0 ? h * p * (log_p + ref.entropy) : 0.0;
    ref.grad[static_cast<size_t>(j)] = (g * ((j == target) - p) - entropy_part) / temperature;
  }
  return ref;
}

struct Results {
  explicit Results(int64_t rows)
      : logprobs(static_cast<size_t>(rows)),
        entropy(static_cast<size_t>(rows)),
        lse(static_cast<size_t>(rows)) {}
  TokenLogprobOutputs outputs() { return {logprobs.data(), entropy.data(), lse.data()}; }
  std::vector<float> logprobs, entropy, lse;
};

struct Case {
  int64_t cols;
  int64_t padding;
  DType dtype;
  float temperature;
};

std::string Name(const testing::TestParamInfo<Case>& info) {
  const Case& c = info.param;
  return std::string(c.dtype == DType::kFloat32 ? "f32" : "bf16") + "_v" + std::to_string(c.cols) +
         "_pad" + std::to_string(c.padding) + "_t" +
         std::to_string(static_cast<int>(c.temperature * 100.0f));
}

std::vector<Case> AllCases() {
  std::vector<Case> cases;
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    for (const int64_t cols : {1, 7, 257, 1000, 32001, 49152}) {
      cases.push_back({cols, 0, dtype, 1.0f});
      cases.push_back({cols, 3, dtype, 0.7f});
    }
    cases.push_back({64, 64, dtype, 2.0f});
    cases.push_back({4097, 0, dtype, 0.5f});
  }
  return cases;
}

class TokenLogprobTest : public testing::TestWithParam<Case> {
 protected:
  static constexpr int64_t kRows = 5;

  Logits MakeLogits() const {
    const Case& c = GetParam();
    Logits x(kRows, c.cols, c.cols + c.padding, c.dtype);
    x.Randomize(17, 4.0f);
    // A masked vocabulary in row 1, large values in row 2.
    for (int64_t j = 1; j < c.cols; j += 3) x.Set(1, j, -kInf);
    for (int64_t j = 0; j < c.cols; ++j) x.Set(2, j, static_cast<float>(x.Get(2, j)) + 80.0f);
    return x;
  }
  std::vector<int64_t> MakeTargets() const {
    const int64_t last = GetParam().cols - 1;
    return {last, 0, last / 2, kIgnoreIndex, last / 3};
  }
};

TEST_P(TokenLogprobTest, ForwardEqualsTheReference) {
  const Logits x = MakeLogits();
  const std::vector<int64_t> targets = MakeTargets();
  const float temperature = GetParam().temperature;
  Results got(kRows);
  ASSERT_TRUE(
      TokenLogprobForward({x.view(), targets.data(), temperature}, got.outputs(), ScatteredFor())
          .ok());
  for (int64_t i = 0; i < kRows; ++i) {
    const auto row = static_cast<size_t>(i);
    const Reference want = ReferenceRow(x, i, targets[row], temperature, 0.0, 0.0);
    const double scale = 1.0 + std::abs(want.lse) / 20.0;
    EXPECT_NEAR(got.logprobs[row], want.logprob, 3e-6 * (1.0 + std::abs(want.logprob) / 10.0)) << i;
    EXPECT_NEAR(got.entropy[row], want.entropy, 1e-5) << i;
    EXPECT_NEAR(got.lse[row], want.lse, 3e-6 * scale) << i;
  }
}

TEST_P(TokenLogprobTest, InPlaceBackwardEqualsTheReferenceAndLeavesThePaddingAlone) {
  Logits x = MakeLogits();
  const Logits original = x;
  const std::vector<int64_t> targets = MakeTargets();
  const float temperature = GetParam().temperature;
  const std::vector<float> g = {1.0f, -0.5f, 2.0f, 3.0f, 0.0f};
  const std::vector<float> h = {0.1f, -0.2f, 0.0f, 1.0f, 0.3f};
  Results saved(kRows);
  const TokenLogprobRows rows{x.view(), targets.data(), temperature};
  ASSERT_TRUE(TokenLogprobForward(rows, saved.outputs(), SerialFor()).ok());
  ASSERT_TRUE(TokenLogprobBackward(rows,
                                   {saved.lse.data(), saved.entropy.data(), g.data(), h.data()},
                                   x.mutable_view(), ScatteredFor())
                  .ok());
  EXPECT_TRUE(x.PaddingIsIntact());
  for (int64_t i = 0; i < kRows; ++i) {
    const auto row = static_cast<size_t>(i);
    const Reference want = ReferenceRow(original, i, targets[row], temperature, g[row], h[row]);
    // float32: the saved lse carries half a unit in its last place; bfloat16: the gradient is
    // rounded to 8 bits.
    const double tolerance =
        GetParam().dtype == DType::kFloat32 ? 1e-6 + 1.2e-7 * std::abs(want.lse) : 8e-3;
    double largest = 0.0;
    double worst = 0.0;
    for (int64_t j = 0; j < x.cols; ++j) {
      const double expected = want.grad[static_cast<size_t>(j)];
      largest = std::max(largest, std::abs(expected));
      worst = std::max(worst, std::abs(x.Get(i, j) - expected));
      if (std::isinf(original.Get(i, j)) || targets[row] == kIgnoreIndex) {
        EXPECT_EQ(x.Get(i, j), 0.0);
      }
    }
    EXPECT_LE(worst, tolerance * std::max(1.0, largest)) << i;
  }
}

TEST_P(TokenLogprobTest, ResultsDoNotDependOnHowRowsAreSplit) {
  const Logits x = MakeLogits();
  const std::vector<int64_t> targets = MakeTargets();
  const TokenLogprobRows rows{x.view(), targets.data(), GetParam().temperature};
  Results serial(kRows), scattered(kRows);
  ASSERT_TRUE(TokenLogprobForward(rows, serial.outputs(), SerialFor()).ok());
  ASSERT_TRUE(TokenLogprobForward(rows, scattered.outputs(), ScatteredFor()).ok());
  EXPECT_EQ(serial.logprobs, scattered.logprobs);
  EXPECT_EQ(serial.entropy, scattered.entropy);
  EXPECT_EQ(serial.lse, scattered.lse);
}

INSTANTIATE_TEST_SUITE_P(Sizes, TokenLogprobTest, testing::ValuesIn(AllCases()), Name);

// One float32 row, forward and backward out of place, for the special values.
struct OneRow {
  OneRow(const std::vector<float>& logits, int64_t target, float g, float h = 0.0f)
      : grad(logits.size(), 9.0f), result(1) {
    const auto cols = static_cast<int64_t>(logits.size());
    const TokenLogprobRows rows{{logits.data(), 1, cols, cols, DType::kFloat32}, &target, 1.0f};
    EXPECT_TRUE(TokenLogprobForward(rows, result.outputs(), SerialFor()).ok());
    const MatrixView out{grad.data(), 1, cols, cols, DType::kFloat32};
    EXPECT_TRUE(TokenLogprobBackward(rows, {result.lse.data(), result.entropy.data(), &g, &h}, out,
                                     SerialFor())
                    .ok());
  }
  std::vector<float> grad;
  Results result;
};

TEST(TokenLogprobSpecialValues,
     ATargetAtMinusInfinityHasLogprobMinusInfinityAndNoGradientOfItsOwn) {
  const OneRow row({1.0f, -kInf, 2.0f}, 1, 1.0f);
  EXPECT_EQ(row.result.logprobs[0], -kInf);
  EXPECT_EQ(row.grad[1], 0.0f);
  EXPECT_NEAR(row.grad[0], -1.0 / (1.0 + std::exp(1.0)), 1e-6);
}

TEST(TokenLogprobSpecialValues, ARowOfMinusInfinityIsVisible) {
  const OneRow row(std::vector<float>(5000, -kInf), 3, 0.0f);
  EXPECT_EQ(row.result.lse[0], -kInf);
  EXPECT_TRUE(std::isnan(row.result.logprobs[0]));
  EXPECT_TRUE(std::isnan(row.result.entropy[0]));
}

TEST(TokenLogprobSpecialValues, BlocksOfMinusInfinityOnEitherSideAddNothing) {
  std::vector<float> logits(3 * 4096, -kInf);
  logits[5000] = 1.0f;
  const OneRow row(logits, 5000, 1.0f, 1.0f);
  EXPECT_EQ(row.result.logprobs[0], 0.0f);
  EXPECT_EQ(row.result.entropy[0], 0.0f);
  for (const float value : row.grad) EXPECT_EQ(value, 0.0f);
}

TEST(TokenLogprobSpecialValues, ANaNAnywhereReachesEveryOutput) {
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
  // The largest payload survives too, and so does +inf as NaN.
  const OneRow payload({std::bit_cast<float>(0x7FFFFFFFu), 1.0f}, 1, 1.0f);
  EXPECT_TRUE(std::isnan(payload.result.logprobs[0]));
  const OneRow infinite({kInf, 1.0f}, 1, 1.0f);
  EXPECT_TRUE(std::isnan(infinite.result.lse[0]));
}

TEST(TokenLogprobSpecialValues, AMaskedTokenWritesAnExactZeroRowWhateverTheLogitsHold) {
  const OneRow row({kQuietNaN, kInf, 2.0f}, 0, 0.0f);
  for (const float value : row.grad) EXPECT_EQ(value, 0.0f);
}

TEST(TokenLogprobSpecialValues, TemperatureDividesTheLogits) {
  const std::vector<float> logits = {2.0f, 0.0f};
  const int64_t target = 1;
  for (const auto& [temperature, want] : {std::pair{1.0f, -2.1269f}, std::pair{0.5f, -4.0181f}}) {
    Results got(1);
    const TokenLogprobRows rows{{logits.data(), 1, 2, 2, DType::kFloat32}, &target, temperature};
    ASSERT_TRUE(TokenLogprobForward(rows, got.outputs(), SerialFor()).ok());
    EXPECT_NEAR(got.logprobs[0], want, 1e-4);
  }
}

TEST(TokenLogprobOffsets, RowsBeyondTwoToThe31ElementsAreReached) {
  // Sparse memory: only the pages of the four rows exist.
  constexpr int64_t kRows = 4, kCols = 5, kStride = (int64_t{1} << 31) / 3 + 1;
  constexpr size_t kBytes = static_cast<size_t>(((kRows - 1) * kStride + kCols) * 4);
  void* memory = mmap(nullptr, kBytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) GTEST_SKIP() << "no address space for " << kBytes << " bytes";
  float* logits = static_cast<float*>(memory);
  const std::vector<float> row = {0.5f, -1.0f, 2.0f, 0.0f, 1.0f};
  for (int64_t i = 0; i < kRows; ++i) std::copy(row.begin(), row.end(), logits + i * kStride);
  const std::vector<int64_t> targets(kRows, 2);
  const std::vector<float> g(kRows, 1.0f);
  Results got(kRows);
  const TokenLogprobRows rows{{logits, kRows, kCols, kStride, DType::kFloat32}, targets.data()};
  const MatrixView grad{logits, kRows, kCols, kStride, DType::kFloat32};
  ASSERT_TRUE(TokenLogprobForward(rows, got.outputs(), SerialFor()).ok());
  ASSERT_TRUE(TokenLogprobBackward(rows, {got.lse.data(), got.entropy.data(), g.data(), nullptr},
                                   grad, SerialFor())
                  .ok());
  const float* last = logits + (kRows - 1) * kStride;
  EXPECT_EQ(got.logprobs.back(), got.logprobs.front());
  EXPECT_NEAR(last[2], 1.0 - std::exp(got.logprobs.back()), 1e-6);
  EXPECT_TRUE(std::equal(last, last + kCols, logits));
  munmap(memory, kBytes);
}

TEST(TokenLogprobErrors, NameTheArgumentAndTheValue) {
  const std::vector<float> logits = {2.0f, 0.0f};
  int64_t target = 2;
  Results got(1);
  TokenLogprobRows rows{{logits.data(), 1, 2, 2, DType::kFloat32}, &target, 1.0f};
  EXPECT_EQ(TokenLogprobForward(rows, got.outputs(), SerialFor()).message(),
            "targets: row 0 holds 2, want 0 <= target < 2 or -100 (ignored)");
  target = 1;
  rows.temperature = 0.0f;
  EXPECT_EQ(TokenLogprobForward(rows, got.outputs(), SerialFor()).message(),
            "temperature: want a finite number > 0, got 0");
}

TEST(TokenLogprobErrors, NoRowsIsFine) {
  Results got(0);
  EXPECT_TRUE(TokenLogprobForward({{nullptr, 0, 8, 8, DType::kFloat32}, nullptr, 1.0f},
                                  got.outputs(), SerialFor())
                  .ok());
}

}  // namespace
}  // namespace tandem
