// Statistics and merge of row_stats.h on CUDA. All of it is bound by memory: every element is
// loaded once, in vectors of 16 bytes of which each thread has four in flight (row_tiles.h), and
// costs one ex2; sums are rescaled once per tile.
//
// A row is cut into segments of kSegmentColumns, a block reduces one segment after the other, and
// the segments of a row are merged in their order, exactly as StatsFinish merges shards. So neither
// the grid nor the device decides about a single bit.
//
// Exponents are taken in base 2 as (x - max x) * (log2 e / temperature): subtracting first keeps
// the digits of large logits, and one product does for the temperature and the change of base.
//
// Grids are one-dimensional with 256 threads per block: a block per (row, segment), and a thread
// per row for merges. Nothing is assumed about alignment or lengths.
#include <cmath>
#include <cstdint>

#include "csrc/common/simt.h"
#include "csrc/common/simt_reduce.h"
#include "csrc/loss/device_rows.h"
#include "csrc/loss/row_stats_cuda.h"
#include "csrc/loss/row_tiles.h"

namespace tandem::cuda {
namespace {

// m = max x, s = sum 2^d and t = sum d 2^d with d = (x - m) * scale. The maximum starts at a finite
// number, so that no -inf is ever subtracted from another; sum == 0 tells the empty row.
struct Sums {
  float max = kLowestFloat;
  float sum = 0.0f;
  float shifted = 0.0f;
};

// Moves sums to the larger maximum `max`: each d grows by delta.
SIMT_DEVICE void Rescale(float max, float scale, Sums* sums) {
  const float delta = simt::MaxOrNaN((sums->max - max) * scale, kExp2Floor);
  const float factor = simt::Exp2(delta);
  sums->shifted = (sums->shifted + delta * sums->sum) * factor;
  sums->sum *= factor;
  sums->max = max;
}

template <typename T, bool kHasThreshold>
SIMT_DEVICE void AddTile(const Tile<T>& tile, float scale, float threshold, Sums* sums) {
  constexpr int kLanes = Tile<T>::kLanes;
  float x[kTileGroups][kLanes];
  float max = sums->max;
  SIMT_UNROLL
  for (int group = 0; group < kTileGroups; ++group) {
    simt::Unpack(tile.groups[group], x[group]);
    SIMT_UNROLL
    for (int lane = 0; lane < kLanes; ++lane) {
      if constexpr (kHasThreshold) x[group][lane] = Cut(x[group][lane], threshold);
      max = fmaxf(max, x[group][lane]);
    }
  }
  Rescale(max, scale, sums);
  SIMT_UNROLL
  for (int group = 0; group < kTileGroups; ++group) {
    float sum = 0.0f;
    float shifted = 0.0f;
    SIMT_UNROLL
    for (int lane = 0; lane < kLanes; ++lane) {
      const float d = simt::MaxOrNaN((x[group][lane] - max) * scale, kExp2Floor);
      const float e = simt::Exp2(d);
      sum += e;
      shifted += d * e;
    }
    sums->sum += sum;
    sums->shifted += shifted;
  }
}

// The block's sums, in every thread. Two arrays of shared memory in turn: see BlockReduce.
SIMT_DEVICE Sums ReduceBlock(Sums sums, float scale, float* max_scratch, float2* sum_scratch) {
  Rescale(simt::BlockReduce(sums.max, simt::Max{}, max_scratch), scale, &sums);
  sums.sum = simt::WarpReduce(sums.sum, simt::Add{});
  sums.shifted = simt::WarpReduce(sums.shifted, simt::Add{});
  if (threadIdx.x % simt::kWarpSize == 0) {
    sum_scratch[threadIdx.x / simt::kWarpSize] = {sums.sum, sums.shifted};
  }
  __syncthreads();
  sums.sum = 0.0f;
  sums.shifted = 0.0f;
  for (int warp = 0; warp < kRowThreads / simt::kWarpSize; ++warp) {
    sums.sum += sum_scratch[warp].x;
    sums.shifted += sum_scratch[warp].y;
  }
  return sums;
}

SIMT_DEVICE void WriteStats(const Sums& sums, float temperature, const RowStats& out, int64_t i) {
  out.max[i] = sums.sum == 0.0f ? MinusInfinity() : sums.max / temperature;
  out.sum[i] = sums.sum;
  out.shifted[i] = sums.shifted * kLn2;
}

// partial: [segments, rows]. The target's logit goes to out.target, whatever the segment.
template <typename T, bool kHasThreshold>
SIMT_KERNEL(kRowThreads)
StatsKernel(Rows<T> rows, RowStats partial, RowStats out) {
  SIMT_SHARED(float, max_scratch, kRowThreads / simt::kWarpSize);
  SIMT_SHARED(float2, sum_scratch, kRowThreads / simt::kWarpSize);
  const float scale = kLog2E / rows.temperature;
  const int64_t tasks = rows.count * rows.segments;
  // Segments are the outer dimension: the short last ones come together, at the end of the grid.
  for (int64_t task = blockIdx.x; task < tasks; task += gridDim.x) {
    const int64_t segment = task / rows.count;
    const int64_t row = task - segment * rows.count;
    const T* logits = rows.logits + row * rows.stride;
    const float threshold = kHasThreshold ? Threshold(rows, row) : 0.0f;
    const bool is_aligned = simt::IsVectorAligned(logits);
    const int begin = static_cast<int>(segment) * kSegmentColumns;
    const int end = begin + kSegmentColumns < rows.live ? begin + kSegmentColumns : rows.live;
    Sums sums;
    for (int start = begin; start < end; start += Tile<T>::kColumns) {
      const Tile<T> tile = LoadTile(logits, start, end, is_aligned);
      AddTile<T, kHasThreshold>(tile, scale, threshold, &sums);
    }
    sums = ReduceBlock(sums, scale, max_scratch, sum_scratch);
    if (threadIdx.x != 0) continue;
    WriteStats(sums, rows.temperature, partial, task);
    if (segment > 0) continue;
    const int column = TargetColumn(rows, row);
    const float target = column < 0 ? MinusInfinity() : simt::Widen(logits[column]);
    out.target[row] = Cut(target, Threshold(rows, row)) / rows.temperature;
  }
}

// The statistics of row i over all shards, in the units of RowStats, merged in their order.
SIMT_DEVICE Sums MergeShards(const ShardStats& stats, int64_t i) {
  float max = MinusInfinity();
  for (int64_t r = 0; r < stats.num_shards; ++r) {
    max = fmaxf(max, stats.max[r * stats.shard_stride + i]);
  }
  const float base = max == MinusInfinity() ? 0.0f : max;
  Sums total;
  for (int64_t r = 0; r < stats.num_shards; ++r) {
    const int64_t at = r * stats.shard_stride + i;
    const float sum = stats.sum[at];
    const float delta = simt::MaxOrNaN(stats.max[at] - base, kExp2Floor);
    const float factor = simt::Exp2(delta * kLog2E);
    total.sum += sum * factor;
    total.shifted += (stats.shifted[at] + delta * sum) * factor;
  }
  total.max = max;
  return total;
}

SIMT_KERNEL(kRowThreads) MergeKernel(ShardStats partial, int64_t rows, RowStats out) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * kRowThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kRowThreads + threadIdx.x; i < rows;
       i += step) {
    const Sums total = MergeShards(partial, i);
    out.max[i] = total.max;
    out.sum[i] = total.sum;
    out.shifted[i] = total.shifted;
  }
}

SIMT_KERNEL(kRowThreads)
FinishKernel(ShardStats stats, int64_t rows, const int64_t* targets, int64_t ignore_index,
             TokenLogprobs out) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * kRowThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kRowThreads + threadIdx.x; i < rows;
       i += step) {
    const Sums total = MergeShards(stats, i);
    float target = MinusInfinity();
    for (int64_t r = 0; r < stats.num_shards; ++r) {
      target = fmaxf(target, stats.target[r * stats.shard_stride + i]);
    }
    const float log_sum = logf(total.sum);
    out.lse[i] = total.sum == 0.0f ? MinusInfinity() : total.max + log_sum;
    out.logprobs[i] = targets[i] == ignore_index ? 0.0f : (target - total.max) - log_sum;
    // 0 / 0 makes the entropy of a row without any finite logit NaN.
    if (out.entropy != nullptr) out.entropy[i] = log_sum - total.shifted / total.sum;
  }
}

template <typename T>
Status LaunchStats(const LogitRows& logit_rows, const RowStats& stats, void* workspace,
                   Stream stream, int64_t max_blocks) {
  const Rows<T> rows = MakeRows<T>(logit_rows);
  const int64_t tasks = rows.count * rows.segments;
  RowStats partial = stats;
  if (rows.segments > 1) {
    float* floats = static_cast<float*>(workspace);
    partial = {floats, floats + tasks, floats + 2 * tasks, nullptr};
  }
  const unsigned grid = GridFor(tasks, max_blocks);
  if (rows.thresholds == nullptr) {
    SIMT_LAUNCH((StatsKernel<T, false>), grid, kRowThreads, 0, stream, rows, partial, stats);
  } else {
    SIMT_LAUNCH((StatsKernel<T, true>), grid, kRowThreads, 0, stream, rows, partial, stats);
  }
  if (rows.segments == 1) return OkStatus();
  const ShardStats shards{partial.max, partial.sum,   partial.shifted,
                          nullptr,     rows.segments, rows.count};
  const unsigned merge_grid = GridFor((rows.count - 1) / kRowThreads + 1, max_blocks);
  SIMT_LAUNCH(MergeKernel, merge_grid, kRowThreads, 0, stream, shards, rows.count, stats);
  return OkStatus();
}

}  // namespace

int64_t LogitsStatsWorkspaceBytes(int64_t rows, int64_t cols) {
  const int segments = Segments(cols);
  return segments == 1 ? 0 : 3 * segments * rows * static_cast<int64_t>(sizeof(float));
}

Status LogitsStats(const LogitRows& rows, const RowStats& stats, const Workspace& workspace,
                   const Execution& execution) {
  return LogitsStatsOnGrid(rows, stats, workspace, execution, kMaxBlocks);
}

Status LogitsStatsOnGrid(const LogitRows& rows, const RowStats& stats, const Workspace& workspace,
                         const Execution& execution, int64_t max_blocks) {
  if (Status status = CheckRows(rows); !status.ok()) return status;
  const int64_t wanted = LogitsStatsWorkspaceBytes(rows.logits.rows, rows.logits.cols);
  if (workspace.bytes < wanted) {
    return InvalidArgument("workspace: want %lld bytes, got %lld", Printed(wanted),
                           Printed(workspace.bytes));
  }
  if (rows.logits.rows == 0) return OkStatus();
  if (rows.logits.dtype == DType::kFloat32) {
    return LaunchStats<float>(rows, stats, workspace.data, execution.stream, max_blocks);
  }
  if (rows.logits.dtype == DType::kBFloat16) {
    return LaunchStats<BFloat16>(rows, stats, workspace.data, execution.stream, max_blocks);
  }
  return LaunchStats<Float16>(rows, stats, workspace.data, execution.stream, max_blocks);
}

Status StatsFinish(const ShardStats& stats, int64_t rows, const int64_t* targets,
                   int64_t ignore_index, const TokenLogprobs& out, const Execution& execution) {
  if (rows < 0 || stats.num_shards < 1) {
    return InvalidArgument("stats: want rows >= 0 of at least one shard, got %lld of %lld",
                           Printed(rows), Printed(stats.num_shards));
  }
  if (rows == 0) return OkStatus();
  const unsigned grid = GridFor((rows - 1) / kRowThreads + 1, kMaxBlocks);
  SIMT_LAUNCH(FinishKernel, grid, kRowThreads, 0, execution.stream, stats, rows, targets,
              ignore_index, out);
  return OkStatus();
}

}  // namespace tandem::cuda
