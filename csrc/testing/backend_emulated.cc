// The CUDA kernels under the emulator as the backend under test.
#include "csrc/testing/loss_backend.h"

namespace tandem {

const bool kIsEmulated = true;

const LossKernels& KernelsUnderTest() {
  static constexpr LossKernels kKernels = TANDEM_LOSS_KERNELS(cuda);
  return kKernels;
}

}  // namespace tandem
