// The arithmetic of digest.h that both backends share.
#pragma once

#include <cstdint>

#include "csrc/common/simt_qualifiers.h"
#include "csrc/refit/digest.h"

namespace tandem {

inline constexpr int kDigestWords = kDigestBlock / 8;

// The finaliser of splitmix64: a bijection, Mix(0) = 0.
SIMT_HD constexpr uint64_t Mix(uint64_t z) {
  z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9;
  z = (z ^ z >> 27) * 0x94D049BB133111EB;
  return z ^ z >> 31;
}

// The key of word i: the sequence that splitmix64 gives from seed 0.
SIMT_HD constexpr uint64_t DigestKey(uint64_t i) { return Mix((i + 1) * 0x9E3779B97F4A7C15); }

// What word i adds to h.
SIMT_HD constexpr uint64_t DigestProduct(uint64_t word, uint64_t key) {
  const uint32_t low = static_cast<uint32_t>(word) + static_cast<uint32_t>(key);
  const uint32_t high = static_cast<uint32_t>(word >> 32) + static_cast<uint32_t>(key >> 32);
  return static_cast<uint64_t>(low) * high;
}

// What block b of a tensor, with `bytes` bytes, adds to its digest.
SIMT_HD constexpr uint64_t DigestOfBlock(uint64_t h, uint64_t s, int64_t block, int64_t bytes) {
  return Mix(h + Mix(s + Mix(static_cast<uint64_t>(block) + 1)) + static_cast<uint64_t>(bytes));
}

// Blocks of a piece; bytes of its block number `block`.
SIMT_HD constexpr int64_t DigestBlocks(int64_t bytes) {
  return (bytes + kDigestBlock - 1) / kDigestBlock;
}
SIMT_HD constexpr int64_t DigestBlockBytes(int64_t bytes, int64_t block) {
  const int64_t left = bytes - block * kDigestBlock;
  return left < kDigestBlock ? left : kDigestBlock;
}

}  // namespace tandem
