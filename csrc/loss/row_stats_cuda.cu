// CUDA backend of row_stats.h. All of it is bound by memory: every element is loaded once, in
// vectors of 16 bytes of which each thread has four in flight (row_tiles.h), and costs one ex2;
// sums are rescaled once per tile.
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
#include <algorithm>
#include <cmath>
#include <cstdint>

#include "csrc/common/simt.h"
#include "csrc/common/simt_reduce.h"
#include "csrc/loss/row_stats_cuda.h"
#include "csrc/loss/row_tiles.h"

namespace tandem::cuda {
namespace {

constexpr float kLog2E = 1.44269504088896340736f;
constexpr float kLn2 = 0.69314718055994530942f;
// 2^x is 0 from here on down, and x * 2^x is too.
constexpr float kExp2Floor = -127.0f;
constexpr int64_t kMaxBlocks = 1 << 20;
// No lane of a group: its distance from every column is negative.
constexpr int kNoColumn = -1;

// LogitRows as kernels take them.
template <typename T>
struct Rows {
  const T* logits;
  const int64_t* targets;
  const float* thresholds;
  int64_t count;
  int64_t stride;
  int cols;
  int live;  // columns before the padding
  int segments;
  int64_t vocab_start;
  int64_t ignore_index;
  float temperature;
};

// m = max x, s = sum 2^d and t = sum d 2^d with d = (x - m) * scale. The maximum starts at a finite
// number, so that no -inf is ever subtracted from another; sum == 0 tells the empty row.
struct Sums {
  float max = kLowestFloat;
  float sum = 0.0f;
  float shifted = 0.0f;
};

template <typename T>
SIMT_DEVICE float Threshold(const Rows<T>& rows, int64_t row) {
  return rows.thresholds == nullptr ? MinusInfinity() : rows.thresholds[row];
}

// The target's column of this shard, or kNoColumn.
template <typename T>
SIMT_DEVICE int TargetColumn(const Rows<T>& rows, int64_t row) {
  const int64_t target = rows.targets[row];
  const int64_t column = target - rows.vocab_start;
  return target != rows.ignore_index && column >= 0 && column < rows.live ? static_cast<int>(column)
                                                                          : kNoColumn;
}

SIMT_DEVICE float Cut(float x, float threshold) { return x < threshold ? MinusInfinity() : x; }

// Moves sums to the larger maximum `max`: each d grows by delta.
SIMT_DEVICE void Rescale(float max, float scale, Sums* sums) {
  const float delta = simt::AtLeast((sums->max - max) * scale, kExp2Floor);
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
      const float d = simt::AtLeast((x[group][lane] - max) * scale, kExp2Floor);
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
    const float delta = simt::AtLeast(stats.max[at] - base, kExp2Floor);
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

// grad_j = [j = target] * own - p_j * (base + slope * log2 p_j) with log2 p_j = (x_j - lse) * scale
struct GradientLine {
  float scale;
  float lse;  // times the temperature, so in the units of x
  float base;
  float slope;
  float own;
  float threshold;
  int target;  // column, or kNoColumn
};

// Where a segment ends: its columns, and those of them that are not padding.
struct TileBounds {
  int end;
  int live;
  bool are_aligned;  // rows in and out
};

template <typename T>
SIMT_DEVICE GradientLine MakeLine(const Rows<T>& rows, const TokenLogprobGradients& in, int64_t row,
                                  float g, float h) {
  const float inverse_temperature = 1.0f / rows.temperature;
  GradientLine line;
  line.scale = kLog2E / rows.temperature;
  line.lse = in.lse[row] * rows.temperature;
  line.base = (h == 0.0f ? g : g + h * in.entropy[row]) * inverse_temperature;
  line.slope = h * kLn2 * inverse_temperature;
  line.own = g * inverse_temperature;
  line.threshold = Threshold(rows, row);
  line.target = TargetColumn(rows, row);
  return line;
}

template <typename T, bool kHasThreshold>
SIMT_DEVICE simt::Vector<T> GradientGroup(const simt::Vector<T>& group, const GradientLine& line,
                                          int column) {
  constexpr int kLanes = Tile<T>::kLanes;
  float x[kLanes];
  float gradient[kLanes];
  simt::Unpack(group, x);
  SIMT_UNROLL
  for (int lane = 0; lane < kLanes; ++lane) {
    if constexpr (kHasThreshold) x[lane] = Cut(x[lane], line.threshold);
    const float d = simt::AtLeast((x[lane] - line.lse) * line.scale, kExp2Floor);
    gradient[lane] = -simt::Exp2(d) * (line.base + line.slope * d);
  }
  // One comparison for the whole group; the thread that owns the target's element does it all, so
  // nobody races for it.
  const unsigned own_lane = static_cast<unsigned>(line.target - column);
  if (own_lane < kLanes) {
    SIMT_UNROLL
    for (unsigned lane = 0; lane < kLanes; ++lane) {
      // A target at -inf has been masked away upstream: nothing flows into it.
      const bool is_own = lane == own_lane && x[lane] != MinusInfinity();
      gradient[lane] += is_own ? line.own : 0.0f;
    }
  }
  return simt::Pack<T>(gradient);
}

// One tile, columns from rows.live on included (their gradient is zero). The path of whole vectors
// loads all of them before it stores the first; the other one takes the groups in turn.
template <typename T, bool kHasThreshold>
SIMT_DEVICE void GradientTile(const T* logits, const GradientLine& line, int start,
                              const TileBounds& bounds, T* out) {
  if (bounds.are_aligned && start + Tile<T>::kColumns <= bounds.live) {
    const Tile<T> tile = LoadTile(logits, start);
    SIMT_UNROLL
    for (int group = 0; group < kTileGroups; ++group) {
      const int column = GroupColumn<T>(start, group);
      simt::StoreVector(GradientGroup<T, kHasThreshold>(tile.groups[group], line, column),
                        out + column);
    }
    return;
  }
  SIMT_NO_UNROLL
  for (int group = 0; group < kTileGroups; ++group) {
    const int column = GroupColumn<T>(start, group);
    const simt::Vector<T> x = LoadGroup(logits, column, bounds.live, bounds.are_aligned);
    StoreGroup(GradientGroup<T, kHasThreshold>(x, line, column), column, bounds.end,
               bounds.are_aligned, out);
  }
}

template <typename T>
SIMT_DEVICE void ZeroSegment(int begin, int end, T* out) {
  const bool is_aligned = simt::IsVectorAligned(out);
  const simt::Vector<T> zeros = {};
  for (int start = begin; start < end; start += kRowThreads * Tile<T>::kLanes) {
    StoreGroup(zeros, GroupColumn<T>(start, 0), end, is_aligned, out);
  }
}

template <typename T, bool kHasThreshold>
SIMT_KERNEL(kRowThreads)
GradientKernel(Rows<T> rows, TokenLogprobGradients in, T* grad_logits, int64_t grad_stride) {
  const int64_t tasks = rows.count * rows.segments;
  for (int64_t task = blockIdx.x; task < tasks; task += gridDim.x) {
    const int64_t segment = task / rows.count;
    const int64_t row = task - segment * rows.count;
    T* out = grad_logits + row * grad_stride;
    const int begin = static_cast<int>(segment) * kSegmentColumns;
    const int end = begin + kSegmentColumns < rows.cols ? begin + kSegmentColumns : rows.cols;
    const float g = in.grad_logprobs == nullptr ? 0.0f : in.grad_logprobs[row];
    const float h = in.grad_entropy == nullptr ? 0.0f : in.grad_entropy[row];
    // lse = -inf: every logit is -inf, and gets no gradient.
    if (rows.targets[row] == rows.ignore_index || (g == 0.0f && h == 0.0f) ||
        in.lse[row] == MinusInfinity()) {
      ZeroSegment(begin, end, out);
      continue;
    }
    const GradientLine line = MakeLine(rows, in, row, g, h);
    const T* logits = rows.logits + row * rows.stride;
    const TileBounds bounds = {end, rows.live < end ? rows.live : end,
                               simt::IsVectorAligned(logits) && simt::IsVectorAligned(out)};
    for (int start = begin; start < end; start += Tile<T>::kColumns) {
      GradientTile<T, kHasThreshold>(logits, line, start, bounds, out);
    }
  }
}

int Segments(int64_t cols) {
  return cols <= kSegmentColumns ? 1 : static_cast<int>((cols - 1) / kSegmentColumns + 1);
}

unsigned GridFor(int64_t tasks, int64_t max_blocks) {
  return static_cast<unsigned>(tasks < max_blocks ? tasks : max_blocks);
}

long long Printed(int64_t value) { return static_cast<long long>(value); }

Status CheckMatrix(const char* name, const ConstMatrixView& matrix) {
  if (matrix.rows < 0 || matrix.cols < 0 || matrix.cols > kMaxColumns) {
    return InvalidArgument("%s: want [N, V] with N >= 0 and 0 <= V <= 2^30, got [%lld, %lld]", name,
                           Printed(matrix.rows), Printed(matrix.cols));
  }
  if (matrix.row_stride < matrix.cols) {
    return InvalidArgument("%s: want row_stride >= %lld columns, got %lld", name,
                           Printed(matrix.cols), Printed(matrix.row_stride));
  }
  return OkStatus();
}

Status CheckRows(const LogitRows& rows) {
  if (!(rows.temperature > 0.0f) || std::isinf(rows.temperature)) {
    return InvalidArgument("temperature: want a finite number > 0, got %g",
                           static_cast<double>(rows.temperature));
  }
  if (rows.vocab_start < 0 || rows.vocab_size < 0) {
    return InvalidArgument("vocab_start and vocab_size: want both >= 0, got %lld and %lld",
                           Printed(rows.vocab_start), Printed(rows.vocab_size));
  }
  return CheckMatrix("logits", rows.logits);
}

template <typename T>
Rows<T> MakeRows(const LogitRows& rows) {
  const int64_t cols = rows.logits.cols;
  const int64_t live = std::clamp<int64_t>(rows.vocab_size - rows.vocab_start, 0, cols);
  return {static_cast<const T*>(rows.logits.data),
          rows.targets,
          rows.thresholds,
          rows.logits.rows,
          rows.logits.row_stride,
          static_cast<int>(cols),
          static_cast<int>(live),
          Segments(cols),
          rows.vocab_start,
          rows.ignore_index,
          rows.temperature};
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

template <typename T>
Status LaunchGradient(const LogitRows& logit_rows, const TokenLogprobGradients& gradients,
                      const MatrixView& grad_logits, Stream stream, int64_t max_blocks) {
  const Rows<T> rows = MakeRows<T>(logit_rows);
  T* out = static_cast<T*>(grad_logits.data);
  const unsigned grid = GridFor(rows.count * rows.segments, max_blocks);
  if (rows.thresholds == nullptr) {
    SIMT_LAUNCH((GradientKernel<T, false>), grid, kRowThreads, 0, stream, rows, gradients, out,
                grad_logits.row_stride);
  } else {
    SIMT_LAUNCH((GradientKernel<T, true>), grid, kRowThreads, 0, stream, rows, gradients, out,
                grad_logits.row_stride);
  }
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

Status LogitsGradient(const LogitRows& rows, const TokenLogprobGradients& gradients,
                      const MatrixView& grad_logits, const Execution& execution) {
  return LogitsGradientOnGrid(rows, gradients, grad_logits, execution, kMaxBlocks);
}

Status LogitsGradientOnGrid(const LogitRows& rows, const TokenLogprobGradients& gradients,
                            const MatrixView& grad_logits, const Execution& execution,
                            int64_t max_blocks) {
  if (Status status = CheckRows(rows); !status.ok()) return status;
  const ConstMatrixView out{grad_logits.data, grad_logits.rows, grad_logits.cols,
                            grad_logits.row_stride, grad_logits.dtype};
  if (Status status = CheckMatrix("grad_logits", out); !status.ok()) return status;
  if (out.rows != rows.logits.rows || out.cols != rows.logits.cols ||
      out.dtype != rows.logits.dtype) {
    return InvalidArgument("grad_logits: want the shape and dtype of logits");
  }
  if (out.rows == 0 || out.cols == 0) return OkStatus();
  if (out.dtype == DType::kFloat32) {
    return LaunchGradient<float>(rows, gradients, grad_logits, execution.stream, max_blocks);
  }
  if (out.dtype == DType::kBFloat16) {
    return LaunchGradient<BFloat16>(rows, gradients, grad_logits, execution.stream, max_blocks);
  }
  return LaunchGradient<Float16>(rows, gradients, grad_logits, execution.stream, max_blocks);
}

}  // namespace tandem::cuda
