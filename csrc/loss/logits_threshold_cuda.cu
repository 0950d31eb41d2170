// CUDA backend of logits_threshold.h: a radix select per row, one block each. Floats become
// integers of the same order, whose digits are fixed from the top: every pass over the row sums the
// weights of the elements by their next digit, and descends into the digit where the sum from the
// top reaches what is wanted. A weight is 1 for top-k and a probability for top-p; probabilities
// are fixed-point integers, so atomics may add them in any order and the sum is the same.
//
// Digits of 11 bits hold the sign, the exponent and two bits of the fraction: equal logits hit one
// bin, but ordinary ones spread over dozens. Grid: 256 threads per block, a block per row.
#include <algorithm>
#include <cmath>
#include <cstdint>

#include "csrc/common/simt.h"
#include "csrc/common/simt_reduce.h"
#include "csrc/loss/logits_threshold.h"
#include "csrc/loss/row_tiles.h"

namespace tandem::cuda {
namespace {

constexpr float kLog2E = 1.44269504088896340736f;
constexpr int kDigitBits = 11;
constexpr int kBins = 1 << kDigitBits;
constexpr int kBinsPerThread = kBins / kRowThreads;
constexpr int kWarps = kRowThreads / simt::kWarpSize;
constexpr int64_t kMaxBlocks = 1 << 20;
// Of a probability relative to the largest; 2^23 of them stay below 2^64.
constexpr float kMassScale = 1099511627776.0f;  // 2^40
constexpr int64_t kMaxMassColumns = int64_t{1} << 23;

// Lowest bit that a float of this type can have set when its sign is off: keys need no digit below.
template <typename T>
inline constexpr int kLowestKeyBit = 0;
template <>
inline constexpr int kLowestKeyBit<BFloat16> = 16;
template <>
inline constexpr int kLowestKeyBit<Float16> = 13;

// Integers in the order of floats; -0 and 0 are one.
SIMT_DEVICE uint32_t KeyOf(float x) {
  const uint32_t bits = BitCast<uint32_t>(x + 0.0f);
  return (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
}

SIMT_DEVICE float FloatOf(uint32_t key) {
  return BitCast<float>((key & 0x80000000u) != 0 ? key & 0x7FFFFFFFu : ~key);
}

// Sums of 64 bits by digit in two halves, because a device adds 32 bits to shared memory at once.
struct Histogram {
  uint32_t* low;          // [kBins]
  uint32_t* high;         // [kBins]
  uint64_t* warp_totals;  // [kWarps]
  uint64_t* above;        // [1] weight above the chosen digit
  int* digit;             // [1] the chosen digit, or -1
};

SIMT_DEVICE void AddWeight(const Histogram& histogram, uint32_t bin, uint64_t weight) {
  const uint32_t low = static_cast<uint32_t>(weight);
  const uint32_t before = atomicAdd(&histogram.low[bin], low);
  const uint32_t carry = before + low < before ? 1u : 0u;
  const uint32_t high = static_cast<uint32_t>(weight >> 32) + carry;
  if (high != 0) atomicAdd(&histogram.high[bin], high);
}

SIMT_DEVICE uint64_t WeightOf(const Histogram& histogram, int bin) {
  return static_cast<uint64_t>(histogram.high[bin]) << 32 | histogram.low[bin];
}

// Calls body(x) for every logit that is not NaN.
template <typename T, typename Body>
SIMT_DEVICE void ForEachLogit(const T* row, int cols, Body body) {
  constexpr int kLanes = simt::Vector<T>::kLanes;
  const bool is_aligned = simt::IsVectorAligned(row);
  for (int start = 0; start < cols; start += kRowThreads * kLanes) {
    const int column = GroupColumn<T>(start, 0);
    float x[kLanes];
    simt::Unpack(LoadGroup(row, column, cols, is_aligned), x);
    SIMT_UNROLL
    for (int lane = 0; lane < kLanes; ++lane) {
      if (column + lane < cols && x[lane] == x[lane]) body(x[lane]);
    }
  }
}

// This thread's bins: their weight, and that of all bins above them. The block's total too.
struct Share {
  uint64_t own;
  uint64_t above;
  uint64_t total;
};

SIMT_DEVICE Share ShareOf(const Histogram& histogram) {
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = thread % simt::kWarpSize;
  const int warp = thread / simt::kWarpSize;
  Share share = {0, 0, 0};
  for (int i = 0; i < kBinsPerThread; ++i) {
    share.own += WeightOf(histogram, thread * kBinsPerThread + i);
  }
  uint64_t from_here = share.own;  // to the end of the warp
  SIMT_UNROLL
  for (int offset = 1; offset < simt::kWarpSize; offset *= 2) {
    const uint64_t other = __shfl_down_sync(simt::kFullMask, from_here, offset);
    if (lane + offset < simt::kWarpSize) from_here += other;
  }
  if (lane == 0) histogram.warp_totals[warp] = from_here;
  __syncthreads();
  share.above = from_here - share.own;
  for (int i = 0; i < kWarps; ++i) {
    share.total += histogram.warp_totals[i];
    if (i > warp) share.above += histogram.warp_totals[i];
  }
  return share;
}

// Leaves the digit where the weight from the top reaches `wanted` in the histogram; -1 if none.
SIMT_DEVICE void ChooseDigit(const Histogram& histogram, const Share& share, uint64_t wanted) {
  if (share.above >= wanted || share.above + share.own < wanted) return;
  uint64_t above = share.above;
  int bin = static_cast<int>(threadIdx.x) * kBinsPerThread + kBinsPerThread - 1;
  while (above + WeightOf(histogram, bin) < wanted) above += WeightOf(histogram, bin--);
  *histogram.above = above;
  *histogram.digit = bin;
}

// The largest key so that the keys from it on weigh at least wanted_of(total); 0 if there is none.
// weight_of gives an element's weight.
template <typename T, typename Weight, typename Wanted>
SIMT_DEVICE uint32_t SelectKey(const T* row, int cols, const Histogram& histogram, Weight weight_of,
                               Wanted wanted_of) {
  uint32_t prefix = 0;  // digits so far
  uint64_t wanted = 0;
  int shift = 32;
  while (shift > kLowestKeyBit<T>) {
    const int above_shift = shift;
    shift = shift - kDigitBits > kLowestKeyBit<T> ? shift - kDigitBits : kLowestKeyBit<T>;
    for (int bin = static_cast<int>(threadIdx.x); bin < kBins; bin += kRowThreads) {
      histogram.low[bin] = 0;
      histogram.high[bin] = 0;
    }
    if (threadIdx.x == 0) {
      *histogram.digit = -1;
      *histogram.above = 0;
    }
    __syncthreads();
    const uint32_t digit_mask = (1u << (above_shift - shift)) - 1;
    ForEachLogit(row, cols, [&](float x) {
      const uint32_t key = KeyOf(x);
      if (above_shift < 32 && key >> above_shift != prefix) return;
      const uint64_t weight = weight_of(x, key);
      if (weight != 0) AddWeight(histogram, (key >> shift) & digit_mask, weight);
    });
    __syncthreads();
    const Share share = ShareOf(histogram);
    if (above_shift == 32) wanted = wanted_of(share.total);
    ChooseDigit(histogram, share, wanted);
    __syncthreads();
    const int digit = *histogram.digit;
    const uint64_t above = *histogram.above;
    __syncthreads();
    if (digit < 0) return 0;  // in every thread
    wanted -= above;
    prefix = prefix << (above_shift - shift) | static_cast<uint32_t>(digit);
  }
  // Below the digits every bit of a positive float is off; of a negative one, whose bits are turned
  // around, on.
  const uint32_t rest = (1u << kLowestKeyBit<T>)-1;
  const uint32_t key = prefix << kLowestKeyBit<T>;
  return (key & 0x80000000u) != 0 ? key : key | rest;
}

struct Cuts {
  int64_t top_k;  // 0 = off
  float top_p;    // 1 = off
  float temperature;
};

template <typename T>
SIMT_DEVICE float MaxOf(const T* row, int cols, float* scratch) {
  float max = MinusInfinity();
  ForEachLogit(row, cols, [&](float x) { max = fmaxf(max, x); });
  return simt::BlockReduce(max, simt::Max{}, scratch);
}

template <typename T>
SIMT_DEVICE float ThresholdOf(const T* row, int cols, const Cuts& cuts, const Histogram& histogram,
                              float* scratch) {
  uint32_t kept = 0;  // keys from here on stay
  if (cuts.top_k > 0) {
    const auto wanted = static_cast<uint64_t>(cuts.top_k);
    kept = SelectKey(
        row, cols, histogram, [](float, uint32_t) { return uint64_t{1}; },
        [=](uint64_t) { return wanted; });
  }
  if (cuts.top_p < 1.0f) {
    const float scale = kLog2E / cuts.temperature;
    const float max = MaxOf(row, cols, scratch);
    const auto mass_of = [=](float x, uint32_t key) {
      if (key < kept) return uint64_t{0};
      // The largest weighs 1, even an infinite one.
      const float d = x == max ? 0.0f : (x - max) * scale;
      return static_cast<uint64_t>(simt::Exp2(d) * kMassScale);
    };
    const double top_p = static_cast<double>(cuts.top_p);
    const auto part_of = [=](uint64_t total) {
      const auto part = static_cast<uint64_t>(ceil(top_p * static_cast<double>(total)));
      return part < 1 ? uint64_t{1} : part < total ? part : total;
    };
    kept = SelectKey(row, cols, histogram, mass_of, part_of);
  }
  return kept == 0 ? MinusInfinity() : FloatOf(kept);  // 0 is no float's key
}

template <typename T>
SIMT_KERNEL(kRowThreads)
ThresholdKernel(const T* logits, int64_t rows, int64_t row_stride, int cols, Cuts cuts,
                float* thresholds) {
  SIMT_SHARED(uint32_t, low, kBins);
  SIMT_SHARED(uint32_t, high, kBins);
  SIMT_SHARED(uint64_t, warp_totals, kWarps);
  SIMT_SHARED(uint64_t, above, 1);
  SIMT_SHARED(int, digit, 1);
  SIMT_SHARED(float, scratch, kWarps);
  const Histogram histogram = {low, high, warp_totals, above, digit};
  for (int64_t i = blockIdx.x; i < rows; i += gridDim.x) {
    const float threshold = ThresholdOf(logits + i * row_stride, cols, cuts, histogram, scratch);
    if (threadIdx.x == 0) thresholds[i] = threshold;
  }
}

template <typename T>
Status Launch(const ConstMatrixView& logits, const Cuts& cuts, float* thresholds, Stream stream) {
  const auto grid = static_cast<unsigned>(std::min(logits.rows, kMaxBlocks));
  SIMT_LAUNCH((ThresholdKernel<T>), grid, kRowThreads, 0, stream,
              static_cast<const T*>(logits.data), logits.rows, logits.row_stride,
              static_cast<int>(logits.cols), cuts, thresholds);
  return OkStatus();
}

Status Check(const ConstMatrixView& logits, const ThresholdParams& params) {
  if (logits.rows < 0 || logits.cols < 0 || logits.cols > kMaxMassColumns ||
      logits.row_stride < logits.cols) {
    return InvalidArgument(
        "logits: want [N, V] with N >= 0 and 0 <= V <= min(2^23, row_stride), got [%lld, %lld] of "
        "row_stride %lld",
        static_cast<long long>(logits.rows), static_cast<long long>(logits.cols),
        static_cast<long long>(logits.row_stride));
  }
  if (params.top_k < 0) {
    return InvalidArgument("top_k: want >= 0, got %lld", static_cast<long long>(params.top_k));
  }
  if (!(params.top_p > 0.0f && params.top_p <= 1.0f)) {
    return InvalidArgument("top_p: want > 0 and <= 1, got %g", static_cast<double>(params.top_p));
  }
  if (!(params.temperature > 0.0f) || std::isinf(params.temperature)) {
    return InvalidArgument("temperature: want a finite number > 0, got %g",
                           static_cast<double>(params.temperature));
  }
  return OkStatus();
}

}  // namespace

int64_t LogitsThresholdWorkspaceBytes(int64_t /*rows*/, int64_t /*cols*/) { return 0; }

Status LogitsThreshold(const ConstMatrixView& logits, const ThresholdParams& params,
                       float* thresholds, const Workspace& /*workspace*/,
                       const Execution& execution) {
  if (Status status = Check(logits, params); !status.ok()) return status;
  if (logits.rows == 0) return OkStatus();
  const int64_t top_k = params.top_k < logits.cols ? params.top_k : 0;
  const Cuts cuts = {top_k, params.top_p, params.temperature};
  if (logits.dtype == DType::kFloat32) {
    return Launch<float>(logits, cuts, thresholds, execution.stream);
  }
  if (logits.dtype == DType::kBFloat16) {
    return Launch<BFloat16>(logits, cuts, thresholds, execution.stream);
  }
  return Launch<Float16>(logits, cuts, thresholds, execution.stream);
}

}  // namespace tandem::cuda
