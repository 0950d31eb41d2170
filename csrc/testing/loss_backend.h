// The backend that a test of csrc/loss runs against. Each *_test.cc is written once, on this table
// alone; it is linked with backend_cpu.cc for the CPU kernels, and with backend_emulated.cc for the
// CUDA kernels under the emulator.
#pragma once

#include "csrc/loss/loss_kernels.h"

namespace tandem {

const LossKernels& KernelsUnderTest();

// The emulator switches fibers at every barrier: tests leave their largest sizes out there.
extern const bool kIsEmulated;

}  // namespace tandem
