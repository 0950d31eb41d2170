// policy_loss.h on the CPU. Tokens are cut into blocks whose sums go to the workspace and are added
// in the order of the blocks. A block is walked in tiles, whose columns then are in the first cache
// for a second walk, and a tile in groups of lanes, each lane with its own sums. The order of every
// sum is thus fixed by the tokens alone.
#include <algorithm>
#include <limits>

#include "csrc/common/multiarch.h"
#include "csrc/loss/policy_loss.h"
#include "csrc/loss/policy_loss_checks.h"
#include "csrc/loss/policy_loss_math.h"
#include "csrc/loss/policy_loss_tile.h"

namespace tandem::cpu {
namespace {

constexpr int64_t kBlockTokens = 4096;
constexpr int64_t kSequencesPerTask = 8;

alignas(64) constexpr float kZeros[kTileTokens] = {};

TANDEM_INLINE float Smaller(float x, float y) { return Select(x < y, x, y); }
TANDEM_INLINE float Larger(float x, float y) { return Select(x > y, x, y); }

template <bool kIsSequence>
TANDEM_INLINE SequenceTerms SequenceAt(const Columns& columns, const Tile& tile, int64_t i) {
  if constexpr (!kIsSequence) return {};
  const bool counts = columns.weights[i] > 0.0f;
  return {Counted(tile.sequence_ratios[i], counts), Counted(tile.sequence_corrections[i], counts),
          Counted(tile.sequence_outside[i], counts), Counted(tile.sequence_gradients[i], counts)};
}

TANDEM_INLINE PolicyToken TokenAt(const Columns& columns, int64_t i) {
  const bool counts = columns.weights[i] > 0.0f;
  return {Counted(columns.logprobs[i], counts),   Counted(columns.entropy[i], counts),
          Counted(columns.prev[i], counts),       Counted(columns.reference[i], counts),
          Counted(columns.generation[i], counts), Counted(columns.advantages[i], counts),
          Counted(columns.shares[i], counts),     Counted(columns.weights[i], counts),
          Counted(columns.nll_coefs[i], counts)};
}

TANDEM_INLINE TokenRatios RatiosAt(const Tile& tile, int64_t i) {
  return {tile.policy_ratios[i], tile.sampling_ratios[i]};
}

// Three walks over a tile, because one has more values at a time than there are registers.
template <bool kIsSequence>
TANDEM_INLINE void WalkRatios(const PolicyLossBounds& given, const Columns& given_columns,
                              int64_t count, Tile* tile) {
  const PolicyLossBounds bounds = given;  // locals that no store can change
  const Columns columns = given_columns;
#pragma GCC ivdep
  for (int64_t i = 0; i < count; ++i) {
    const TokenRatios ratios = RatiosOf<kIsSequence>(bounds, TokenAt(columns, i));
    tile->policy_ratios[i] = ratios.policy;
    tile->sampling_ratios[i] = ratios.sampling;
  }
}

template <bool kIsSequence>
TANDEM_INLINE void WalkGenerator(const PolicyLossBounds& given, const Columns& given_columns,
                                 int64_t count, Tile* tile, LaneSums* sums) {
  const PolicyLossBounds bounds = given;  // locals that no store can change
  const Columns columns = given_columns;
  for (int64_t begin = 0; begin < count; begin += kLanes) {
#pragma GCC ivdep
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      const int64_t i = begin + lane;
      const GeneratorTerms terms =
          GeneratorTermsOf<kIsSequence>(bounds, TokenAt(columns, i), RatiosAt(*tile, i),
                                        SequenceAt<kIsSequence>(columns, *tile, i));
      tile->factors[i] = terms.factor;
      VisitSums(terms,
                [&](PolicyMetric metric, float value) { sums->sums[metric][lane] += value; });
    }
  }
}

template <bool kIsSequence, bool kHasReference>
TANDEM_INLINE void WalkLoss(const PolicyLossBounds& given, const Columns& given_columns,
                            int64_t count, Tile* tile, LaneSums* sums) {
  const PolicyLossBounds bounds = given;
  const Columns columns = given_columns;
  for (int64_t begin = 0; begin < count; begin += kLanes) {
#pragma GCC ivdep
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      const int64_t i = begin + lane;
      const LossTerms terms = LossTermsOf<kIsSequence, kHasReference>(
          bounds, TokenAt(columns, i), RatiosAt(*tile, i),
          SequenceAt<kIsSequence>(columns, *tile, i), tile->factors[i]);
      tile->grad_logprobs[i] = terms.grad_logprob;
      tile->grad_entropy[i] = terms.grad_entropy;
      VisitSums(terms,
                [&](PolicyMetric metric, float value) { sums->sums[metric][lane] += value; });
      sums->ratio_min[lane] = Smaller(terms.ratio_min, sums->ratio_min[lane]);
      sums->ratio_max[lane] = Larger(terms.ratio_max, sums->ratio_max[lane]);
    }
  }
}

template <bool kIsSequence, bool kHasReference>
TANDEM_INLINE void WalkTile(const PolicyLossBounds& bounds, const Columns& columns, int64_t count,
                            Tile* tile, LaneSums* sums) {
  WalkRatios<kIsSequence>(bounds, columns, count, tile);
  WalkGenerator<kIsSequence>(bounds, columns, count, tile, sums);
  WalkLoss<kIsSequence, kHasReference>(bounds, columns, count, tile, sums);
}

TANDEM_MULTIARCH void PortableTileSums(const PolicyLossBounds& bounds, const Columns& columns,
                                       bool has_reference, int64_t count, Tile* tile,
                                       LaneSums* sums) {
  if (bounds.ratio != RatioKind::kSequence) {
    has_reference ? WalkTile<false, true>(bounds, columns, count, tile, sums)
                  : WalkTile<false, false>(bounds, columns, count, tile, sums);
  } else {
    has_reference ? WalkTile<true, true>(bounds, columns, count, tile, sums)
                  : WalkTile<true, false>(bounds, columns, count, tile, sums);
  }
}

void TileSums(const PolicyLossBounds& bounds, const Columns& columns, bool has_reference,
              int64_t count, Tile* tile, LaneSums* sums) {
#ifdef TANDEM_HAS_AVX512
  if (HasAvx512()) return Avx512TileSums(bounds, columns, has_reference, count, tile, sums);
#endif
  PortableTileSums(bounds, columns, has_reference, count, tile, sums);
}

// The part of a call that one task walks: whole rows, so that no two tasks write the same gradient.
struct Block {
  int64_t token_begin;
  int64_t token_end;
  int64_t row_begin;
  int64_t row_end;
};

int64_t NumBlocks(int64_t num_tokens) {
  return std::max<int64_t>(1, (num_tokens + kBlockTokens - 1) / kBlockTokens);
}

Block BlockAt(const PolicyLossInputs& inputs, int64_t index) {
  const int64_t* offsets = inputs.tokens.row_offsets;
  if (offsets == nullptr) {
    const int64_t begin = index * kBlockTokens;
    const int64_t end = std::min(begin + kBlockTokens, inputs.num_rows);
    return {begin, end, begin, end};
  }
  const int64_t num_blocks = NumBlocks(inputs.tokens.num_tokens);
  // A row belongs to the block that its first token would be in.
  const auto first_row = [&](int64_t block) {
    if (block == 0) return int64_t{0};
    if (block == num_blocks) return inputs.num_rows;
    return std::lower_bound(offsets, offsets + inputs.num_rows, offsets[0] + block * kBlockTokens) -
           offsets;
  };
  const int64_t row_begin = first_row(index);
  const int64_t row_end = first_row(index + 1);
  return {offsets[row_begin], offsets[row_end], row_begin, row_end};
}

constexpr int64_t Padded(int64_t count) { return (count + kLanes - 1) / kLanes * kLanes; }

// The columns of `count` tokens from `begin` on; `logprobs` and `entropy` begin there themselves.
// Padding is made of tokens of weight 0.
Columns ColumnsAt(const PolicyLossTokens& tokens, int64_t begin, int64_t count,
                  const float* logprobs, const float* entropy, Tile* tile) {
  const auto column = [&](const float* values, int index) -> const float* {
    if (values == nullptr) return kZeros;
    if (Padded(count) == count) return values;
    float* staged = tile->staged[index];
    std::copy_n(values, count, staged);
    std::fill(staged + count, staged + Padded(count), 0.0f);
    return staged;
  };
  const auto at = [&](const float* values) { return values == nullptr ? nullptr : values + begin; };
  const float* prev = tokens.prev_logprobs == nullptr ? logprobs : at(tokens.prev_logprobs);
  return {column(logprobs, 0),
          column(entropy, 1),
          column(prev, 2),
          column(at(tokens.reference_logprobs), 3),
          column(at(tokens.generation_logprobs), 4),
          column(at(tokens.advantages), 5),
          column(at(tokens.shares), 6),
          column(at(tokens.weights), 7),
          column(at(tokens.nll_coefs), 8)};
}

// One call, as the tasks see it.
struct Call {
  const PolicyLossBounds& bounds;
  const PolicyLossInputs& inputs;
  const PolicyLossOutputs& outputs;
  const SequenceTerms* sequences;
};

// Gives each token of a tile what its sequence says. `sequence` moves on from tile to tile.
void StageSequences(const Call& call, int64_t begin, int64_t count, int64_t* sequence, Tile* tile) {
  const int64_t* offsets = call.inputs.tokens.sequence_offsets;
  for (int64_t i = 0; i < Padded(count); ++i) {
    if (i < count) {
      while (offsets[*sequence + 1] <= begin + i) ++*sequence;
    }
    const SequenceTerms& terms = call.sequences[*sequence];
    tile->sequence_ratios[i] = terms.ratio;
    tile->sequence_corrections[i] = terms.correction;
    tile->sequence_outside[i] = terms.is_outside;
    tile->sequence_gradients[i] = terms.gradient;
  }
}

// Rows are tokens: results go where they belong, whole groups at once.
void PlaceGradients(const PolicyLossOutputs& outputs, int64_t begin, int64_t count, Tile* tile) {
  const bool is_whole = Padded(count) == count;
  float* entropy = outputs.grad_entropy;
  tile->grad_logprobs = is_whole ? outputs.grad_logprobs + begin : tile->staged_gradients[0];
  tile->grad_entropy = is_whole && entropy != nullptr ? entropy + begin : tile->staged_gradients[1];
}

void StoreStaged(const PolicyLossOutputs& outputs, int64_t begin, int64_t count, const Tile& tile) {
  if (Padded(count) == count) return;
  std::copy_n(tile.grad_logprobs, count, outputs.grad_logprobs + begin);
  if (outputs.grad_entropy != nullptr) {
    std::copy_n(tile.grad_entropy, count, outputs.grad_entropy + begin);
  }
}

void WalkTokens(const Call& call, const Block& block, Tile* tile, LaneSums* sums) {
  const PolicyLossTokens& tokens = call.inputs.tokens;
  int64_t sequence = 0;
  if (call.sequences != nullptr && block.token_begin < block.token_end) {
    const int64_t* offsets = tokens.sequence_offsets;
    sequence =
        std::upper_bound(offsets, offsets + tokens.num_sequences, block.token_begin) - offsets - 1;
  }
  for (int64_t begin = block.token_begin; begin < block.token_end; begin += kTileTokens) {
    const int64_t count = std::min(kTileTokens, block.token_end - begin);
    const Columns columns = ColumnsAt(tokens, begin, count, call.inputs.logprobs + begin,
                                      call.inputs.entropy + begin, tile);
    if (call.sequences != nullptr) StageSequences(call, begin, count, &sequence, tile);
    PlaceGradients(call.outputs, begin, count, tile);
    TileSums(call.bounds, columns, tokens.reference_logprobs != nullptr, Padded(count), tile, sums);
    StoreStaged(call.outputs, begin, count, *tile);
  }
}

// The rows of a tile's tokens, and what they hold.
struct TileRows {
  int64_t index[kTileTokens];
  float logprobs[kTileTokens];
  float entropy[kTileTokens];
};

void WalkSharedRows(const Call& call, const Block& block, Tile* tile, LaneSums* sums) {
  const PolicyLossTokens& tokens = call.inputs.tokens;
  const PolicyLossOutputs& outputs = call.outputs;
  float* grad_entropy = outputs.grad_entropy;
  std::fill(outputs.grad_logprobs + block.row_begin, outputs.grad_logprobs + block.row_end, 0.0f);
  if (grad_entropy != nullptr) {
    std::fill(grad_entropy + block.row_begin, grad_entropy + block.row_end, 0.0f);
  }
  TileRows rows;
  int64_t row = block.row_begin;
  for (int64_t begin = block.token_begin; begin < block.token_end; begin += kTileTokens) {
    const int64_t count = std::min(kTileTokens, block.token_end - begin);
    for (int64_t i = 0; i < count; ++i) {
      while (tokens.row_offsets[row + 1] <= begin + i) ++row;
      rows.index[i] = row;
      rows.logprobs[i] = call.inputs.logprobs[row];
      rows.entropy[i] = call.inputs.entropy[row];
    }
    const Columns columns = ColumnsAt(tokens, begin, count, rows.logprobs, rows.entropy, tile);
    tile->grad_logprobs = tile->staged_gradients[0];
    tile->grad_entropy = tile->staged_gradients[1];
    TileSums(call.bounds, columns, tokens.reference_logprobs != nullptr, Padded(count), tile, sums);
    for (int64_t i = 0; i < count; ++i) {
      outputs.grad_logprobs[rows.index[i]] += tile->grad_logprobs[i];
      if (grad_entropy != nullptr) grad_entropy[rows.index[i]] += tile->grad_entropy[i];
    }
  }
}

// All but the extrema of clamped ratios.
void FoldLanes(const LaneSums& sums, double* metrics) {
  for (int metric = 0; metric < kNumPolicyMetrics; ++metric) {
    metrics[metric] = NeutralMetric(metric);
  }
  for (int64_t lane = 0; lane < kLanes; ++lane) {
    double values[kNumPolicyMetrics];
    for (int metric = 0; metric < kNumPolicyMetrics; ++metric) {
      values[metric] = sums.sums[metric][lane];
    }
    values[kRatioMin] = sums.ratio_min[lane];
    values[kRatioMax] = sums.ratio_max[lane];
    for (int metric = 0; metric < kNumPolicyMetrics; ++metric) {
      metrics[metric] = CombineMetric(metric, metrics[metric], values[metric]);
    }
  }
}

void WalkBlock(const Call& call, int64_t index, double* metrics) {
  LaneSums sums = {};
  std::fill_n(sums.ratio_min, kLanes, kMathInfinity);
  std::fill_n(sums.ratio_max, kLanes, -kMathInfinity);
  Tile tile;
  const Block block = BlockAt(call.inputs, index);
  if (call.inputs.tokens.row_offsets == nullptr) {
    WalkTokens(call, block, &tile, &sums);
  } else {
    WalkSharedRows(call, block, &tile, &sums);
  }
  FoldLanes(sums, metrics);
  FillClampedExtrema(call.bounds, metrics);
}

// Sums over the counted tokens of a sequence, then the gradient through its ratio.
SequenceTerms WalkSequence(const PolicyLossBounds& bounds, const PolicyLossInputs& inputs,
                           int64_t begin, int64_t end) {
  const PolicyLossTokens& tokens = inputs.tokens;
  double log_ratios = 0.0;
  double log_weights = 0.0;
  int64_t count = 0;
  for (int64_t i = begin; i < end; ++i) {
    if (!(tokens.weights[i] > 0.0f)) continue;
    const float logprob = inputs.logprobs[i];
    const float prev = bounds.has_prev ? tokens.prev_logprobs[i] : logprob;
    log_ratios += ClampLogRatio(LogRatioOf(bounds, logprob, prev));
    log_weights += prev - tokens.generation_logprobs[i];
    ++count;
  }
  SequenceTerms terms = SequenceTermsOf(bounds, log_ratios, log_weights, count);
  double slope = 0.0;
  for (int64_t i = begin; i < end; ++i) {
    if (!(tokens.weights[i] > 0.0f)) continue;
    slope += SequenceSlope(bounds, tokens.advantages[i], tokens.shares[i], terms);
  }
  if (count > 0) {
    terms.gradient = static_cast<float>(slope * terms.ratio / static_cast<double>(count));
  }
  return terms;
}

void MergeMetrics(const Call& call, const double* blocks, int64_t num_blocks) {
  double totals[kNumPolicyMetrics];
  for (int metric = 0; metric < kNumPolicyMetrics; ++metric) {
    totals[metric] = NeutralMetric(metric);
    for (int64_t block = 0; block < num_blocks; ++block) {
      totals[metric] =
          CombineMetric(metric, totals[metric], blocks[block * kNumPolicyMetrics + metric]);
    }
  }
  if (call.sequences != nullptr) {
    const PolicyLossTokens& tokens = call.inputs.tokens;
    for (int64_t s = 0; s < tokens.num_sequences; ++s) {
      totals[kCorrection] +=
          static_cast<double>(tokens.sequence_weights[s]) * call.sequences[s].correction;
    }
  }
  double* metrics = call.outputs.metrics;
  for (int metric = 0; metric < kNumPolicyMetrics; ++metric) {
    metrics[metric] = call.outputs.accumulate
                          ? CombineMetric(metric, metrics[metric], totals[metric])
                          : totals[metric];
  }
}

}  // namespace

int64_t PolicyLossWorkspaceBytes(int64_t num_tokens, int64_t num_sequences) {
  return NumBlocks(num_tokens) * kNumPolicyMetrics * static_cast<int64_t>(sizeof(double)) +
         num_sequences * static_cast<int64_t>(sizeof(SequenceTerms));
}

Status PolicyLoss(const PolicyLossParams& params, const PolicyLossInputs& inputs,
                  const PolicyLossOutputs& outputs, const Workspace& workspace,
                  const Execution& execution) {
  const PolicyLossTokens& tokens = inputs.tokens;
  const bool by_sequence = params.ratio == RatioKind::kSequence;
  const int64_t num_sequences = by_sequence ? tokens.num_sequences : 0;
  const int64_t want = PolicyLossWorkspaceBytes(tokens.num_tokens, num_sequences);
  if (Status status = CheckPolicyLoss(params, inputs, outputs, workspace, want); !status.ok()) {
    return status;
  }
  const PolicyLossBounds bounds = BoundsOf(params, tokens.prev_logprobs != nullptr);
  const int64_t num_blocks = NumBlocks(tokens.num_tokens);
  double* blocks = static_cast<double*>(workspace.data);
  auto* sequences = reinterpret_cast<SequenceTerms*>(blocks + num_blocks * kNumPolicyMetrics);
  RunParallel(execution.parallel, num_sequences, kSequencesPerTask,
              [&](int64_t begin, int64_t end) {
                for (int64_t s = begin; s < end; ++s) {
                  sequences[s] = WalkSequence(bounds, inputs, tokens.sequence_offsets[s],
                                              tokens.sequence_offsets[s + 1]);
                }
              });
  const Call call = {bounds, inputs, outputs, by_sequence ? sequences : nullptr};
  RunParallel(execution.parallel, num_blocks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block) {
      WalkBlock(call, block, blocks + block * kNumPolicyMetrics);
    }
  });
  MergeMetrics(call, blocks, num_blocks);
  return OkStatus();
}

Status SequenceReduce(const float* values, const float* weights, const int64_t* sequence_offsets,
                      int64_t num_sequences, bool mean, float* out, const Execution& execution) {
  if (Status status = CheckSequenceReduce(sequence_offsets, num_sequences, out); !status.ok()) {
    return status;
  }
  RunParallel(execution.parallel, num_sequences, kSequencesPerTask,
              [&](int64_t begin, int64_t end) {
                for (int64_t s = begin; s < end; ++s) {
                  double sum = 0.0;
                  int64_t count = 0;
                  for (int64_t i = sequence_offsets[s]; i < sequence_offsets[s + 1]; ++i) {
                    const float weight = weights == nullptr ? 1.0f : weights[i];
                    if (weight == 0.0f) continue;
                    sum += static_cast<double>(weight) * values[i];
                    ++count;
                  }
                  const bool divides = mean && count > 0;
                  out[s] = static_cast<float>(divides ? sum / static_cast<double>(count) : sum);
                }
              });
  return OkStatus();
}

}  // namespace tandem::cpu
