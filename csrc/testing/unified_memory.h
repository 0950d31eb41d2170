// Memory that a test and the kernels under test both use: the heap where kernels are emulated,
// managed memory where they run on a device.
#pragma once

#include <cstddef>
#include <vector>

namespace tandem {

void* AllocateUnified(size_t bytes);
void FreeUnified(void* memory);

// Waits for all kernels; false if one of them failed.
bool WaitForKernels();

// False where kernels cannot run: the test is to be skipped.
bool HasDevice();

template <typename T>
struct UnifiedAllocator {
  using value_type = T;

  UnifiedAllocator() = default;
  template <typename U>
  UnifiedAllocator(const UnifiedAllocator<U>&) {}

  T* allocate(size_t count) { return static_cast<T*>(AllocateUnified(count * sizeof(T))); }
  void deallocate(T* memory, size_t) { FreeUnified(memory); }
  bool operator==(const UnifiedAllocator&) const = default;
};

template <typename T>
using UnifiedVector = std::vector<T, UnifiedAllocator<T>>;

}  // namespace tandem
