// The matrix product as three loops on the host: what linear kernels are tested with, on both
// backends, since the emulator's device memory is the host's. Sums are float64, so that a result's
// bits do not depend on how rows are cut into chunks.
#pragma once

#include <cstdint>

#include "csrc/common/gemm.h"
#include "csrc/common/scalar_types.h"

namespace tandem {

inline double LoadDouble(const void* data, int64_t index, DType dtype) {
  if (dtype == DType::kFloat32) return static_cast<const float*>(data)[index];
  if (dtype == DType::kBFloat16) return ToFloat(static_cast<const BFloat16*>(data)[index]);
  return ToFloat(static_cast<const Float16*>(data)[index]);
}

inline void StoreDouble(double value, void* data, int64_t index, DType dtype) {
  const auto narrow = static_cast<float>(value);
  if (dtype == DType::kFloat32) {
    static_cast<float*>(data)[index] = narrow;
  } else if (dtype == DType::kBFloat16) {
    StoreFloat(narrow, static_cast<BFloat16*>(data) + index);
  } else {
    StoreFloat(narrow, static_cast<Float16*>(data) + index);
  }
}

class NaiveGemm : public Gemm {
 public:
  Status Multiply(const ConstMatrixView& a, bool transpose_a, const ConstMatrixView& b,
                  bool transpose_b, float beta, const MatrixView& c, const Execution&) override {
    ++num_calls;
    const int64_t inner = transpose_a ? a.rows : a.cols;
    const int64_t inner_b = transpose_b ? b.cols : b.rows;
    if (a.dtype != b.dtype || inner != inner_b || c.rows != (transpose_a ? a.cols : a.rows) ||
        c.cols != (transpose_b ? b.rows : b.cols)) {
      return InvalidArgument("product: shapes or dtypes do not fit");
    }
    if (inner > 0) num_products += 1;
    const auto at = [](const ConstMatrixView& m, bool transpose, int64_t row, int64_t col) {
      return LoadDouble(m.data, transpose ? col * m.row_stride + row : row * m.row_stride + col,
                        m.dtype);
    };
    for (int64_t i = 0; i < c.rows; ++i) {
      for (int64_t j = 0; j < c.cols; ++j) {
        const int64_t index = i * c.row_stride + j;
        double sum = beta == 0.0f ? 0.0 : beta * LoadDouble(c.data, index, c.dtype);
        for (int64_t k = 0; k < inner; ++k)
          sum += at(a, transpose_a, i, k) * at(b, transpose_b, k, j);
        StoreDouble(sum, c.data, index, c.dtype);
      }
    }
    return OkStatus();
  }

  int64_t num_calls = 0;
  int64_t num_products = 0;  // those with an inner size
};

}  // namespace tandem
