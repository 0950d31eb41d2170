// The memory that the two ends of a shared-memory link share: a file in /dev/shm, its layout, who
// holds which part of it, and its name. It moves nothing and waits for nothing (shm_end.h,
// shm_link.h).
//
// End 0 is the sender, end 1 + r is reader r. An end holds a lock on byte `end` of the file, of the
// kind that belongs to the open file: the kernel drops it when the process ends, however it does. A
// child that the process forks would keep the file open, so forking closes it there.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <utility>

#include "csrc/common/status.h"
#include "csrc/refit/fork_guard.h"
#include "csrc/refit/link.h"
#include "csrc/refit/shared_counter.h"

namespace tandem {

inline constexpr int64_t kMaxFaultMessage = 400;

// Written once, by its own end, before SegmentHeader::first_fault may point to it.
struct FaultRecord {
  int32_t code;
  int32_t rank;
  int64_t bucket;
  int32_t size;
  char message[kMaxFaultMessage];
};

enum class Presence : uint32_t { kAbsent, kAttached, kJoined, kLeft };

struct EndRecord {
  SharedCounter counter;  // slots posted (sender), released (reader)
  std::atomic<Presence> presence;
  std::atomic<int32_t> process;  // for messages only
  FaultRecord fault;
};

struct alignas(64) SlotRecord {
  uint64_t number;  // counted from the link's first slot
  uint64_t epoch;
  int64_t bytes;
};

// At the start of the file; then EndRecord [1 + num_readers], SlotRecord [num_slots], and, at a
// multiple of kSlotAlignment, the slots.
struct SegmentHeader {
  uint64_t magic;
  int64_t total_bytes;
  LinkGeometry geometry;
  std::atomic<uint32_t> first_fault;  // 0, or 1 + the end whose record is the link's fault
  SharedCounter joined;               // readers
  SharedCounter complete;             // 1 when the sender saw them all
};

class ShmSegment {
 public:
  ShmSegment() = default;
  ShmSegment(ShmSegment&& other) noexcept { *this = std::move(other); }
  ShmSegment& operator=(ShmSegment&& other) noexcept;
  ~ShmSegment() { Close(); }

  // Makes a segment complete and held by the sender, then gives it its name: whoever finds the name
  // finds a whole segment. A segment of that name whose owner is dead is replaced.
  static Status Create(const std::string& name, const LinkGeometry& geometry, ShmSegment* segment);
  // Maps what is there, as it says itself; takes the place of reader `reader`.
  static Status Attach(const std::string& name, int32_t reader, ShmSegment* segment);

  // False in a child that was forked since: it must not touch the memory.
  bool is_mine() const;
  const std::string& name() const { return name_; }
  int32_t end() const { return end_; }

  SegmentHeader& header() const { return *reinterpret_cast<SegmentHeader*>(base_); }
  EndRecord& record(int32_t end) const { return records_[end]; }
  SlotRecord& slot_record(int64_t slot) const { return slot_records_[slot]; }
  uint8_t* slot(int64_t slot) const { return slots_ + slot * slot_stride_; }

  // Whether a living process holds the end.
  bool IsHeld(int32_t end) const;
  // Removes the name, if it still is this segment's. From then on nothing is left behind, whoever
  // dies.
  void Unlink();
  void Close();

 private:
  Status Map(int64_t bytes);
  Status TakeEnd(int32_t end);
  void FindParts(const LinkGeometry& geometry);

  std::string name_;
  int file_ = -1;
  bool has_name_ = false;
  uint32_t forks_ = NumForks();
  int32_t end_ = 0;
  int64_t bytes_ = 0;
  uint8_t* base_ = nullptr;
  EndRecord* records_ = nullptr;
  SlotRecord* slot_records_ = nullptr;
  uint8_t* slots_ = nullptr;
  int64_t slot_stride_ = 0;
};

}  // namespace tandem
