// With a GPU: the kernel against a loop. Without one: the runtime's refusal arrives as a Status
// that names its place.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

#include "csrc/loss/row_max.h"

namespace tandem {
namespace {

bool HasDevice() {
  int count = 0;
  return cudaGetDeviceCount(&count) == cudaSuccess && count > 0;
}

TEST(RowMaxCuda, EqualsALoopOverTheRow) {
  if (!HasDevice()) GTEST_SKIP() << "no CUDA device";
  constexpr int64_t kRows = 3, kCols = 1001, kStride = 1003;
  std::vector<float> logits(kRows * kStride, 1e30f);
  std::vector<float> want(kRows, -std::numeric_limits<float>::infinity());
  for (int64_t i = 0; i < kRows; ++i) {
    for (int64_t j = 0; j < kCols; ++j) {
      const float value = static_cast<float>((i * 7919 + j * 104729) % 5003) - 2500.0f;
      logits[static_cast<size_t>(i * kStride + j)] = value;
      want[static_cast<size_t>(i)] = std::max(want[static_cast<size_t>(i)], value);
    }
  }
  void* device_logits = nullptr;
  void* device_max = nullptr;
  ASSERT_EQ(cudaMalloc(&device_logits, logits.size() * sizeof(float)), cudaSuccess);
  ASSERT_EQ(cudaMalloc(&device_max, kRows * sizeof(float)), cudaSuccess);
  ASSERT_EQ(cudaMemcpy(device_logits, logits.data(), logits.size() * sizeof(float),
                       cudaMemcpyHostToDevice),
            cudaSuccess);
  const Status status = RowMaxCuda({device_logits, kRows, kCols, kStride, DType::kFloat32},
                                   static_cast<float*>(device_max), nullptr);
  ASSERT_TRUE(status.ok()) << status.message();
  std::vector<float> got(kRows);
  ASSERT_EQ(cudaMemcpy(got.data(), device_max, kRows * sizeof(float), cudaMemcpyDeviceToHost),
            cudaSuccess);
  EXPECT_EQ(got, want);
  EXPECT_EQ(cudaFree(device_logits), cudaSuccess);
  EXPECT_EQ(cudaFree(device_max), cudaSuccess);
}

TEST(RowMaxCuda, ReportsAMissingDeviceWithFileAndLine) {
  if (HasDevice()) GTEST_SKIP() << "there is a CUDA device";
  float memory[2] = {1.0f, 2.0f};
  const Status status = RowMaxCuda({memory, 1, 1, 1, DType::kFloat32}, memory + 1, nullptr);
  EXPECT_EQ(status.code(), StatusCode::kDeviceError);
  EXPECT_NE(status.message().find("csrc/loss/row_max_cuda.cu:"), std::string::npos)
      << status.message();
}

TEST(RowMaxCuda, NoRowsIsFineAndTooManyAreRefused) {
  EXPECT_TRUE(RowMaxCuda({nullptr, 0, 8, 8, DType::kFloat32}, nullptr, nullptr).ok());
  EXPECT_EQ(RowMaxCuda({nullptr, int64_t{1} << 31, 8, 8, DType::kFloat32}, nullptr, nullptr).code(),
            StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace tandem
