// Logits, results and float64 references for the tests of row kernels, on the backend that the test
// is linked with.
#pragma once

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "csrc/common/scalar_types.h"
#include "csrc/testing/loss_backend.h"

namespace tandem {

inline constexpr float kInf = std::numeric_limits<float>::infinity();
inline constexpr float kQuietNaN = std::numeric_limits<float>::quiet_NaN();
inline constexpr float kGap = 768.0f;  // between rows; exact in every dtype

inline const char* NameOf(DType dtype) {
  if (dtype == DType::kFloat32) return "f32";
  return dtype == DType::kBFloat16 ? "bf16" : "f16";
}

// Runs `ranges` contiguous ranges of items, the last one first.
inline Execution InRanges(const int64_t& ranges) {
  return {{[](void* pool, int64_t count, int64_t, RangeBody body, void* context) {
             const int64_t ranges = *static_cast<const int64_t*>(pool);
             const int64_t length = (count + ranges - 1) / ranges;
             for (int64_t r = ranges - 1; r >= 0; --r) {
               const int64_t end = std::min(count, (r + 1) * length);
               if (r * length < end) body(context, r * length, end);
             }
           },
           const_cast<int64_t*>(&ranges)},
          nullptr};
}

inline Execution Serially() { return {SerialFor(), nullptr}; }

struct WorkspaceMemory {
  explicit WorkspaceMemory(int64_t bytes)
      : bytes(bytes), storage(static_cast<size_t>(bytes) + 256) {
    const auto address = reinterpret_cast<uintptr_t>(storage.data());
    aligned = storage.data() + (256 - address % 256) % 256;
  }
  Workspace workspace() { return {aligned, bytes}; }

  int64_t bytes;
  std::vector<char> storage;
  char* aligned = nullptr;
};

// Four copies of a row, so far apart that the last offset passes 2^31 elements; only their pages
// exist. data is null where the address space is too small.
struct RowsFarApart {
  static constexpr int64_t kRows = 4;
  static constexpr int64_t kStride = (int64_t{1} << 31) / 3 + 1;

  explicit RowsFarApart(const std::vector<float>& row)
      : cols(static_cast<int64_t>(row.size())),
        bytes(static_cast<size_t>((kRows - 1) * kStride + cols) * sizeof(float)) {
    void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) return;
    data = static_cast<float*>(memory);
    for (int64_t i = 0; i < kRows; ++i) std::copy(row.begin(), row.end(), data + i * kStride);
  }
  ~RowsFarApart() {
    if (data != nullptr) munmap(data, bytes);
  }
  RowsFarApart(const RowsFarApart&) = delete;
  RowsFarApart& operator=(const RowsFarApart&) = delete;

  ConstMatrixView view() const { return {data, kRows, cols, kStride, DType::kFloat32}; }
  const float* last() const { return data + (kRows - 1) * kStride; }

  int64_t cols;
  size_t bytes;
  float* data = nullptr;
};

// A matrix of logits with gaps between its rows, which nobody may touch. `offset` elements stand
// before the first row and decide about its alignment.
struct Logits {
  Logits(int64_t rows, int64_t cols, int64_t stride, DType dtype, int64_t offset = 0)
      : rows(rows), cols(cols), stride(stride), offset(offset), dtype(dtype) {
    bytes.resize(static_cast<size_t>((offset + rows * stride) * SizeOf(dtype)));
    for (int64_t i = -offset; i < rows * stride; ++i) SetFlat(i, kGap);
  }

  void SetFlat(int64_t i, float value) {
    char* at = bytes.data() + (offset + i) * SizeOf(dtype);
    BFloat16 brain;
    Float16 half;
    StoreFloat(value, &brain);
    StoreFloat(value, &half);
    if (dtype == DType::kFloat32) std::memcpy(at, &value, 4);
    if (dtype == DType::kBFloat16) std::memcpy(at, &brain, 2);
    if (dtype == DType::kFloat16) std::memcpy(at, &half, 2);
  }
  float GetFlat(int64_t i) const {
    const char* at = bytes.data() + (offset + i) * SizeOf(dtype);
    float value = 0.0f;
    BFloat16 brain;
    Float16 half;
    if (dtype == DType::kFloat32) {
      std::memcpy(&value, at, 4);
      return value;
    }
    if (dtype == DType::kBFloat16) {
      std::memcpy(&brain, at, 2);
      return ToFloat(brain);
    }
    std::memcpy(&half, at, 2);
    return ToFloat(half);
  }
  void Set(int64_t i, int64_t j, float value) { SetFlat(i * stride + j, value); }
  double Get(int64_t i, int64_t j) const { return GetFlat(i * stride + j); }
  void Randomize(uint32_t seed, float sigma, float mean = 0.0f) {
    std::mt19937 generator(seed);
    std::normal_distribution<float> normal(mean, sigma);
    for (int64_t i = 0; i < rows; ++i) {
      for (int64_t j = 0; j < cols; ++j) Set(i, j, normal(generator));
    }
  }
  bool GapsAreIntact() const {
    for (int64_t i = 0; i < rows; ++i) {
      for (int64_t j = cols; j < stride; ++j) {
        if (GetFlat(i * stride + j) != kGap) return false;
      }
    }
    return true;
  }
  ConstMatrixView view() const {
    return {bytes.data() + offset * SizeOf(dtype), rows, cols, stride, dtype};
  }
  MatrixView mutable_view() {
    return {bytes.data() + offset * SizeOf(dtype), rows, cols, stride, dtype};
  }

  int64_t rows, cols, stride, offset;
  DType dtype;
  std::vector<char> bytes;
};

// What a row must give, in float64 and over the whole vocabulary. Cut logits are -inf in `x`.
struct Reference {
  double logprob, entropy, lse;
  std::vector<double> grad;
};

inline Reference ReferenceOf(const std::vector<double>& x, int64_t target, double temperature,
                             double g, double h) {
  const auto cols = static_cast<int64_t>(x.size());
  double max = -std::numeric_limits<double>::infinity();
  for (const double value : x) max = std::max(max, value / temperature);
  double sum = 0.0;
  for (const double value : x) sum += std::exp(value / temperature - max);
  Reference ref{0.0, 0.0, max + std::log(sum), std::vector<double>(x.size(), 0.0)};
  for (const double value : x) {
    const double log_p = value / temperature - ref.lse;
    if (std::exp(log_p) > 0.0) ref.entropy -= std::exp(log_p) * log_p;
  }
  if (target == kIgnoreIndex) return ref;
  const bool is_here = target >= 0 && target < cols;
  ref.logprob = is_here ? x[static_cast<size_t>(target)] / temperature - ref.lse
                        : -std::numeric_limits<double>::infinity();
  if (g == 0.0 && h == 0.0) return ref;
  for (int64_t j = 0; j < cols; ++j) {
    const double value = x[static_cast<size_t>(j)];
    if (std::isinf(value)) continue;
    const double log_p = value / temperature - ref.lse;
    const double p = std::exp(log_p);
    const double entropy_part = p > 0.0 ? h * p * (log_p + ref.entropy) : 0.0;
    ref.grad[static_cast<size_t>(j)] = (g * ((j == target) - p) - entropy_part) / temperature;
  }
  return ref;
}

inline std::vector<double> RowOf(const Logits& x, int64_t i) {
  std::vector<double> row;
  for (int64_t j = 0; j < x.cols; ++j) row.push_back(x.Get(i, j));
  return row;
}

// The statistics of R shards of N rows, rank after rank as after an all-gather.
struct GatheredStats {
  GatheredStats(int64_t shards, int64_t rows)
      : shards(shards), rows(rows), values(static_cast<size_t>(4 * shards * rows), 7.0f) {}
  RowStats of_shard(int64_t r) {
    float* base = values.data() + r * 4 * rows;
    return {base, base + rows, base + 2 * rows, base + 3 * rows};
  }
  ShardStats all() const {
    const float* base = values.data();
    return {base, base + rows, base + 2 * rows, base + 3 * rows, shards, 4 * rows};
  }
  int64_t shards, rows;
  std::vector<float> values;
};

struct Results {
  explicit Results(int64_t rows)
      : logprobs(static_cast<size_t>(rows)),
        lse(static_cast<size_t>(rows)),
        entropy(static_cast<size_t>(rows)) {}
  TokenLogprobs outputs() { return {logprobs.data(), lse.data(), entropy.data()}; }
  std::vector<float> logprobs, lse, entropy;
};

inline void StatsOf(const LogitRows& rows, const RowStats& stats, const Execution& execution) {
  const LossKernels& kernels = KernelsUnderTest();
  WorkspaceMemory memory(kernels.logits_stats_workspace_bytes(rows.logits.rows, rows.logits.cols));
  const Status status = kernels.logits_stats(rows, stats, memory.workspace(), execution);
  ASSERT_TRUE(status.ok()) << status.message();
}

// Statistics and merge of a vocabulary whose shards these are.
inline Results Forward(const std::vector<LogitRows>& shards, const Execution& execution) {
  const int64_t n = shards[0].logits.rows;
  GatheredStats stats(static_cast<int64_t>(shards.size()), n);
  for (size_t r = 0; r < shards.size(); ++r) {
    StatsOf(shards[r], stats.of_shard(static_cast<int64_t>(r)), execution);
  }
  Results results(n);
  const Status status = KernelsUnderTest().stats_finish(
      stats.all(), n, shards[0].targets, shards[0].ignore_index, results.outputs(), execution);
  EXPECT_TRUE(status.ok()) << status.message();
  return results;
}

inline void Backward(const LogitRows& rows, const TokenLogprobGradients& gradients,
                     const MatrixView& out, const Execution& execution) {
  const Status status = KernelsUnderTest().logits_gradient(rows, gradients, out, execution);
  ASSERT_TRUE(status.ok()) << status.message();
}

}  // namespace tandem
