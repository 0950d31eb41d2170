#include "csrc/testing/shared_memory.h"

#include <cstring>

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(address, bytes) static_cast<void>(0)
#define ASAN_UNPOISON_MEMORY_REGION(address, bytes) static_cast<void>(0)
#endif

namespace simt::emulator {
namespace {

constexpr unsigned char kGuard = 0xA5;

bool IsGuard(const unsigned char* guard) {
  for (int64_t i = 0; i < SharedMemory::kGuardBytes; ++i) {
    if (guard[i] != kGuard) return false;
  }
  return true;
}

}  // namespace

SharedMemory::SharedMemory() : memory_(new unsigned char[kMemoryBytes]) {}

SharedMemory::~SharedMemory() { ASAN_UNPOISON_MEMORY_REGION(memory_.get(), kMemoryBytes); }

void SharedMemory::StartBlock(int64_t dynamic_bytes, uint8_t poison) {
  ASAN_POISON_MEMORY_REGION(memory_.get(), kMemoryBytes);
  arrays_.clear();
  used_ = 0;
  static_bytes_ = 0;
  poison_ = poison;
  // 16 bytes are what CUDA promises.
  dynamic_ = Place(nullptr, "dynamic shared memory", dynamic_bytes, 16);
}

void* SharedMemory::Static(const void* site, const char* name, int64_t bytes, int64_t alignment) {
  for (const Array& array : arrays_) {
    if (array.site == site) return array.data;
  }
  if (static_bytes_ + bytes > kMaxStaticBytes || arrays_.size() >= kMaxArrays) return nullptr;
  static_bytes_ += bytes;
  return Place(site, name, bytes, alignment);
}

unsigned char* SharedMemory::Place(const void* site, const char* name, int64_t bytes,
                                   int64_t alignment) {
  // An odd multiple of the alignment: nothing is aligned by luck.
  const auto base = reinterpret_cast<intptr_t>(memory_.get());
  intptr_t start = (base + used_ + kGuardBytes + alignment - 1) / alignment * alignment;
  if (start / alignment % 2 == 0) start += alignment;
  unsigned char* data = memory_.get() + (start - base);
  used_ = start - base + bytes + kGuardBytes;
  ASAN_UNPOISON_MEMORY_REGION(data - kGuardBytes, bytes + 2 * kGuardBytes);
  std::memset(data - kGuardBytes, kGuard, static_cast<size_t>(kGuardBytes));
  std::memset(data, poison_, static_cast<size_t>(bytes));
  std::memset(data + bytes, kGuard, static_cast<size_t>(kGuardBytes));
  ASAN_POISON_MEMORY_REGION(data - kGuardBytes, kGuardBytes);
  ASAN_POISON_MEMORY_REGION(data + bytes, kGuardBytes);
  arrays_.push_back({site, name, data, bytes});
  return data;
}

std::string SharedMemory::Describe(int64_t offset) const {
  for (const Array& array : arrays_) {
    const int64_t at = offset - (array.data - memory_.get());
    if (at >= 0 && at < array.bytes) return "byte " + std::to_string(at) + " of " + array.name;
  }
  return "shared memory outside of all arrays";
}

std::string SharedMemory::FindOverrun() const {
  for (const Array& array : arrays_) {
    ASAN_UNPOISON_MEMORY_REGION(array.data - kGuardBytes, array.bytes + 2 * kGuardBytes);
    if (!IsGuard(array.data - kGuardBytes) || !IsGuard(array.data + array.bytes)) {
      return array.name;
    }
  }
  return "";
}

}  // namespace simt::emulator
