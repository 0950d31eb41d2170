// Tells the compiler that an address which a kernel read from memory is one of global memory: it
// then emits global accesses, not generic ones. For kernel files.
//
//   const float* source = simt::Global(item.source);
#pragma once

#include "csrc/common/simt_qualifiers.h"

namespace simt {

template <typename T>
SIMT_DEVICE T* Global(T* address) {
#ifdef __CUDA_ARCH__
  __builtin_assume(__isGlobal(address));
#endif
  return address;
}

}  // namespace simt
