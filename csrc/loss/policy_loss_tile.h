// What the CPU's policy loss works on at a time: a tile of tokens, whose columns then are in the
// first cache, in groups of lanes, each lane with its own sums. Private to the CPU backend.
#pragma once

#include <cstdint>

#include "csrc/common/multiarch.h"
#include "csrc/loss/policy_loss.h"

namespace tandem {

struct PolicyLossBounds;

namespace cpu {

inline constexpr int64_t kTileTokens = 512;
inline constexpr int64_t kLanes = 16;

// Columns of a tile's tokens, where they stand. None is null but those of sequences.
struct Columns {
  const float* logprobs;
  const float* entropy;
  const float* prev;
  const float* reference;
  const float* generation;
  const float* advantages;
  const float* shares;
  const float* weights;
  const float* nll_coefs;
};

// What is made of a tile: it stays in the first cache.
struct Tile {
  // A TokenRatios and the factor of a GeneratorTerms per token, taken apart.
  float policy_ratios[kTileTokens];
  float sampling_ratios[kTileTokens];
  float factors[kTileTokens];
  // With kSequence: a SequenceTerms per token, taken apart.
  float sequence_ratios[kTileTokens];
  float sequence_corrections[kTileTokens];
  float sequence_outside[kTileTokens];
  float sequence_gradients[kTileTokens];
  // Where gradients go: into memory of the caller's that has room for whole groups, or staged ones.
  float* grad_logprobs;
  float* grad_entropy;
  float staged_gradients[2][kTileTokens];
  // Columns that cannot be read where they stand: of shared rows, and of a tile with padding.
  float staged[9][kTileTokens];
};

struct LaneSums {
  double sums[kNumPolicyMetrics][kLanes];  // those of the extrema stay 0
  float ratio_min[kLanes];
  float ratio_max[kLanes];
};

#ifdef TANDEM_HAS_AVX512
// Fills the tile's exponentials and gradients, and adds to the sums; count is a
// multiple of kLanes. Only where HasAvx512().
void Avx512TileSums(const PolicyLossBounds& bounds, const Columns& columns, bool has_reference,
                    int64_t count, Tile* tile, LaneSums* sums);
#endif

}  // namespace cpu
}  // namespace tandem
