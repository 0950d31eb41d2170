#include "csrc/testing/nccl/collectives.h"

#include <algorithm>
#include <cstring>

namespace tandem::testing {
namespace {

template <typename T>
void ReduceAs(int32_t op, const unsigned char* from, unsigned char* into, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    T a, b;
    std::memcpy(&a, into + i * sizeof(T), sizeof(T));
    std::memcpy(&b, from + i * sizeof(T), sizeof(T));
    switch (op) {
      case nccl::kSum:
        a = static_cast<T>(a + b);
        break;
      case nccl::kProd:
        a = static_cast<T>(a * b);
        break;
      case nccl::kMax:
        a = std::max(a, b);
        break;
      default:
        a = std::min(a, b);
    }
    std::memcpy(into + i * sizeof(T), &a, sizeof(T));
  }
}

bool Reduce(const Call& call, const unsigned char* from, unsigned char* into, int64_t count) {
  switch (call.type) {
    case nccl::kInt8:
      ReduceAs<int8_t>(call.op, from, into, count);
      return true;
    case nccl::kUint8:
      ReduceAs<uint8_t>(call.op, from, into, count);
      return true;
    case nccl::kInt32:
      ReduceAs<int32_t>(call.op, from, into, count);
      return true;
    case nccl::kInt64:
      ReduceAs<int64_t>(call.op, from, into, count);
      return true;
    case nccl::kUint64:
      ReduceAs<uint64_t>(call.op, from, into, count);
      return true;
    case nccl::kFloat32:
      ReduceAs<float>(call.op, from, into, count);
      return true;
    case nccl::kFloat64:
      ReduceAs<double>(call.op, from, into, count);
      return true;
    default:
      return false;
  }
}

}  // namespace

int64_t SizeOfType(int32_t type) {
  constexpr int64_t kSizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2};
  return type >= 0 && type < static_cast<int32_t>(std::size(kSizes)) ? kSizes[type] : 0;
}

Outcome Collectives::Run(const Call& call, const void* source, void* target) {
  if (Outcome outcome = Agree(call); outcome.result != nccl::kSuccess) return outcome;
  return call.kind == Call::kBroadcast ? Broadcast(call, source, target)
                                       : AllReduce(call, source, target);
}

// One that died before one that aborted, which may have done so because of the first.
std::string Collectives::FindLostPeer() const {
  if (is_silent_) return "";
  std::string aborted;
  for (int peer = 0; peer < num_ranks_; ++peer) {
    if (peer == rank_) continue;
    const std::atomic<Presence>& presence = segment_->data().ranks[peer].presence;
    if (presence == Presence::kAborted) aborted = "rank " + std::to_string(peer) + " aborted";
    // Asked twice, as it may leave in peace in between.
    if (presence == Presence::kThere && !segment_->IsAlive(peer) && presence == Presence::kThere) {
      return "the process of rank " + std::to_string(peer) + " died";
    }
  }
  return aborted;
}

int64_t Collectives::Least(std::atomic<int64_t> RankState::* counter) const {
  int64_t least = INT64_MAX;
  for (int rank = 0; rank < num_ranks_; ++rank) {
    least = std::min(least, (segment_->data().ranks[rank].*counter).load());
  }
  return least;
}

Outcome Collectives::Wait(const std::function<bool()>& condition) {
  Outcome outcome;
  segment_->WaitFor(condition, [&] {
    if (is_interrupted_) {
      outcome = {nccl::kInProgress, ""};
      return true;
    }
    const std::string lost = FindLostPeer();
    // What the peer did before it went may be all that this collective needs.
    if (lost.empty() || condition()) return false;
    outcome = {nccl::kRemoteError,
               lost + " while collective " + std::to_string(number_) + " was under way"};
    return true;
  });
  return outcome;
}

Outcome Collectives::Agree(const Call& call) {
  SegmentData& data = segment_->data();
  RankState& own = data.ranks[rank_];
  ++number_;
  Outcome outcome = Wait([&] { return Least(&RankState::checked) > number_ - kCallsInFlight; });
  if (outcome.result != nccl::kSuccess) return outcome;
  own.calls[number_ % kCallsInFlight] = call;
  own.posted = number_;
  segment_->Announce();
  outcome = Wait([&] { return Least(&RankState::posted) >= number_; });
  if (outcome.result != nccl::kSuccess) return outcome;
  const Call& first = data.ranks[0].calls[number_ % kCallsInFlight];
  for (int rank = 1; rank < num_ranks_; ++rank) {
    const Call& other = data.ranks[rank].calls[number_ % kCallsInFlight];
    if (other == first) continue;
    outcome = {nccl::kInvalidUsage, "collective " + std::to_string(number_) + ": rank 0 calls " +
                                        first.Describe() + ", rank " + std::to_string(rank) +
                                        " calls " + other.Describe()};
    break;
  }
  own.checked = number_;
  segment_->Announce();
  return outcome;
}

Outcome Collectives::Broadcast(const Call& call, const void* source, void* target) {
  SegmentData& data = segment_->data();
  RankState& own = data.ranks[rank_];
  const int64_t bytes = static_cast<int64_t>(call.count) * SizeOfType(call.type);
  for (int64_t offset = 0; offset < bytes; offset += kChunkBytes, ++chunk_) {
    const auto size = static_cast<size_t>(std::min(kChunkBytes, bytes - offset));
    unsigned char* chunk = data.chunks[chunk_ % kNumChunks];
    const bool is_root = call.root == rank_;
    const Outcome outcome = Wait([&] {
      return is_root ? Least(&RankState::consumed) > chunk_ - kNumChunks : data.produced > chunk_;
    });
    if (outcome.result != nccl::kSuccess) return outcome;
    if (is_root) {
      std::memcpy(chunk, static_cast<const unsigned char*>(source) + offset, size);
      data.produced = chunk_ + 1;
    } else {
      std::memcpy(static_cast<unsigned char*>(target) + offset, chunk, size);
    }
    own.consumed = chunk_ + 1;
    segment_->Announce();
  }
  if (call.root == rank_ && target != source) {
    std::memcpy(target, source, static_cast<size_t>(bytes));
  }
  return {};
}

Outcome Collectives::AllReduce(const Call& call, const void* source, void* target) {
  SegmentData& data = segment_->data();
  RankState& own = data.ranks[rank_];
  const int64_t size = SizeOfType(call.type);
  const int64_t per_round = kLaneBytes / size;
  for (int64_t begin = 0; begin < static_cast<int64_t>(call.count); begin += per_round) {
    const int64_t count = std::min(per_round, static_cast<int64_t>(call.count) - begin);
    Outcome outcome = Wait([&] { return Least(&RankState::reduced) >= round_; });
    if (outcome.result != nccl::kSuccess) return outcome;
    std::memcpy(data.lanes[rank_], static_cast<const unsigned char*>(source) + begin * size,
                static_cast<size_t>(count * size));
    own.contributed = ++round_;
    segment_->Announce();
    outcome = Wait([&] { return Least(&RankState::contributed) >= round_; });
    if (outcome.result != nccl::kSuccess) return outcome;
    unsigned char result[kLaneBytes];
    std::memcpy(result, data.lanes[0], static_cast<size_t>(count * size));
    for (int rank = 1; rank < num_ranks_; ++rank) {
      if (!Reduce(call, data.lanes[rank], result, count)) {
        return {nccl::kInvalidArgument, "reductions of this type are not supported here"};
      }
    }
    std::memcpy(static_cast<unsigned char*>(target) + begin * size, result,
                static_cast<size_t>(count * size));
    own.reduced = round_;
    segment_->Announce();
  }
  return {};
}

}  // namespace tandem::testing
