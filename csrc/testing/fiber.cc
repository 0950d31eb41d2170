#include "csrc/testing/fiber.h"

#include <sys/mman.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

namespace simt::emulator {
namespace {

constexpr size_t kGuardBytes = 4096;

#ifdef __SANITIZE_ADDRESS__
void BeforeSwitch(Fiber* from, const Fiber* to, bool is_last) {
  __sanitizer_start_switch_fiber(is_last ? nullptr : &from->fake_stack, to->stack, to->stack_bytes);
}
void AfterSwitch(Fiber* self) {
  __sanitizer_finish_switch_fiber(self->fake_stack, nullptr, nullptr);
}
#else
void BeforeSwitch(Fiber*, const Fiber*, bool) {}
void AfterSwitch(Fiber*) {}
#endif

}  // namespace

#ifdef __x86_64__

// void simt_fiber_switch(void** save, void* load): the callee-saved registers stay on the stack
// that is left. No system call, unlike swapcontext.
extern "C" void simt_fiber_switch(void** save, void* load);
asm(R"(
.text
.type simt_fiber_switch, @function
simt_fiber_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size simt_fiber_switch, .-simt_fiber_switch
)");

namespace {

void PrepareRegisters(Fiber* fiber, void (*entry)()) {
  constexpr int kSavedRegisters = 6;
  // From the top: an empty return address of entry, then entry as the switch's own, the registers.
  // entry starts with its stack at 16 n + 8, as after a call.
  void** top = reinterpret_cast<void**>(fiber->stack + fiber->stack_bytes);
  top[-1] = nullptr;
  std::memcpy(&top[-2], &entry, sizeof(entry));
  for (int i = 0; i < kSavedRegisters; ++i) top[-3 - i] = nullptr;
  fiber->stack_pointer = &top[-2 - kSavedRegisters];
}

void SwitchRegisters(Fiber* from, Fiber* to) {
  simt_fiber_switch(&from->stack_pointer, to->stack_pointer);
}

}  // namespace

#else

namespace {

void PrepareRegisters(Fiber* fiber, void (*entry)()) {
  getcontext(&fiber->context);
  fiber->context.uc_stack.ss_sp = fiber->stack;
  fiber->context.uc_stack.ss_size = fiber->stack_bytes;
  fiber->context.uc_link = nullptr;
  makecontext(&fiber->context, entry, 0);
}

void SwitchRegisters(Fiber* from, Fiber* to) { swapcontext(&from->context, &to->context); }

}  // namespace

#endif

void PrepareFiber(Fiber* fiber, void (*entry)()) {
#ifdef __SANITIZE_ADDRESS__
  ASAN_UNPOISON_MEMORY_REGION(fiber->stack, fiber->stack_bytes);
#endif
  fiber->fake_stack = nullptr;
  PrepareRegisters(fiber, entry);
}

void EnterFiber([[maybe_unused]] Fiber* from) {
#ifdef __SANITIZE_ADDRESS__
  const void* bottom = nullptr;
  size_t bytes = 0;
  __sanitizer_finish_switch_fiber(nullptr, &bottom, &bytes);
  from->stack = static_cast<unsigned char*>(const_cast<void*>(bottom));
  from->stack_bytes = bytes;
#endif
}

void SwitchFiber(Fiber* from, Fiber* to) {
  BeforeSwitch(from, to, false);
  SwitchRegisters(from, to);
  AfterSwitch(from);
}

void LeaveFiber(Fiber* from, Fiber* to) {
  BeforeSwitch(from, to, true);
  SwitchRegisters(from, to);
  std::abort();
}

FiberStacks::FiberStacks(int count)
    : memory_(nullptr), bytes_(static_cast<size_t>(count) * (kStackBytes + kGuardBytes)) {
  void* memory = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) {
    std::perror("mmap of the emulator's stacks");
    std::abort();
  }
  memory_ = static_cast<unsigned char*>(memory);
  for (int i = 0; i < count; ++i) {
    mprotect(memory_ + static_cast<size_t>(i) * (kStackBytes + kGuardBytes), kGuardBytes,
             PROT_NONE);
  }
}

FiberStacks::~FiberStacks() { munmap(memory_, bytes_); }

void FiberStacks::Assign(int index, Fiber* fiber) const {
  fiber->stack = memory_ + static_cast<size_t>(index) * (kStackBytes + kGuardBytes) + kGuardBytes;
  fiber->stack_bytes = kStackBytes;
}

}  // namespace simt::emulator
