// CPU kernels of token_logprob.h. A row is reduced block by block: the maximum of a block first,
// its exponentials second while the block is still in the L1 cache, then one rescale merges it into
// the running sums. Exponents are taken in base 2, (x - max x) * (log2 e / temperature):
// subtracting first keeps the digits of large logits, and one product does for the temperature and
// the change of base.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "csrc/common/multiarch.h"
#include "csrc/loss/exp2.h"
#include "csrc/loss/token_logprob.h"

namespace tandem {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

// Independent accumulators per sum: enough to keep several vector registers of any width busy.
constexpr int kLanes = 64;
// 16 KiB of float32, half of the smallest L1 in use.
constexpr int64_t kBlock = 4096;
// Below this many elements a thread costs more than it brings.
constexpr int64_t kElementsPerThread = 32768;

struct BFloat16 {
  uint16_t bits;
};

TANDEM_INLINE float ToFloat(float x) { return x; }
TANDEM_INLINE float ToFloat(BFloat16 x) {
  return std::bit_cast<float>(static_cast<uint32_t>(x.bits) << 16);
}

TANDEM_INLINE void StoreFloat(float value, float* out) { *out = value; }
// Round to nearest even; a NaN stays a NaN.
TANDEM_INLINE void StoreFloat(float value, BFloat16* out) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
  out->bits = static_cast<uint16_t>(value != value ? 0x7FC0u : rounded);
}

// m = max x, s = sum 2^d and t = sum d 2^d with d = (x - m) * scale. The empty row is {-inf, 0, 0}.
struct RowStats {
  float max = -kInfinity;
  float sum = 0.0f;
  float shifted = 0.0f;
};

// Loads kLanes elements, the missing ones of a row's tail as -inf, which adds nothing to any sum.
template <typename T>
TANDEM_INLINE void LoadLanes(const T* row, int64_t count, float* lanes) {
  if (count >= kLanes) {
    for (int lane = 0; lane < kLanes; ++lane) lanes[lane] = ToFloat(row[lane]);
    return;
  }
  for (int lane = 0; lane < kLanes; ++lane) lanes[lane] = -kInfinity;
  for (int64_t lane = 0; lane < count; ++lane) lanes[lane] = ToFloat(row[lane]);
}

template <typename T>
TANDEM_INLINE float BlockMax(const T* block, int64_t count) {
  float best[kLanes];
  for (int lane = 0; lane < kLanes; ++lane) best[lane] = -kInfinity;
  for (int64_t start = 0; start < count; start += kLanes) {
    float x[kLanes];
    LoadLanes(block + start, count - start, x);
    for (int lane = 0; lane < kLanes; ++lane)
      best[lane] = x[lane] > best[lane] ? x[lane] : best[lane];
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
TANDEM_INLINE RowStats BlockStats(const T* block, int64_t count, float scale, float max) {
  float sum[kLanes] = {};
  float shifted[kLanes] = {};
  for (int64_t start = 0; start < count; start += kLanes) {
    float d[kLanes];
    LoadLanes(block + start, count - start, d);
    // Two loops: in one, the compiler turns the clamp into a branch and gives up on vectors.
    for (int lane = 0; lane < kLanes; ++lane) d[lane] = ClampExponent((d[lane] - max) * scale);
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
  for (int64_t i = 0; i < count; ++i) found |= std::isnan(ToFloat(block[i]));
  return found;
}

// Moves stats to the larger maximum `max`: each d grows by delta = (m - max) * scale.
TANDEM_INLINE void Rescale(float max, float scale, RowStats* stats) {
  if (stats->sum != 0.0f) {
    const float delta = (stats->max - max) * scale;
    const float factor = std::exp2(delta);
    stats->shifted = factor == 0.0f ? 0.0f : (stats->shifted + delta * stats->sum) * factor;
    stats->sum *= factor;
  }
  stats->max = max;
}

template <typename T>
TANDEM_INLINE RowStats Reduce(const T* row, int64_t count, float scale) {
  RowStats stats;
  for (int64_t start = 0; start < count; start += kBlock) {
    const int64_t length = std::min(kBlock, count - start);
    const float block_max = BlockMax(row + start, length);
    if (block_max > stats.max) Rescale(block_max, scale, &stats);
    if (stats.max == -kInfinity) {
      // All of it is -inf and adds nothing, unless a NaN hides among them (comparisons skip NaN).
      if (HasNaN(row + start, length)) stats.sum = kNaN;
      continue;
    }
    const RowStats block = BlockStats(row + start, length, scale, stats.max);
    stats.sum += block.sum;
    stats.shifted += block.shifted;
  }
  return stats;
}

TANDEM_MULTIARCH RowStats ReduceRow(const float* row, int64_t count, float scale) {
  return Reduce(row, count, scale);
}
TANDEM_MULTIARCH RowStats ReduceRow(const BFloat16* row, int64_t count, float scale) {
  return Reduce(row, count, scale);
}

// grad_j = -p_j * (base + slope * log2 p_j); the target's own term is added by the caller.
struct GradientLine {
  float scale;  // log2 p = (x - lse) * scale
  float lse;    // times the temperature, so in the units of x
  float base;
  float slope;
};

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
    LoadLanes(row + start, count - start, x);
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
TANDEM_INLINE void DispatchGradient(const T* row, int64_t count, const GradientLine& line, T* out) {
  if (line.slope == 0.0f) {
    WriteGradient<false>(row, count, line, out);
  } else {
    WriteGradient<true>(row, count, line, out);
  }
}

TANDEM_MULTIARCH void WriteGradientRow(const float* row, int64_t count, const GradientLine& line,
                                       float* out) {
  DispatchGradient(row, count, line, out);
}
TANDEM_MULTIARCH void WriteGradientRow(const BFloat16* row, int64_t count, const GradientLine& line,
                                       BFloat16* out) {
  DispatchGradient(row, count, line, out);
}

int64_t Grain(int64_t cols) {
  return std::max<int64_t>(1, kElementsPerThread / std::max<int64_t>(1, cols));
}

Status CheckRows(const TokenLogprobRows& rows) {
  const ConstMatrixView& logits = rows.logits;
  if (logits.rows < 0 || logits.cols < 1) {
    return InvalidArgument("logits: want [N, V] with V >= 1, got [%lld, %lld]",
                           static_cast<long long>(logits.rows),
                           static_cast<long long>(logits.cols));
  }
  if (!(rows.temperature > 0.0f) || std::isinf(rows.temperature)) {
    return InvalidArgument("temperature: want a finite number > 0, got %g",
                           static_cast<double>(rows.temperature));
  }
  for (int64_t i = 0; i < logits.rows; ++i) {
    const int64_t target = rows.targets[i];
    if (target != rows.ignore_index && (target < 0 || target >= logits.cols)) {
      return InvalidArgument(
          "targets: row %lld holds %lld, want 0 <= target < %lld or %lld (ignored)",
          static_cast<long long>(i), static_cast<long long>(target),
          static_cast<long long>(logits.cols), static_cast<long long>(rows.ignore_index));
    }
  }
  return OkStatus();
}

template <typename T>
void ForwardRow(const TokenLogprobRows& rows, int64_t i, const TokenLogprobOutputs& out) {
  const T* row = static_cast<const T*>(rows.logits.data) + i * rows.logits.row_stride;
  const float scale = kLog2E / rows.temperature;
  const RowStats stats = ReduceRow(row, rows.logits.cols, scale);
  const float log_sum = std::log(stats.sum);
  const int64_t target = rows.targets[i];
  out.lse[i] = stats.sum == 0.0f ? -kInfinity : stats.max / rows.temperature + log_sum;
  // 0/0 makes the entropy of a row without any finite logit NaN.
  out.entropy[i] = log_sum - kLn2 * (stats.shifted / stats.sum);
  out.logprobs[i] = target == rows.ignore_index
                        ? 0.0f
                        : (ToFloat(row[target]) - stats.max) / rows.temperature - log_sum;
}

template <typename T>
void BackwardRow(const TokenLogprobRows& rows, int64_t i, const TokenLogprobGradients& in,
                 const MatrixView& grad_logits) {
  const int64_t cols = rows.logits.cols;
  const T* row = static_cast<const T*>(rows.logits.data) + i * rows.logits.row_stride;
  T* out = static_cast<T*>(grad_logits.data) + i * grad_logits.row_stride;
  const int64_t target = rows.targets[i];
  const float g = in.grad_logprobs == nullptr ? 0.0f : in.grad_logprobs[i];
  const float h = in.grad_entropy == nullptr ? 0.0f : in.grad_entropy[i];
  if (target == rows.ignore_index || (g == 0.0f && h == 0.0f)) {
    std::memset(static_cast<void*>(out), 0, static_cast<size_t>(cols) * sizeof(T));
    return;
  }
  const float inverse_temperature = 1.0f / rows.temperature;
  const float target_logit = ToFloat(row[target]);
  GradientLine line;
  line.scale = kLog2E / rows.temperature;
  line.lse = in.lse[i] * rows.temperature;
  line.base = (h == 0.0f ? g : g + h * in.entropy[i]) * inverse_temperature;
  line.slope = h * kLn2 * inverse_temperature;
  WriteGradientRow(row, cols, line, out);
  // A target at -inf has been masked away upstream: nothing flows into it.
  if (target_logit != -kInfinity) {
    const float own = line.slope == 0.0f ? Gradient<false>(target_logit, line)
                                         : Gradient<true>(target_logit, line);
    StoreFloat(own + g * inverse_temperature, &out[target]);
  }
}

}  // namespace

Status TokenLogprobForward(const TokenLogprobRows& rows, const TokenLogprobOutputs& outputs,
                           const ParallelFor& parallel) {
  if (Status status = CheckRows(rows); !status.ok()) return status;
  const bool is_float32 = rows.logits.dtype == DType::kFloat32;
  RunParallel(parallel, rows.logits.rows, Grain(rows.logits.cols), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      is_float32 ? ForwardRow<float>(rows, i, outputs) : ForwardRow<BFloat16>(rows, i, outputs);
    }
  });
  return OkStatus();
}

Status TokenLogprobBackward(const TokenLogprobRows& rows, const TokenLogprobGradients& gradients,
                            const MatrixView& grad_logits, const ParallelFor& parallel) {
  if (Status status = CheckRows(rows); !status.ok()) return status;
  if (grad_logits.rows != rows.logits.rows || grad_logits.cols != rows.logits.cols ||
      grad_logits.dtype != rows.logits.dtype) {
    return InvalidArgument("grad_logits: want the shape and dtype of logits");
  }
  const bool is_float32 = rows.logits.dtype == DType::kFloat32;
  RunParallel(parallel, rows.logits.rows, Grain(rows.logits.cols), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      is_float32 ? BackwardRow<float>(rows, i, gradients, grad_logits)
                 : BackwardRow<BFloat16>(rows, i, gradients, grad_logits);
    }
  });
  return OkStatus();
}

}  // namespace tandem
