// The backend that a test's build target links: backend_cpu.cc or backend_emulated.cc. One test
// source serves both.
#pragma once

#include "csrc/refit/refit_kernels.h"

namespace tandem {

extern const bool kRefitIsEmulated;
const RefitKernels& RefitKernelsUnderTest();

}  // namespace tandem
