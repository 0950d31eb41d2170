// What travels in a refit and how it is cut: the manifest (tensors in wire order) and the buckets.
// Pure: made once by the first sender, shipped as bytes to every rank, which checks its digest
// before the first byte moves. Nothing here moves bytes.
//
// A root is a sender; tensor i belongs to root i mod num_roots. A bucket belongs to one root and
// holds tensors in manifest order, filled greedily; a tensor that does not fit the rest of a bucket
// starts the next one, only a tensor larger than a whole bucket is split, at multiples of
// kPieceAlignment. Buckets are numbered so that the roots take turns: a receiver that takes them in
// order has all roots' wires busy. Empty tensors are pieces of 0 bytes.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "csrc/common/status.h"

namespace tandem {

// Offsets of pieces in tensors and in buckets are multiples of it: whole tensors can be viewed in
// place, and digests add up (digest.h).
inline constexpr int64_t kPieceAlignment = 1024;

// Wire dtypes; the values are part of the shipped bytes.
enum class WireType : int32_t {
  kFloat64,
  kFloat32,
  kBFloat16,
  kFloat16,
  kFloat8E4M3,
  kFloat8E5M2,
  kInt64,
  kInt32,
  kInt16,
  kInt8,
  kUInt8,
  kBool,
};
int64_t SizeOf(WireType type);      // bytes; 0 of a number that is none of them
const char* NameOf(WireType type);  // torch's: "float32", "float8_e4m3fn"

struct TensorEntry {
  std::string name;
  WireType type = WireType::kFloat32;
  std::vector<int64_t> shape;

  int64_t bytes() const;
};

// Bytes [tensor_offset, tensor_offset + bytes) of a tensor, at bucket_offset of its bucket.
struct Piece {
  int64_t tensor = 0;
  int64_t tensor_offset = 0;
  int64_t bucket_offset = 0;
  int64_t bytes = 0;
};

struct Bucket {
  int32_t root = 0;
  int64_t first_piece = 0;  // in Plan::pieces
  int64_t num_pieces = 0;
  int64_t bytes = 0;  // end of its last piece
};

struct Plan {
  std::vector<TensorEntry> tensors;
  std::vector<Bucket> buckets;
  std::vector<Piece> pieces;
  int64_t bucket_bytes = 0;  // the largest bucket, rounded up to kPieceAlignment
  int32_t num_roots = 1;
  uint64_t digest = 0;  // of the serialized form

  int64_t total_bytes() const;
};

// bucket_bytes: capacity, at least kPieceAlignment, rounded down to a multiple of it. Refuses
// (kInvalidArgument, naming the tensor) an empty manifest, an empty or repeated name, negative
// extents, a size beyond int64.
Status BuildPlan(std::vector<TensorEntry> tensors, int64_t bucket_bytes, int32_t num_roots,
                 Plan* plan);

// The shipped form: little-endian, versioned, complete. Parsing takes nothing on trust: every
// offset and count is checked against BuildPlan's rules, anything else is kMismatch.
std::string SerializePlan(const Plan& plan);
Status ParsePlan(const std::string& bytes, Plan* plan);

// The first difference between two manifests in words, "" where there is none.
std::string FirstDifference(const std::vector<TensorEntry>& expected,
                            const std::vector<TensorEntry>& actual);

}  // namespace tandem
