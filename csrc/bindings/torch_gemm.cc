#include "csrc/bindings/torch_gemm.h"

#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cpu.h>
#include <torch/csrc/stable/ops.h>
#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>
#include <array>

namespace tandem {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// Elements of an operand that are widened at a time: 8 MB of float32.
constexpr int64_t kTileElements = int64_t{2} << 20;
constexpr int64_t kMinTileRows = 64;

ScalarType TorchDType(DType dtype) {
  if (dtype == DType::kFloat32) return ScalarType::Float;
  return dtype == DType::kBFloat16 ? ScalarType::BFloat16 : ScalarType::Half;
}

// op(matrix) as a tensor over the same memory.
Tensor View(const ConstMatrixView& matrix, bool transpose) {
  std::array<int64_t, 2> sizes = {matrix.rows, matrix.cols};
  std::array<int64_t, 2> strides = {matrix.row_stride, 1};
  if (transpose) {
    std::swap(sizes[0], sizes[1]);
    std::swap(strides[0], strides[1]);
  }
  return torch::stable::from_blob(const_cast<void*>(matrix.data), sizes, strides,
                                  torch::stable::Device(torch::headeronly::DeviceType::CPU),
                                  TorchDType(matrix.dtype));
}

ConstMatrixView AsConst(const MatrixView& view) {
  return {view.data, view.rows, view.cols, view.row_stride, view.dtype};
}

Status Product(const Tensor& a, const Tensor& b, float beta, const Tensor& c) {
  const AOTITorchError error =
      beta == 0.0f ? aoti_torch_cpu_mm_out(c.get(), a.get(), b.get())
                   : aoti_torch_cpu_addmm_out(c.get(), c.get(), a.get(), b.get(), beta, 1.0);
  if (error == AOTI_TORCH_SUCCESS) return OkStatus();
  return InvalidArgument("product: torch refuses [%lld, %lld] x [%lld, %lld]",
                         static_cast<long long>(a.size(0)), static_cast<long long>(a.size(1)),
                         static_cast<long long>(b.size(0)), static_cast<long long>(b.size(1)));
}

// Rows [begin, begin + count) of op(matrix) are this part of the matrix.
ConstMatrixView RowsOfOp(const ConstMatrixView& matrix, bool transpose, int64_t begin,
                         int64_t count) {
  const int64_t offset = transpose ? begin : begin * matrix.row_stride;
  const void* data = static_cast<const char*>(matrix.data) + offset * SizeOf(matrix.dtype);
  return transpose ? ConstMatrixView{data, matrix.rows, count, matrix.row_stride, matrix.dtype}
                   : ConstMatrixView{data, count, matrix.cols, matrix.row_stride, matrix.dtype};
}

// The matrix in float32, in memory that is made, or taken from before when it suffices.
ConstMatrixView Widen(const ConstMatrixView& matrix, std::optional<Tensor>* memory) {
  const int64_t count = matrix.rows * matrix.cols;
  if (!memory->has_value() || (*memory)->numel() < count) {
    *memory = torch::stable::empty({count}, ScalarType::Float);
  }
  const ConstMatrixView wide = {(*memory)->const_data_ptr(), matrix.rows, matrix.cols, matrix.cols,
                                DType::kFloat32};
  Tensor target = View(wide, false);
  torch::stable::copy_(target, View(matrix, false));
  return wide;
}

}  // namespace

Status TorchGemm::Multiply(const ConstMatrixView& a, bool transpose_a, const ConstMatrixView& b,
                           bool transpose_b, float beta, const MatrixView& c,
                           const Execution& /*execution: torch's own threads*/) {
  if (c.rows == 0 || c.cols == 0) return OkStatus();
  if (a.dtype == c.dtype) {
    return Product(View(a, transpose_a), View(b, transpose_b), beta, View(AsConst(c), false));
  }
  return MultiplyWidened(a, transpose_a, b, transpose_b, beta, c);
}

// The longer side of the result is walked in tiles; the operand of the shorter one is widened once.
// Each element of the result is still one sum, so tiles change no bits that torch's blocks do not.
Status TorchGemm::MultiplyWidened(const ConstMatrixView& a, bool transpose_a,
                                  const ConstMatrixView& b, bool transpose_b, float beta,
                                  const MatrixView& c) {
  const bool walks_rows = c.rows >= c.cols;
  const int64_t inner = transpose_a ? a.rows : a.cols;
  const int64_t step = std::max(kMinTileRows, kTileElements / std::max<int64_t>(inner, 1));
  const ConstMatrixView whole = Widen(walks_rows ? b : a, &whole_);
  for (int64_t begin = 0; begin < std::max(c.rows, c.cols); begin += step) {
    const int64_t count = std::min(step, std::max(c.rows, c.cols) - begin);
    const ConstMatrixView out = RowsOfOp(AsConst(c), !walks_rows, begin, count);
    Status status;
    if (walks_rows) {
      const ConstMatrixView tile = Widen(RowsOfOp(a, transpose_a, begin, count), &tile_);
      status = Product(View(tile, transpose_a), View(whole, transpose_b), beta, View(out, false));
    } else {
      const ConstMatrixView tile = Widen(RowsOfOp(b, !transpose_b, begin, count), &tile_);
      status = Product(View(whole, transpose_a), View(tile, transpose_b), beta, View(out, false));
    }
    if (!status.ok()) return status;
  }
  return OkStatus();
}

}  // namespace tandem
