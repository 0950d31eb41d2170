// The matrix product on CUDA devices, by cuBLASLt.
//
// Sums are float32; float32 operands are multiplied as such, never as TF32. Splits of the inner
// dimension are merged in float32 and in one order, so a product of given shapes, strides and
// alignments (up to 256 bytes) on a given device gives the same bits every time. Multiply enqueues;
// it neither allocates device memory nor waits.
#pragma once

#include <cstdint>

#include "csrc/common/execution.h"
#include "csrc/common/gemm.h"
#include "csrc/common/status.h"

namespace tandem {

// What cuBLASLt recommends for the newest architectures.
inline constexpr int64_t kCublasLtScratchBytes = int64_t{32} << 20;

// See CudaTables::make_gemm.
Status MakeCublasLtGemm(const Workspace& scratch, Gemm** gemm);

}  // namespace tandem
