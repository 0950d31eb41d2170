// The matrix product that linear kernels call: cuBLASLt on CUDA, torch's own on the CPU, a plain
// loop in tests. The core links none of them.
#pragma once

#include "csrc/common/execution.h"
#include "csrc/common/status.h"
#include "csrc/common/tensor_view.h"

namespace tandem {

class Gemm {
 public:
  virtual ~Gemm() = default;

  // c = op(a) op(b) + beta c, where op transposes if asked. Row-major views with adjacent columns;
  // accumulates in float32 whatever the dtypes. beta is 0 (c is not read, and may hold NaN) or 1.
  // Dtypes: a and b agree; c is float32 or that of a and b. An inner size of 0 gives beta c.
  virtual Status Multiply(const ConstMatrixView& a, bool transpose_a, const ConstMatrixView& b,
                          bool transpose_b, float beta, const MatrixView& c,
                          const Execution& execution) = 0;
};

}  // namespace tandem
