// The collectives as a stream's thread carries them out, and the check that all ranks mean the same
// one.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <string>

#include "csrc/testing/nccl/segment.h"

namespace tandem::testing {

// How a collective ended; `message` says why it did not succeed.
struct Outcome {
  nccl::Result result = nccl::kSuccess;
  std::string message;
};

// Bytes of an element, 0 of a type that the collectives do not know.
int64_t SizeOfType(int32_t type);

class Collectives {
 public:
  // `segment` is entered, and all ranks are there. is_silent: the end of a peer is not noticed, as
  // over a wire that does not tell.
  Collectives(Segment* segment, int num_ranks, int rank, bool is_silent)
      : segment_(segment), num_ranks_(num_ranks), rank_(rank), is_silent_(is_silent) {}

  // In the order of the stream. Returns kInProgress where Interrupt ended it.
  Outcome Run(const Call& call, const void* source, void* target);
  void Interrupt() { is_interrupted_ = true; }
  // A peer that died or aborted, in words; "" if there is none.
  std::string FindLostPeer() const;

 private:
  Outcome Agree(const Call& call);
  Outcome Broadcast(const Call& call, const void* source, void* target);
  Outcome AllReduce(const Call& call, const void* source, void* target);
  Outcome Wait(const std::function<bool()>& condition);
  // The smallest value of a counter among the ranks.
  int64_t Least(std::atomic<int64_t> RankState::* counter) const;

  Segment* segment_;
  const int num_ranks_;
  const int rank_;
  const bool is_silent_;
  std::atomic<bool> is_interrupted_ = false;
  int64_t number_ = 0;  // of the collective
  int64_t chunk_ = 0;   // of broadcasts so far
  int64_t round_ = 0;   // of reductions so far
};

}  // namespace tandem::testing
