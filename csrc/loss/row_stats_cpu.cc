// CPU backend of row_stats.h: checks, threads over rows, and the merge of shards. What is done to
// the elements of a row is in row_kernels.h.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "csrc/common/multiarch.h"
#include "csrc/common/scalar_types.h"
#include "csrc/loss/exp2.h"
#include "csrc/loss/row_kernels.h"
#include "csrc/loss/row_stats.h"

namespace tandem::cpu {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
// Below this many elements a thread costs more than it brings.
constexpr int64_t kElementsPerThread = 32768;

long long Printed(int64_t value) { return static_cast<long long>(value); }

int64_t Grain(int64_t cols) {
  return std::max<int64_t>(1, kElementsPerThread / std::max<int64_t>(1, cols));
}

float LoadElement(const void* row, int64_t column, DType dtype) {
  if (dtype == DType::kFloat32) return static_cast<const float*>(row)[column];
  if (dtype == DType::kBFloat16) return ToFloat(static_cast<const BFloat16*>(row)[column]);
  return ToFloat(static_cast<const Float16*>(row)[column]);
}

void StoreElement(float value, DType dtype, void* row, int64_t column) {
  if (dtype == DType::kFloat32) {
    static_cast<float*>(row)[column] = value;
  } else if (dtype == DType::kBFloat16) {
    StoreFloat(value, static_cast<BFloat16*>(row) + column);
  } else {
    StoreFloat(value, static_cast<Float16*>(row) + column);
  }
}

// Columns before the padding of the vocabulary.
int64_t LiveColumns(const LogitRows& rows) {
  return std::clamp<int64_t>(rows.vocab_size - rows.vocab_start, 0, rows.logits.cols);
}

float Threshold(const LogitRows& rows, int64_t i) {
  return rows.thresholds == nullptr ? -kInfinity : rows.thresholds[i];
}

const void* RowOf(const ConstMatrixView& matrix, int64_t i) {
  return static_cast<const char*>(matrix.data) + i * matrix.row_stride * SizeOf(matrix.dtype);
}

// The target's logit as the row counts it: -inf where it is cut away or not in this shard.
float TargetLogit(const LogitRows& rows, int64_t i) {
  const int64_t target = rows.targets[i];
  const int64_t column = target - rows.vocab_start;
  if (target == rows.ignore_index || column < 0 || column >= LiveColumns(rows)) return -kInfinity;
  const float logit = LoadElement(RowOf(rows.logits, i), column, rows.logits.dtype);
  return logit < Threshold(rows, i) ? -kInfinity : logit;
}

Status CheckMatrix(const char* name, const ConstMatrixView& matrix) {
  if (matrix.rows < 0 || matrix.cols < 0) {
    return InvalidArgument("%s: want [N, V] with N, V >= 0, got [%lld, %lld]", name,
                           Printed(matrix.rows), Printed(matrix.cols));
  }
  if (matrix.row_stride < matrix.cols) {
    return InvalidArgument("%s: want row_stride >= %lld columns, got %lld", name,
                           Printed(matrix.cols), Printed(matrix.row_stride));
  }
  if (matrix.data == nullptr && matrix.rows > 0 && matrix.cols > 0) {
    return InvalidArgument("%s: null", name);
  }
  return OkStatus();
}

// A shard does not know which targets the others hold, but nobody holds a negative one, and no one
// else has any where the whole vocabulary is here.
Status CheckTargets(const LogitRows& rows) {
  const int64_t cols = rows.logits.cols;
  const bool whole = rows.vocab_start == 0 && rows.vocab_size <= cols;
  const int64_t limit = whole ? cols : std::numeric_limits<int64_t>::max();
  for (int64_t i = 0; i < rows.logits.rows; ++i) {
    const int64_t target = rows.targets[i];
    if (target == rows.ignore_index || (target >= 0 && target < limit)) continue;
    return InvalidArgument(
        "targets: row %lld holds %lld, want 0 <= target < %lld or %lld (ignored)", Printed(i),
        Printed(target), Printed(limit), Printed(rows.ignore_index));
  }
  return OkStatus();
}

Status CheckRows(const LogitRows& rows) {
  if (Status status = CheckMatrix("logits", rows.logits); !status.ok()) return status;
  if (!(rows.temperature > 0.0f) || std::isinf(rows.temperature)) {
    return InvalidArgument("temperature: want a finite number > 0, got %g",
                           static_cast<double>(rows.temperature));
  }
  if (rows.vocab_start < 0 || rows.vocab_size < 0) {
    return InvalidArgument("vocab_start and vocab_size: want both >= 0, got %lld and %lld",
                           Printed(rows.vocab_start), Printed(rows.vocab_size));
  }
  if (rows.targets == nullptr && rows.logits.rows > 0) return InvalidArgument("targets: null");
  return CheckTargets(rows);
}

void StatsOfRow(const LogitRows& rows, const RowKernels& kernels, int64_t i, const RowStats& out) {
  const RowReading reading{kLog2E / rows.temperature, Threshold(rows, i)};
  const RowSums sums = kernels.reduce(RowOf(rows.logits, i), LiveColumns(rows), reading);
  out.max[i] = sums.max / rows.temperature;
  out.sum[i] = sums.sum;
  out.shifted[i] = sums.shifted * kLn2;
  out.target[i] = TargetLogit(rows, i) / rows.temperature;
}

// A piece of a row as float32: 16 KiB, half of the smallest L1 in use.
constexpr int64_t kPiece = 4096;

TANDEM_MULTIARCH void NarrowPiece(const float* piece, int64_t count, BFloat16* out) {
  for (int64_t i = 0; i < count; ++i) StoreFloat(piece[i], out + i);
}

// The gradient of a float32 row in another dtype, piece by piece.
void NarrowGradient(const RowKernels& kernels, const float* row, int64_t count,
                    const GradientLine& line, DType dtype, void* out) {
  float piece[kPiece];
  for (int64_t start = 0; start < count; start += kPiece) {
    const int64_t length = std::min(kPiece, count - start);
    kernels.gradient(row + start, length, line, piece);
    if (dtype == DType::kBFloat16) {
      NarrowPiece(piece, length, static_cast<BFloat16*>(out) + start);
    } else {
      for (int64_t i = 0; i < length; ++i) StoreElement(piece[i], dtype, out, start + i);
    }
  }
}

void GradientOfRow(const LogitRows& rows, const RowKernels& kernels, int64_t i,
                   const TokenLogprobGradients& in, const MatrixView& grad_logits) {
  const int64_t live = LiveColumns(rows);
  const DType dtype = grad_logits.dtype;
  char* out = static_cast<char*>(grad_logits.data) + i * grad_logits.row_stride * SizeOf(dtype);
  const float g = in.grad_logprobs == nullptr ? 0.0f : in.grad_logprobs[i];
  const float h = in.grad_entropy == nullptr ? 0.0f : in.grad_entropy[i];
  // lse = -inf: every logit is -inf, and gets no gradient.
  const bool nothing_flows =
      rows.targets[i] == rows.ignore_index || (g == 0.0f && h == 0.0f) || in.lse[i] == -kInfinity;
  const int64_t written = nothing_flows ? 0 : live;
  const int64_t zeros = rows.logits.cols - written;
  if (written > 0) {
    const void* row = RowOf(rows.logits, i);
    const float inverse_temperature = 1.0f / rows.temperature;
    const float target_logit = TargetLogit(rows, i);
    const GradientLine line{kLog2E / rows.temperature, Threshold(rows, i),
                            in.lse[i] * rows.temperature,
                            (h == 0.0f ? g : g + h * in.entropy[i]) * inverse_temperature,
                            h * kLn2 * inverse_temperature};
    if (dtype == rows.logits.dtype) {
      kernels.gradient(row, live, line, out);
    } else {
      NarrowGradient(kernels, static_cast<const float*>(row), live, line, dtype, out);
    }
    // A target at -inf has been masked away upstream: nothing flows into it.
    if (target_logit != -kInfinity) {
      const float d = ClampExponent((target_logit - line.lse) * line.scale);
      const float own = g * inverse_temperature - std::exp2(d) * (line.base + line.slope * d);
      StoreElement(own, dtype, out, rows.targets[i] - rows.vocab_start);
    }
  }
  std::memset(out + written * SizeOf(dtype), 0, static_cast<size_t>(zeros * SizeOf(dtype)));
}

struct Merged {
  float max = -kInfinity;
  float sum = 0.0f;
  float shifted = 0.0f;
  float target = -kInfinity;
};

Merged Merge(const ShardStats& stats, int64_t i) {
  Merged merged;
  for (int64_t r = 0; r < stats.num_shards; ++r) {
    const int64_t at = r * stats.shard_stride + i;
    merged.max = std::max(merged.max, stats.max[at]);
    merged.target = std::max(merged.target, stats.target[at]);
  }
  for (int64_t r = 0; r < stats.num_shards; ++r) {
    const int64_t at = r * stats.shard_stride + i;
    const float sum = stats.sum[at];
    if (sum == 0.0f) continue;  // an empty element, whose maximum is -inf
    const float delta = stats.max[at] - merged.max;
    const float factor = std::exp(delta);
    merged.sum += sum * factor;
    // A factor of 0 may come with an infinite delta.
    if (factor != 0.0f) merged.shifted += (stats.shifted[at] + delta * sum) * factor;
  }
  return merged;
}

}  // namespace

int64_t LogitsStatsWorkspaceBytes(int64_t /*rows*/, int64_t /*cols*/) { return 0; }

Status LogitsStats(const LogitRows& rows, const RowStats& stats, const Workspace& /*workspace*/,
                   const Execution& execution) {
  if (Status status = CheckRows(rows); !status.ok()) return status;
  const RowKernels& kernels = RowKernelsFor(rows.logits.dtype);
  RunParallel(execution.parallel, rows.logits.rows, Grain(rows.logits.cols),
              [&](int64_t begin, int64_t end) {
                for (int64_t i = begin; i < end; ++i) StatsOfRow(rows, kernels, i, stats);
              });
  return OkStatus();
}

Status StatsFinish(const ShardStats& stats, int64_t rows, const int64_t* targets,
                   int64_t ignore_index, const TokenLogprobs& out, const Execution& execution) {
  if (rows < 0) return InvalidArgument("rows: want >= 0, got %lld", Printed(rows));
  if (stats.num_shards < 1) {
    return InvalidArgument("num_shards: want >= 1, got %lld", Printed(stats.num_shards));
  }
  if (targets == nullptr && rows > 0) return InvalidArgument("targets: null");
  RunParallel(execution.parallel, rows, Grain(stats.num_shards), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const Merged merged = Merge(stats, i);
      const float log_sum = std::log(merged.sum);
      out.lse[i] = merged.sum == 0.0f ? -kInfinity : merged.max + log_sum;
      out.logprobs[i] = targets[i] == ignore_index ? 0.0f : (merged.target - merged.max) - log_sum;
      // 0/0 makes the entropy of a row without any finite logit NaN.
      if (out.entropy != nullptr) out.entropy[i] = log_sum - merged.shifted / merged.sum;
    }
  });
  return OkStatus();
}

Status LogitsGradient(const LogitRows& rows, const TokenLogprobGradients& gradients,
                      const MatrixView& grad_logits, const Execution& execution) {
  if (Status status = CheckRows(rows); !status.ok()) return status;
  const ConstMatrixView& logits = rows.logits;
  if (grad_logits.rows != logits.rows || grad_logits.cols != logits.cols) {
    return InvalidArgument("grad_logits: want the shape of logits");
  }
  const bool narrows = grad_logits.dtype != logits.dtype;
  if (narrows && (logits.dtype != DType::kFloat32 || grad_logits.data == logits.data)) {
    return InvalidArgument(
        "grad_logits: want the dtype of logits, or apart from float32 logits a 16-bit one");
  }
  const ConstMatrixView written{grad_logits.data, grad_logits.rows, grad_logits.cols,
                                grad_logits.row_stride, grad_logits.dtype};
  if (Status status = CheckMatrix("grad_logits", written); !status.ok()) return status;
  if (gradients.lse == nullptr && logits.rows > 0) return InvalidArgument("lse: null");
  if (gradients.grad_entropy != nullptr && gradients.entropy == nullptr) {
    return InvalidArgument("entropy: null, want it with grad_entropy");
  }
  const RowKernels& kernels = RowKernelsFor(logits.dtype);
  RunParallel(execution.parallel, logits.rows, Grain(logits.cols), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) GradientOfRow(rows, kernels, i, gradients, grad_logits);
  });
  return OkStatus();
}

}  // namespace tandem::cpu
