// Rows of logits as the CUDA kernels of row_stats.h take them, and the checks of their host side.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "csrc/common/simt.h"
#include "csrc/common/status.h"
#include "csrc/loss/logit_rows.h"
#include "csrc/loss/row_stats_cuda.h"
#include "csrc/loss/row_tiles.h"

namespace tandem::cuda {

inline constexpr float kLog2E = 1.44269504088896340736f;
inline constexpr float kLn2 = 0.69314718055994530942f;
// 2^x is 0 from here on down, and x * 2^x is too.
inline constexpr float kExp2Floor = -127.0f;
inline constexpr int64_t kMaxBlocks = 1 << 20;
inline constexpr int kNoColumn = -1;

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

inline int Segments(int64_t cols) {
  return cols <= kSegmentColumns ? 1 : static_cast<int>((cols - 1) / kSegmentColumns + 1);
}

inline unsigned GridFor(int64_t tasks, int64_t max_blocks) {
  return static_cast<unsigned>(tasks < max_blocks ? tasks : max_blocks);
}

inline long long Printed(int64_t value) { return static_cast<long long>(value); }

inline Status CheckMatrix(const char* name, const ConstMatrixView& matrix) {
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

inline Status CheckRows(const LogitRows& rows) {
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

}  // namespace tandem::cuda
