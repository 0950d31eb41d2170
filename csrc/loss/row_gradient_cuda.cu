// LogitsGradient of row_stats.h on CUDA: one read and one write of the logits, in vectors of 16
// bytes of which each thread has four in flight (row_tiles.h), and one ex2 per element. Where the
// gradient replaces the logits, a thread overwrites only what itself has read. From float32 logits
// it may also be written in 16 bits, elsewhere and in half vectors.
//
// Grid: one dimension, 256 threads per block, a block per (row, segment of kSegmentColumns).
// Nothing is assumed about alignment or lengths.
#include <cstdint>
#include <type_traits>

#include "csrc/common/simt.h"
#include "csrc/loss/device_rows.h"
#include "csrc/loss/row_stats_cuda.h"
#include "csrc/loss/row_tiles.h"

namespace tandem::cuda {
namespace {

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

// Where the columns of a segment end, those of padding left out.
struct TileBounds {
  int end;
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

// Without the target's own part.
template <bool kHasThreshold>
SIMT_DEVICE float GradientOf(float x, const GradientLine& line) {
  if constexpr (kHasThreshold) x = Cut(x, line.threshold);
  const float d = simt::MaxOrNaN((x - line.lse) * line.scale, kExp2Floor);
  return -simt::Exp2(d) * (line.base + line.slope * d);
}

// What a group of logits becomes: of their own type, or half as large.
template <typename T, typename Out>
using GradientVector =
    std::conditional_t<sizeof(T) == sizeof(Out), simt::Vector<Out>, simt::HalfVector<Out>>;

template <typename T, bool kHasThreshold, typename Out>
SIMT_DEVICE GradientVector<T, Out> GradientGroup(const simt::Vector<T>& group,
                                                 const GradientLine& line) {
  float x[Tile<T>::kLanes];
  simt::Unpack(group, x);
  SIMT_UNROLL
  for (float& lane : x) lane = GradientOf<kHasThreshold>(lane, line);
  return simt::PackInto<GradientVector<T, Out>>(x);
}

// The target's logit if it is in the group that starts at `column`, else `x`.
template <typename T>
SIMT_DEVICE float PickTarget(const simt::Vector<T>& group, int column, int target, float x) {
  SIMT_UNROLL
  for (int lane = 0; lane < Tile<T>::kLanes; ++lane) {
    if (column + lane == target) x = simt::Widen(group.lanes[lane]);
  }
  return x;
}

// The thread that has the target's logit writes its gradient, so nobody races for the element.
template <bool kHasThreshold, typename Out>
SIMT_DEVICE void StoreTarget(float x, const GradientLine& line, Out* out) {
  // A target at -inf has been masked away upstream: nothing flows into it.
  const bool is_masked = x == MinusInfinity() || (kHasThreshold && x < line.threshold);
  const float own = is_masked ? 0.0f : line.own;
  out[line.target] = simt::Narrow<Out>(GradientOf<kHasThreshold>(x, line) + own);
}

// A tile of whole vectors: all loads, then all stores, and no branch between but the target's.
template <typename T, bool kHasThreshold, typename Out>
SIMT_DEVICE void GradientTile(const T* logits, const GradientLine& line, int start, Out* out) {
  const Tile<T> tile = LoadTile(logits, start);
  const int ahead = line.target - start;
  const bool is_mine = ahead >= 0 && ahead < Tile<T>::kColumns &&
                       ahead / Tile<T>::kLanes % kRowThreads == static_cast<int>(threadIdx.x);
  float target = 0.0f;
  if (is_mine) {
    SIMT_UNROLL
    for (int group = 0; group < kTileGroups; ++group) {
      target = PickTarget(tile.groups[group], GroupColumn<T>(start, group), line.target, target);
    }
  }
  SIMT_UNROLL
  for (int group = 0; group < kTileGroups; ++group) {
    simt::StoreVector(GradientGroup<T, kHasThreshold, Out>(tile.groups[group], line),
                      out + GroupColumn<T>(start, group));
  }
  if (is_mine) StoreTarget<kHasThreshold>(target, line, out);
}

// Any tile, a group at a time.
template <typename T, bool kHasThreshold, typename Out>
SIMT_DEVICE void GradientGroups(const T* logits, const GradientLine& line, int start,
                                const TileBounds& bounds, Out* out) {
  SIMT_NO_UNROLL
  for (int group = 0; group < kTileGroups; ++group) {
    const int column = GroupColumn<T>(start, group);
    const simt::Vector<T> x = LoadGroup(logits, column, bounds.end, bounds.are_aligned);
    StoreGroup(GradientGroup<T, kHasThreshold, Out>(x, line), column, bounds.end,
               bounds.are_aligned, out);
    if (line.target >= column && line.target < column + Tile<T>::kLanes) {
      StoreTarget<kHasThreshold>(PickTarget(x, column, line.target, 0.0f), line, out);
    }
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

// From any column on.
template <typename T>
SIMT_DEVICE void ZeroPadding(int begin, int end, T* out) {
  for (int column = begin + static_cast<int>(threadIdx.x); column < end; column += kRowThreads) {
    out[column] = T{};
  }
}

template <typename T, bool kHasThreshold, typename Out>
SIMT_KERNEL(kRowThreads)
GradientKernel(Rows<T> rows, TokenLogprobGradients in, Out* grad_logits, int64_t grad_stride) {
  const int64_t tasks = rows.count * rows.segments;
  for (int64_t task = blockIdx.x; task < tasks; task += gridDim.x) {
    const int64_t segment = task / rows.count;
    const int64_t row = task - segment * rows.count;
    Out* out = grad_logits + row * grad_stride;
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
    const TileBounds bounds = {rows.live < end ? rows.live : end,
                               simt::IsVectorAligned(logits) && simt::IsVectorAligned(out)};
    for (int start = begin; start < bounds.end; start += Tile<T>::kColumns) {
      if (bounds.are_aligned && start + Tile<T>::kColumns <= bounds.end) {
        GradientTile<T, kHasThreshold>(logits, line, start, out);
      } else {
        GradientGroups<T, kHasThreshold>(logits, line, start, bounds, out);
      }
    }
    ZeroPadding(bounds.end > begin ? bounds.end : begin, end, out);
  }
}

template <typename T, typename Out>
Status LaunchGradient(const LogitRows& logit_rows, const TokenLogprobGradients& gradients,
                      const MatrixView& grad_logits, Stream stream, int64_t max_blocks) {
  const Rows<T> rows = MakeRows<T>(logit_rows);
  Out* out = static_cast<Out*>(grad_logits.data);
  const unsigned grid = GridFor(rows.count * rows.segments, max_blocks);
  if (rows.thresholds == nullptr) {
    SIMT_LAUNCH((GradientKernel<T, false, Out>), grid, kRowThreads, 0, stream, rows, gradients, out,
                grad_logits.row_stride);
  } else {
    SIMT_LAUNCH((GradientKernel<T, true, Out>), grid, kRowThreads, 0, stream, rows, gradients, out,
                grad_logits.row_stride);
  }
  return OkStatus();
}

Status DispatchGradient(const LogitRows& rows, const TokenLogprobGradients& gradients,
                        const MatrixView& grad_logits, Stream stream, int64_t max_blocks) {
  const DType from = rows.logits.dtype;
  const DType to = grad_logits.dtype;
  const auto launch = [&]<typename T, typename Out>(T, Out) {
    return LaunchGradient<T, Out>(rows, gradients, grad_logits, stream, max_blocks);
  };
  if (from != to && (from != DType::kFloat32 || grad_logits.data == rows.logits.data)) {
    return InvalidArgument(
        "grad_logits: want the dtype of logits, or apart from float32 logits a 16-bit one");
  }
  if (from == DType::kBFloat16) return launch(BFloat16{}, BFloat16{});
  if (from == DType::kFloat16) return launch(Float16{}, Float16{});
  if (to == DType::kBFloat16) return launch(float{}, BFloat16{});
  if (to == DType::kFloat16) return launch(float{}, Float16{});
  return launch(float{}, float{});
}

}  // namespace

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
  if (out.rows != rows.logits.rows || out.cols != rows.logits.cols) {
    return InvalidArgument("grad_logits: want the shape of logits");
  }
  if (out.rows == 0 || out.cols == 0) return OkStatus();
  return DispatchGradient(rows, gradients, grad_logits, execution.stream, max_blocks);
}

}  // namespace tandem::cuda
