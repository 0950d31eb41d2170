// Row kernels in plain C++, written so that compilers turn the loops into vector code. A row is
// reduced block by block: the maximum of a block first, its exponentials second while the block is
// still in the L1 cache, then one rescale merges it into the running sums. Subtracting the maximum
// before anything else keeps the digits of large logits.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "csrc/common/multiarch.h"
#include "csrc/common/scalar_types.h"
#include "csrc/loss/exp2.h"
#include "csrc/loss/row_kernels.h"

namespace tandem::cpu {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

// Independent accumulators per sum: enough to keep several vector registers of any width busy.
constexpr int kLanes = 64;
// 16 KiB of float32, half of the smallest L1 in use.
constexpr int64_t kBlock = 4096;

// Loads kLanes elements, the missing ones of a row's tail and those below the threshold as -inf,
// which adds nothing to any sum. NaN is below nothing.
template <typename T>
TANDEM_INLINE void LoadLanes(const T* row, int64_t count, float threshold, float* lanes) {
  if (count >= kLanes) {
    for (int lane = 0; lane < kLanes; ++lane) lanes[lane] = ToFloat(row[lane]);
  } else {
    for (int lane = 0; lane < kLanes; ++lane) lanes[lane] = -kInfinity;
    for (int64_t lane = 0; lane < count; ++lane) lanes[lane] = ToFloat(row[lane]);
  }
  for (int lane = 0; lane < kLanes; ++lane) {
    lanes[lane] = lanes[lane] < threshold ? -kInfinity : lanes[lane];
  }
}

template <typename T>
TANDEM_INLINE float BlockMax(const T* block, int64_t count, float threshold) {
  float best[kLanes];
  for (int lane = 0; lane < kLanes; ++lane) best[lane] = -kInfinity;
  for (int64_t start = 0; start < count; start += kLanes) {
    float x[kLanes];
    LoadLanes(block + start, count - start, threshold, x);
    for (int lane = 0; lane < kLanes; ++lane) {
      best[lane] = x[lane] > best[lane] ? x[lane] : best[lane];
    }
  }
  float result = best[0];
  for (int lane = 1; lane < kLanes; ++lane) result = best[lane] > result ? best[lane] : result;
  return result;
}

TANDEM_INLINE float SumLanes(float* lanes) {
  for (int width = kLanes / 2; width > 0; width /= 2) {
    for (int lane = 0; lane < width; ++lane) lanes[lane] += lanes[lane + width];
  }
  return lanes[0];
}

template <typename T>
TANDEM_INLINE RowSums BlockSums(const T* block, int64_t count, const RowReading& reading,
                                float max) {
  float sum[kLanes] = {};
  float shifted[kLanes] = {};
  for (int64_t start = 0; start < count; start += kLanes) {
    float d[kLanes];
    LoadLanes(block + start, count - start, reading.threshold, d);
    // Two loops: in one, the compiler turns the clamp into a branch and gives up on vectors.
    for (int lane = 0; lane < kLanes; ++lane) {
      d[lane] = ClampExponent((d[lane] - max) * reading.scale);
    }
    for (int lane = 0; lane < kLanes; ++lane) {
      const float e = Exp2NonPositive(d[lane]);
      sum[lane] += e;
      shifted[lane] += d[lane] * e;
    }
  }
  return {max, SumLanes(sum), SumLanes(shifted)};
}

template <typename T>
TANDEM_INLINE bool HasNaN(const T* block, int64_t count) {
  bool found = false;
  for (int64_t i = 0; i < count; ++i) {
    const float x = ToFloat(block[i]);
    found |= x != x;
  }
  return found;
}

// Moves sums to the larger maximum `max`: each d grows by delta = (m - max) * scale.
TANDEM_INLINE void Rescale(float max, float scale, RowSums* sums) {
  if (sums->sum != 0.0f) {
    const float delta = (sums->max - max) * scale;
    const float factor = std::exp2(delta);
    sums->shifted = factor == 0.0f ? 0.0f : (sums->shifted + delta * sums->sum) * factor;
    sums->sum *= factor;
  }
  sums->max = max;
}

template <typename T>
TANDEM_INLINE RowSums Reduce(const T* row, int64_t count, const RowReading& reading) {
  RowSums sums{-kInfinity, 0.0f, 0.0f};
  for (int64_t start = 0; start < count; start += kBlock) {
    const int64_t length = std::min(kBlock, count - start);
    const float block_max = BlockMax(row + start, length, reading.threshold);
    if (block_max > sums.max) Rescale(block_max, reading.scale, &sums);
    if (sums.max == -kInfinity) {
      // All of it is -inf and adds nothing, unless a NaN hides among them (comparisons skip NaN).
      if (HasNaN(row + start, length)) sums.sum = kNaN;
      continue;
    }
    const RowSums block = BlockSums(row + start, length, reading, sums.max);
    sums.sum += block.sum;
    sums.shifted += block.shifted;
  }
  return sums;
}

template <bool kWithEntropy>
TANDEM_INLINE float Gradient(float x, const GradientLine& line) {
  const float d = ClampExponent((x - line.lse) * line.scale);
  const float p = Exp2NonPositive(d);
  if constexpr (kWithEntropy) return -p * (line.base + line.slope * d);
  return -p * line.base;
}

template <bool kWithEntropy, typename T>
TANDEM_INLINE void WriteGradient(const T* row, int64_t count, const GradientLine& line, T* out) {
  for (int64_t start = 0; start < count; start += kLanes) {
    // Through local arrays, because `out` may be `row` and the compiler must not care.
    float x[kLanes];
    T gradient[kLanes];
    LoadLanes(row + start, count - start, line.threshold, x);
    for (int lane = 0; lane < kLanes; ++lane) {
      StoreFloat(Gradient<kWithEntropy>(x[lane], line), &gradient[lane]);
    }
    const int64_t live = std::min<int64_t>(kLanes, count - start);
    if (live == kLanes) {
      std::memcpy(out + start, gradient, sizeof(gradient));
    } else {
      std::memcpy(out + start, gradient, static_cast<size_t>(live) * sizeof(T));
    }
  }
}

template <typename T>
TANDEM_INLINE void DispatchGradient(const void* row, int64_t count, const GradientLine& line,
                                    void* out) {
  const T* from = static_cast<const T*>(row);
  T* to = static_cast<T*>(out);
  if (line.slope == 0.0f) {
    WriteGradient<false>(from, count, line, to);
  } else {
    WriteGradient<true>(from, count, line, to);
  }
}

// Clones need functions of their own: a template cannot have them.
#define TANDEM_PORTABLE_ROW_KERNELS(Type)                                                        \
  TANDEM_MULTIARCH RowSums Reduce##Type(const void* row, int64_t count,                          \
                                        const RowReading& reading) {                             \
    return Reduce(static_cast<const Type*>(row), count, reading);                                \
  }                                                                                              \
  TANDEM_MULTIARCH void Gradient##Type(const void* row, int64_t count, const GradientLine& line, \
                                       void* out) {                                              \
    DispatchGradient<Type>(row, count, line, out);                                               \
  }

using Float32 = float;
TANDEM_PORTABLE_ROW_KERNELS(Float32)
TANDEM_PORTABLE_ROW_KERNELS(BFloat16)
TANDEM_PORTABLE_ROW_KERNELS(Float16)

}  // namespace

const RowKernels& PortableRowKernels(DType dtype) {
  static constexpr RowKernels kFloat32{ReduceFloat32, GradientFloat32};
  static constexpr RowKernels kBFloat16{ReduceBFloat16, GradientBFloat16};
  static constexpr RowKernels kFloat16{ReduceFloat16, GradientFloat16};
  if (dtype == DType::kFloat32) return kFloat32;
  return dtype == DType::kBFloat16 ? kBFloat16 : kFloat16;
}

const RowKernels& RowKernelsFor(DType dtype) {
#ifdef TANDEM_HAS_AVX512
  if (HasAvx512()) return Avx512RowKernels(dtype);
#endif
  return PortableRowKernels(dtype);
}

}  // namespace tandem::cpu
