// How kernel files walk a row of logits: a block takes tiles of kTileGroups vectors per thread, all
// of whose loads are in flight at once.
//
// Which thread sees which element is a matter of the columns alone. A row whose address or length
// is no multiple of 16 bytes is read element by element (the caches make vectors of it again), in
// the same order: a view has the bits of its contiguous copy.
#pragma once

#include <cstdint>

#include "csrc/common/scalar_types.h"
#include "csrc/common/simt.h"

namespace tandem {

inline constexpr int kRowThreads = 256;
// 64 bytes in flight per thread, 16 KB per block.
inline constexpr int kTileGroups = 4;

// Columns are counted in int, rows and offsets in int64_t. The room up to 2^31 is for ends of
// tiles.
inline constexpr int64_t kMaxColumns = int64_t{1} << 30;

inline constexpr float kLowestFloat = -3.402823466e+38f;
inline constexpr uint32_t kMinusInfinityBits = 0xFF800000u;

SIMT_HD inline float MinusInfinity() { return BitCast<float>(kMinusInfinityBits); }

template <typename T>
struct Tile {
  static constexpr int kLanes = simt::Vector<T>::kLanes;
  static constexpr int kElements = kTileGroups * kLanes;    // per thread
  static constexpr int kColumns = kRowThreads * kElements;  // per block
  simt::Vector<T> groups[kTileGroups];
};

// Column of this thread's first element in a group of the tile that starts at `tile_start`.
template <typename T>
SIMT_DEVICE int GroupColumn(int tile_start, int group) {
  const int thread = static_cast<int>(threadIdx.x);
  return tile_start + (group * kRowThreads + thread) * Tile<T>::kLanes;
}

// Columns from `end` on read as -inf, which adds nothing to any sum.
template <typename T>
SIMT_DEVICE simt::Vector<T> LoadGroup(const T* row, int column, int end, bool is_aligned) {
  if (is_aligned && column + Tile<T>::kLanes <= end) return simt::LoadVector(row + column);
  simt::Vector<T> group;
  SIMT_UNROLL
  for (int lane = 0; lane < Tile<T>::kLanes; ++lane) {
    group.lanes[lane] = column + lane < end ? row[column + lane] : simt::Narrow<T>(MinusInfinity());
  }
  return group;
}

// Of a vector or half of one.
template <typename Packed, typename T>
SIMT_DEVICE void StoreGroup(const Packed& group, int column, int end, bool is_aligned, T* row) {
  if (is_aligned && column + Packed::kLanes <= end) return simt::StoreVector(group, row + column);
  SIMT_UNROLL
  for (int lane = 0; lane < Packed::kLanes; ++lane) {
    if (column + lane < end) row[column + lane] = group.lanes[lane];
  }
}

// A tile of whole vectors.
template <typename T>
SIMT_DEVICE Tile<T> LoadTile(const T* row, int start) {
  Tile<T> tile;
  SIMT_UNROLL
  for (int group = 0; group < kTileGroups; ++group) {
    tile.groups[group] = simt::LoadVector(row + GroupColumn<T>(start, group));
  }
  return tile;
}

// Any tile; columns from `end` on as in LoadGroup.
template <typename T>
SIMT_DEVICE Tile<T> LoadTile(const T* row, int start, int end, bool is_aligned) {
  if (is_aligned && start + Tile<T>::kColumns <= end) return LoadTile(row, start);
  Tile<T> tile;
  SIMT_UNROLL
  for (int group = 0; group < kTileGroups; ++group) {
    tile.groups[group] = LoadGroup(row, GroupColumn<T>(start, group), end, is_aligned);
  }
  return tile;
}

}  // namespace tandem
