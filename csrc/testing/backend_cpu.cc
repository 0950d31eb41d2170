// The CPU kernels as the backend under test.
#include "csrc/testing/loss_backend.h"

namespace tandem {

const bool kIsEmulated = false;

const LossKernels& KernelsUnderTest() {
  static constexpr LossKernels kKernels = TANDEM_LOSS_KERNELS(cpu);
  return kKernels;
}

}  // namespace tandem
