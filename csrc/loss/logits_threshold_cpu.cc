// CPU backend of logits_threshold.h: a radix select over the bits of a logit. The cut is the
// largest value whose mass, summed over everything not below it, reaches a target: for top-k every
// logit weighs 1 and the target is k; for top-p it weighs its probability.
//
// Each pass over the row settles some bits of the answer, from the highest. Mass is summed in
// float64 in the order of the row.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

#include "csrc/common/multiarch.h"
#include "csrc/common/scalar_types.h"
#include "csrc/loss/exp2.h"
#include "csrc/loss/logits_threshold.h"

namespace tandem::cpu {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr int kLanes = 64;
constexpr int64_t kElementsPerThread = 8192;

constexpr int kDigitBits = 11;
constexpr int kDigits = 1 << kDigitBits;
constexpr int kShifts[] = {21, 10, 0};  // of the three digits of a key, 11 + 11 + 10 bits

// Ordered as the floats are; -0 comes before +0.
TANDEM_INLINE uint32_t KeyOf(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  return bits ^ ((bits >> 31) != 0 ? 0xFFFFFFFFu : 0x80000000u);
}

TANDEM_INLINE float ValueOf(uint32_t key) {
  return std::bit_cast<float>(key ^ ((key >> 31) != 0 ? 0x80000000u : 0xFFFFFFFFu));
}

// What a logit weighs, and what has to be reached.
struct Weighing {
  bool by_probability;
  float max;      // of the row
  float scale;    // log2 e / temperature
  double target;  // a number of logits, or a fraction of the mass of all
};

// NaN where a row ends, as NaN is not looked at.
template <typename T>
TANDEM_INLINE void LoadLanes(const T* row, int64_t count, float* lanes) {
  for (int lane = 0; lane < kLanes; ++lane) {
    lanes[lane] = std::numeric_limits<float>::quiet_NaN();
  }
  for (int64_t lane = 0; lane < std::min<int64_t>(kLanes, count); ++lane) {
    lanes[lane] = ToFloat(row[lane]);
  }
}

TANDEM_INLINE void Weigh(const float* x, const Weighing& weighing, float* weights) {
  for (int lane = 0; lane < kLanes; ++lane) {
    // The largest weighs 1, though it be infinite.
    const float d = x[lane] == weighing.max ? 0.0f : (x[lane] - weighing.max) * weighing.scale;
    const float clamped = ClampExponent(d);
    const float weight = clamped == kExp2Floor ? 0.0f : Exp2NonPositive(clamped);
    weights[lane] = weighing.by_probability ? weight : 1.0f;
  }
}

// The part of a row that a pass looks at: logits not below `floor` whose higher digits are known.
struct Candidates {
  float floor;
  uint32_t prefix;
  int known_from;  // bits from here up are known; 32: none are
};

TANDEM_INLINE bool IsCandidate(float x, const Candidates& candidates) {
  const uint32_t unknown_bits =
      (candidates.known_from == 32 ? 0u : 1u << candidates.known_from) - 1;
  return ((KeyOf(x) ^ candidates.prefix) & ~unknown_bits) == 0 && x >= candidates.floor;
}

TANDEM_INLINE bool HasCandidate(const float* x, const Candidates& candidates) {
  uint32_t found = 0;
  for (int lane = 0; lane < kLanes; ++lane) found |= IsCandidate(x[lane], candidates) ? 1u : 0u;
  return found != 0;
}

template <typename T>
TANDEM_INLINE void SumDigits(const T* row, int64_t count, const Weighing& weighing,
                             const Candidates& candidates, int shift, double* mass) {
  std::fill(mass, mass + kDigits, 0.0);
  for (int64_t start = 0; start < count; start += kLanes) {
    float x[kLanes];
    float weights[kLanes];
    LoadLanes(row + start, count - start, x);
    if (!HasCandidate(x, candidates)) continue;
    Weigh(x, weighing, weights);
    for (int lane = 0; lane < kLanes; ++lane) {
      if (!IsCandidate(x[lane], candidates)) continue;
      mass[(KeyOf(x[lane]) >> shift) % kDigits] += static_cast<double>(weights[lane]);
    }
  }
}

// The largest digit down to which `mass` reaches `target`, which shrinks by what lies above it. If
// rounding keeps the sum short of the target it is the smallest digit that weighs anything.
TANDEM_INLINE uint32_t DigitThatReaches(const double* mass, double* target) {
  uint32_t last = 0;
  double above = 0.0;
  for (int digit = kDigits - 1; digit >= 0; --digit) {
    if (mass[digit] == 0.0) continue;
    last = static_cast<uint32_t>(digit);
    if (above + mass[digit] >= *target) break;
    above += mass[digit];
  }
  *target -= above;
  return last;
}

// -inf if all that is there does not reach the target.
template <typename T>
TANDEM_INLINE float Select(const T* row, int64_t count, const Weighing& weighing, float floor) {
  double mass[kDigits];
  double target = weighing.target;
  Candidates candidates{floor, 0, 32};
  for (const int shift : kShifts) {
    SumDigits(row, count, weighing, candidates, shift, mass);
    if (candidates.known_from == 32) {
      double total = 0.0;
      for (int digit = 0; digit < kDigits; ++digit) total += mass[digit];
      if (weighing.by_probability) target *= total;
      if (total == 0.0 || total < target) return -kInfinity;
    }
    candidates.prefix |= DigitThatReaches(mass, &target) << shift;
    candidates.known_from = shift;
  }
  return ValueOf(candidates.prefix);
}

template <typename T>
TANDEM_INLINE float Max(const T* row, int64_t count) {
  float best[kLanes];
  for (int lane = 0; lane < kLanes; ++lane) best[lane] = -kInfinity;
  for (int64_t start = 0; start < count; start += kLanes) {
    float x[kLanes];
    LoadLanes(row + start, count - start, x);
    for (int lane = 0; lane < kLanes; ++lane) {
      best[lane] = x[lane] > best[lane] ? x[lane] : best[lane];
    }
  }
  return *std::max_element(best, best + kLanes);
}

template <typename T>
TANDEM_INLINE float CutOf(const T* row, int64_t count, const ThresholdParams& params) {
  float cut = -kInfinity;
  if (params.top_k > 0 && params.top_k < count) {
    cut = Select(row, count, {false, 0.0f, 0.0f, static_cast<double>(params.top_k)}, cut);
  }
  if (params.top_p < 1.0f) {
    const Weighing weighing{true, Max(row, count), kLog2E / params.temperature,
                            static_cast<double>(params.top_p)};
    cut = std::max(cut, Select(row, count, weighing, cut));
  }
  return cut;
}

using Float32 = float;
TANDEM_MULTIARCH float CutOfRow(const Float32* row, int64_t count, const ThresholdParams& params) {
  return CutOf(row, count, params);
}
TANDEM_MULTIARCH float CutOfRow(const BFloat16* row, int64_t count, const ThresholdParams& params) {
  return CutOf(row, count, params);
}
TANDEM_MULTIARCH float CutOfRow(const Float16* row, int64_t count, const ThresholdParams& params) {
  return CutOf(row, count, params);
}

template <typename T>
void CutRows(const ConstMatrixView& logits, const ThresholdParams& params, float* thresholds,
             const Execution& execution) {
  const int64_t grain =
      std::max<int64_t>(1, kElementsPerThread / std::max<int64_t>(1, logits.cols));
  RunParallel(execution.parallel, logits.rows, grain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const T* row = static_cast<const T*>(logits.data) + i * logits.row_stride;
      thresholds[i] = CutOfRow(row, logits.cols, params);
    }
  });
}

Status Check(const ConstMatrixView& logits, const ThresholdParams& params,
             const float* thresholds) {
  if (logits.rows < 0 || logits.cols < 0 || logits.row_stride < logits.cols) {
    return InvalidArgument("logits: want [N, V] with row_stride >= V, got [%lld, %lld] and %lld",
                           static_cast<long long>(logits.rows), static_cast<long long>(logits.cols),
                           static_cast<long long>(logits.row_stride));
  }
  if (params.top_k < 0) {
    return InvalidArgument("top_k: want >= 0 (0 = off), got %lld",
                           static_cast<long long>(params.top_k));
  }
  if (!(params.top_p > 0.0f && params.top_p <= 1.0f)) {
    return InvalidArgument("top_p: want 0 < top_p <= 1, got %g", static_cast<double>(params.top_p));
  }
  if (!(params.temperature > 0.0f) || std::isinf(params.temperature)) {
    return InvalidArgument("temperature: want a finite number > 0, got %g",
                           static_cast<double>(params.temperature));
  }
  if (logits.rows > 0 && (thresholds == nullptr || (logits.data == nullptr && logits.cols > 0))) {
    return InvalidArgument("%s: null", thresholds == nullptr ? "thresholds" : "logits");
  }
  return OkStatus();
}

}  // namespace

int64_t LogitsThresholdWorkspaceBytes(int64_t /*rows*/, int64_t /*cols*/) { return 0; }

Status LogitsThreshold(const ConstMatrixView& logits, const ThresholdParams& params,
                       float* thresholds, const Workspace& /*workspace*/,
                       const Execution& execution) {
  if (Status status = Check(logits, params, thresholds); !status.ok()) return status;
  if (logits.dtype == DType::kFloat32) {
    CutRows<float>(logits, params, thresholds, execution);
  } else if (logits.dtype == DType::kBFloat16) {
    CutRows<BFloat16>(logits, params, thresholds, execution);
  } else {
    CutRows<Float16>(logits, params, thresholds, execution);
  }
  return OkStatus();
}

}  // namespace tandem::cpu
