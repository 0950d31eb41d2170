// The tiles of policy_loss_cpu.cc in AVX-512: the mathematics of policy_loss_math.h over sixteen
// tokens at a time. Two walks over a tile: shorter loops keep their constants in registers, and
// the processor sees the next group of tokens while it works on one.
#include "csrc/common/multiarch.h"
#include "csrc/loss/policy_loss_tile.h"

#ifdef TANDEM_HAS_AVX512

// gcc 12 takes its own intrinsics' undefined operands for a mistake of the caller's.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"

#include <immintrin.h>

#include <cstdint>
#include <limits>

#include "csrc/common/simt_qualifiers.h"

// What follows is compiled for AVX-512, the functions of the header too: all of them are inlined,
// so that no other file can meet them.
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,fma")

namespace tandem {

// The truth of a comparison in each lane.
struct LaneMask {
  __mmask16 bits;
};

TANDEM_INLINE LaneMask Every(bool condition) {
  return {static_cast<__mmask16>(condition ? 0xFFFF : 0)};
}
TANDEM_INLINE LaneMask operator&(LaneMask x, LaneMask y) {
  return {static_cast<__mmask16>(x.bits & y.bits)};
}
TANDEM_INLINE LaneMask operator|(LaneMask x, LaneMask y) {
  return {static_cast<__mmask16>(x.bits | y.bits)};
}
TANDEM_INLINE LaneMask operator&(LaneMask x, bool y) { return x & Every(y); }
TANDEM_INLINE LaneMask operator|(bool x, LaneMask y) { return Every(x) | y; }

// A float of sixteen tokens, written like one.
struct Lanes {
  Lanes() = default;
  TANDEM_INLINE Lanes(float x) : v(_mm512_set1_ps(x)) {}  // NOLINT: implicit, like float's own
  TANDEM_INLINE explicit Lanes(__m512 x) : v(x) {}
  __m512 v;
};

TANDEM_INLINE Lanes operator+(Lanes x, Lanes y) { return Lanes(_mm512_add_ps(x.v, y.v)); }
TANDEM_INLINE Lanes operator-(Lanes x, Lanes y) { return Lanes(_mm512_sub_ps(x.v, y.v)); }
TANDEM_INLINE Lanes operator*(Lanes x, Lanes y) { return Lanes(_mm512_mul_ps(x.v, y.v)); }
TANDEM_INLINE Lanes operator/(Lanes x, Lanes y) { return Lanes(_mm512_div_ps(x.v, y.v)); }
TANDEM_INLINE Lanes operator-(Lanes x) { return Lanes(_mm512_xor_ps(x.v, _mm512_set1_ps(-0.0f))); }
TANDEM_INLINE Lanes& operator+=(Lanes& x, Lanes y) { return x = x + y; }
TANDEM_INLINE Lanes& operator-=(Lanes& x, Lanes y) { return x = x - y; }

#define TANDEM_COMPARE(op, code)                         \
  TANDEM_INLINE LaneMask operator op(Lanes x, Lanes y) { \
    return {_mm512_cmp_ps_mask(x.v, y.v, code)};         \
  }
TANDEM_COMPARE(<, _CMP_LT_OQ)
TANDEM_COMPARE(<=, _CMP_LE_OQ)
TANDEM_COMPARE(>, _CMP_GT_OQ)
TANDEM_COMPARE(>=, _CMP_GE_OQ)
TANDEM_COMPARE(==, _CMP_EQ_OQ)
TANDEM_COMPARE(!=, _CMP_NEQ_UQ)
#undef TANDEM_COMPARE

TANDEM_INLINE Lanes Select(LaneMask condition, Lanes yes, Lanes no) {
  return Lanes(_mm512_mask_blend_ps(condition.bits, no.v, yes.v));
}
TANDEM_INLINE Lanes Select(bool condition, Lanes yes, Lanes no) { return condition ? yes : no; }

TANDEM_INLINE Lanes Magnitude(Lanes x) { return Lanes(_mm512_abs_ps(x.v)); }

TANDEM_INLINE bool IsEverywhere(LaneMask condition) { return condition.bits == 0xFFFF; }

// A NaN stays: it is the second operand of both.
TANDEM_INLINE Lanes ClampTo(Lanes x, float low, float high) {
  const __m512 above = _mm512_max_ps(_mm512_set1_ps(low), x.v);
  return Lanes(_mm512_min_ps(_mm512_set1_ps(high), above));
}

// Far enough for 0 and infinity.
TANDEM_INLINE Lanes BoundExponent(Lanes x) { return ClampTo(x, -200.0f, 200.0f); }

// One instruction, which knows 0 and infinity.
TANDEM_INLINE Lanes ScaleExp(Lanes /*x*/, Lanes p, Lanes /*shifted*/, Lanes k) {
  return Lanes(_mm512_scalef_ps(p.v, k.v));
}

}  // namespace tandem

#include "csrc/loss/policy_loss_math.h"

namespace tandem {

TANDEM_INLINE Binary<Lanes> Split(Lanes x) {
  const __m512i bits = _mm512_castps_si512(x.v);
  const __m512i k = _mm512_srai_epi32(_mm512_sub_epi32(bits, _mm512_set1_epi32(0x3F3504F3)), 23);
  const __m512i m = _mm512_sub_epi32(bits, _mm512_slli_epi32(k, 23));
  return {Lanes(_mm512_cvtepi32_ps(k)), Lanes(_mm512_castsi512_ps(m))};
}

namespace cpu {
namespace {

// How far ahead of a group memory is asked for: the processor's own prefetch ends at the page.
constexpr int64_t kPrefetchFloats = 2048;

TANDEM_INLINE Lanes Load(const float* p) { return Lanes(_mm512_loadu_ps(p)); }
TANDEM_INLINE void Store(Lanes x, float* p) { _mm512_storeu_ps(p, x.v); }

TANDEM_INLINE BasicPolicyToken<Lanes> TokensAt(const Columns& columns, int64_t i) {
  const LaneMask counts = Load(columns.weights + i) > Lanes(0.0f);
  const auto at = [&](const float* column) __attribute__((always_inline)) {
    return Lanes(_mm512_maskz_loadu_ps(counts.bits, column + i));
  };
  return {at(columns.logprobs),  at(columns.entropy),    at(columns.prev),
          at(columns.reference), at(columns.generation), at(columns.advantages),
          at(columns.shares),    at(columns.weights),    at(columns.nll_coefs)};
}

template <typename... Pointers>
TANDEM_INLINE void Prefetch(int64_t i, Pointers... columns) {
  (_mm_prefetch(columns + i + kPrefetchFloats, _MM_HINT_T0), ...);
}

template <bool kIsSequence>
TANDEM_INLINE BasicSequenceTerms<Lanes> SequencesAt(const Columns& columns, const Tile& tile,
                                                    int64_t i) {
  if constexpr (!kIsSequence) return {0.0f, 0.0f, 0.0f, 0.0f};
  const LaneMask counts = Load(columns.weights + i) > Lanes(0.0f);
  const auto at = [&](const float* terms) __attribute__((always_inline)) {
    return Lanes(_mm512_maskz_loadu_ps(counts.bits, terms + i));
  };
  return {at(tile.sequence_ratios), at(tile.sequence_corrections), at(tile.sequence_outside),
          at(tile.sequence_gradients)};
}

// What most objectives and most tokens add nothing to.
constexpr bool IsRare(PolicyMetric metric) {
  return metric == kNll || metric == kDualClip || metric == kOutside || metric == kClampedLogRatios;
}

// Sums of a tile, in registers. Both halves of sixteen tokens go into the same eight sums: half as
// many registers.
struct TileSum {
  __m512d sums[kNumPolicyMetrics];

  TANDEM_INLINE TileSum() {
#pragma GCC unroll 32
    for (__m512d& sum : sums) sum = _mm512_setzero_pd();
  }

  template <typename Terms>
  TANDEM_INLINE void Add(const Terms& terms) {
    VisitSums(terms, [&](PolicyMetric metric, Lanes value) __attribute__((always_inline)) {
      if (IsRare(metric) &&
          _mm512_test_epi32_mask(_mm512_castps_si512(value.v), _mm512_castps_si512(value.v)) == 0)
        return;
      const __m512d low = _mm512_cvtps_pd(_mm512_castps512_ps256(value.v));
      const __m512d high = _mm512_cvtps_pd(_mm512_extractf32x8_ps(value.v, 1));
      sums[metric] = _mm512_add_pd(_mm512_add_pd(sums[metric], low), high);
    });
  }

  template <typename Terms>
  TANDEM_INLINE void AddTo(LaneSums* all) const {
    VisitSums(Terms(), [&](PolicyMetric metric, Lanes) __attribute__((always_inline)) {
      double* sum = all->sums[metric];
      _mm512_storeu_pd(sum, _mm512_add_pd(_mm512_loadu_pd(sum), sums[metric]));
    });
  }
};

TANDEM_INLINE BasicTokenRatios<Lanes> RatiosAt(const Tile& tile, int64_t i) {
  return {Load(tile.policy_ratios + i), Load(tile.sampling_ratios + i)};
}

template <bool kIsSequence>
TANDEM_INLINE void WalkRatios(const PolicyLossBounds& bounds, const Columns& columns, int64_t count,
                              Tile* tile) {
  for (int64_t i = 0; i < count; i += kLanes) {
    const BasicTokenRatios<Lanes> ratios = RatiosOf<kIsSequence>(bounds, TokensAt(columns, i));
    Prefetch(i, columns.weights, columns.logprobs);
    Store(ratios.policy, tile->policy_ratios + i);
    Store(ratios.sampling, tile->sampling_ratios + i);
  }
}

template <bool kIsSequence>
TANDEM_INLINE void WalkGenerator(const PolicyLossBounds& bounds, const Columns& columns,
                                 int64_t count, Tile* tile, LaneSums* sums) {
  TileSum tile_sums;
  for (int64_t i = 0; i < count; i += kLanes) {
    const BasicPolicyToken<Lanes> token = TokensAt(columns, i);
    const BasicSequenceTerms<Lanes> sequence = SequencesAt<kIsSequence>(columns, *tile, i);
    Prefetch(i, columns.prev, columns.generation, columns.shares);
    const BasicGeneratorTerms<Lanes> terms =
        GeneratorTermsOf<kIsSequence>(bounds, token, RatiosAt(*tile, i), sequence);
    tile_sums.Add(terms);
    Store(terms.factor, tile->factors + i);
  }
  tile_sums.AddTo<BasicGeneratorTerms<Lanes>>(sums);
}

template <bool kIsSequence, bool kHasReference>
TANDEM_INLINE void WalkLoss(const PolicyLossBounds& bounds, const Columns& columns, int64_t count,
                            Tile* tile, LaneSums* sums) {
  TileSum tile_sums;
  float* grad_logprobs = tile->grad_logprobs;
  float* grad_entropy = tile->grad_entropy;
  Lanes ratio_min = Load(sums->ratio_min);
  Lanes ratio_max = Load(sums->ratio_max);
  for (int64_t i = 0; i < count; i += kLanes) {
    const BasicPolicyToken<Lanes> token = TokensAt(columns, i);
    const BasicSequenceTerms<Lanes> sequence = SequencesAt<kIsSequence>(columns, *tile, i);
    Prefetch(i, columns.reference, columns.advantages, columns.entropy);
    const BasicLossTerms<Lanes> terms = LossTermsOf<kIsSequence, kHasReference>(
        bounds, token, RatiosAt(*tile, i), sequence, Load(tile->factors + i));
    tile_sums.Add(terms);
    Store(terms.grad_logprob, grad_logprobs + i);
    Store(terms.grad_entropy, grad_entropy + i);
    // A number that is none loses: it is the first operand.
    ratio_min = Lanes(_mm512_min_ps(terms.ratio_min.v, ratio_min.v));
    ratio_max = Lanes(_mm512_max_ps(terms.ratio_max.v, ratio_max.v));
  }
  Store(ratio_min, sums->ratio_min);
  Store(ratio_max, sums->ratio_max);
  tile_sums.AddTo<BasicLossTerms<Lanes>>(sums);
}

template <bool kIsSequence, bool kHasReference>
TANDEM_INLINE void Walk(const PolicyLossBounds& given, const Columns& given_columns, int64_t count,
                        Tile* tile, LaneSums* sums) {
  const PolicyLossBounds bounds = given;  // locals that no store can change
  const Columns columns = given_columns;
  WalkRatios<kIsSequence>(bounds, columns, count, tile);
  WalkGenerator<kIsSequence>(bounds, columns, count, tile, sums);
  WalkLoss<kIsSequence, kHasReference>(bounds, columns, count, tile, sums);
}

// What most objectives have in common, as constants: what they rule out is then not computed.
TANDEM_INLINE PolicyLossBounds Usual(PolicyLossBounds bounds) {
  bounds.ratio = RatioKind::kToken;
  bounds.kl = KlKind::kK3;
  bounds.is_cispo = false;
  bounds.drops_outside = false;
  bounds.weighs_kl = false;
  bounds.has_prev = true;
  bounds.has_dual = false;
  return bounds;
}

TANDEM_INLINE bool IsUsual(const PolicyLossBounds& bounds) {
  return bounds.ratio == RatioKind::kToken && bounds.kl == KlKind::kK3 && !bounds.is_cispo &&
         !bounds.drops_outside && !bounds.weighs_kl && bounds.has_prev && !bounds.has_dual;
}

}  // namespace

void Avx512TileSums(const PolicyLossBounds& bounds, const Columns& columns, bool has_reference,
                    int64_t count, Tile* tile, LaneSums* sums) {
  if (IsUsual(bounds)) {
    has_reference ? Walk<false, true>(Usual(bounds), columns, count, tile, sums)
                  : Walk<false, false>(Usual(bounds), columns, count, tile, sums);
  } else if (bounds.ratio != RatioKind::kSequence) {
    has_reference ? Walk<false, true>(bounds, columns, count, tile, sums)
                  : Walk<false, false>(bounds, columns, count, tile, sums);
  } else {
    has_reference ? Walk<true, true>(bounds, columns, count, tile, sums)
                  : Walk<true, false>(bounds, columns, count, tile, sums);
  }
}

}  // namespace cpu
}  // namespace tandem

#pragma GCC pop_options

#endif  // TANDEM_HAS_AVX512
