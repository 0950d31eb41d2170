#include <cuda_runtime_api.h>

#include "csrc/testing/unified_memory.h"

namespace tandem {

void* AllocateUnified(size_t bytes) {
  void* memory = nullptr;
  return cudaMallocManaged(&memory, bytes == 0 ? 1 : bytes) == cudaSuccess ? memory : nullptr;
}

void FreeUnified(void* memory) { cudaFree(memory); }

bool WaitForKernels() { return cudaDeviceSynchronize() == cudaSuccess; }

bool HasDevice() {
  int count = 0;
  return cudaGetDeviceCount(&count) == cudaSuccess && count > 0;
}

}  // namespace tandem
