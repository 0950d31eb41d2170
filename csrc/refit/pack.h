// Copies many tensors in one call, casting on the way: a bucket of weights is packed before it goes
// over the wire and unpacked after it, with one launch however many tensors it holds.
#pragma once

#include <cstdint>

#include "csrc/common/execution.h"
#include "csrc/common/status.h"
#include "csrc/common/tensor_view.h"

namespace tandem {

// numel elements from source to target, both dense. Equal dtypes copy bits (NaN payloads too);
// narrowing rounds to nearest even.
struct CopyItem {
  const void* source = nullptr;
  void* target = nullptr;
  int64_t numel = 0;
  DType source_dtype = DType::kFloat32;
  DType target_dtype = DType::kFloat32;
};

// Elements of one tile, the unit of work: item i has ceil(numel / kTileElements) tiles.
inline constexpr int64_t kTileElements = 8192;

// One matrix to float8 e4m3 with one float32 scale per 128 x 128 block: target * scale ~ source.
// amax is held away from 0, so that a block of zeros gives zeros and a finite scale.
struct Fp8Item {
  ConstMatrixView source;     // [rows, cols] float32 | bfloat16 | float16
  uint8_t* target = nullptr;  // [rows, cols] dense
  float* scales = nullptr;    // [ceil(rows / 128), ceil(cols / 128)] dense
};

inline constexpr int64_t kFp8Block = 128;

// items [num_items] and tile_prefix [num_items + 1] (tile_prefix[i] = tiles of the items before i)
// are in the memory of the backend.
namespace cpu {
Status BucketCopy(const CopyItem* items, const int64_t* tile_prefix, int64_t num_items,
                  int64_t num_tiles, const Execution& execution);
Status QuantizeFp8(const Fp8Item& item, const Execution& execution);
}  // namespace cpu

namespace cuda {
Status BucketCopy(const CopyItem* items, const int64_t* tile_prefix, int64_t num_items,
                  int64_t num_tiles, const Execution& execution);
Status QuantizeFp8(const Fp8Item& item, const Execution& execution);
}  // namespace cuda

}  // namespace tandem
