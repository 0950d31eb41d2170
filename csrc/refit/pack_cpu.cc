// Bucket copy and float8 quantisation on the CPU. Threads take ranges of tiles (blocks); the loops
// over elements are plain code that the compiler vectorises for each instruction set.
#include <algorithm>
#include <cstring>

#include "csrc/common/multiarch.h"
#include "csrc/common/scalar_types.h"
#include "csrc/refit/fp8.h"
#include "csrc/refit/pack.h"

namespace tandem::cpu {
namespace {

// Fewest tiles that are worth a thread: 64 k elements.
constexpr int64_t kGrainTiles = 8;

// Tensors in a bucket may stand at any byte, so elements are moved as bytes; on this processor that
// is a plain load or store.
template <typename From, typename To>
TANDEM_INLINE void CastElements(const unsigned char* __restrict source,
                                unsigned char* __restrict target, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    From from;
    To to;
    std::memcpy(&from, source + i * static_cast<int64_t>(sizeof(From)), sizeof(From));
    StoreFloat(ToFloat(from), &to);
    std::memcpy(target + i * static_cast<int64_t>(sizeof(To)), &to, sizeof(To));
  }
}

template <typename From>
TANDEM_INLINE void CastFrom(const unsigned char* source, unsigned char* target, int64_t count,
                            DType target_dtype) {
  switch (target_dtype) {
    case DType::kFloat32:
      return CastElements<From, float>(source, target, count);
    case DType::kBFloat16:
      return CastElements<From, BFloat16>(source, target, count);
    case DType::kFloat16:
      return CastElements<From, Float16>(source, target, count);
  }
}

TANDEM_MULTIARCH void Cast(const unsigned char* source, unsigned char* target, int64_t count,
                           DType source_dtype, DType target_dtype) {
  switch (source_dtype) {
    case DType::kFloat32:
      return CastFrom<float>(source, target, count, target_dtype);
    case DType::kBFloat16:
      return CastFrom<BFloat16>(source, target, count, target_dtype);
    case DType::kFloat16:
      return CastFrom<Float16>(source, target, count, target_dtype);
  }
}

void CopyElements(const CopyItem& item, int64_t begin, int64_t end) {
  const int64_t source_size = SizeOf(item.source_dtype);
  const auto* source = static_cast<const unsigned char*>(item.source) + begin * source_size;
  auto* target = static_cast<unsigned char*>(item.target) + begin * SizeOf(item.target_dtype);
  if (item.source_dtype == item.target_dtype) {
    std::memcpy(target, source, static_cast<size_t>((end - begin) * source_size));
  } else {
    Cast(source, target, end - begin, item.source_dtype, item.target_dtype);
  }
}

// Neighbouring tiles of one item are copied in one go.
void CopyTiles(const CopyItem* items, const int64_t* tile_prefix, int64_t num_items, int64_t begin,
               int64_t end) {
  // The last item that starts at or before `begin`: those without tiles are skipped.
  int64_t i = std::upper_bound(tile_prefix, tile_prefix + num_items + 1, begin) - tile_prefix - 1;
  for (; begin < end; ++i) {
    const int64_t stop = std::min(end, tile_prefix[i + 1]);
    if (stop <= begin) continue;
    const int64_t first = begin - tile_prefix[i];
    const int64_t last = stop - tile_prefix[i];
    CopyElements(items[i], first * kTileElements, std::min(items[i].numel, last * kTileElements));
    begin = stop;
  }
}

Status CheckBucket(const CopyItem* items, const int64_t* tile_prefix, int64_t num_items,
                   int64_t num_tiles) {
  if (num_items < 0) {
    return InvalidArgument("num_items: want at least 0, got %lld",
                           static_cast<long long>(num_items));
  }
  if (tile_prefix == nullptr || tile_prefix[0] != 0) {
    return InvalidArgument("tile_prefix: want [num_items + 1] that starts with 0");
  }
  for (int64_t i = 0; i < num_items; ++i) {
    const CopyItem& item = items[i];
    const int64_t tiles = tile_prefix[i + 1] - tile_prefix[i];
    if (item.numel < 0 || tiles != (item.numel + kTileElements - 1) / kTileElements) {
      return InvalidArgument("items[%lld]: %lld elements do not make the %lld tiles of tile_prefix",
                             static_cast<long long>(i), static_cast<long long>(item.numel),
                             static_cast<long long>(tiles));
    }
    if (item.numel > 0 && (item.source == nullptr || item.target == nullptr)) {
      return InvalidArgument("items[%lld]: source or target is null", static_cast<long long>(i));
    }
  }
  if (tile_prefix[num_items] != num_tiles) {
    return InvalidArgument("num_tiles: want the last of tile_prefix, %lld, got %lld",
                           static_cast<long long>(tile_prefix[num_items]),
                           static_cast<long long>(num_tiles));
  }
  return OkStatus();
}

// The elements of one block of a matrix, and where its values and its scale go.
struct Block {
  const void* source;
  int64_t source_stride;
  uint8_t* target;
  int64_t target_stride;
  int64_t rows;
  int64_t cols;
  float* scale;
};

template <typename T>
TANDEM_INLINE uint32_t LargestMagnitude(const T* row, int64_t count) {
  uint32_t largest = 0;
  for (int64_t j = 0; j < count; ++j) {
    const uint32_t magnitude = MagnitudeBits(ToFloat(row[j]));
    largest = largest > magnitude ? largest : magnitude;
  }
  return largest;
}

template <typename T>
TANDEM_INLINE void QuantizeRow(const T* __restrict row, float inverse, uint8_t* __restrict out,
                               int64_t count) {
  for (int64_t j = 0; j < count; ++j) out[j] = ToFp8E4M3(ToFloat(row[j]) * inverse);
}

template <typename T>
TANDEM_INLINE void QuantizeBlockOf(const Block& block) {
  const T* source = static_cast<const T*>(block.source);
  uint32_t amax = 0;
  for (int64_t i = 0; i < block.rows; ++i) {
    amax = std::max(amax, LargestMagnitude(source + i * block.source_stride, block.cols));
  }
  const Fp8Scale scale = Fp8ScaleOf(amax);
  for (int64_t i = 0; i < block.rows; ++i) {
    QuantizeRow(source + i * block.source_stride, scale.inverse,
                block.target + i * block.target_stride, block.cols);
  }
  *block.scale = scale.scale;
}

TANDEM_MULTIARCH void QuantizeBlock(const Block& block, DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return QuantizeBlockOf<float>(block);
    case DType::kBFloat16:
      return QuantizeBlockOf<BFloat16>(block);
    case DType::kFloat16:
      return QuantizeBlockOf<Float16>(block);
  }
}

}  // namespace

Status BucketCopy(const CopyItem* items, const int64_t* tile_prefix, int64_t num_items,
                  int64_t num_tiles, const Execution& execution) {
  const Status status = CheckBucket(items, tile_prefix, num_items, num_tiles);
  if (!status.ok()) return status;
  RunParallel(execution.parallel, num_tiles, kGrainTiles, [&](int64_t begin, int64_t end) {
    CopyTiles(items, tile_prefix, num_items, begin, end);
  });
  return OkStatus();
}

Status QuantizeFp8(const Fp8Item& item, const Execution& execution) {
  const ConstMatrixView& source = item.source;
  const int64_t block_cols = (source.cols + kFp8Block - 1) / kFp8Block;
  const int64_t block_rows = (source.rows + kFp8Block - 1) / kFp8Block;
  RunParallel(execution.parallel, block_rows * block_cols, 1, [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) {
      const int64_t row = b / block_cols * kFp8Block;
      const int64_t col = b % block_cols * kFp8Block;
      const int64_t offset = (row * source.row_stride + col) * SizeOf(source.dtype);
      QuantizeBlock({static_cast<const unsigned char*>(source.data) + offset, source.row_stride,
                     item.target + row * source.cols + col, source.cols,
                     std::min(kFp8Block, source.rows - row), std::min(kFp8Block, source.cols - col),
                     item.scales + b},
                    source.dtype);
    }
  });
  return OkStatus();
}

}  // namespace tandem::cpu
