// Non-owning views of dense memory: what a kernel needs to know of a tensor and nothing else.
#pragma once

#include <cstdint>

namespace tandem {

enum class DType : uint8_t { kFloat32, kBFloat16, kFloat16 };

constexpr int64_t SizeOf(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

// A [rows, cols] matrix. Columns are adjacent; row_stride counts elements and may exceed cols. All
// offsets are int64: rows * row_stride passes 2^31 at sizes that are trained every day.
struct ConstMatrixView {
  const void* data = nullptr;
  int64_t rows = 0;
  int64_t cols = 0;
  int64_t row_stride = 0;
  DType dtype = DType::kFloat32;
};

struct MatrixView {
  void* data = nullptr;
  int64_t rows = 0;
  int64_t cols = 0;
  int64_t row_stride = 0;
  DType dtype = DType::kFloat32;
};

}  // namespace tandem
