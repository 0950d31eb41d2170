// Stackful coroutines: what the emulator's CUDA threads run on. No scheduling here.
#pragma once

#include <cstddef>

#ifndef __x86_64__
#include <ucontext.h>
#endif

namespace simt::emulator {

// A suspended flow of control. The one that a caller starts from needs no Prepare.
struct Fiber {
  unsigned char* stack = nullptr;  // lowest address
  size_t stack_bytes = 0;
#ifdef __x86_64__
  void* stack_pointer = nullptr;
#else
  ucontext_t context;
#endif
  void* fake_stack = nullptr;  // address sanitizer's
};

// Makes the next switch to `fiber` call entry() on its stack. entry must never return: it ends with
// LeaveFiber. What ran on the stack before is forgotten, destructors included.
void PrepareFiber(Fiber* fiber, void (*entry)());

// To be called first in entry(): `from` is the fiber that was switched away from.
void EnterFiber(Fiber* from);

void SwitchFiber(Fiber* from, Fiber* to);

// The same when `from` will not be switched to again.
[[noreturn]] void LeaveFiber(Fiber* from, Fiber* to);

// Stacks with a guard page below each, committed when touched.
class FiberStacks {
 public:
  static constexpr size_t kStackBytes = size_t{128} << 10;

  explicit FiberStacks(int count);
  ~FiberStacks();
  FiberStacks(const FiberStacks&) = delete;
  FiberStacks& operator=(const FiberStacks&) = delete;

  void Assign(int index, Fiber* fiber) const;

 private:
  unsigned char* memory_;
  size_t bytes_;
};

}  // namespace simt::emulator
