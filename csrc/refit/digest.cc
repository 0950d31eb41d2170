// Digests on the CPU. Threads take ranges of blocks and add what they find to their item's digest;
// the loop over words is AVX-512 by hand where the machine has it (half as fast again as the
// compiler's), else plain code that the compiler vectorises for each instruction set.
#include "csrc/refit/digest.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>

#include "csrc/common/multiarch.h"
#include "csrc/refit/digest_math.h"
#ifdef TANDEM_HAS_AVX512
// GCC 12's own headers leave the untouched part of a register undefined, and then warn of it.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>
#endif

namespace tandem {
namespace {

// Fewest blocks that are worth a thread: 256 KiB.
constexpr int64_t kGrainBlocks = 256;

constexpr std::array<uint64_t, kDigestWords> MakeKeys() {
  std::array<uint64_t, kDigestWords> keys{};
  for (size_t i = 0; i < keys.size(); ++i) keys[i] = DigestKey(i);
  return keys;
}
alignas(64) constexpr std::array<uint64_t, kDigestWords> kKeys = MakeKeys();

// The sum over `count` whole blocks at `data`, which are the tensor's from number `first` on.
using SumBlocks = uint64_t (*)(const unsigned char* data, int64_t count, int64_t first);

TANDEM_MULTIARCH uint64_t SumBlocksPlain(const unsigned char* data, int64_t count, int64_t first) {
  uint64_t sum = 0;
  for (int64_t b = 0; b < count; ++b, data += kDigestBlock) {
    uint64_t h = 0;
    uint64_t s = 0;
    for (int i = 0; i < kDigestWords; ++i) {
      uint64_t word;
      std::memcpy(&word, data + i * 8, sizeof(word));
      h += DigestProduct(word, kKeys[static_cast<size_t>(i)]);
      s += word;
    }
    sum += DigestOfBlock(h, s, first + b, kDigestBlock);
  }
  return sum;
}

#ifdef TANDEM_HAS_AVX512
// Modulo 2^64; _mm512_reduce_add_epi64 adds signed numbers.
TANDEM_AVX512 inline uint64_t SumLanes(__m512i lanes) {
  const __m256i four =
      _mm256_add_epi64(_mm512_castsi512_si256(lanes), _mm512_extracti64x4_epi64(lanes, 1));
  const __m128i two =
      _mm_add_epi64(_mm256_castsi256_si128(four), _mm256_extracti128_si256(four, 1));
  return static_cast<uint64_t>(_mm_cvtsi128_si64(_mm_add_epi64(two, _mm_unpackhi_epi64(two, two))));
}

// Two chains of sums, so that an addition need not wait for the one before it.
TANDEM_AVX512 uint64_t SumBlocksAvx512(const unsigned char* data, int64_t count, int64_t first) {
  constexpr int kVectors = kDigestBlock / 64;
  uint64_t sum = 0;
  for (int64_t b = 0; b < count; ++b, data += kDigestBlock) {
    __m512i h[2] = {_mm512_setzero_si512(), _mm512_setzero_si512()};
    __m512i s[2] = {_mm512_setzero_si512(), _mm512_setzero_si512()};
#pragma GCC unroll 16
    for (int i = 0; i < kVectors; ++i) {
      const __m512i words = _mm512_loadu_si512(data + i * 64);
      const __m512i keyed = _mm512_add_epi32(words, _mm512_load_si512(kKeys.data() + i * 8));
      const __m512i product = _mm512_mul_epu32(keyed, _mm512_srli_epi64(keyed, 32));
      h[i % 2] = _mm512_add_epi64(h[i % 2], product);
      s[i % 2] = _mm512_add_epi64(s[i % 2], words);
    }
    const uint64_t h_sum = SumLanes(_mm512_add_epi64(h[0], h[1]));
    const uint64_t s_sum = SumLanes(_mm512_add_epi64(s[0], s[1]));
    sum += DigestOfBlock(h_sum, s_sum, first + b, kDigestBlock);
  }
  return sum;
}
#endif

SumBlocks ChooseSumBlocks() {
#ifdef TANDEM_HAS_AVX512
  if (HasAvx512()) return SumBlocksAvx512;
#endif
  return SumBlocksPlain;
}

// Of the last block, which the tensor does not fill: as if zeros followed.
uint64_t DigestOfTail(const unsigned char* data, int64_t bytes, int64_t block) {
  uint64_t words[kDigestWords] = {};
  std::memcpy(words, data, static_cast<size_t>(bytes));
  uint64_t h = 0;
  uint64_t s = 0;
  for (size_t i = 0; i < kDigestWords; ++i) {
    h += DigestProduct(words[i], kKeys[i]);
    s += words[i];
  }
  return DigestOfBlock(h, s, block, bytes);
}

// Of an item's blocks [begin, end).
uint64_t DigestOfRange(const DigestItem& item, int64_t begin, int64_t end, SumBlocks sum_blocks) {
  const auto* data = static_cast<const unsigned char*>(item.data);
  const int64_t whole = std::min(end, item.bytes / kDigestBlock);
  uint64_t sum = 0;
  if (whole > begin) {
    sum = sum_blocks(data + begin * kDigestBlock, whole - begin, item.first_block + begin);
  }
  const int64_t tail = std::max(begin, whole);
  if (tail < end) {
    sum += DigestOfTail(data + tail * kDigestBlock, item.bytes - tail * kDigestBlock,
                        item.first_block + tail);
  }
  return sum;
}

// Of the blocks [begin, end) of all items in a row.
void DigestOfItems(const DigestItem* items, int64_t num_items, int64_t begin, int64_t end,
                   uint64_t* digests) {
  static const SumBlocks sum_blocks = ChooseSumBlocks();
  for (int64_t i = 0; i < num_items && end > 0; ++i) {
    const int64_t blocks = DigestBlocks(items[i].bytes);
    if (begin < blocks) {
      const uint64_t sum = DigestOfRange(items[i], begin, std::min(end, blocks), sum_blocks);
      std::atomic_ref<uint64_t>(digests[i]).fetch_add(sum, std::memory_order_relaxed);
    }
    begin = std::max<int64_t>(0, begin - blocks);
    end -= blocks;
  }
}

}  // namespace

namespace cpu {

Status Digest(const DigestItem* items, int64_t num_items, uint64_t* digests,
              const Execution& execution) {
  int64_t blocks = 0;
  for (int64_t i = 0; i < num_items; ++i) {
    if (items[i].bytes < 0 || items[i].first_block < 0 ||
        (items[i].bytes > 0 && items[i].data == nullptr)) {
      return InvalidArgument(
          "items[%lld]: want data, bytes >= 0 and first_block >= 0, got %p, "
          "%lld and %lld",
          static_cast<long long>(i), items[i].data, static_cast<long long>(items[i].bytes),
          static_cast<long long>(items[i].first_block));
    }
    digests[i] = 0;
    blocks += DigestBlocks(items[i].bytes);
  }
  RunParallel(execution.parallel, blocks, kGrainBlocks, [&](int64_t begin, int64_t end) {
    DigestOfItems(items, num_items, begin, end, digests);
  });
  return OkStatus();
}

}  // namespace cpu

}  // namespace tandem
