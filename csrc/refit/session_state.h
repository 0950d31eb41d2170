// What the sessions of both sides share: the first fault, which refit is under way, its deadline
// and times. Safe to abort from another thread; everything else belongs to the session's own.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <string>

#include "csrc/common/status.h"
#include "csrc/refit/bucket_mover.h"
#include "csrc/refit/deadline.h"
#include "csrc/refit/fork_guard.h"
#include "csrc/refit/link.h"
#include "csrc/refit/session.h"

namespace tandem {

// Keeps the first fault that it is given. In a forked child, whose links and threads are the
// parent's, it says so and touches nothing: another thread may have held the lock at the fork.
class FaultLatch {
 public:
  // Returns the first.
  Fault Set(const Fault& fault);
  Fault get() const;
  Status ToStatus() const;
  // False in a child that was forked since.
  bool is_mine() const { return forks_ == NumForks(); }

 private:
  const uint32_t forks_ = NumForks();
  mutable std::mutex mutex_;
  std::atomic<bool> is_set_{false};  // so that a bucket takes no lock
  Fault fault_{StatusCode::kOk, kNoRank, -1, ""};
};

class SessionState {
 public:
  // rank: of this end, as in Fault.
  explicit SessionState(int32_t rank) : rank_(rank) {}

  Status Joined();
  // Refuses a refit before Join, inside another one, or with an epoch that is not larger than all
  // before.
  Status Begin(const RefitId& refit, const Deadline& deadline);
  // Whether `verb` may be called: inside a refit, and nothing failed.
  Status CheckUnderWay(const char* verb) const;
  void End();

  // The first fault of this end, of all that a failed step knows: the link's own account, else
  // `status`. Where nobody has said a bucket, it is the one that was under way here.
  Fault FirstFault(const Status& status, const Fault& link_fault, int64_t bucket, const Plan& plan);

  // Seconds of a wait on the link.
  template <typename Step>
  Status TimeWire(Step&& step) {
    const auto start = Deadline::Clock::now();
    Status status = step();
    times.wire += std::chrono::duration<double>(Deadline::Clock::now() - start).count();
    return status;
  }

  const RefitId& refit() const { return refit_; }
  const Deadline& deadline() const { return deadline_; }

  FaultLatch faults;
  SessionTimes times;

 private:
  const int32_t rank_;
  bool is_joined_ = false;
  bool is_under_way_ = false;
  RefitId refit_;
  Deadline deadline_{Deadline::Clock::time_point{}};
  Deadline::Clock::time_point start_;
};

}  // namespace tandem
