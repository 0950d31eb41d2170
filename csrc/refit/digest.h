// A 64-bit digest of tensors: equal bytes give equal digests, other bytes another one except by a
// chance of about 2^-32 per kilobyte block and 2^-64 beyond. Against faults, not against forgers.
//
// A tensor is cut into blocks of kDigestBlock bytes from its start (the last is padded with zeros).
// With w_i the block's 128 words of 64 bits, little-endian, and k_i fixed keys,
//
//   h = sum_i (lo32(w_i) + lo32(k_i) mod 2^32) * (hi32(w_i) + hi32(k_i) mod 2^32)     mod 2^64
//   s = sum_i w_i                                                                      mod 2^64
//   digest = sum over blocks b of Mix(h + Mix(s + Mix(b + 1)) + number of the block's bytes)
//
// Mix is the finaliser of splitmix64. (The products are the NH hash of UMAC; s sees what a zero
// factor would hide.) As a sum over blocks the digest of a tensor is that of its pieces, in any
// order, by any number of threads, where pieces begin at multiples of kDigestBlock. An empty tensor
// has digest 0.
#pragma once

#include <cstdint>

#include "csrc/common/execution.h"
#include "csrc/common/status.h"

namespace tandem {

inline constexpr int64_t kDigestBlock = 1024;

// The digests of pieces, each a part of a tensor that begins at a multiple of kDigestBlock.
struct DigestItem {
  const void* data = nullptr;
  int64_t bytes = 0;
  int64_t first_block = 0;  // offset in the tensor / kDigestBlock
};

// digests [num_items] is overwritten. In the memory of the backend, as the data and (cuda) the
// items.
namespace cpu {
Status Digest(const DigestItem* items, int64_t num_items, uint64_t* digests,
              const Execution& execution);
}  // namespace cpu

namespace cuda {
Status Digest(const DigestItem* items, int64_t num_items, uint64_t* digests,
              const Execution& execution);
}  // namespace cuda

}  // namespace tandem
