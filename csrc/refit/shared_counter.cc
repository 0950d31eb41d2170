#include "csrc/refit/shared_counter.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <cerrno>
#include <climits>

namespace tandem {
namespace {

// Long enough for a peer that is about to be done, far below the time of a slot; where both ends
// share a core, polling only keeps the other one from running.
constexpr int kPolls = 200;

inline void Pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb" ::: "memory");
#endif
}

// Not the private kind: the word is in several address spaces.
int64_t Futex(std::atomic<uint32_t>* word, int operation, uint32_t value, const timespec* until) {
  return syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), operation, value, until, nullptr,
                 FUTEX_BITSET_MATCH_ANY);
}

// steady_clock is CLOCK_MONOTONIC, which is what an absolute futex timeout is measured by.
timespec ToTimespec(std::chrono::steady_clock::time_point time) {
  const auto nanos =
      std::chrono::duration_cast<std::chrono::nanoseconds>(time.time_since_epoch()).count();
  timespec result;
  result.tv_sec = static_cast<time_t>(nanos / 1000000000);
  result.tv_nsec = static_cast<decltype(result.tv_nsec)>(nanos % 1000000000);
  return result;
}

}  // namespace

uint32_t SharedCounter::Advance() {
  const uint32_t before = word_.fetch_add(2, std::memory_order_seq_cst);
  if (waiters_.load(std::memory_order_seq_cst) != 0) WakeAll();
  return before;
}

void SharedCounter::Close() {
  word_.fetch_or(kClosed, std::memory_order_seq_cst);
  WakeAll();
}

void SharedCounter::WakeAll() { Futex(&word_, FUTEX_WAKE, INT_MAX, nullptr); }

bool SharedCounter::AwaitChange(uint32_t seen, std::chrono::steady_clock::time_point until) {
  for (int i = 0; i < kPolls; ++i) {
    if (Load() != seen) return true;
    Pause();
  }
  waiters_.fetch_add(1, std::memory_order_seq_cst);
  const timespec end = ToTimespec(until);
  bool has_changed = Load() != seen;
  while (!has_changed) {
    const bool has_failed = Futex(&word_, FUTEX_WAIT_BITSET, seen, &end) != 0;
    const int error = has_failed ? errno : 0;
    has_changed = Load() != seen;
    if (error != 0 && error != EINTR && error != EAGAIN) break;  // ETIMEDOUT
  }
  waiters_.fetch_sub(1, std::memory_order_seq_cst);
  return has_changed;
}

}  // namespace tandem
