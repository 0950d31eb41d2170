#include "csrc/refit/bucket_mover.h"

#include <algorithm>
#include <cinttypes>
#include <cstddef>
#include <cstdio>

namespace tandem {
namespace {

// Copied and digested in turns, so that the second finds the bytes in the first-level cache. A
// multiple of kDigestBlock.
constexpr int64_t kChunkBytes = 32 << 10;
static_assert(kChunkBytes % kDigestBlock == 0);

class Stopwatch {
 public:
  // Seconds since the last call, or since it was made.
  double Lap() {
    const auto now = Deadline::Clock::now();
    const double seconds = std::chrono::duration<double>(now - last_).count();
    last_ = now;
    return seconds;
  }

 private:
  Deadline::Clock::time_point last_ = Deadline::Clock::now();
};

bool FloatDType(WireType type, DType* dtype) {
  switch (type) {
    case WireType::kFloat32:
      *dtype = DType::kFloat32;
      return true;
    case WireType::kBFloat16:
      *dtype = DType::kBFloat16;
      return true;
    case WireType::kFloat16:
      *dtype = DType::kFloat16;
      return true;
    default:
      return false;
  }
}

Status Mismatch(std::string message) { return Status(StatusCode::kMismatch, std::move(message)); }

std::string Hex(uint64_t value) {
  char text[24];
  std::snprintf(text, sizeof(text), "%016" PRIx64, value);
  return text;
}

// "the header says epoch 3, this end expects 4".
Status WrongField(const char* field, int64_t found, int64_t expected) {
  return Mismatch(std::string("the header says ") + field + " " + std::to_string(found) +
                  ", this end expects " + std::to_string(expected));
}

}  // namespace

std::string DescribeBucket(const Plan& plan, int64_t bucket) {
  if (bucket < 0 || bucket >= static_cast<int64_t>(plan.buckets.size())) {
    return "bucket " + std::to_string(bucket);
  }
  const Bucket& entry = plan.buckets[static_cast<size_t>(bucket)];
  std::string text = "bucket " + std::to_string(bucket) + " of root " + std::to_string(entry.root);
  if (entry.num_pieces == 0) return text;
  const auto name = [&](int64_t piece) {
    return "'" +
           plan.tensors[static_cast<size_t>(plan.pieces[static_cast<size_t>(piece)].tensor)].name +
           "'";
  };
  text += " (" + name(entry.first_piece);
  if (entry.num_pieces > 1) text += " to " + name(entry.first_piece + entry.num_pieces - 1);
  return text + ")";
}

BucketMover::BucketMover(const Plan& plan, Direction direction, bool digests)
    : plan_(plan), direction_(direction), digests_(digests) {}

Status BucketMover::Prepare(Executor* executor) {
  executor_ = executor;
  const size_t words = plan_.pieces.size() + plan_.buckets.size();
  if (executor->is_immediate()) {
    own_memory_.resize(words);
    piece_digests_ = own_memory_.data();
  } else {
    void* memory = nullptr;
    Status status = executor->Allocate(static_cast<int64_t>(words * sizeof(uint64_t)), &memory);
    if (!status.ok()) return status;
    piece_digests_ = static_cast<uint64_t*>(memory);
    host_digests_.resize(words);
  }
  bucket_digests_ = piece_digests_ + plan_.pieces.size();
  int64_t largest = 0;
  for (const Bucket& bucket : plan_.buckets) largest = std::max(largest, bucket.num_pieces);
  copy_items_.reserve(static_cast<size_t>(largest));
  digest_items_.reserve(static_cast<size_t>(largest));
  if (direction_ == Direction::kPack) {
    sent_.resize(plan_.buckets.size());
  } else {
    received_.resize(executor->is_immediate() ? 1 : plan_.buckets.size());
  }
  return OkStatus();
}

Status BucketMover::Pack(int64_t bucket, const RefitId& refit, const TensorMemory* tensors,
                         uint8_t* slot, SessionTimes* times) {
  Status status = MovePieces(bucket, tensors, slot, times);
  if (!status.ok()) return status;
  const Bucket& entry = plan_.buckets[static_cast<size_t>(bucket)];
  SlotHeader& header = sent_[static_cast<size_t>(bucket)];
  header = {kSlotMagic,  refit.epoch, refit.version, bucket,
            entry.bytes, 0,           digests_,      static_cast<uint32_t>(entry.root)};
  status = executor_->FromHost(slot, &header, sizeof(header));
  if (!status.ok() || !digests_) return status;
  // Over the header's own field: only the executor knows the digest by now.
  status = executor_->RawCopy(slot + offsetof(SlotHeader, digest), bucket_digests_ + bucket,
                              sizeof(uint64_t));
  if (!status.ok()) return status;
  const int64_t named = std::min(entry.num_pieces, kMaxNamedPieces);
  return executor_->RawCopy(slot + kPieceDigestsOffset, piece_digests_ + entry.first_piece,
                            named * static_cast<int64_t>(sizeof(uint64_t)));
}

Status BucketMover::Unpack(int64_t bucket, const RefitId& refit, const TensorMemory* tensors,
                           const uint8_t* slot, SessionTimes* times) {
  const bool at_once = executor_->is_immediate();
  ReceivedHeader& received = received_[at_once ? 0 : static_cast<size_t>(bucket)];
  Status status = executor_->ToHost(&received, slot, sizeof(received));
  if (!status.ok()) return status;
  if (at_once) {
    status = CheckHeader(bucket, refit, received.header);
    if (!status.ok()) return status;
  }
  // Only read from: the direction says so.
  status = MovePieces(bucket, tensors, const_cast<uint8_t*>(slot), times);
  if (!status.ok() || !at_once) return status;
  return CheckDigest(bucket, received, piece_digests_, bucket_digests_[bucket]);
}

Status BucketMover::Collect(const RefitId& refit, const std::vector<int64_t>& buckets,
                            const Deadline& deadline, uint64_t* tensor_digests, int64_t* failed) {
  *failed = -1;
  const uint64_t* digests = piece_digests_;
  if (!executor_->is_immediate()) {
    Status status =
        executor_->ToHost(host_digests_.data(), piece_digests_,
                          static_cast<int64_t>(host_digests_.size() * sizeof(uint64_t)));
    if (status.ok()) status = executor_->Wait(deadline);
    if (!status.ok()) return status;
    digests = host_digests_.data();
  }
  const bool is_checked = direction_ == Direction::kPack || executor_->is_immediate();
  for (const int64_t bucket : buckets) {
    Status status = is_checked ? OkStatus() : CheckArrived(bucket, refit, digests);
    if (!status.ok()) {
      *failed = bucket;
      return status;
    }
    const Bucket& entry = plan_.buckets[static_cast<size_t>(bucket)];
    for (int64_t i = entry.first_piece; digests_ && i < entry.first_piece + entry.num_pieces; ++i) {
      tensor_digests[plan_.pieces[static_cast<size_t>(i)].tensor] += digests[i];
    }
  }
  return OkStatus();
}

Status BucketMover::CheckArrived(int64_t bucket, const RefitId& refit,
                                 const uint64_t* digests) const {
  const ReceivedHeader& received = received_[static_cast<size_t>(bucket)];
  Status status = CheckHeader(bucket, refit, received.header);
  if (!status.ok()) return status;
  return CheckDigest(bucket, received, digests,
                     digests[plan_.pieces.size() + static_cast<size_t>(bucket)]);
}

Status BucketMover::MakeMove(const Piece& piece, const TensorMemory& memory, uint8_t* payload,
                             Move* move) const {
  const TensorEntry& entry = plan_.tensors[static_cast<size_t>(piece.tensor)];
  const bool wire_floats = FloatDType(entry.type, &move->wire_dtype);
  const bool both_floats = FloatDType(memory.type, &move->tensor_dtype) && wire_floats;
  if (!both_floats && memory.type != entry.type) {
    return Mismatch("tensor '" + entry.name + "' travels as " + NameOf(entry.type) +
                    " and its memory here is " + NameOf(memory.type) +
                    ": only float32, bfloat16 and float16 are cast into each other");
  }
  if (memory.data == nullptr && piece.bytes > 0) {
    return InvalidArgument("tensor '%.120s' has no memory", entry.name.c_str());
  }
  move->wire_size = both_floats ? SizeOf(move->wire_dtype) : 0;
  move->tensor_size = both_floats ? SizeOf(move->tensor_dtype) : 0;
  const int64_t offset =
      both_floats ? piece.tensor_offset / move->wire_size * move->tensor_size : piece.tensor_offset;
  move->tensor = static_cast<uint8_t*>(memory.data);
  if (move->tensor != nullptr) move->tensor += offset;
  move->wire = payload + piece.bucket_offset;
  move->bytes = piece.bytes;
  move->first_block = piece.tensor_offset / kDigestBlock;
  return OkStatus();
}

CopyItem BucketMover::CopyOf(const Move& move) const {
  // Bytes in pairs, where they have no dtype: equal dtypes copy bits.
  const bool typed = move.wire_size > 0;
  const DType wire_dtype = typed ? move.wire_dtype : DType::kBFloat16;
  const DType tensor_dtype = typed ? move.tensor_dtype : DType::kBFloat16;
  const int64_t numel = move.bytes / (typed ? move.wire_size : SizeOf(wire_dtype));
  if (direction_ == Direction::kPack) {
    return {move.tensor, move.wire, numel, tensor_dtype, wire_dtype};
  }
  return {move.wire, move.tensor, numel, wire_dtype, tensor_dtype};
}

Status BucketMover::MovePieces(int64_t bucket, const TensorMemory* tensors, uint8_t* slot,
                               SessionTimes* times) {
  if (!executor_->is_immediate()) return MoveAtOnce(bucket, tensors, slot, times);
  const Bucket& entry = plan_.buckets[static_cast<size_t>(bucket)];
  for (int64_t i = 0; i < entry.num_pieces; ++i) {
    Move move;
    const int64_t piece = entry.first_piece + i;
    Status status =
        MakeMove(plan_.pieces[static_cast<size_t>(piece)], tensors[i], slot + kHeaderBytes, &move);
    if (status.ok()) status = MoveInChunks(move, piece_digests_ + piece, times);
    if (!status.ok()) return status;
  }
  return digests_ ? DigestOfDigests(bucket) : OkStatus();
}

Status BucketMover::MoveInChunks(const Move& move, uint64_t* digest, SessionTimes* times) {
  const int64_t step = digests_ ? kChunkBytes : std::max<int64_t>(move.bytes, 1);
  *digest = 0;
  Stopwatch watch;
  for (int64_t begin = 0; begin < move.bytes; begin += step) {
    const int64_t bytes = std::min(step, move.bytes - begin);
    // On arrival the digest comes first: it is what brings the bytes into the cache.
    if (direction_ == Direction::kUnpack && digests_) {
      Status status = DigestPart(move, begin, bytes, digest);
      if (!status.ok()) return status;
      times->digest += watch.Lap();
    }
    Status status = CopyPart(move, begin, bytes);
    if (!status.ok()) return status;
    times->copy += watch.Lap();
    if (direction_ == Direction::kPack && digests_) {
      status = DigestPart(move, begin, bytes, digest);
      if (!status.ok()) return status;
      times->digest += watch.Lap();
    }
  }
  return OkStatus();
}

Status BucketMover::CopyPart(const Move& move, int64_t begin, int64_t bytes) {
  Move part = move;
  part.bytes = bytes;
  part.wire += begin;
  part.tensor += move.wire_size > 0 ? begin / move.wire_size * move.tensor_size : begin;
  if (move.wire_size > 0 && move.wire_dtype != move.tensor_dtype) {
    const CopyItem item = CopyOf(part);
    return executor_->Copy(&item, 1);
  }
  return direction_ == Direction::kPack ? executor_->RawCopy(part.wire, part.tensor, bytes)
                                        : executor_->RawCopy(part.tensor, part.wire, bytes);
}

Status BucketMover::DigestPart(const Move& move, int64_t begin, int64_t bytes, uint64_t* digest) {
  const DigestItem item = {move.wire + begin, bytes, move.first_block + begin / kDigestBlock};
  uint64_t part = 0;
  Status status = executor_->Digest(&item, 1, &part);
  *digest += part;
  return status;
}

Status BucketMover::MoveAtOnce(int64_t bucket, const TensorMemory* tensors, uint8_t* slot,
                               SessionTimes* times) {
  Stopwatch watch;
  const Bucket& entry = plan_.buckets[static_cast<size_t>(bucket)];
  copy_items_.clear();
  digest_items_.clear();
  for (int64_t i = 0; i < entry.num_pieces; ++i) {
    Move move;
    Status status = MakeMove(plan_.pieces[static_cast<size_t>(entry.first_piece + i)], tensors[i],
                             slot + kHeaderBytes, &move);
    if (!status.ok()) return status;
    digest_items_.push_back({move.wire, move.bytes, move.first_block});
    if (move.wire_size == 0 && move.bytes % 2 != 0) {
      status = CopyPart(move, 0, move.bytes);
      if (!status.ok()) return status;
    } else if (move.bytes > 0) {
      copy_items_.push_back(CopyOf(move));
    }
  }
  Status status = OkStatus();
  if (!copy_items_.empty()) {
    status = executor_->Copy(copy_items_.data(), static_cast<int64_t>(copy_items_.size()));
  }
  times->copy += watch.Lap();
  if (!status.ok() || !digests_) return status;
  status =
      executor_->Digest(digest_items_.data(), entry.num_pieces, piece_digests_ + entry.first_piece);
  if (status.ok()) status = DigestOfDigests(bucket);
  times->digest += watch.Lap();
  return status;
}

Status BucketMover::DigestOfDigests(int64_t bucket) {
  const Bucket& entry = plan_.buckets[static_cast<size_t>(bucket)];
  const DigestItem item = {piece_digests_ + entry.first_piece,
                           entry.num_pieces * static_cast<int64_t>(sizeof(uint64_t)), 0};
  return executor_->Digest(&item, 1, bucket_digests_ + bucket);
}

Status BucketMover::CheckHeader(int64_t bucket, const RefitId& refit,
                                const SlotHeader& header) const {
  const Bucket& entry = plan_.buckets[static_cast<size_t>(bucket)];
  if (header.magic != kSlotMagic) {
    return Status(StatusCode::kDataLoss, "what arrived is no bucket: it begins with " +
                                             Hex(header.magic) + ", not " + Hex(kSlotMagic));
  }
  const struct {
    const char* name;
    int64_t found;
    int64_t expected;
  } fields[] = {
      {"epoch", static_cast<int64_t>(header.epoch), static_cast<int64_t>(refit.epoch)},
      {"version", static_cast<int64_t>(header.version), static_cast<int64_t>(refit.version)},
      {"root", static_cast<int64_t>(header.root), entry.root},
      {"bucket", header.bucket, bucket},
      {"payload bytes", header.bytes, entry.bytes},
  };
  for (const auto& field : fields) {
    if (field.found != field.expected) return WrongField(field.name, field.found, field.expected);
  }
  if (digests_ && header.has_digest == 0) {
    return Mismatch(
        "the sender sends no digests and this end wants to check them: both ends need "
        "the same option");
  }
  return OkStatus();
}

Status BucketMover::CheckDigest(int64_t bucket, const ReceivedHeader& received,
                                const uint64_t* pieces, uint64_t combined) const {
  if (!digests_ || received.header.digest == combined) return OkStatus();
  const Bucket& entry = plan_.buckets[static_cast<size_t>(bucket)];
  const int64_t named = std::min(entry.num_pieces, kMaxNamedPieces);
  for (int64_t i = 0; i < named; ++i) {
    const uint64_t found = pieces[entry.first_piece + i];
    if (found == received.pieces[i]) continue;
    const Piece& piece = plan_.pieces[static_cast<size_t>(entry.first_piece + i)];
    return Status(StatusCode::kDataLoss,
                  "tensor '" + plan_.tensors[static_cast<size_t>(piece.tensor)].name + "', bytes " +
                      std::to_string(piece.tensor_offset) + " to " +
                      std::to_string(piece.tensor_offset + piece.bytes) +
                      ": the sender's digest is " + Hex(received.pieces[i]) +
                      ", what arrived has " + Hex(found));
  }
  return Status(StatusCode::kDataLoss, "the sender's digest is " + Hex(received.header.digest) +
                                           ", what arrived has " + Hex(combined));
}

}  // namespace tandem
