// How a manifest becomes buckets, and what a manifest may not be.
#include "csrc/refit/plan.h"

#include <algorithm>
#include <limits>
#include <unordered_set>
#include <utility>

#include "csrc/refit/digest.h"

namespace tandem {
namespace {

constexpr int64_t kMaxBytes = std::numeric_limits<int64_t>::max() / 2;

struct WireTypeRow {
  const char* name;
  int64_t size;
};

// By the value of WireType.
constexpr WireTypeRow kWireTypes[] = {
    {"float64", 8},       {"float32", 4},     {"bfloat16", 2}, {"float16", 2},
    {"float8_e4m3fn", 1}, {"float8_e5m2", 1}, {"int64", 8},    {"int32", 4},
    {"int16", 2},         {"int8", 1},        {"uint8", 1},    {"bool", 1},
};

bool IsKnown(WireType type) {
  const auto value = static_cast<int64_t>(type);
  return value >= 0 && value < static_cast<int64_t>(std::size(kWireTypes));
}

int64_t AlignUp(int64_t bytes) {
  return (bytes + kPieceAlignment - 1) / kPieceAlignment * kPieceAlignment;
}

std::string ShapeInWords(const std::vector<int64_t>& shape) {
  std::string words = "[";
  for (size_t i = 0; i < shape.size(); ++i) {
    words += (i == 0 ? "" : ", ") + std::to_string(shape[i]);
  }
  return words + "]";
}

std::string InWords(const TensorEntry& tensor) {
  return "'" + tensor.name + "' " + NameOf(tensor.type) + " " + ShapeInWords(tensor.shape);
}

Status Refuse(size_t index, const TensorEntry& tensor, const std::string& why) {
  return Status(StatusCode::kInvalidArgument,
                "manifest: tensor " + std::to_string(index) + ", '" + tensor.name + "': " + why);
}

// Adds the tensor's bytes, each rounded up as in a bucket of its own, to `total`.
Status CheckTensor(size_t index, const TensorEntry& tensor, int64_t* total) {
  if (tensor.name.empty()) return Refuse(index, tensor, "want a name");
  if (!IsKnown(tensor.type)) {
    return Refuse(index, tensor,
                  "no dtype has number " + std::to_string(static_cast<int32_t>(tensor.type)));
  }
  bool is_empty = false;
  for (int64_t extent : tensor.shape) {
    if (extent < 0) {
      return Refuse(index, tensor, "negative extent in shape " + ShapeInWords(tensor.shape));
    }
    is_empty |= extent == 0;
  }
  if (is_empty) return OkStatus();
  int64_t bytes = SizeOf(tensor.type);
  for (int64_t extent : tensor.shape) {
    if (bytes > kMaxBytes / extent) {
      return Refuse(index, tensor, "shape " + ShapeInWords(tensor.shape) + " is beyond 63 bits");
    }
    bytes *= extent;
  }
  bytes = AlignUp(bytes);
  if (*total > kMaxBytes - bytes) {
    return Refuse(index, tensor, "the manifest's bytes up to here are beyond 63 bits");
  }
  *total += bytes;
  return OkStatus();
}

Status CheckManifest(const std::vector<TensorEntry>& tensors) {
  if (tensors.empty()) {
    return InvalidArgument("manifest: want at least one tensor");
  }
  std::unordered_set<std::string> names;
  int64_t total = 0;
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (Status status = CheckTensor(i, tensors[i], &total); !status.ok()) return status;
    if (!names.insert(tensors[i].name).second) {
      return Refuse(i, tensors[i], "an earlier tensor has this name; tied weights are sent once");
    }
  }
  return OkStatus();
}

// The buckets of one root, each with its pieces.
class Filler {
 public:
  explicit Filler(int64_t capacity) : capacity_(capacity) {}

  void Add(int64_t tensor, int64_t bytes) {
    if (buckets_.empty() || bytes > capacity_ - end_) Open();
    int64_t offset = 0;
    while (bytes - offset > capacity_) {
      Put({tensor, offset, 0, capacity_});
      offset += capacity_;
      Open();
    }
    Put({tensor, offset, end_, bytes - offset});
  }
  const std::vector<std::vector<Piece>>& buckets() const { return buckets_; }

 private:
  void Open() {
    // Only a tensor that is split can find an empty one.
    if (buckets_.empty() || !buckets_.back().empty()) buckets_.emplace_back();
    end_ = 0;
  }
  void Put(const Piece& piece) {
    buckets_.back().push_back(piece);
    end_ = std::min(capacity_, AlignUp(piece.bucket_offset + piece.bytes));
  }

  int64_t capacity_;
  int64_t end_ = 0;  // of the last bucket, where the next piece may begin
  std::vector<std::vector<Piece>> buckets_;
};

void Append(int32_t root, const std::vector<Piece>& pieces, Plan* plan) {
  const Piece& last = pieces.back();
  const int64_t bytes = last.bucket_offset + last.bytes;
  plan->buckets.push_back({root, static_cast<int64_t>(plan->pieces.size()),
                           static_cast<int64_t>(pieces.size()), bytes});
  plan->pieces.insert(plan->pieces.end(), pieces.begin(), pieces.end());
  plan->bucket_bytes = std::max(plan->bucket_bytes, AlignUp(bytes));
}

}  // namespace

int64_t SizeOf(WireType type) {
  return IsKnown(type) ? kWireTypes[static_cast<size_t>(type)].size : 0;
}

const char* NameOf(WireType type) {
  return IsKnown(type) ? kWireTypes[static_cast<size_t>(type)].name : "unknown dtype";
}

int64_t TensorEntry::bytes() const {
  if (std::find(shape.begin(), shape.end(), 0) != shape.end()) return 0;
  int64_t bytes = SizeOf(type);
  for (int64_t extent : shape) bytes *= extent;
  return bytes;
}

int64_t Plan::total_bytes() const {
  int64_t total = 0;
  for (const TensorEntry& tensor : tensors) total += tensor.bytes();
  return total;
}

Status BuildPlan(std::vector<TensorEntry> tensors, int64_t bucket_bytes, int32_t num_roots,
                 Plan* plan) {
  if (bucket_bytes < kPieceAlignment) {
    return InvalidArgument("bucket_bytes: want at least %lld, got %lld",
                           static_cast<long long>(kPieceAlignment),
                           static_cast<long long>(bucket_bytes));
  }
  if (num_roots < 1) return InvalidArgument("num_roots: want at least 1, got %d", num_roots);
  if (Status status = CheckManifest(tensors); !status.ok()) return status;

  const auto roots = static_cast<size_t>(num_roots);
  std::vector<Filler> fillers(std::min(roots, tensors.size()),
                              Filler(bucket_bytes / kPieceAlignment * kPieceAlignment));
  for (size_t i = 0; i < tensors.size(); ++i) {
    fillers[i % roots].Add(static_cast<int64_t>(i), tensors[i].bytes());
  }
  Plan built;
  built.tensors = std::move(tensors);
  built.num_roots = num_roots;
  size_t rounds = 0;
  for (const Filler& filler : fillers) rounds = std::max(rounds, filler.buckets().size());
  for (size_t round = 0; round < rounds; ++round) {
    for (size_t root = 0; root < fillers.size(); ++root) {
      const auto& buckets = fillers[root].buckets();
      if (round < buckets.size()) Append(static_cast<int32_t>(root), buckets[round], &built);
    }
  }
  const std::string bytes = SerializePlan(built);
  const DigestItem item = {bytes.data(), static_cast<int64_t>(bytes.size()), 0};
  Status status = cpu::Digest(&item, 1, &built.digest, {SerialFor(), nullptr});
  if (status.ok()) *plan = std::move(built);
  return status;
}

std::string FirstDifference(const std::vector<TensorEntry>& expected,
                            const std::vector<TensorEntry>& actual) {
  const size_t both = std::min(expected.size(), actual.size());
  for (size_t i = 0; i < both; ++i) {
    if (expected[i].name != actual[i].name || expected[i].type != actual[i].type ||
        expected[i].shape != actual[i].shape) {
      return "tensor " + std::to_string(i) + ": want " + InWords(expected[i]) + ", got " +
             InWords(actual[i]);
    }
  }
  if (expected.size() == actual.size()) return "";
  const bool is_missing = expected.size() > actual.size();
  return "want " + std::to_string(expected.size()) + " tensors, got " +
         std::to_string(actual.size()) + ": " +
         InWords(is_missing ? expected[both] : actual[both]) +
         (is_missing ? " is missing" : " is too many");
}

}  // namespace tandem
