#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "csrc/loss/policy_loss.h"
#include "csrc/testing/loss_backend.h"

namespace tandem {
namespace {

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

TEST(SequenceReduceTest, SumsAndMeansSkipWhatHasNoWeight) {
  const std::vector<float> values = {1, 2, kNaN, 4, 5, 6};
  const std::vector<float> weights = {1, 2, 0, 0.5, 0, 0};
  const std::vector<int64_t> offsets = {0, 3, 3, 4, 6};
  std::vector<float> out(4, kNaN);
  const auto reduce = [&](const float* factors, bool mean) {
    const Status status = KernelsUnderTest().sequence_reduce(
        values.data(), factors, offsets.data(), 4, mean, out.data(), {SerialFor(), nullptr});
    EXPECT_TRUE(status.ok()) << status.message();
    return out;
  };
  EXPECT_EQ(reduce(weights.data(), false), (std::vector<float>{5, 0, 2, 0}));
  EXPECT_EQ(reduce(weights.data(), true), (std::vector<float>{2.5, 0, 2, 0}));
  const std::vector<float> plain = reduce(nullptr, true);
  EXPECT_TRUE(std::isnan(plain[0]));
  EXPECT_EQ(plain[3], 5.5f);
}

TEST(SequenceReduceTest, LongSequencesKeepTheirDigits) {
  std::vector<float> values;
  double want = 0;
  for (int i = 0; i < 5000; ++i) {
    values.push_back(1.0f + 1e-3f * static_cast<float>(i % 17));
    want += values.back();
  }
  const std::vector<int64_t> offsets = {0, 5000};
  float out = kNaN;
  const Status status = KernelsUnderTest().sequence_reduce(values.data(), nullptr, offsets.data(),
                                                           1, false, &out, {SerialFor(), nullptr});
  ASSERT_TRUE(status.ok()) << status.message();
  EXPECT_EQ(out, static_cast<float>(want));
}

}  // namespace
}  // namespace tandem
