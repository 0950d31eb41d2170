// What libtandem_cuda.so hands over: found at run time, so that nothing else links CUDA.
#pragma once

#include <cstdint>

#include "csrc/common/execution.h"
#include "csrc/common/gemm.h"
#include "csrc/common/status.h"
#include "csrc/loss/loss_kernels.h"
#include "csrc/refit/refit_kernels.h"

namespace tandem {

struct CudaTables {
  int64_t size_bytes = 0;  // sizeof(CudaTables) of the library's build: both sides must agree
  LossKernels loss;
  RefitKernels refit;
  // A product on the current device, which the caller owns; cheap, as a device's products share one
  // handle and one memory of chosen algorithms. `scratch` is device memory of at least
  // gemm_scratch_bytes, which its calls use one after the other: one stream per product.
  Status (*make_gemm)(const Workspace& scratch, Gemm** gemm) = nullptr;
  int64_t gemm_scratch_bytes = 0;
};

}  // namespace tandem

// The only symbol that the library exports.
extern "C" const tandem::CudaTables* TandemCudaTables();
