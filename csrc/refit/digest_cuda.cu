// Digests on CUDA. A warp takes four blocks of an item at a time, 4 KiB, and goes through all items
// with the other warps as if their blocks lay in a row: the grid does not depend on how many items
// there are nor how long, and no warp has more work than another. What a warp finds of an item it
// adds in one atomic addition.
#include "csrc/common/simt.h"
#include "csrc/common/simt_reduce.h"
#include "csrc/refit/digest.h"
#include "csrc/refit/digest_math.h"
#include "csrc/refit/simt_global.h"

namespace tandem::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / simt::kWarpSize;
// Blocks of threads; the result does not depend on it. On devices four for each of 132
// multiprocessors: enough to balance them, few enough that the walk over the items costs little.
#ifdef TANDEM_SIMT_EMULATOR
constexpr int kGrid = 3;
#else
constexpr int kGrid = 528;
#endif

constexpr int kBlocksPerTile = 4;
constexpr int kVectorBytes = simt::kVectorBytes;
// A lane has vectors `lane` and `lane` + 32 of each block.
constexpr int kVectorsPerLane = kDigestBlock / kVectorBytes / simt::kWarpSize;

struct Words {
  uint64_t low;
  uint64_t high;
};

SIMT_DEVICE Words LoadWords(const unsigned char* address) {
  return BitCast<Words>(simt::LoadVector(address));
}

// A vector that is not aligned, or that the piece does not fill: zeros follow the piece.
SIMT_DEVICE Words GatherWords(const unsigned char* address, int64_t bytes) {
  Words words = {0, 0};
  for (int i = 0; i < kVectorBytes && i < bytes; ++i) {
    const auto byte = static_cast<uint64_t>(address[i]);
    if (i < 8) {
      words.low |= byte << 8 * i;
    } else {
      words.high |= byte << 8 * (i - 8);
    }
  }
  return words;
}

// h and s of four blocks, each as what one lane has of it.
struct LaneSums {
  uint64_t h[kBlocksPerTile];
  uint64_t s[kBlocksPerTile];
};

// The keys of a lane's vectors.
struct LaneKeys {
  Words words[kVectorsPerLane];
};

SIMT_DEVICE void AddWords(const Words& words, const Words& keys, uint64_t* h, uint64_t* s) {
  *h += DigestProduct(words.low, keys.low) + DigestProduct(words.high, keys.high);
  *s += words.low + words.high;
}

// Four whole blocks that are aligned: all loads are under way before the first is used.
SIMT_DEVICE void SumWholeTile(const unsigned char* lane_data, const LaneKeys& keys,
                              LaneSums* sums) {
  Words loaded[kBlocksPerTile][kVectorsPerLane];
  SIMT_UNROLL
  for (int b = 0; b < kBlocksPerTile; ++b) {
    SIMT_UNROLL
    for (int v = 0; v < kVectorsPerLane; ++v) {
      loaded[b][v] = LoadWords(lane_data + b * kDigestBlock + v * simt::kWarpSize * kVectorBytes);
    }
  }
  SIMT_UNROLL
  for (int b = 0; b < kBlocksPerTile; ++b) {
    sums->h[b] = 0;
    sums->s[b] = 0;
    SIMT_UNROLL
    for (int v = 0; v < kVectorsPerLane; ++v) {
      AddWords(loaded[b][v], keys.words[v], &sums->h[b], &sums->s[b]);
    }
  }
}

// Any tile: `bytes` from `lane_data` to the end of the piece, perhaps none.
SIMT_DEVICE void SumAnyTile(const unsigned char* lane_data, int64_t bytes, const LaneKeys& keys,
                            LaneSums* sums) {
  SIMT_UNROLL
  for (int b = 0; b < kBlocksPerTile; ++b) {
    sums->h[b] = 0;
    sums->s[b] = 0;
    SIMT_UNROLL
    for (int v = 0; v < kVectorsPerLane; ++v) {
      const int64_t offset = b * kDigestBlock + v * simt::kWarpSize * kVectorBytes;
      // Beyond the piece a word is 0, as DigestOfTail has it.
      const Words words = GatherWords(lane_data + offset, bytes - offset);
      AddWords(words, keys.words[v], &sums->h[b], &sums->s[b]);
    }
  }
}

// Sums of eight numbers over the lanes in nine exchanges: at each of the first three a lane keeps
// half of its numbers and hands the other half over. Lane l is left with number l / 4 of
// {h[0..3], s[0..3]}; the digest of its block needs both, so lanes of h fetch s.
SIMT_DEVICE uint64_t DigestOfLaneBlock(const LaneSums& sums, int lane, int64_t first_block,
                                       int64_t first_of_tile, int64_t bytes) {
  uint64_t half[4];
  SIMT_UNROLL
  for (int i = 0; i < 4; ++i) {
    const bool keeps_s = (lane & 16) != 0;
    const uint64_t sent = keeps_s ? sums.h[i] : sums.s[i];
    half[i] = (keeps_s ? sums.s[i] : sums.h[i]) +
              __shfl_xor_sync(simt::kFullMask, static_cast<unsigned long long>(sent), 16);
  }
  uint64_t quarter[2];
  SIMT_UNROLL
  for (int i = 0; i < 2; ++i) {
    const bool keeps_upper = (lane & 8) != 0;
    const uint64_t sent = keeps_upper ? half[i] : half[i + 2];
    quarter[i] = (keeps_upper ? half[i + 2] : half[i]) +
                 __shfl_xor_sync(simt::kFullMask, static_cast<unsigned long long>(sent), 8);
  }
  const bool keeps_upper = (lane & 4) != 0;
  const uint64_t sent = keeps_upper ? quarter[0] : quarter[1];
  unsigned long long sum =
      (keeps_upper ? quarter[1] : quarter[0]) +
      __shfl_xor_sync(simt::kFullMask, static_cast<unsigned long long>(sent), 4);
  sum += __shfl_xor_sync(simt::kFullMask, sum, 2);
  sum += __shfl_xor_sync(simt::kFullMask, sum, 1);
  const uint64_t s = __shfl_xor_sync(simt::kFullMask, sum, 16);
  const int64_t block = first_of_tile + (lane >> 2 & 3);
  const bool is_owner = (lane & 19) == 0 && block < DigestBlocks(bytes);
  return is_owner ? DigestOfBlock(sum, s, first_block + block, DigestBlockBytes(bytes, block)) : 0;
}

SIMT_KERNEL(kThreads) DigestClearKernel(uint64_t* digests, int64_t num_items) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i < num_items) digests[i] = 0;
}

SIMT_KERNEL(kThreads)
DigestKernel(const DigestItem* items, int64_t num_items, unsigned long long* digests) {
  const int lane = static_cast<int>(threadIdx.x) % simt::kWarpSize;
  LaneKeys keys;
  SIMT_UNROLL
  for (int v = 0; v < kVectorsPerLane; ++v) {
    const uint64_t word = 2 * static_cast<uint64_t>(lane + v * simt::kWarpSize);
    keys.words[v] = {DigestKey(word), DigestKey(word + 1)};
  }
  const int64_t warps = static_cast<int64_t>(gridDim.x) * kWarps;
  int64_t tile = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / simt::kWarpSize;
  for (int64_t i = 0; i < num_items; ++i) {
    const int64_t bytes = items[i].bytes;
    const int64_t tiles = (DigestBlocks(bytes) + kBlocksPerTile - 1) / kBlocksPerTile;
    if (tile >= tiles) {
      tile -= tiles;
      continue;
    }
    const auto* data = simt::Global(static_cast<const unsigned char*>(items[i].data));
    const int64_t first_block = items[i].first_block;
    const bool is_aligned = simt::IsVectorAligned(data);
    unsigned long long digest = 0;
    for (; tile < tiles; tile += warps) {
      const int64_t first = tile * kBlocksPerTile;
      const int64_t offset = first * kDigestBlock + lane * kVectorBytes;
      LaneSums sums;
      if (is_aligned && (first + kBlocksPerTile) * kDigestBlock <= bytes) {
        SumWholeTile(data + offset, keys, &sums);
      } else {
        SumAnyTile(data + offset, bytes - offset, keys, &sums);
      }
      digest += DigestOfLaneBlock(sums, lane, first_block, first, bytes);
    }
    tile -= tiles;
    digest = simt::WarpReduce(digest, simt::Add{});
    if (lane == 0) atomicAdd(&digests[i], digest);
  }
}

}  // namespace

Status Digest(const DigestItem* items, int64_t num_items, uint64_t* digests,
              const Execution& execution) {
  if (num_items < 0) {
    return InvalidArgument("num_items: want at least 0, got %lld",
                           static_cast<long long>(num_items));
  }
  if (num_items == 0) return OkStatus();
  const auto clear_grid = static_cast<unsigned>((num_items + kThreads - 1) / kThreads);
  SIMT_LAUNCH((DigestClearKernel), clear_grid, kThreads, 0, execution.stream, digests, num_items);
  SIMT_LAUNCH((DigestKernel), kGrid, kThreads, 0, execution.stream, items, num_items,
              reinterpret_cast<unsigned long long*>(digests));
  return OkStatus();
}

}  // namespace tandem::cuda
