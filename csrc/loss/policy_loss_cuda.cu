// CUDA backend of policy_loss.h: bound by memory, each column is read once.
//
// - PolicySequenceKernel (kSequence alone): a block per sequence writes its SequenceTerms.
// - PolicyTokenKernel: a block per kBlockTokens tokens writes gradients, and its sums.
// - PolicyMergeKernel: one block, a warp per metric, merges those sums into the metrics.
//
// What one kernel leaves for the next is in the workspace.
//
// Which tokens a block sums up, and the order in which sums are merged, depend on the tokens alone,
// so that neither the grid nor the device decides about a bit. Where tokens share rows, a thread
// walks the tokens of one row after the other: no gradient is written by two threads.
//
// Grids are one-dimensional; nothing is assumed about alignment.
#include <algorithm>
#include <cstdint>

#include "csrc/common/simt.h"
#include "csrc/common/simt_reduce.h"
#include "csrc/loss/policy_loss_checks.h"
#include "csrc/loss/policy_loss_cuda.h"
#include "csrc/loss/policy_loss_math.h"

namespace tandem::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / simt::kWarpSize;
constexpr int kMergeThreads = kNumPolicyMetrics * simt::kWarpSize;
constexpr int64_t kBlockTokens = 2048;
constexpr int64_t kMaxBlocks = 1 << 16;
static_assert(kMergeThreads <= 1024);

// One call, as kernels take it.
struct Call {
  PolicyLossBounds bounds;
  PolicyLossInputs inputs;
  PolicyLossOutputs outputs;
  SequenceTerms* sequences;  // null but for kSequence
  double* blocks;            // [num_blocks][kNumPolicyMetrics]
  int64_t num_blocks;
};

int64_t NumBlocks(int64_t num_tokens) {
  return std::max<int64_t>(1, (num_tokens + kBlockTokens - 1) / kBlockTokens);
}

// The first index whose value is at least `value`; `count` where there is none.
SIMT_DEVICE int64_t LowerBound(const int64_t* values, int64_t count, int64_t value) {
  int64_t begin = 0;
  int64_t end = count;
  while (begin < end) {
    const int64_t middle = begin + (end - begin) / 2;
    if (values[middle] < value) {
      begin = middle + 1;
    } else {
      end = middle;
    }
  }
  return begin;
}

// Rows [begin, end) of a block: those whose first token is among its tokens.
struct RowRange {
  int64_t begin;
  int64_t end;
};

SIMT_DEVICE int64_t FirstRow(const Call& call, int64_t block) {
  const int64_t* offsets = call.inputs.tokens.row_offsets;
  const int64_t rows = call.inputs.num_rows;
  if (offsets == nullptr) return block * kBlockTokens < rows ? block * kBlockTokens : rows;
  if (block == 0) return 0;
  if (block == call.num_blocks) return rows;
  return LowerBound(offsets, rows, offsets[0] + block * kBlockTokens);
}

SIMT_DEVICE SequenceTerms SequenceOf(const Call& call, int64_t token) {
  const PolicyLossTokens& tokens = call.inputs.tokens;
  const int64_t next = LowerBound(tokens.sequence_offsets, tokens.num_sequences + 1, token + 1);
  return call.sequences[next - 1];
}

// Of one row: the sums over its tokens.
struct RowGradients {
  float logprob = 0.0f;
  float entropy = 0.0f;
};

// Adds a token to the sums and to its row's gradients. All loads stand before the branch on the
// weight, so that they are under way together.
template <bool kIsSequence, bool kHasReference>
SIMT_DEVICE void WalkToken(const Call& call, int64_t i, float logprob, float entropy, double* sums,
                           RowGradients* gradients) {
  const PolicyLossTokens& tokens = call.inputs.tokens;
  const PolicyToken token = {logprob,
                             entropy,
                             tokens.prev_logprobs == nullptr ? logprob : tokens.prev_logprobs[i],
                             kHasReference ? tokens.reference_logprobs[i] : 0.0f,
                             tokens.generation_logprobs[i],
                             tokens.advantages[i],
                             tokens.shares[i],
                             tokens.weights[i],
                             tokens.nll_coefs == nullptr ? 0.0f : tokens.nll_coefs[i]};
  if (!(token.weight > 0.0f)) return;
  const SequenceTerms sequence = kIsSequence ? SequenceOf(call, i) : SequenceTerms{};
  const TokenRatios ratios = RatiosOf<kIsSequence>(call.bounds, token);
  const GeneratorTerms generator =
      GeneratorTermsOf<kIsSequence>(call.bounds, token, ratios, sequence);
  const LossTerms terms = LossTermsOf<kIsSequence, kHasReference>(call.bounds, token, ratios,
                                                                  sequence, generator.factor);
  gradients->logprob += terms.grad_logprob;
  gradients->entropy += terms.grad_entropy;
  const auto add = [&](int metric, float value) { sums[metric] += value; };
  VisitSums(generator, add);
  VisitSums(terms, add);
  sums[kRatioMin] = CombineMetric(kRatioMin, sums[kRatioMin], terms.ratio_min);
  sums[kRatioMax] = CombineMetric(kRatioMax, sums[kRatioMax], terms.ratio_max);
}

template <bool kIsSequence, bool kHasReference>
SIMT_DEVICE void WalkRow(const Call& call, int64_t row, double* sums) {
  const int64_t* offsets = call.inputs.tokens.row_offsets;
  const int64_t begin = offsets == nullptr ? row : offsets[row];
  const int64_t end = offsets == nullptr ? row + 1 : offsets[row + 1];
  RowGradients gradients;
  for (int64_t i = begin; i < end; ++i) {
    WalkToken<kIsSequence, kHasReference>(call, i, call.inputs.logprobs[row],
                                          call.inputs.entropy[row], sums, &gradients);
  }
  call.outputs.grad_logprobs[row] = gradients.logprob;
  if (call.outputs.grad_entropy != nullptr) call.outputs.grad_entropy[row] = gradients.entropy;
}

// The combination of a metric over the lanes of a warp, in every lane.
SIMT_DEVICE double CombineLanes(int metric, double value) {
  SIMT_UNROLL
  for (int offset = simt::kWarpSize / 2; offset > 0; offset /= 2) {
    value = CombineMetric(metric, value, __shfl_xor_sync(simt::kFullMask, value, offset));
  }
  return value;
}

template <bool kIsSequence, bool kHasReference>
SIMT_KERNEL(kThreads)
PolicyTokenKernel(Call call) {
  SIMT_SHARED(double, warp_sums, kWarps* kNumPolicyMetrics);
  const int lane = static_cast<int>(threadIdx.x) % simt::kWarpSize;
  const int warp = static_cast<int>(threadIdx.x) / simt::kWarpSize;
  for (int64_t block = blockIdx.x; block < call.num_blocks; block += gridDim.x) {
    double sums[kNumPolicyMetrics];
    SIMT_UNROLL
    for (int m = 0; m < kNumPolicyMetrics; ++m) sums[m] = NeutralMetric(m);
    const RowRange rows = {FirstRow(call, block), FirstRow(call, block + 1)};
    SIMT_NO_UNROLL
    for (int64_t row = rows.begin + threadIdx.x; row < rows.end; row += kThreads) {
      WalkRow<kIsSequence, kHasReference>(call, row, sums);
    }
    FillClampedExtrema(call.bounds, sums);
    SIMT_UNROLL
    for (int m = 0; m < kNumPolicyMetrics; ++m) {
      const double sum = CombineLanes(m, sums[m]);
      if (lane == 0) warp_sums[warp * kNumPolicyMetrics + m] = sum;
    }
    __syncthreads();
    const int metric = static_cast<int>(threadIdx.x);
    if (metric < kNumPolicyMetrics) {
      double total = warp_sums[metric];
      for (int w = 1; w < kWarps; ++w) {
        total = CombineMetric(metric, total, warp_sums[w * kNumPolicyMetrics + metric]);
      }
      call.blocks[block * kNumPolicyMetrics + metric] = total;
    }
    __syncthreads();  // before the next block's sums
  }
}

SIMT_KERNEL(kMergeThreads)
PolicyMergeKernel(Call call) {
  const int lane = static_cast<int>(threadIdx.x) % simt::kWarpSize;
  const int metric = static_cast<int>(threadIdx.x) / simt::kWarpSize;
  double total = NeutralMetric(metric);
  for (int64_t block = lane; block < call.num_blocks; block += simt::kWarpSize) {
    total = CombineMetric(metric, total, call.blocks[block * kNumPolicyMetrics + metric]);
  }
  if (metric == kCorrection && call.sequences != nullptr) {
    const PolicyLossTokens& tokens = call.inputs.tokens;
    for (int64_t s = lane; s < tokens.num_sequences; s += simt::kWarpSize) {
      total += static_cast<double>(tokens.sequence_weights[s]) * call.sequences[s].correction;
    }
  }
  total = CombineLanes(metric, total);
  if (lane != 0) return;
  double* out = call.outputs.metrics + metric;
  *out = call.outputs.accumulate ? CombineMetric(metric, *out, total) : total;
}

// Sums over the counted tokens of a sequence, then the gradient through its ratio.
SIMT_KERNEL(kThreads)
PolicySequenceKernel(Call call) {
  SIMT_SHARED(double, ratio_scratch, kWarps);
  SIMT_SHARED(double, weight_scratch, kWarps);
  SIMT_SHARED(double, count_scratch, kWarps);
  SIMT_SHARED(double, slope_scratch, kWarps);
  const PolicyLossTokens& tokens = call.inputs.tokens;
  for (int64_t s = blockIdx.x; s < tokens.num_sequences; s += gridDim.x) {
    const int64_t begin = tokens.sequence_offsets[s] + threadIdx.x;
    const int64_t end = tokens.sequence_offsets[s + 1];
    double log_ratios = 0.0;
    double log_weights = 0.0;
    double count = 0.0;
    for (int64_t i = begin; i < end; i += kThreads) {
      if (!(tokens.weights[i] > 0.0f)) continue;
      const float logprob = call.inputs.logprobs[i];
      const float prev = call.bounds.has_prev ? tokens.prev_logprobs[i] : logprob;
      log_ratios += ClampLogRatio(LogRatioOf(call.bounds, logprob, prev));
      log_weights += prev - tokens.generation_logprobs[i];
      count += 1.0;
    }
    log_ratios = simt::BlockReduce(log_ratios, simt::Add{}, ratio_scratch);
    log_weights = simt::BlockReduce(log_weights, simt::Add{}, weight_scratch);
    count = simt::BlockReduce(count, simt::Add{}, count_scratch);
    SequenceTerms terms =
        SequenceTermsOf(call.bounds, log_ratios, log_weights, static_cast<int64_t>(count));
    double slope = 0.0;
    for (int64_t i = begin; i < end; i += kThreads) {
      if (!(tokens.weights[i] > 0.0f)) continue;
      slope += SequenceSlope(call.bounds, tokens.advantages[i], tokens.shares[i], terms);
    }
    slope = simt::BlockReduce(slope, simt::Add{}, slope_scratch);
    if (threadIdx.x == 0) {
      if (count > 0.0) terms.gradient = static_cast<float>(slope * terms.ratio / count);
      call.sequences[s] = terms;
    }
  }
}

// A block per sequence.
SIMT_KERNEL(kThreads)
SequenceReduceKernel(const float* values, const float* weights, const int64_t* sequence_offsets,
                     int64_t num_sequences, bool mean, float* out) {
  SIMT_SHARED(double, sum_scratch, kWarps);
  SIMT_SHARED(double, count_scratch, kWarps);
  for (int64_t s = blockIdx.x; s < num_sequences; s += gridDim.x) {
    const int64_t end = sequence_offsets[s + 1];
    double sum = 0.0;
    double count = 0.0;
    for (int64_t i = sequence_offsets[s] + threadIdx.x; i < end; i += kThreads) {
      const float weight = weights == nullptr ? 1.0f : weights[i];
      if (weight == 0.0f) continue;
      sum += static_cast<double>(weight) * values[i];
      count += 1.0;
    }
    sum = simt::BlockReduce(sum, simt::Add{}, sum_scratch);
    count = simt::BlockReduce(count, simt::Add{}, count_scratch);
    if (threadIdx.x == 0) out[s] = static_cast<float>(mean && count > 0.0 ? sum / count : sum);
  }
}

unsigned GridFor(int64_t tasks, int64_t max_blocks) {
  return static_cast<unsigned>(std::clamp<int64_t>(tasks, 1, max_blocks));
}

template <bool kIsSequence, bool kHasReference>
Status LaunchTokens(const Call& call, Stream stream, int64_t max_blocks) {
  SIMT_LAUNCH((PolicyTokenKernel<kIsSequence, kHasReference>), GridFor(call.num_blocks, max_blocks),
              kThreads, 0, stream, call);
  return OkStatus();
}

Status Launch(const Call& call, Stream stream, int64_t max_blocks) {
  const bool has_reference = call.inputs.tokens.reference_logprobs != nullptr;
  if (call.sequences == nullptr) {
    return has_reference ? LaunchTokens<false, true>(call, stream, max_blocks)
                         : LaunchTokens<false, false>(call, stream, max_blocks);
  }
  SIMT_LAUNCH(PolicySequenceKernel, GridFor(call.inputs.tokens.num_sequences, max_blocks), kThreads,
              0, stream, call);
  return has_reference ? LaunchTokens<true, true>(call, stream, max_blocks)
                       : LaunchTokens<true, false>(call, stream, max_blocks);
}

}  // namespace

int64_t PolicyLossWorkspaceBytes(int64_t num_tokens, int64_t num_sequences) {
  return NumBlocks(num_tokens) * kNumPolicyMetrics * static_cast<int64_t>(sizeof(double)) +
         num_sequences * static_cast<int64_t>(sizeof(SequenceTerms));
}

Status PolicyLossOnGrid(const PolicyLossParams& params, const PolicyLossInputs& inputs,
                        const PolicyLossOutputs& outputs, const Workspace& workspace,
                        const Execution& execution, int64_t max_blocks) {
  const PolicyLossTokens& tokens = inputs.tokens;
  const bool by_sequence = params.ratio == RatioKind::kSequence;
  const int64_t want =
      PolicyLossWorkspaceBytes(tokens.num_tokens, by_sequence ? tokens.num_sequences : 0);
  if (Status status = CheckPolicyLoss(params, inputs, outputs, workspace, want); !status.ok()) {
    return status;
  }
  Call call;
  call.bounds = BoundsOf(params, tokens.prev_logprobs != nullptr);
  call.inputs = inputs;
  call.outputs = outputs;
  call.num_blocks = NumBlocks(tokens.num_tokens);
  call.blocks = static_cast<double*>(workspace.data);
  call.sequences =
      by_sequence
          ? reinterpret_cast<SequenceTerms*>(call.blocks + call.num_blocks * kNumPolicyMetrics)
          : nullptr;
  if (Status status = Launch(call, execution.stream, max_blocks); !status.ok()) return status;
  SIMT_LAUNCH(PolicyMergeKernel, 1, kMergeThreads, 0, execution.stream, call);
  return OkStatus();
}

Status PolicyLoss(const PolicyLossParams& params, const PolicyLossInputs& inputs,
                  const PolicyLossOutputs& outputs, const Workspace& workspace,
                  const Execution& execution) {
  return PolicyLossOnGrid(params, inputs, outputs, workspace, execution, kMaxBlocks);
}

Status SequenceReduce(const float* values, const float* weights, const int64_t* sequence_offsets,
                      int64_t num_sequences, bool mean, float* out, const Execution& execution) {
  if (Status status = CheckSequenceReduce(sequence_offsets, num_sequences, out); !status.ok()) {
    return status;
  }
  if (num_sequences == 0) return OkStatus();
  SIMT_LAUNCH(SequenceReduceKernel, GridFor(num_sequences, kMaxBlocks), kThreads, 0,
              execution.stream, values, weights, sequence_offsets, num_sequences, mean, out);
  return OkStatus();
}

}  // namespace tandem::cuda
