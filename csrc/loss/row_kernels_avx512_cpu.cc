// Row kernels in AVX-512. A row is read once: the running maximum is compared group by group, and
// the running sums are rescaled in the few groups that raise it. 2^d is one instruction for the
// fraction of d, a polynomial, and one for its integer part.
#include "csrc/common/multiarch.h"
#include "csrc/loss/row_kernels.h"

#ifdef TANDEM_HAS_AVX512

// gcc 12 takes its own intrinsics' undefined operands for a mistake of the caller's.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"

#include <immintrin.h>

#include <cstdint>
#include <cstring>
#include <limits>

#include "csrc/common/scalar_types.h"

#define TANDEM_AVX512_INLINE TANDEM_AVX512 inline __attribute__((always_inline))

namespace tandem::cpu {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Elements that are worked on together: four registers of float32.
constexpr int64_t kGroup = 64;
constexpr int kRegisters = 4;
// Elements that are summed up by themselves.
constexpr int64_t kBlock = 4096;
// How far ahead of a group memory is asked for, in bytes: the processor's own prefetch ends at the
// page, and the first lines of every page would be waited for.
constexpr int64_t kPrefetchBytes = 4096;
// 2^d is exactly 0 from here on, and so is d 2^d.
constexpr float kFloor = -252.0f;

struct Group {
  __m512 x[kRegisters];
};

TANDEM_AVX512_INLINE __m512 Max(__m512 a, __m512 b) { return _mm512_max_ps(a, b); }

// The order of a 16-bit group's registers does not matter as long as LoadGroup and StoreGroup
// agree: even elements are in the even registers, odd ones in the odd.
TANDEM_AVX512_INLINE Group LoadGroup(const float* row) {
  Group group;
  for (int i = 0; i < kRegisters; ++i) group.x[i] = _mm512_loadu_ps(row + 16 * i);
  return group;
}

TANDEM_AVX512_INLINE Group LoadGroup(const BFloat16* row) {
  Group group;
  for (int i = 0; i < kRegisters; i += 2) {
    const __m512i pairs = _mm512_loadu_si512(row + 16 * i);
    group.x[i] = _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16));
    group.x[i + 1] = _mm512_castsi512_ps(
        _mm512_and_si512(pairs, _mm512_set1_epi32(static_cast<int>(0xFFFF0000u))));
  }
  return group;
}

TANDEM_AVX512_INLINE Group LoadGroup(const Float16* row) {
  Group group;
  for (int i = 0; i < kRegisters; ++i) {
    group.x[i] =
        _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(row + 16 * i)));
  }
  return group;
}

// Round to nearest even; a NaN stays a NaN. The result stands in the high half of each element.
TANDEM_AVX512_INLINE __m512i RoundToBFloat16(__m512 x) {
  const __m512i bits = _mm512_castps_si512(x);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7FFF)), odd);
  const __mmask16 is_nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  return _mm512_mask_mov_epi32(rounded, is_nan, _mm512_set1_epi32(0x7FC00000));
}

TANDEM_AVX512_INLINE void StoreGroup(const Group& group, float* out) {
  for (int i = 0; i < kRegisters; ++i) _mm512_storeu_ps(out + 16 * i, group.x[i]);
}

TANDEM_AVX512_INLINE void StoreGroup(const Group& group, BFloat16* out) {
  for (int i = 0; i < kRegisters; i += 2) {
    const __m512i even = _mm512_srli_epi32(RoundToBFloat16(group.x[i]), 16);
    const __m512i odd = RoundToBFloat16(group.x[i + 1]);
    _mm512_storeu_si512(out + 16 * i, _mm512_mask_blend_epi16(0xAAAAAAAAu, even, odd));
  }
}

// A BFloat16 on machines with AVX512_BF16. Its rounding is the one above, but for numbers below
// 2^-126, which become 0.
struct HardwareBFloat16 : BFloat16 {};

TANDEM_AVX512_INLINE void StoreGroup(const Group& group, HardwareBFloat16* out) {
  const __m512i interleave = _mm512_set_epi16(                       //
      31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8,  //
      23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  for (int i = 0; i < kRegisters; i += 2) {
    // Not the intrinsic: it would want the whole call chain compiled for AVX512_BF16.
    __m512i even_then_odd;
    asm("vcvtne2ps2bf16 %2, %1, %0" : "=v"(even_then_odd) : "v"(group.x[i + 1]), "v"(group.x[i]));
    _mm512_storeu_si512(out + 16 * i, _mm512_permutexvar_epi16(interleave, even_then_odd));
  }
}

TANDEM_AVX512_INLINE void StoreGroup(const Group& group, Float16* out) {
  for (int i = 0; i < kRegisters; ++i) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + 16 * i),
                        _mm512_cvtps_ph(group.x[i], _MM_FROUND_TO_NEAREST_INT));
  }
}

template <typename T>
TANDEM_AVX512_INLINE void Prefetch(const T* row) {
  constexpr int64_t kBytes = kGroup * sizeof(T);
  for (int64_t line = 0; line < kBytes; line += 64) {
    _mm_prefetch(reinterpret_cast<const char*>(row) + kPrefetchBytes + line, _MM_HINT_T0);
  }
}

// The last elements of a row, filled up with -inf, which adds nothing to any sum.
template <typename T>
struct Tail {
  TANDEM_AVX512_INLINE Tail(const T* row, int64_t count) {
    T empty;
    StoreFloat(-kInfinity, &empty);
    for (int64_t i = 0; i < kGroup; ++i) x[i] = empty;
    std::memcpy(x, row, static_cast<size_t>(count) * sizeof(T));
  }
  T x[kGroup];
};

// NaN is below nothing.
template <bool kWithThreshold>
TANDEM_AVX512_INLINE Group Cut(Group group, float threshold) {
  if constexpr (kWithThreshold) {
    for (int i = 0; i < kRegisters; ++i) {
      const __mmask16 is_cut =
          _mm512_cmp_ps_mask(group.x[i], _mm512_set1_ps(threshold), _CMP_LT_OQ);
      group.x[i] = _mm512_mask_mov_ps(group.x[i], is_cut, _mm512_set1_ps(-kInfinity));
    }
  }
  return group;
}

// 2^d, minimax in [0, 1) with 2^0 held at exactly 1. Relative error 1.5e-7 with degree 5; with
// degree 4 3e-6, far below the rounding of a 16-bit result. NaN gives NaN.
template <int kDegree>
TANDEM_AVX512_INLINE __m512 Exp2(__m512 d) {
  static_assert(kDegree == 4 || kDegree == 5);
  constexpr float k4[] = {1.0f, 0.693044841f, 0.241280198f, 0.0522424728f, 0.0134266838f};
  constexpr float k5[] = {1.0f,          0.693151295f,   0.240164444f,
                          0.0557999127f, 0.00901703071f, 0.00186713005f};
  const float* coefficients = kDegree == 4 ? k4 : k5;
  const __m512 fraction = _mm512_reduce_ps(d, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
  __m512 p = _mm512_set1_ps(coefficients[kDegree]);
  for (int i = kDegree - 1; i >= 0; --i) {
    p = _mm512_fmadd_ps(p, fraction, _mm512_set1_ps(coefficients[i]));
  }
  return _mm512_scalef_ps(p, d);  // p * 2^floor(d)
}

// NaN passes (the order matters).
TANDEM_AVX512_INLINE __m512 Exponent(__m512 x, __m512 origin, __m512 scale) {
  return _mm512_max_ps(_mm512_set1_ps(kFloor), _mm512_mul_ps(_mm512_sub_ps(x, origin), scale));
}

// Sums around the largest logit so far. It starts at the smallest finite number: x - max is then
// never inf - inf unless x is +inf or NaN. A block's sums are kept apart from those of the blocks
// before it, so that rounding grows with the length of a block and with their number only.
struct Running {
  __m512 max;
  __m512 sum[kRegisters];
  __m512 shifted[kRegisters];
  __m512 sum_before;
  __m512 shifted_before;
};

TANDEM_AVX512_INLINE __m512 Total(const __m512 (&sums)[kRegisters]) {
  return _mm512_add_ps(_mm512_add_ps(sums[0], sums[1]), _mm512_add_ps(sums[2], sums[3]));
}

TANDEM_AVX512_INLINE void StartBlock(Running* running) {
  for (int i = 0; i < kRegisters; ++i) {
    running->sum[i] = _mm512_setzero_ps();
    running->shifted[i] = _mm512_setzero_ps();
  }
}

TANDEM_AVX512_INLINE void EndBlock(Running* running) {
  running->sum_before = _mm512_add_ps(running->sum_before, Total(running->sum));
  running->shifted_before = _mm512_add_ps(running->shifted_before, Total(running->shifted));
}

// One pair of sums under a larger maximum: each d grows by delta.
TANDEM_AVX512_INLINE void Rescale(__m512 delta, __m512 factor, __m512* sum, __m512* shifted) {
  *shifted = _mm512_mul_ps(_mm512_fmadd_ps(delta, *sum, *shifted), factor);
  *sum = _mm512_mul_ps(*sum, factor);
}

TANDEM_AVX512_INLINE void Raise(__m512 group_max, __m512 scale, Running* running) {
  const __m512 max = _mm512_set1_ps(_mm512_reduce_max_ps(group_max));
  const __m512 delta = Exponent(running->max, max, scale);
  const __m512 factor = Exp2<5>(delta);
  for (int i = 0; i < kRegisters; ++i) {
    Rescale(delta, factor, &running->sum[i], &running->shifted[i]);
  }
  Rescale(delta, factor, &running->sum_before, &running->shifted_before);
  running->max = max;
}

TANDEM_AVX512_INLINE void Add(const Group& group, __m512 scale, Running* running) {
  const __m512 group_max = Max(Max(group.x[0], group.x[1]), Max(group.x[2], group.x[3]));
  if (_mm512_cmp_ps_mask(group_max, running->max, _CMP_GT_OQ) != 0) [[unlikely]] {
    Raise(group_max, scale, running);
  }
  for (int i = 0; i < kRegisters; ++i) {
    const __m512 d = Exponent(group.x[i], running->max, scale);
    const __m512 e = Exp2<5>(d);
    running->sum[i] = _mm512_add_ps(running->sum[i], e);
    running->shifted[i] = _mm512_fmadd_ps(d, e, running->shifted[i]);
  }
}

template <bool kWithThreshold, typename T>
TANDEM_AVX512_INLINE RowSums ReduceRow(const T* row, int64_t count, const RowReading& reading) {
  const __m512 scale = _mm512_set1_ps(reading.scale);
  Running running;
  running.max = _mm512_set1_ps(-std::numeric_limits<float>::max());
  running.sum_before = _mm512_setzero_ps();
  running.shifted_before = _mm512_setzero_ps();
  int64_t start = 0;
  while (start + kGroup <= count) {
    const int64_t left = count - start;
    const int64_t end = start + (left < kBlock ? left : kBlock);
    StartBlock(&running);
    for (; start + kGroup <= end; start += kGroup) {
      Prefetch(row + start);
      Add(Cut<kWithThreshold>(LoadGroup(row + start), reading.threshold), scale, &running);
    }
    EndBlock(&running);
  }
  if (start < count) {
    const Tail<T> tail(row + start, count - start);
    StartBlock(&running);
    Add(Cut<kWithThreshold>(LoadGroup(tail.x), reading.threshold), scale, &running);
    EndBlock(&running);
  }
  const float sum = _mm512_reduce_add_ps(running.sum_before);
  if (sum == 0.0f) return {-kInfinity, 0.0f, 0.0f};
  return {_mm512_cvtss_f32(running.max), sum, _mm512_reduce_add_ps(running.shifted_before)};
}

// -p (base + slope log2 p)
template <bool kWithEntropy, int kDegree>
TANDEM_AVX512_INLINE Group GradientOf(const Group& group, const GradientLine& line) {
  const __m512 lse = _mm512_set1_ps(line.lse);
  const __m512 scale = _mm512_set1_ps(line.scale);
  const __m512 base = _mm512_set1_ps(-line.base);
  Group gradient;
  for (int i = 0; i < kRegisters; ++i) {
    const __m512 d = Exponent(group.x[i], lse, scale);
    __m512 factor = base;
    if constexpr (kWithEntropy) factor = _mm512_fmadd_ps(_mm512_set1_ps(-line.slope), d, base);
    gradient.x[i] = _mm512_mul_ps(Exp2<kDegree>(d), factor);
  }
  return gradient;
}

template <bool kWithThreshold, bool kWithEntropy, typename T>
TANDEM_AVX512_INLINE void WriteGradient(const T* row, int64_t count, const GradientLine& line,
                                        T* out) {
  constexpr int kDegree = sizeof(T) == 2 ? 4 : 5;
  int64_t start = 0;
  for (; start + kGroup <= count; start += kGroup) {
    Prefetch(row + start);
    const Group x = Cut<kWithThreshold>(LoadGroup(row + start), line.threshold);
    StoreGroup(GradientOf<kWithEntropy, kDegree>(x, line), out + start);
  }
  if (start < count) {
    const Tail<T> tail(row + start, count - start);
    const Group x = Cut<kWithThreshold>(LoadGroup(tail.x), line.threshold);
    T gradient[kGroup];
    StoreGroup(GradientOf<kWithEntropy, kDegree>(x, line), gradient);
    std::memcpy(out + start, gradient, static_cast<size_t>(count - start) * sizeof(T));
  }
}

template <typename T>
TANDEM_AVX512 RowSums Reduce(const void* row, int64_t count, const RowReading& reading) {
  const T* from = static_cast<const T*>(row);
  return reading.threshold == -kInfinity ? ReduceRow<false>(from, count, reading)
                                         : ReduceRow<true>(from, count, reading);
}

template <typename T>
TANDEM_AVX512 void Gradient(const void* row, int64_t count, const GradientLine& line, void* out) {
  const T* from = static_cast<const T*>(row);
  T* to = static_cast<T*>(out);
  const bool cuts = line.threshold != -kInfinity;
  if (line.slope == 0.0f) {
    cuts ? WriteGradient<true, false>(from, count, line, to)
         : WriteGradient<false, false>(from, count, line, to);
  } else {
    cuts ? WriteGradient<true, true>(from, count, line, to)
         : WriteGradient<false, true>(from, count, line, to);
  }
}

}  // namespace

const RowKernels& Avx512RowKernels(DType dtype) {
  static constexpr RowKernels kFloat32{Reduce<float>, Gradient<float>};
  static constexpr RowKernels kBFloat16{Reduce<BFloat16>, Gradient<BFloat16>};
  static constexpr RowKernels kHardwareBFloat16{Reduce<BFloat16>, Gradient<HardwareBFloat16>};
  static constexpr RowKernels kFloat16{Reduce<Float16>, Gradient<Float16>};
  if (dtype == DType::kFloat32) return kFloat32;
  if (dtype == DType::kFloat16) return kFloat16;
  return __builtin_cpu_supports("avx512bf16") ? kHardwareBFloat16 : kBFloat16;
}

}  // namespace tandem::cpu

#endif  // TANDEM_HAS_AVX512
