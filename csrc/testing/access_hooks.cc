// The calls that g++ -fsanitize=thread puts before every memory access of a kernel file, as far as
// the emulator wants them: with these functions in place of the sanitizer's own library, it sees
// all that a kernel does to shared memory. Builds that link the real library leave this file empty.
#ifndef __SANITIZE_THREAD__

#include <cstdint>

#include "csrc/testing/block_runner.h"

namespace {

using simt::emulator::Access;
using simt::emulator::OnAccess;

}  // namespace

extern "C" {

void __tsan_init() { simt::emulator::is_watching = true; }
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}

#define SIMT_HOOKS(bytes)                                                                       \
  void __tsan_read##bytes(void* address) { OnAccess(address, bytes, Access::kRead); }           \
  void __tsan_write##bytes(void* address) { OnAccess(address, bytes, Access::kWrite); }         \
  void __tsan_unaligned_read##bytes(void* address) { OnAccess(address, bytes, Access::kRead); } \
  void __tsan_unaligned_write##bytes(void* address) { OnAccess(address, bytes, Access::kWrite); }
SIMT_HOOKS(1)
SIMT_HOOKS(2)
SIMT_HOOKS(4)
SIMT_HOOKS(8)
SIMT_HOOKS(16)
#undef SIMT_HOOKS

void __tsan_read_range(void* address, unsigned long bytes) {
  OnAccess(address, static_cast<int64_t>(bytes), Access::kRead);
}
void __tsan_write_range(void* address, unsigned long bytes) {
  OnAccess(address, static_cast<int64_t>(bytes), Access::kWrite);
}
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}

// The guard of a static variable in a function.
char __tsan_atomic8_load(const volatile char* address, int) {
  return __atomic_load_n(address, __ATOMIC_ACQUIRE);
}

}  // extern "C"

#endif
