// The tiles of policy_loss_cpu.cc in AVX-512: the mathematics of policy_loss_math.h over sixteen
// tokens at a time. Three walks over a tile: shorter loops keep their constants in registers, and
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

// Far enough for 0 and infinity. A NaN stays: it is the second operand of both.
TANDEM_INLINE Lanes BoundExponent(Lanes x) {
  const __m512 above = _mm512_max_ps(_mm512_set1_ps(-200.0f), x.v);
  return Lanes(_mm512_min_ps(_mm512_set1_ps(200.0f), above));
}

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

template <bool kPrefetches>
TANDEM_INLINE BasicPolicyToken<Lanes> TokensAt(const Columns& columns, int64_t i) {
  const Lanes weight = Load(columns.weights + i);
  const LaneMask counts = weight > Lanes(0.0f);
  const auto at = [&](const float* column) __attribute__((always_inline)) {
    if (kPrefetches) _mm_prefetch(column + i + kPrefetchFloats, _MM_HINT_T0);
    return Lanes(_mm512_maskz_loadu_ps(counts.bits, column + i));
  };
  return {at(columns.logprobs),  at(columns.entropy),    at(columns.prev),
          at(columns.reference), at(columns.generation), at(columns.advantages),
          at(columns.shares),    at(columns.weights),    at(columns.nll_coefs)};
}

template <bool kIsSequence>
TANDEM_INLINE BasicSequenceTerms<Lanes> SequencesAt(const Tile& tile, int64_t i) {
  if constexpr (!kIsSequence) return {0.0f, 0.0f, 0.0f, 0.0f};
  return {Load(tile.sequence_ratios + i), Load(tile.sequence_corrections + i),
          Load(tile.sequence_outside + i), Load(tile.sequence_gradients + i)};
}

TANDEM_INLINE BasicTokenExps<Lanes> ExpsAt(const Tile& tile, int64_t i) {
  return {Load(tile.gap_exps + i), Load(tile.opposite_exps + i), Load(tile.sampling_exps + i),
          Load(tile.ratio_exps + i), Load(tile.kl_exps + i)};
}

// Both halves go into the first eight sums: half as many loads and stores.
TANDEM_INLINE void AddTo(double* sums, Lanes x) {
  const __m512d low = _mm512_cvtps_pd(_mm512_castps512_ps256(x.v));
  const __m512d high = _mm512_cvtps_pd(_mm512_extractf32x8_ps(x.v, 1));
  _mm512_storeu_pd(sums, _mm512_add_pd(_mm512_add_pd(_mm512_loadu_pd(sums), low), high));
}

// A number that is none loses: it is the first operand.
template <PolicyMetric kExtremum>
TANDEM_INLINE void Extend(float* extrema, Lanes x) {
  const __m512 before = _mm512_loadu_ps(extrema);
  _mm512_storeu_ps(
      extrema, kExtremum == kRatioMin ? _mm512_min_ps(x.v, before) : _mm512_max_ps(x.v, before));
}

template <bool kIsSequence, bool kHasReference>
TANDEM_INLINE void Walk(const PolicyLossBounds& given, const Columns& columns, int64_t count,
                        Tile* tile, LaneSums* sums) {
  const PolicyLossBounds bounds = given;  // a local that no store can change
  const auto add = [&](PolicyMetric metric, Lanes value)
                       __attribute__((always_inline)) { AddTo(sums->sums[metric], value); };
  for (int64_t i = 0; i < count; i += kLanes) {
    const BasicTokenExps<Lanes> exps =
        ExpsOf<kIsSequence, kHasReference>(bounds, TokensAt<true>(columns, i));
    Store(exps.gap, tile->gap_exps + i);
    Store(exps.opposite, tile->opposite_exps + i);
    Store(exps.sampling, tile->sampling_exps + i);
    Store(exps.ratio, tile->ratio_exps + i);
    Store(exps.kl, tile->kl_exps + i);
  }
  for (int64_t i = 0; i < count; i += kLanes) {
    const BasicPolicyToken<Lanes> token = TokensAt<false>(columns, i);
    const BasicSequenceTerms<Lanes> sequence = SequencesAt<kIsSequence>(*tile, i);
    const BasicTokenExps<Lanes> exps = ExpsAt(*tile, i);
    const BasicGeneratorTerms<Lanes> generator =
        GeneratorTermsOf<kIsSequence>(bounds, token, exps, sequence);
    VisitSums(generator, add);
    Store(generator.factor, tile->corrections + i);
  }
  for (int64_t i = 0; i < count; i += kLanes) {
    const BasicPolicyToken<Lanes> token = TokensAt<false>(columns, i);
    const BasicSequenceTerms<Lanes> sequence = SequencesAt<kIsSequence>(*tile, i);
    const BasicTokenExps<Lanes> exps = ExpsAt(*tile, i);
    const BasicLossTerms<Lanes> terms = LossTermsOf<kIsSequence, kHasReference>(
        bounds, token, sequence, exps, Load(tile->corrections + i));
    VisitSums(terms, add);
    Store(terms.grad_logprob, tile->grad_logprobs + i);
    Store(terms.grad_entropy, tile->grad_entropy + i);
    Extend<kRatioMin>(sums->ratio_min, terms.ratio_min);
    Extend<kRatioMax>(sums->ratio_max, terms.ratio_max);
    Extend<kRatioMin>(sums->ratio_clamped_min, terms.ratio_clamped_min);
    Extend<kRatioMax>(sums->ratio_clamped_max, terms.ratio_clamped_max);
  }
}

// What most objectives have in common, as constants: what they rule out is then not computed.
TANDEM_INLINE PolicyLossBounds Usual(PolicyLossBounds bounds) {
  bounds.ratio = RatioKind::kToken;
  bounds.kl = KlKind::kK3;
  bounds.is_cispo = false;
  bounds.drops_outside = false;
  bounds.weighs_kl = false;
  bounds.has_prev = true;
  return bounds;
}

TANDEM_INLINE bool IsUsual(const PolicyLossBounds& bounds) {
  return bounds.ratio == RatioKind::kToken && bounds.kl == KlKind::kK3 && !bounds.is_cispo &&
         !bounds.drops_outside && !bounds.weighs_kl && bounds.has_prev;
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
