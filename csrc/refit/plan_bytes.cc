// The shipped form of a plan:
//
//   magic u64, version u32, num_roots i32, bucket_bytes i64, tensors i64, buckets i64, pieces i64
//   per tensor  type i32, rank i32, name's length i64, name, extents i64...
//   per bucket  root i32, 0 i32, pieces i64
//   per piece   tensor i64, tensor_offset i64, bucket_offset i64, bytes i64
//
// A plan follows from its manifest, bucket_bytes and num_roots, so a reader builds it anew and
// takes only what is equal to it: senders and receivers of releases that cut differently find that
// out here.
#include <bit>
#include <cstring>
#include <utility>

#include "csrc/refit/plan.h"

namespace tandem {
namespace {

static_assert(std::endian::native == std::endian::little);

constexpr uint64_t kMagic = 0x4E414C504D444E54;  // "TNDMPLAN"
constexpr uint32_t kVersion = 1;
constexpr int64_t kMinTensorBytes = 16;
constexpr int64_t kBucketBytes = 16;
constexpr int64_t kPieceBytes = 32;

template <typename T>
void Write(T value, std::string* bytes) {
  bytes->append(reinterpret_cast<const char*>(&value), sizeof(value));
}

Status Damaged(const std::string& what) {
  return Status(StatusCode::kMismatch, "plan: " + what +
                                           "; it was damaged on its way, or its sender is of "
                                           "another release");
}

// Takes values off the front of `bytes`; after one that is not there, is_good() is false and values
// are 0.
class Reader {
 public:
  explicit Reader(const std::string& bytes) : next_(bytes.data()), left_(bytes.size()) {}

  bool is_good() const { return is_good_; }
  bool is_at_end() const { return is_good_ && left_ == 0; }

  template <typename T>
  T Read() {
    T value{};
    if (Take(sizeof(value))) std::memcpy(&value, next_ - sizeof(value), sizeof(value));
    return value;
  }
  std::string ReadString(int64_t length) {
    if (length < 0 || !Take(static_cast<size_t>(length))) {
      is_good_ = false;
      return "";
    }
    return std::string(next_ - length, static_cast<size_t>(length));
  }
  // Whether `count` things of at least `bytes` each can follow: before memory is made for them.
  bool CanHold(int64_t count, int64_t bytes) const {
    return is_good_ && count >= 0 && static_cast<uint64_t>(count) <= left_ / bytes;
  }

 private:
  bool Take(size_t count) {
    is_good_ = is_good_ && count <= left_;
    if (!is_good_) return false;
    next_ += count;
    left_ -= count;
    return true;
  }

  const char* next_;
  size_t left_;
  bool is_good_ = true;
};

bool ReadTensor(Reader* reader, TensorEntry* tensor) {
  tensor->type = static_cast<WireType>(reader->Read<int32_t>());
  const auto rank = reader->Read<int32_t>();
  tensor->name = reader->ReadString(reader->Read<int64_t>());
  if (!reader->CanHold(rank, sizeof(int64_t))) return false;
  tensor->shape.resize(static_cast<size_t>(rank));
  for (int64_t& extent : tensor->shape) extent = reader->Read<int64_t>();
  return reader->is_good();
}

bool ReadBucket(Reader* reader, int64_t first_piece, Bucket* bucket) {
  bucket->root = reader->Read<int32_t>();
  const auto padding = reader->Read<int32_t>();
  bucket->first_piece = first_piece;
  bucket->num_pieces = reader->Read<int64_t>();
  return reader->is_good() && padding == 0;
}

void ReadPiece(Reader* reader, Piece* piece) {
  piece->tensor = reader->Read<int64_t>();
  piece->tensor_offset = reader->Read<int64_t>();
  piece->bucket_offset = reader->Read<int64_t>();
  piece->bytes = reader->Read<int64_t>();
}

bool IsSame(const Piece& a, const Piece& b) {
  return a.tensor == b.tensor && a.tensor_offset == b.tensor_offset &&
         a.bucket_offset == b.bucket_offset && a.bytes == b.bytes;
}

bool IsSame(const Bucket& a, const Bucket& b) {
  return a.root == b.root && a.first_piece == b.first_piece && a.num_pieces == b.num_pieces;
}

// Pieces that the rules make of a manifest, without making them: a damaged extent might ask for any
// number. -1 of a manifest that BuildPlan refuses.
int64_t CountPieces(const std::vector<TensorEntry>& tensors, int64_t capacity) {
  int64_t pieces = 0;
  for (const TensorEntry& tensor : tensors) {
    bool is_empty = false;
    for (int64_t extent : tensor.shape) is_empty |= extent == 0;
    int64_t bytes = SizeOf(tensor.type);
    for (int64_t extent : tensor.shape) {
      if (extent < 0) return -1;
      if (!is_empty && __builtin_mul_overflow(bytes, extent, &bytes)) return -1;
    }
    const int64_t more = is_empty ? 1 : bytes / capacity + (bytes % capacity != 0);
    if (__builtin_add_overflow(pieces, more, &pieces)) return -1;
  }
  return pieces;
}

// "" where the shipped buckets are those that the rules give.
std::string DifferenceFromRules(const Plan& shipped, const Plan& rules) {
  if (shipped.bucket_bytes != rules.bucket_bytes) {
    return "bucket_bytes is " + std::to_string(shipped.bucket_bytes) + ", its largest bucket has " +
           std::to_string(rules.bucket_bytes);
  }
  const size_t buckets = rules.buckets.size();
  if (shipped.buckets.size() != buckets) {
    return "it has " + std::to_string(shipped.buckets.size()) + " buckets, its manifest makes " +
           std::to_string(buckets);
  }
  for (size_t b = 0; b < buckets; ++b) {
    if (!IsSame(shipped.buckets[b], rules.buckets[b])) {
      return "bucket " + std::to_string(b) + " is not what its manifest makes";
    }
  }
  for (size_t p = 0; p < rules.pieces.size(); ++p) {
    if (!IsSame(shipped.pieces[p], rules.pieces[p])) {
      return "piece " + std::to_string(p) + ", of '" +
             rules.tensors[static_cast<size_t>(rules.pieces[p].tensor)].name +
             "', is not what its manifest makes";
    }
  }
  return "";
}

Status ReadHeader(Reader* reader, Plan* plan) {
  if (reader->Read<uint64_t>() != kMagic) return Damaged("these bytes are none");
  const auto version = reader->Read<uint32_t>();
  if (version != kVersion) {
    return Damaged("want format " + std::to_string(kVersion) + ", got " + std::to_string(version));
  }
  plan->num_roots = reader->Read<int32_t>();
  plan->bucket_bytes = reader->Read<int64_t>();
  const auto tensors = reader->Read<int64_t>();
  const auto buckets = reader->Read<int64_t>();
  const auto pieces = reader->Read<int64_t>();
  if (!reader->CanHold(tensors, kMinTensorBytes) || !reader->CanHold(buckets, kBucketBytes) ||
      !reader->CanHold(pieces, kPieceBytes)) {
    return Damaged("it is shorter than its counts say");
  }
  plan->tensors.resize(static_cast<size_t>(tensors));
  plan->buckets.resize(static_cast<size_t>(buckets));
  plan->pieces.resize(static_cast<size_t>(pieces));
  return OkStatus();
}

Status ReadBody(Reader* reader, Plan* plan) {
  for (size_t i = 0; i < plan->tensors.size(); ++i) {
    if (!ReadTensor(reader, &plan->tensors[i])) {
      return Damaged("it ends, or has no sense, at tensor " + std::to_string(i));
    }
  }
  int64_t first_piece = 0;
  for (size_t b = 0; b < plan->buckets.size(); ++b) {
    const auto left = static_cast<int64_t>(plan->pieces.size()) - first_piece;
    Bucket& bucket = plan->buckets[b];
    if (!ReadBucket(reader, first_piece, &bucket) || bucket.num_pieces < 0 ||
        bucket.num_pieces > left) {
      return Damaged("it ends, or has no sense, at bucket " + std::to_string(b));
    }
    first_piece += bucket.num_pieces;
  }
  for (Piece& piece : plan->pieces) ReadPiece(reader, &piece);
  return reader->is_at_end() ? OkStatus() : Damaged("its length is not what its counts say");
}

}  // namespace

std::string SerializePlan(const Plan& plan) {
  std::string bytes;
  Write(kMagic, &bytes);
  Write(kVersion, &bytes);
  Write(plan.num_roots, &bytes);
  Write(plan.bucket_bytes, &bytes);
  Write(static_cast<int64_t>(plan.tensors.size()), &bytes);
  Write(static_cast<int64_t>(plan.buckets.size()), &bytes);
  Write(static_cast<int64_t>(plan.pieces.size()), &bytes);
  for (const TensorEntry& tensor : plan.tensors) {
    Write(static_cast<int32_t>(tensor.type), &bytes);
    Write(static_cast<int32_t>(tensor.shape.size()), &bytes);
    Write(static_cast<int64_t>(tensor.name.size()), &bytes);
    bytes += tensor.name;
    for (int64_t extent : tensor.shape) Write(extent, &bytes);
  }
  for (const Bucket& bucket : plan.buckets) {
    Write(bucket.root, &bytes);
    Write(int32_t{0}, &bytes);
    Write(bucket.num_pieces, &bytes);
  }
  for (const Piece& piece : plan.pieces) {
    Write(piece.tensor, &bytes);
    Write(piece.tensor_offset, &bytes);
    Write(piece.bucket_offset, &bytes);
    Write(piece.bytes, &bytes);
  }
  return bytes;
}

Status ParsePlan(const std::string& bytes, Plan* plan) {
  Reader reader(bytes);
  Plan shipped;
  if (Status status = ReadHeader(&reader, &shipped); !status.ok()) return status;
  if (Status status = ReadBody(&reader, &shipped); !status.ok()) return status;
  // A manifest of empty tensors makes buckets of 0 bytes.
  const int64_t capacity = shipped.bucket_bytes == 0 ? kPieceAlignment : shipped.bucket_bytes;
  if (capacity < kPieceAlignment || capacity % kPieceAlignment != 0) {
    return Damaged("bucket_bytes is " + std::to_string(capacity));
  }
  const int64_t pieces = CountPieces(shipped.tensors, capacity);
  if (pieces >= 0 && pieces != static_cast<int64_t>(shipped.pieces.size())) {
    return Damaged("it has " + std::to_string(shipped.pieces.size()) +
                   " pieces, its manifest makes " + std::to_string(pieces));
  }
  Plan rules;
  if (Status status = BuildPlan(shipped.tensors, capacity, shipped.num_roots, &rules);
      !status.ok()) {
    return Damaged(status.message());
  }
  const std::string difference = DifferenceFromRules(shipped, rules);
  if (!difference.empty()) return Damaged(difference);
  *plan = std::move(rules);
  return OkStatus();
}

}  // namespace tandem
