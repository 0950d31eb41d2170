// The CPU kernels as the backend under test.
#include "csrc/refit/refit_backend.h"

namespace tandem {

const bool kRefitIsEmulated = false;

const RefitKernels& RefitKernelsUnderTest() {
  static constexpr RefitKernels kKernels = TANDEM_REFIT_KERNELS(cpu);
  return kKernels;
}

}  // namespace tandem
