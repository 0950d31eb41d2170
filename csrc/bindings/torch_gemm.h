// The matrix product on the CPU: torch's own, on views of the caller's memory, through the stable
// ABI. No operand is copied, with one exception: torch has no product of 16-bit operands into
// float32 on the CPU, so those are widened, a few megabytes at a time.
//
// Such a product is exact in float32, and also under
// torch.backends.mkldnn.matmul.fp32_precision = "bf16" when the operands are bfloat16: they lose
// nothing by the rounding. Whoever calls the operators may set it around them.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <optional>

#include "csrc/common/gemm.h"

namespace tandem {

class TorchGemm : public Gemm {
 public:
  Status Multiply(const ConstMatrixView& a, bool transpose_a, const ConstMatrixView& b,
                  bool transpose_b, float beta, const MatrixView& c,
                  const Execution& execution) override;

 private:
  // c = op(a) op(b) + beta c with operands that are widened.
  Status MultiplyWidened(const ConstMatrixView& a, bool transpose_a, const ConstMatrixView& b,
                         bool transpose_b, float beta, const MatrixView& c);

  // What operands are widened into; kept between products.
  std::optional<torch::stable::Tensor> whole_;
  std::optional<torch::stable::Tensor> tile_;
};

}  // namespace tandem
