// CUDA kernel of row_max.h.
#include <cuda_runtime.h>

#include <cstdint>
#include <limits>

#include "csrc/common/cuda_check.h"
#include "csrc/loss/row_max.h"

namespace tandem {
namespace {

constexpr int kWarp = 32;
constexpr int kThreads = 256;

struct BFloat16 {
  uint16_t bits;
};

__device__ float ToFloat(float x) { return x; }
__device__ float ToFloat(BFloat16 x) {
  return __uint_as_float(static_cast<uint32_t>(x.bits) << 16);
}

__device__ float WarpMax(float value) {
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
    value = fmaxf(value, __shfl_xor_sync(0xFFFFFFFFu, value, offset));
  }
  return value;
}

// One block of kThreads per row. No alignment is assumed.
template <typename T>
__global__ void RowMaxKernel(const T* __restrict__ logits, int64_t cols, int64_t row_stride,
                             float lowest, float* __restrict__ row_max) {
  __shared__ float warp_max[kThreads / kWarp];
  const T* row = logits + static_cast<int64_t>(blockIdx.x) * row_stride;
  float best = lowest;
  for (int64_t j = threadIdx.x; j < cols; j += kThreads) best = fmaxf(best, ToFloat(row[j]));
  best = WarpMax(best);
  if (threadIdx.x % kWarp == 0) warp_max[threadIdx.x / kWarp] = best;
  __syncthreads();
  if (threadIdx.x >= kWarp) return;
  best = WarpMax(threadIdx.x < kThreads / kWarp ? warp_max[threadIdx.x] : lowest);
  if (threadIdx.x == 0) row_max[blockIdx.x] = best;
}

template <typename T>
Status Launch(const ConstMatrixView& logits, float* row_max, Stream stream) {
  RowMaxKernel<T>
      <<<static_cast<unsigned>(logits.rows), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(
          static_cast<const T*>(logits.data), logits.cols, logits.row_stride,
          -std::numeric_limits<float>::infinity(), row_max);
  TANDEM_RETURN_IF_CUDA_ERROR(cudaGetLastError());
  return OkStatus();
}

}  // namespace

Status RowMaxCuda(const ConstMatrixView& logits, float* row_max, Stream stream) {
  // The grid's first dimension ends at 2^31 - 1.
  if (logits.rows < 0 || logits.rows > std::numeric_limits<int32_t>::max() || logits.cols < 0) {
    return InvalidArgument("logits: want [N, V] with 0 <= N < 2^31, got [%lld, %lld]",
                           static_cast<long long>(logits.rows),
                           static_cast<long long>(logits.cols));
  }
  if (logits.rows == 0) return OkStatus();
  return logits.dtype == DType::kFloat32 ? Launch<float>(logits, row_max, stream)
                                         : Launch<BFloat16>(logits, row_max, stream);
}

}  // namespace tandem
