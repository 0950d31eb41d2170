// libtandem_cuda.so: everything that needs CUDA behind two symbols, one for the operators and one,
// in device_ops.cc, for the refit.
#include "csrc/cuda/cublaslt_gemm.h"
#include "csrc/cuda/tables.h"

extern "C" __attribute__((visibility("default"))) const tandem::CudaTables* TandemCudaTables() {
  static const tandem::CudaTables tables = {
      sizeof(tandem::CudaTables), TANDEM_LOSS_KERNELS(tandem::cuda), TANDEM_REFIT_KERNELS(cuda),
      &tandem::MakeCublasLtGemm, tandem::kCublasLtScratchBytes};
  return &tables;
}
