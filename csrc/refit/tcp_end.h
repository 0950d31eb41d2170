// What both ends of the TCP link have in common: the first fault, waiting between the caller's
// thread and the I/O thread, memory of the slots, and how a connection is ended.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "csrc/refit/fork_guard.h"
#include "csrc/refit/link.h"
#include "csrc/refit/tcp_channel.h"
#include "csrc/refit/tcp_link.h"

namespace tandem::tcp {

// An end that has said nothing for so long sends a heartbeat: five fit into the shortest silence
// that is allowed. Also how often an I/O thread that waits looks at the clock.
inline constexpr double kHeartbeatS = 0.1;
inline constexpr double kMinSilenceS = 0.5;
// Aborts and goodbyes have this long to get out and to be taken before a connection is closed.
inline constexpr double kFarewellS = 1;

Status CheckGeometry(const LinkGeometry& geometry, const TcpOptions& options);

[[gnu::format(printf, 3, 4)]] Fault MakeFault(StatusCode code, int32_t rank, const char* format,
                                              ...);

// num_slots x slot_bytes of memory, each slot at a multiple of kSlotAlignment.
class SlotMemory {
 public:
  SlotMemory() = default;
  SlotMemory(const SlotMemory&) = delete;
  SlotMemory& operator=(const SlotMemory&) = delete;
  ~SlotMemory();
  Status Allocate(const LinkGeometry& geometry);
  // Of slot number `slot` since the link was made.
  uint8_t* at(int64_t slot) const { return base_ + (slot % num_slots_) * stride_; }

 private:
  uint8_t* base_ = nullptr;
  int64_t stride_ = 0;
  int64_t num_slots_ = 1;
};

// Guards what the caller's thread, the I/O thread and whoever aborts share. Methods named Locked
// are called with the mutex held.
class EndState {
 public:
  // Ends the I/O thread and waits for it. A forked child has no such thread.
  void StopAndJoin(std::thread* thread);

  std::mutex& mutex() { return mutex_; }
  Wakeup& wakeup() { return wakeup_; }
  void NotifyCaller() { changed_.notify_all(); }

  // The first fault stays; Fail returns it as a status.
  void SetFault(const Fault& fault);
  void SetFaultLocked(const Fault& fault);
  Status Fail(const Fault& fault);
  Status FailLocked(const Fault& fault);
  Fault fault() const;
  Status StatusLocked() const { return Status(fault_.code, fault_.message); }
  // The I/O thread is to end: a fault, or the link is being destroyed.
  bool IsOverLocked() const { return fault_.code != StatusCode::kOk || is_stopping_; }
  bool IsOver() const;

  // Waits for is_ready(); at the deadline late() is the fault. Both are called with the mutex held.
  template <typename Ready, typename Late>
  Status WaitLocked(std::unique_lock<std::mutex>& lock, const Deadline& deadline, Ready is_ready,
                    Late late) {
    while (true) {
      if (fault_.code != StatusCode::kOk) return StatusLocked();
      if (is_ready()) return OkStatus();
      if (deadline.HasPassed()) return FailLocked(late());
      changed_.wait_until(lock, deadline.end());
    }
  }

 private:
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  Wakeup wakeup_;
  Fault fault_ = {StatusCode::kOk, kNoRank, -1, ""};
  bool is_stopping_ = false;
  const uint32_t num_forks_ = NumForks();
};

// Notices that this process did not run for a while: it was stopped, alone or with all others (a
// job that is suspended). Its peers may be well and could not say so to it.
class OwnPause {
 public:
  // Once per turn of an I/O thread, which takes far less: whether half a silence has passed since
  // the last time. `now` is also what silences of this turn are measured by, or a pause between two
  // looks at the clock would count.
  bool HasEnded(Deadline::Clock::time_point now, double silence_s);

 private:
  Deadline::Clock::time_point last_turn_ = Deadline::Clock::now();
};

// Queues a heartbeat when it is time.
void KeepAlive(Channel* channel);
// For how long nothing was heard until `now`, 0 when that is less than the limit.
double SilenceOf(const Channel& channel, Deadline::Clock::time_point now, double limit_s);
std::string SilenceMessage(double silence_s);

// Tells every peer the fault, or goodbye where there is none, waits until they have closed their
// side, at most kFarewellS, and drops what they still send.
void BidFarewell(const std::vector<Channel*>& channels, const Fault& fault);

}  // namespace tandem::tcp
