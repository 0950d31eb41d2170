// The memory that the ranks of one communicator share, and how they find it, wait in it and notice
// that one of them is gone.
//
// It has no name in the file system: it belongs to the process that made the unique id, which, as
// with the real library, must live until all ranks are there. Each rank holds a lock on a byte of
// it, which the kernel releases however the process ends.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>

#include "csrc/refit/nccl_api.h"

namespace tandem::testing {

inline constexpr int kMaxRanks = 16;
inline constexpr int64_t kCallsInFlight = 8;
inline constexpr int64_t kChunkBytes = int64_t{256} << 10;
inline constexpr int64_t kNumChunks = 4;
inline constexpr int64_t kLaneBytes = 4096;

// One rank's idea of a collective; all ranks' must be equal.
struct Call {
  enum Kind : int32_t { kBroadcast, kAllReduce };
  Kind kind = kBroadcast;
  int32_t type = 0;
  int32_t root = -1;  // of a broadcast
  int32_t op = -1;    // of a reduction
  uint64_t count = 0;

  bool operator==(const Call&) const = default;
  std::string Describe() const;
};

enum class Presence : int32_t { kAbsent, kThere, kLeft, kAborted };

// The counters only grow. `posted`: collectives that the rank has described in `calls`; `checked`:
// those whose descriptions it has compared.
struct RankState {
  std::atomic<Presence> presence;
  std::atomic<int32_t> device;
  std::atomic<int64_t> posted;
  std::atomic<int64_t> checked;
  std::atomic<int64_t> consumed;     // chunks of broadcasts
  std::atomic<int64_t> contributed;  // rounds of reductions
  std::atomic<int64_t> reduced;
  Call calls[kCallsInFlight];
};

struct SegmentData {
  std::atomic<uint32_t> changes;  // a futex; counts
  std::atomic<int32_t> num_ranks;
  std::atomic<int64_t> produced;  // chunks of broadcasts
  RankState ranks[kMaxRanks];
  alignas(64) unsigned char lanes[kMaxRanks][kLaneBytes];
  alignas(64) unsigned char chunks[kNumChunks][kChunkBytes];
};

nccl::Result MakeUniqueId(nccl::UniqueId* id, std::string* error);
// Lets go of what MakeUniqueId keeps in this process, if it was here.
void ForgetUniqueId(const nccl::UniqueId& id);

class Segment {
 public:
  Segment() = default;
  ~Segment();
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  // Enters as `rank`. "" or what is wrong.
  std::string Enter(const nccl::UniqueId& id, int num_ranks, int rank);
  SegmentData& data() const { return *data_; }
  bool is_open() const { return data_ != nullptr; }

  // Wakes the other ranks; after every change of a counter.
  void Announce();
  // True when `condition` holds; false as soon as `gives_up` does, which is asked every now and
  // then.
  bool WaitFor(const std::function<bool()>& condition, const std::function<bool()>& gives_up);
  // Whether the process of a rank that entered still lives.
  bool IsAlive(int rank) const;

 private:
  int fd_ = -1;
  SegmentData* data_ = nullptr;
};

}  // namespace tandem::testing
