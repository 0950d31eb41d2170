// The CUDA kernels under the emulator as the backend under test.
#include "csrc/refit/refit_backend.h"

namespace tandem {

const bool kRefitIsEmulated = true;

const RefitKernels& RefitKernelsUnderTest() {
  static constexpr RefitKernels kKernels = TANDEM_REFIT_KERNELS(cuda);
  return kKernels;
}

}  // namespace tandem
