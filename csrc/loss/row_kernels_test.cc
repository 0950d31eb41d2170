// Every table of row kernels that this machine can run, against float64: the public functions only
// reach the fastest.
#include "csrc/loss/row_kernels.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <utility>
#include <vector>

#include "csrc/common/multiarch.h"
#include "csrc/common/scalar_types.h"

namespace tandem::cpu {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr float kLog2E = 1.44269504088896340736f;

using TableOf = const RowKernels& (*)(DType dtype);

std::vector<TableOf> Tables() {
  std::vector<TableOf> tables = {PortableRowKernels};
#ifdef TANDEM_HAS_AVX512
  if (HasAvx512()) tables.push_back(Avx512RowKernels);
#endif
  return tables;
}

constexpr DType DTypeOf(float) { return DType::kFloat32; }
constexpr DType DTypeOf(BFloat16) { return DType::kBFloat16; }
constexpr DType DTypeOf(Float16) { return DType::kFloat16; }

template <typename T>
class RowKernelsTest : public testing::Test {
 protected:
  // 64 elements are worked on together, 4096 are a block.
  static constexpr int64_t kCounts[] = {0, 1, 63, 64, 65, 4095, 4096, 4097, 9000};

  std::vector<T> RandomRow(int64_t count, float sigma) {
    std::vector<T> row(static_cast<size_t>(count));
    std::normal_distribution<float> normal(0.0f, sigma);
    for (T& x : row) StoreFloat(normal(generator_), &x);
    return row;
  }
  static const RowKernels& Of(TableOf table) { return table(DTypeOf(T{})); }

  std::mt19937 generator_{11};
};

using Types = testing::Types<float, BFloat16, Float16>;
TYPED_TEST_SUITE(RowKernelsTest, Types);

TYPED_TEST(RowKernelsTest, SumsEqualTheReferenceAroundTheLargestLogit) {
  for (const int64_t count : TestFixture::kCounts) {
    const auto row = TestFixture::RandomRow(count, 4.0f);
    for (const float threshold : {-kInf, -1.0f}) {
      double max = -kInf, sum = 0.0, shifted = 0.0;
      for (const TypeParam& x : row) {
        if (ToFloat(x) >= threshold) max = std::max<double>(max, ToFloat(x));
      }
      for (const TypeParam& x : row) {
        if (ToFloat(x) < threshold) continue;
        const double d = (ToFloat(x) - max) * 0.5 * kLog2E;
        sum += std::exp2(d);
        shifted += d * std::exp2(d);
      }
      for (const TableOf table : Tables()) {
        const RowSums got =
            TestFixture::Of(table).reduce(row.data(), count, {0.5f * kLog2E, threshold});
        EXPECT_EQ(static_cast<double>(got.max), max) << count;
        EXPECT_NEAR(got.sum, sum, 6e-7 * sum) << count;
        EXPECT_NEAR(got.shifted, shifted, 1e-6 * std::abs(shifted)) << count;
      }
    }
  }
}

TYPED_TEST(RowKernelsTest, ARisingRowIsRescaledAtEveryStep) {
  std::vector<TypeParam> row(1000);
  for (size_t j = 0; j < row.size(); ++j) StoreFloat(0.0625f * static_cast<float>(j), &row[j]);
  double sum = 0.0;
  for (const TypeParam& x : row) sum += std::exp(ToFloat(x) - ToFloat(row.back()));
  for (const TableOf table : Tables()) {
    const RowSums got = TestFixture::Of(table).reduce(row.data(), 1000, {kLog2E, -kInf});
    EXPECT_NEAR(got.sum, sum, 2e-6 * sum);
  }
}

TYPED_TEST(RowKernelsTest, GradientsEqualTheReferenceAndEndWithTheRow) {
  const double rounding = sizeof(TypeParam) == 4                    ? 4e-7
                          : DTypeOf(TypeParam{}) == DType::kFloat16 ? std::ldexp(1.01, -11)
                                                                    : std::ldexp(1.01, -8);
  for (const int64_t count : TestFixture::kCounts) {
    const auto row = TestFixture::RandomRow(count, 2.0f);
    for (const auto& [slope, threshold] :
         {std::pair{0.0f, -kInf}, {0.3f, -kInf}, {0.0f, 0.5f}, {0.3f, 0.5f}}) {
      const GradientLine line{kLog2E, threshold, 1.25f, 0.75f, slope};
      for (const TableOf table : Tables()) {
        TypeParam guard;
        StoreFloat(17.0f, &guard);
        std::vector<TypeParam> out(static_cast<size_t>(count) + 1, guard);
        TestFixture::Of(table).gradient(row.data(), count, line, out.data());
        EXPECT_EQ(ToFloat(out.back()), 17.0f);
        for (size_t j = 0; j < row.size(); ++j) {
          const double x = ToFloat(row[j]);
          const double d = (x - 1.25) * kLog2E;
          const double want = x < threshold ? 0.0 : -std::exp2(d) * (0.75 + slope * d);
          ASSERT_NEAR(ToFloat(out[j]), want, rounding * std::abs(want) + 1e-6 * std::exp2(d))
              << count << " " << j;
        }
      }
    }
  }
}

TYPED_TEST(RowKernelsTest, NaNReachesTheSumAndItsOwnGradientOnly) {
  for (const size_t position : {size_t{0}, size_t{70}, size_t{4999}}) {
    std::vector<TypeParam> row(5000);
    for (TypeParam& x : row) StoreFloat(-kInf, &x);
    StoreFloat(kNaN, &row[position]);
    for (const TableOf table : Tables()) {
      EXPECT_TRUE(std::isnan(TestFixture::Of(table).reduce(row.data(), 5000, {1.0f, -kInf}).sum));
      std::vector<TypeParam> out(row.size());
      TestFixture::Of(table).gradient(row.data(), 5000, {1.0f, -kInf, 0.5f, 1.0f, 0.5f},
                                      out.data());
      for (size_t j = 0; j < out.size(); ++j) {
        if (j == position) {
          ASSERT_TRUE(std::isnan(ToFloat(out[j])));
        } else {
          ASSERT_EQ(ToFloat(out[j]), 0.0f);
        }
      }
    }
  }
}

TYPED_TEST(RowKernelsTest, TheEmptyRowIsTheEmptyElement) {
  std::vector<TypeParam> row(300);
  for (TypeParam& x : row) StoreFloat(-kInf, &x);
  for (const TableOf table : Tables()) {
    for (const int64_t count : {0, 10, 300}) {
      const RowSums got = TestFixture::Of(table).reduce(row.data(), count, {kLog2E, -kInf});
      EXPECT_EQ(got.max, -kInf);
      EXPECT_EQ(got.sum, 0.0f);
      EXPECT_EQ(got.shifted, 0.0f);
    }
  }
}

// Powers of two and everything else a gradient may be, so that ties of rounding are met.
TEST(RowKernelsTest, BFloat16GradientsAreRoundedToNearestEven) {
  for (uint32_t bits = 0x3F000000u; bits < 0x3F810000u; bits += 0x1000u) {
    // p = 1 at x = lse: the gradient is -base.
    const float base = BitCast<float>(bits);
    BFloat16 zero, want;
    StoreFloat(0.0f, &zero);
    StoreFloat(-base, &want);
    const std::vector<BFloat16> row(64, zero);
    for (const TableOf table : Tables()) {
      std::vector<BFloat16> out(64);
      table(DType::kBFloat16).gradient(row.data(), 64, {1.0f, -kInf, 0.0f, base, 0.0f}, out.data());
      for (const BFloat16& x : out) ASSERT_EQ(x.bits, want.bits) << bits;
    }
  }
}

}  // namespace
}  // namespace tandem::cpu
