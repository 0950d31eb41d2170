// Moves the pieces of a bucket between whole tensors and a slot, with casts and digests, and writes
// and checks what a slot's header says. It works on one executor, which may finish later than it
// returns; it knows neither links nor who is right when two ends differ.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "csrc/common/status.h"
#include "csrc/refit/deadline.h"
#include "csrc/refit/executor.h"
#include "csrc/refit/plan.h"
#include "csrc/refit/session.h"

namespace tandem {

// The digests of a bucket's first pieces stand in its slot between header and payload, so that a
// fault can be named after its tensor.
inline constexpr int64_t kPieceDigestsOffset = 64;
inline constexpr int64_t kMaxNamedPieces =
    (kHeaderBytes - kPieceDigestsOffset) / static_cast<int64_t>(sizeof(uint64_t));
static_assert(sizeof(SlotHeader) <= kPieceDigestsOffset);

inline constexpr uint64_t kSlotMagic = 0x31746966'65726474;  // "tdrefit1"

// Which refit a slot belongs to.
struct RefitId {
  uint64_t epoch = 0;
  uint64_t version = 0;
};

// "bucket 3 of root 0 ('a' to 'b')".
std::string DescribeBucket(const Plan& plan, int64_t bucket);

class BucketMover {
 public:
  enum class Direction { kPack, kUnpack };

  // `plan` outlives it.
  BucketMover(const Plan& plan, Direction direction, bool digests);

  // Allocates all that it will ever need; once, before the first bucket.
  Status Prepare(Executor* executor);

  // Tensors to slot and the header with it; times are added to.
  Status Pack(int64_t bucket, const RefitId& refit, const TensorMemory* tensors, uint8_t* slot,
              SessionTimes* times);
  // Slot to tensors. What the header says is checked here where the executor is immediate, else in
  // Collect.
  Status Unpack(int64_t bucket, const RefitId& refit, const TensorMemory* tensors,
                const uint8_t* slot, SessionTimes* times);

  // After the last bucket: waits for the executor, checks what is left to check of `buckets`, and
  // adds the digests of their pieces to those of their tensors. `failed` is the bucket that a
  // failure is about, -1 where it is about none.
  Status Collect(const RefitId& refit, const std::vector<int64_t>& buckets,
                 const Deadline& deadline, uint64_t* tensor_digests, int64_t* failed);

 private:
  // What arrived at the start of a slot.
  struct ReceivedHeader {
    SlotHeader header;
    uint8_t padding[kPieceDigestsOffset - sizeof(SlotHeader)];
    uint64_t pieces[kMaxNamedPieces];
  };
  static_assert(sizeof(ReceivedHeader) == kHeaderBytes);

  // One piece: the memory of its tensor, its place in the slot, how both are typed.
  struct Move {
    uint8_t* tensor = nullptr;
    uint8_t* wire = nullptr;
    int64_t bytes = 0;  // on the wire
    int64_t first_block = 0;
    DType tensor_dtype = DType::kFloat32;
    DType wire_dtype = DType::kFloat32;
    int64_t wire_size = 0;  // of an element; 0: raw bytes
    int64_t tensor_size = 0;
  };

  Status MakeMove(const Piece& piece, const TensorMemory& memory, uint8_t* payload,
                  Move* move) const;
  CopyItem CopyOf(const Move& move) const;
  Status MovePieces(int64_t bucket, const TensorMemory* tensors, uint8_t* slot,
                    SessionTimes* times);
  Status MoveInChunks(const Move& move, uint64_t* digest, SessionTimes* times);
  Status MoveAtOnce(int64_t bucket, const TensorMemory* tensors, uint8_t* slot,
                    SessionTimes* times);
  Status DigestOfDigests(int64_t bucket);
  Status CopyPart(const Move& move, int64_t begin, int64_t bytes);
  Status DigestPart(const Move& move, int64_t begin, int64_t bytes, uint64_t* digest);
  Status CheckArrived(int64_t bucket, const RefitId& refit, const uint64_t* digests) const;
  Status CheckHeader(int64_t bucket, const RefitId& refit, const SlotHeader& header) const;
  Status CheckDigest(int64_t bucket, const ReceivedHeader& received, const uint64_t* pieces,
                     uint64_t combined) const;

  const Plan& plan_;
  const Direction direction_;
  const bool digests_;
  Executor* executor_ = nullptr;
  // In the executor's memory: of all pieces of the plan, and of each bucket's row of them.
  uint64_t* piece_digests_ = nullptr;
  uint64_t* bucket_digests_ = nullptr;
  std::vector<uint64_t> own_memory_;      // both, where the executor is immediate
  std::vector<SlotHeader> sent_;          // [buckets]: alive until the executor has read them
  std::vector<ReceivedHeader> received_;  // [buckets], or [1] where it is checked at once
  std::vector<uint64_t> host_digests_;    // what Collect brings back: pieces, then buckets
  std::vector<CopyItem> copy_items_;      // of one bucket, as the following
  std::vector<DigestItem> digest_items_;
};

}  // namespace tandem
