// What libtandem_cuda.so hands over: found at run time, so that nothing else links CUDA.
#pragma once

#include <cstdint>

#include "csrc/common/gemm.h"
#include "csrc/loss/loss_kernels.h"
#include "csrc/refit/refit_kernels.h"

namespace tandem {

struct CudaTables {
  int64_t size_bytes = 0;  // sizeof(CudaTables) of the library's build: both sides must agree
  LossKernels loss;
  RefitKernels refit;
  Gemm* (*make_gemm)() = nullptr;  // the caller owns it
};

}  // namespace tandem

// The only symbol that the library exports.
extern "C" const tandem::CudaTables* TandemCudaTables();
