// What both ends of a shared-memory link do alike: the link's one fault, waiting for a counter with
// an eye on the peers, and saying who they are.
//
// A fault is written into the record of the end that raises it and then made the link's by one
// exchange, so whoever dies meanwhile leaves either none or a whole one; the first one stays. Then
// all counters are closed, which ends every wait.
#pragma once

#include <algorithm>
#include <chrono>
#include <mutex>
#include <string>
#include <utility>

#include "csrc/common/status.h"
#include "csrc/refit/deadline.h"
#include "csrc/refit/link.h"
#include "csrc/refit/shared_counter.h"
#include "csrc/refit/shm_segment.h"

namespace tandem {

class ShmEnd {
 public:
  explicit ShmEnd(ShmSegment segment) : segment_(std::move(segment)) {}
  ShmEnd(const ShmEnd&) = delete;
  ShmEnd& operator=(const ShmEnd&) = delete;
  ~ShmEnd();

  ShmSegment& segment() { return segment_; }
  const ShmSegment& segment() const { return segment_; }
  int32_t RankOf(int32_t end) const;

  // The fault so far, as a status.
  Status Check() const;
  Fault fault() const;
  // Ends the link for all; returns its first fault, which may be another one. Any thread.
  Status Raise(const Fault& fault);
  Status Raise(StatusCode code, int32_t end, std::string message);

  // kOk while the end lives and has not closed its link; else what happened, for Raise.
  Fault Examine(int32_t end, const char* waited_for) const;
  Fault Late(int32_t end, const char* waited_for) const;

  // Waits until `counter` has reached `count`. Whenever nothing has moved for a while, and at the
  // deadline, `examine(is_late)` says whom to blame (a Fault, kOk: nobody).
  template <typename ExamineFunction>
  Status Await(SharedCounter& counter, uint64_t count, const Deadline& deadline,
               ExamineFunction examine) {
    for (;;) {
      const uint32_t word = counter.Load();
      if ((word & SharedCounter::kClosed) != 0) return Check();
      if (SharedCounter::HasReached(word, count)) return OkStatus();
      const bool is_late = deadline.HasPassed();
      const Deadline::Clock::time_point look = Deadline::Clock::now() + kLookInterval;
      if (!is_late && counter.AwaitChange(word, std::min(look, deadline.end()))) continue;
      const Fault fault = examine(is_late);
      // A peer may have done its part and then gone.
      if (fault.code == StatusCode::kOk || counter.Load() != word) continue;
      return Raise(fault);
    }
  }

 private:
  // A dead peer wakes nobody: how often a waiter asks the kernel whether the peers live.
  static constexpr std::chrono::milliseconds kLookInterval{50};

  std::string Describe(int32_t end) const;
  void CloseCounters();

  ShmSegment segment_;
  std::mutex mutex_;  // of this end's fault record
  bool has_raised_ = false;
};

}  // namespace tandem
