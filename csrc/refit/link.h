// One sender's wire to all its receivers, as the pipeline (session.h) sees it: slots of memory that
// are filled, posted, received and given back, in order. A link knows neither plan nor tensors; it
// checks who is there, never what travels. Backends: shm_link.h, tcp_link.h, nccl_link.h.
//
//   sender                                   receiver (reader r of num_readers)
//   Join(deadline)                           Join(deadline)            once; all are present after
//   it Begin(epoch)                             Begin(epoch)              per refit Acquire ->
//   memory; fill; Post(bytes)     Receive -> memory; read; Release Flush(deadline) every reader has
//   released all Abort(fault)                             Abort(fault)              any time, from
//   any thread
//
// Threads: one thread per end, but Abort. After any error or Abort every call returns the first
// fault until the link is destroyed: a refit that failed gets new links, with a new epoch.
#pragma once

#include <cstdint>
#include <string>

#include "csrc/common/status.h"
#include "csrc/refit/deadline.h"
#include "csrc/refit/executor.h"

namespace tandem {

// Who gave up, where, and why. rank: a sender's root number, or kFirstReader + reader.
inline constexpr int32_t kFirstReader = 1 << 16;
inline constexpr int32_t kNoRank = -1;

struct Fault {
  StatusCode code = StatusCode::kAborted;
  int32_t rank = kNoRank;
  int64_t bucket = -1;  // -1: none was under way
  std::string message;  // cut at 400 bytes where it crosses a wire
};

// What both ends of a link must agree on; compared in Join before anything else, kMismatch names
// the first field that differs.
struct LinkGeometry {
  uint64_t plan_digest = 0;
  int64_t slot_bytes = 0;  // header and payload of the largest bucket
  int32_t num_slots = 0;   // >= 2
  int32_t num_readers = 0;
  int32_t root = 0;
};

// Memory of a slot begins at a multiple of kSlotAlignment.
inline constexpr int64_t kSlotAlignment = 4096;

inline constexpr int32_t kMaxReaders = 1 << 14;
inline constexpr int32_t kMaxSlots = 1 << 16;

// What no link can be, before memory is made for it; all slots together stay within 62 bits.
inline Status CheckGeometry(const LinkGeometry& geometry) {
  if (geometry.num_slots < 2 || geometry.num_slots > kMaxSlots) {
    return InvalidArgument("num_slots must be 2 to %d, got %d", kMaxSlots, geometry.num_slots);
  }
  if (geometry.num_readers < 1 || geometry.num_readers > kMaxReaders) {
    return InvalidArgument("num_readers must be 1 to %d, got %d", kMaxReaders,
                           geometry.num_readers);
  }
  const int64_t limit = (int64_t{1} << 62) / geometry.num_slots - kSlotAlignment;
  if (geometry.slot_bytes >= 1 && geometry.slot_bytes <= limit) return OkStatus();
  return InvalidArgument("slot_bytes must be 1 to %lld, got %lld", static_cast<long long>(limit),
                         static_cast<long long>(geometry.slot_bytes));
}

class SendLink {
 public:
  virtual ~SendLink() = default;
  // Where receivers find this end; stable from construction on.
  virtual std::string address() const = 0;
  virtual Executor* executor() = 0;  // whose memory slots are
  virtual Status Join(const Deadline& deadline) = 0;
  // Waits as little as it can for readers; an epoch is larger than the one before.
  virtual Status Begin(uint64_t epoch, const Deadline& deadline) = 0;
  // A slot that no reader still reads; waits for the slowest reader.
  virtual Status Acquire(const Deadline& deadline, uint8_t** slot) = 0;
  // Sends the first `bytes` of the slot last acquired.
  virtual Status Post(int64_t bytes, const Deadline& deadline) = 0;
  virtual Status Flush(const Deadline& deadline) = 0;
  virtual void Abort(const Fault& fault) = 0;
  // The fault that ended the link, code kOk where there is none.
  virtual Fault fault() const = 0;
};

class ReceiveLink {
 public:
  virtual ~ReceiveLink() = default;
  virtual Executor* executor() = 0;
  virtual Status Join(const Deadline& deadline) = 0;
  virtual Status Begin(uint64_t epoch, const Deadline& deadline) = 0;
  // Says before Receive how many bytes the next slot has by the plan, and once after the last
  // Release of a refit that there are no more; for links on which a receiver's part is a call of
  // the same size as the sender's, and on which a sender cannot see Release. Others need neither.
  virtual Status Expect(int64_t /*bytes*/) { return Status(); }
  virtual Status Flush(const Deadline& /*deadline*/) { return Status(); }
  // The next slot in order; valid until Release.
  virtual Status Receive(const Deadline& deadline, const uint8_t** slot, int64_t* bytes) = 0;
  virtual Status Release() = 0;
  virtual void Abort(const Fault& fault) = 0;
  virtual Fault fault() const = 0;
};

}  // namespace tandem
