// The refit kernels of one backend as a table: what the CUDA library, which is found at run time,
// hands over, and what the tests of both backends call.
#pragma once

#include "csrc/refit/digest.h"
#include "csrc/refit/pack.h"

namespace tandem {

struct RefitKernels {
  decltype(&cpu::BucketCopy) bucket_copy;
  decltype(&cpu::QuantizeFp8) quantize_fp8;
  decltype(&cpu::Digest) digest;
};

// A namespace's functions as a table: TANDEM_REFIT_KERNELS(cpu), TANDEM_REFIT_KERNELS(cuda).
#define TANDEM_REFIT_KERNELS(backend)                                                           \
  ::tandem::RefitKernels {                                                                      \
    &::tandem::backend::BucketCopy, &::tandem::backend::QuantizeFp8, &::tandem::backend::Digest \
  }

}  // namespace tandem
