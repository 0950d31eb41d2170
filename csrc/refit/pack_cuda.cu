// Bucket copy and float8 quantisation on CUDA.
//
// Copy: one block per tile, so the grid is as wide as the bucket is long, whatever the number of
// items. A block looks its item up in the prefix (a binary search that stays in the L1 cache), then
// moves 16 bytes per access where source and target reach a 16-byte boundary together, one element
// per access where they do not, and single bytes where not even elements are aligned.
//
// Quantisation: one block per 128 x 128 block, which stays in registers between its amax and its
// values.
#include <cstring>

#include "csrc/common/scalar_types.h"
#include "csrc/common/simt.h"
#include "csrc/common/simt_reduce.h"
#include "csrc/refit/fp8.h"
#include "csrc/refit/pack.h"
#include "csrc/refit/simt_global.h"

namespace tandem::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kMaxGrid = 0x7FFFFFFF;

// kCount adjacent elements in registers, moved by 16 bytes.
template <typename T, int kCount>
struct Group {
  static constexpr int kLanes = simt::Vector<T>::kLanes;
  simt::Vector<T> parts[kCount / kLanes];

  SIMT_DEVICE T& operator[](int k) { return parts[k / kLanes].lanes[k % kLanes]; }
  SIMT_DEVICE void Load(const T* source) {
    SIMT_UNROLL
    for (int i = 0; i < kCount / kLanes; ++i) parts[i] = simt::LoadVector(source + i * kLanes);
  }
  SIMT_DEVICE void Store(T* target) const {
    SIMT_UNROLL
    for (int i = 0; i < kCount / kLanes; ++i) simt::StoreVector(parts[i], target + i * kLanes);
  }
};

// ---- Bucket copy ----

template <typename From, typename To>
SIMT_DEVICE To Convert(From from) {
  return simt::Narrow<To>(simt::Widen(from));
}
// Bits of one width: a copy.
template <>
SIMT_DEVICE uint32_t Convert<uint32_t, uint32_t>(uint32_t from) {
  return from;
}
template <>
SIMT_DEVICE uint16_t Convert<uint16_t, uint16_t>(uint16_t from) {
  return from;
}

// The item of a tile: the last one that starts at or before it.
SIMT_DEVICE int64_t FindItem(const int64_t* tile_prefix, int64_t num_items, int64_t tile) {
  int64_t low = 0;
  int64_t high = num_items;
  while (high - low > 1) {
    const int64_t middle = low + (high - low) / 2;
    if (tile_prefix[middle] <= tile) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

SIMT_DEVICE bool IsAligned(const void* pointer, uint64_t bytes) {
  return reinterpret_cast<uintptr_t>(pointer) % bytes == 0;
}

// Elements before the first at which both sides are aligned to 16 bytes; -1 if there is none.
template <typename From, typename To>
SIMT_DEVICE int HeadElements(const unsigned char* source, const unsigned char* target) {
  for (int head = 0; head < 8; ++head) {
    if (simt::IsVectorAligned(source + head * sizeof(From)) &&
        simt::IsVectorAligned(target + head * sizeof(To))) {
      return head;
    }
  }
  return -1;
}

template <typename From, typename To>
SIMT_DEVICE void CopyScalars(const From* source, To* target, int count) {
  for (int i = static_cast<int>(threadIdx.x); i < count; i += kThreads) {
    target[i] = Convert<From, To>(source[i]);
  }
}

template <typename From, typename To>
SIMT_DEVICE void CopyBytewise(const unsigned char* source, unsigned char* target, int count) {
  for (int i = static_cast<int>(threadIdx.x); i < count; i += kThreads) {
    From from;
    std::memcpy(&from, source + i * sizeof(From), sizeof(From));
    const To to = Convert<From, To>(from);
    std::memcpy(target + i * sizeof(To), &to, sizeof(To));
  }
}

// `groups` groups of elements that fill 16 bytes on the narrower side; several loads are in flight
// before the first use.
template <typename From, typename To, int kCount>
SIMT_DEVICE void CopyGroups(const From* source, To* target, int groups) {
  constexpr int kUnroll = 4;
  for (int base = static_cast<int>(threadIdx.x); base < groups; base += kUnroll * kThreads) {
    Group<From, kCount> loaded[kUnroll];
    SIMT_UNROLL
    for (int u = 0; u < kUnroll; ++u) {
      const int group = base + u * kThreads;
      if (group < groups) loaded[u].Load(source + group * kCount);
    }
    SIMT_UNROLL
    for (int u = 0; u < kUnroll; ++u) {
      const int group = base + u * kThreads;
      if (group >= groups) continue;
      Group<To, kCount> converted;
      SIMT_UNROLL
      for (int k = 0; k < kCount; ++k) converted[k] = Convert<From, To>(loaded[u][k]);
      converted.Store(target + group * kCount);
    }
  }
}

template <typename From, typename To>
SIMT_DEVICE void CopyTile(const CopyItem& item, int64_t start, int count) {
  constexpr int kNarrow = sizeof(From) < sizeof(To) ? sizeof(From) : sizeof(To);
  constexpr int kCount = simt::kVectorBytes / kNarrow;
  const auto* source_bytes = simt::Global(static_cast<const unsigned char*>(item.source)) +
                             start * static_cast<int64_t>(sizeof(From));
  auto* target_bytes = simt::Global(static_cast<unsigned char*>(item.target)) +
                       start * static_cast<int64_t>(sizeof(To));
  if (!IsAligned(source_bytes, sizeof(From)) || !IsAligned(target_bytes, sizeof(To))) {
    CopyBytewise<From, To>(source_bytes, target_bytes, count);
    return;
  }
  const auto* source = reinterpret_cast<const From*>(source_bytes);
  auto* target = reinterpret_cast<To*>(target_bytes);
  const int head = HeadElements<From, To>(source_bytes, target_bytes);
  const int groups = head < 0 || head > count ? 0 : (count - head) / kCount;
  if (groups == 0) {
    CopyScalars(source, target, count);
    return;
  }
  const int tail = head + groups * kCount;
  CopyScalars(source, target, head);
  CopyGroups<From, To, kCount>(source + head, target + head, groups);
  CopyScalars(source + tail, target + tail, count - tail);
}

template <typename From>
SIMT_DEVICE void CastTile(const CopyItem& item, int64_t start, int count) {
  switch (item.target_dtype) {
    case DType::kFloat32:
      return CopyTile<From, float>(item, start, count);
    case DType::kBFloat16:
      return CopyTile<From, BFloat16>(item, start, count);
    case DType::kFloat16:
      return CopyTile<From, Float16>(item, start, count);
  }
}

SIMT_KERNEL(kThreads)
BucketCopyKernel(const CopyItem* items, const int64_t* tile_prefix, int64_t num_items) {
  const int64_t tile = blockIdx.x;
  const int64_t index = FindItem(tile_prefix, num_items, tile);
  const CopyItem item = items[index];
  const int64_t start = (tile - tile_prefix[index]) * kTileElements;
  const int64_t left = item.numel - start;
  const int count = static_cast<int>(left < kTileElements ? left : kTileElements);
  if (item.source_dtype == item.target_dtype) {
    const bool is_wide = item.source_dtype == DType::kFloat32;
    return is_wide ? CopyTile<uint32_t, uint32_t>(item, start, count)
                   : CopyTile<uint16_t, uint16_t>(item, start, count);
  }
  switch (item.source_dtype) {
    case DType::kFloat32:
      return CastTile<float>(item, start, count);
    case DType::kBFloat16:
      return CastTile<BFloat16>(item, start, count);
    case DType::kFloat16:
      return CastTile<Float16>(item, start, count);
  }
}

// ---- float8 ----

// A thread owns 8 adjacent columns of every 16th row of its block.
constexpr int kColsPerThread = 8;
constexpr int kThreadsPerRow = kFp8Block / kColsPerThread;
constexpr int kRowStep = kThreads / kThreadsPerRow;
constexpr int kRowsPerThread = kFp8Block / kRowStep;
constexpr int kWarps = kThreads / simt::kWarpSize;

template <typename T>
SIMT_DEVICE void LoadColumns(const T* source, int64_t cols, bool is_vector, float* values) {
  if (is_vector) {
    Group<T, kColsPerThread> loaded;
    loaded.Load(source);
    SIMT_UNROLL
    for (int k = 0; k < kColsPerThread; ++k) values[k] = simt::Widen(loaded[k]);
    return;
  }
  SIMT_UNROLL
  for (int k = 0; k < kColsPerThread; ++k) values[k] = k < cols ? simt::Widen(source[k]) : 0.0f;
}

SIMT_DEVICE void StoreColumns(const float* values, float inverse, int64_t cols, bool is_vector,
                              uint8_t* target) {
  struct alignas(kColsPerThread) Codes {
    uint16_t pairs[kColsPerThread / 2];
  } codes;
  SIMT_UNROLL
  for (int k = 0; k < kColsPerThread; k += 2) {
    codes.pairs[k / 2] = ToFp8E4M3Pair(values[k] * inverse, values[k + 1] * inverse);
  }
  if (is_vector) {
    *reinterpret_cast<Codes*>(target) = codes;
    return;
  }
  SIMT_UNROLL
  for (int k = 0; k < kColsPerThread; ++k) {
    if (k < cols) target[k] = static_cast<uint8_t>(codes.pairs[k / 2] >> (k % 2 * 8));
  }
}

template <typename T>
SIMT_KERNEL(kThreads)
QuantizeFp8Kernel(Fp8Item item, int64_t block_cols) {
  SIMT_SHARED(uint32_t, partial, kWarps);
  const ConstMatrixView& source = item.source;
  const int thread = static_cast<int>(threadIdx.x);
  const int64_t first_row = blockIdx.x / block_cols * kFp8Block + thread / kThreadsPerRow;
  const int64_t col =
      blockIdx.x % block_cols * kFp8Block + thread % kThreadsPerRow * kColsPerThread;
  const int64_t cols = source.cols - col;  // from here to the edge of the matrix
  const bool reads_vectors = cols >= kColsPerThread && simt::IsVectorAligned(source.data) &&
                             source.row_stride * sizeof(T) % simt::kVectorBytes == 0;
  const bool writes_vectors = cols >= kColsPerThread && IsAligned(item.target, kColsPerThread) &&
                              source.cols % kColsPerThread == 0;
  float values[kRowsPerThread][kColsPerThread];
  SIMT_UNROLL
  for (int i = 0; i < kRowsPerThread; ++i) {
    const int64_t row = first_row + i * kRowStep;
    const bool is_inside = row < source.rows && cols > 0;
    const int64_t offset = is_inside ? row * source.row_stride + col : 0;
    LoadColumns(static_cast<const T*>(source.data) + offset, is_inside ? cols : 0,
                is_inside && reads_vectors, values[i]);
  }
  uint32_t amax = 0;
  SIMT_UNROLL
  for (int i = 0; i < kRowsPerThread; ++i) {
    SIMT_UNROLL
    for (int k = 0; k < kColsPerThread; ++k) {
      const uint32_t magnitude = MagnitudeBits(values[i][k]);
      amax = amax > magnitude ? amax : magnitude;
    }
  }
  const Fp8Scale scale = Fp8ScaleOf(simt::BlockReduce(amax, simt::Max{}, partial));
  if (thread == 0) item.scales[blockIdx.x] = scale.scale;
  SIMT_UNROLL
  for (int i = 0; i < kRowsPerThread; ++i) {
    const int64_t row = first_row + i * kRowStep;
    if (row >= source.rows || cols <= 0) continue;
    StoreColumns(values[i], scale.inverse, cols, writes_vectors,
                 item.target + row * source.cols + col);
  }
}

template <typename T>
Status LaunchQuantize(const Fp8Item& item, int64_t blocks, int64_t block_cols, Stream stream) {
  SIMT_LAUNCH((QuantizeFp8Kernel<T>), static_cast<unsigned>(blocks), kThreads, 0, stream, item,
              block_cols);
  return OkStatus();
}

}  // namespace

Status BucketCopy(const CopyItem* items, const int64_t* tile_prefix, int64_t num_items,
                  int64_t num_tiles, const Execution& execution) {
  if (num_items < 0 || num_tiles < 0 || num_tiles > kMaxGrid) {
    return InvalidArgument("bucket: want items >= 0 and tiles in [0, 2^31), got %lld and %lld",
                           static_cast<long long>(num_items), static_cast<long long>(num_tiles));
  }
  if (num_tiles == 0) return OkStatus();
  SIMT_LAUNCH((BucketCopyKernel), static_cast<unsigned>(num_tiles), kThreads, 0, execution.stream,
              items, tile_prefix, num_items);
  return OkStatus();
}

Status QuantizeFp8(const Fp8Item& item, const Execution& execution) {
  const int64_t block_cols = (item.source.cols + kFp8Block - 1) / kFp8Block;
  const int64_t blocks = (item.source.rows + kFp8Block - 1) / kFp8Block * block_cols;
  if (blocks > kMaxGrid) {
    return InvalidArgument("source: want fewer than 2^31 blocks, got %lld",
                           static_cast<long long>(blocks));
  }
  if (blocks == 0) return OkStatus();
  switch (item.source.dtype) {
    case DType::kFloat32:
      return LaunchQuantize<float>(item, blocks, block_cols, execution.stream);
    case DType::kBFloat16:
      return LaunchQuantize<BFloat16>(item, blocks, block_cols, execution.stream);
    case DType::kFloat16:
      return LaunchQuantize<Float16>(item, blocks, block_cols, execution.stream);
  }
  return OkStatus();
}

}  // namespace tandem::cuda
