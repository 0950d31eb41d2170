// A counter in memory that processes share, and the wait for it to move: a few polls, then a futex.
// Nobody waits: no system call. A process that dies anywhere leaves the counter usable.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

namespace tandem {

// All zeros is the initial state. The word is twice the count, modulo 2^32, plus kClosed: closing
// changes the word, so no waiter can sleep through it, and one load tells both.
class alignas(128) SharedCounter {
 public:
  static constexpr uint32_t kClosed = 1;

  uint32_t Load() const { return word_.load(std::memory_order_acquire); }
  // Adds one and wakes the waiters; returns the word before. What was written before is visible to
  // whoever sees the new count.
  uint32_t Advance();
  // For good; advancing goes on.
  void Close();
  // Returns when the word differs from `seen` (true) or at `until` (false).
  bool AwaitChange(uint32_t seen, std::chrono::steady_clock::time_point until);

  // Whether the word's count is at least `count`, which is within 2^30 of it.
  static bool HasReached(uint32_t word, uint64_t count) {
    return static_cast<int32_t>((word & ~kClosed) - static_cast<uint32_t>(count << 1)) >= 0;
  }

 private:
  void WakeAll();

  std::atomic<uint32_t> word_{0};
  // Sequentially consistent with word_: either the waker sees the waiter or the waiter sees the new
  // word. A waiter that is killed stays counted; that costs wakers a call, nothing else.
  std::atomic<uint32_t> waiters_{0};
};

static_assert(std::atomic<uint32_t>::is_always_lock_free);

}  // namespace tandem
