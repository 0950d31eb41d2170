#include "csrc/common/simt.h"
#include "csrc/testing/emulator_kernels.h"

namespace tandem::testing {
namespace {

constexpr unsigned kAll = 0xFFFFFFFFu;
constexpr int kWarp = 32;
constexpr int kMaxThreads = 1024;

SIMT_KERNEL(kMaxThreads) IndicesKernel(int64_t* threads, int64_t* blocks) {
  const int64_t block =
      (static_cast<int64_t>(blockIdx.z) * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
  const int64_t thread =
      (static_cast<int64_t>(threadIdx.z) * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
  const int64_t volume = static_cast<int64_t>(blockDim.x) * blockDim.y * blockDim.z;
  threads[block * volume + thread] = thread;
  blocks[block * volume + thread] = block;
}

SIMT_KERNEL(kMaxThreads) ShufflesKernel(uint32_t mask, int width, int* out) {
  const int i = static_cast<int>(threadIdx.x);
  const int lane = i % kWarp;
  const int n = static_cast<int>(blockDim.x);
  if ((mask >> lane & 1) == 0) return;
  const int value = 100 + i;
  out[i] = __shfl_sync(mask, value, 3, width);
  out[n + i] = __shfl_sync(mask, value, lane + 1, width);
  out[2 * n + i] = __shfl_xor_sync(mask, value, 1, width);
  out[3 * n + i] = __shfl_xor_sync(mask, value, width / 2, width);
  out[4 * n + i] = __shfl_down_sync(mask, value, 1, width);
  out[5 * n + i] = __shfl_down_sync(mask, value, 5, width);
  out[6 * n + i] = __shfl_up_sync(mask, value, 1, width);
  out[7 * n + i] = __shfl_up_sync(mask, value, 5, width);
}

SIMT_KERNEL(kMaxThreads) VotesKernel(uint32_t mask, uint32_t* out) {
  const int i = static_cast<int>(threadIdx.x);
  const int lane = i % kWarp;
  const int n = static_cast<int>(blockDim.x);
  if ((mask >> lane & 1) == 0) return;
  out[i] = __ballot_sync(mask, lane % 3 == 0);
  out[n + i] = static_cast<uint32_t>(__any_sync(mask, lane == 31));
  out[2 * n + i] = static_cast<uint32_t>(__all_sync(mask, lane < 31));
  __syncwarp(mask);
  out[3 * n + i] = __activemask();
}

SIMT_KERNEL(kWarp) HalvesKernel(uint32_t* out) {
  const int lane = static_cast<int>(threadIdx.x);
  if (lane < 16) {
    out[lane] = __ballot_sync(0x0000FFFFu, lane % 2);
  } else {
    out[lane] = __ballot_sync(0xFFFF0000u, lane % 2);
  }
}

SIMT_KERNEL(kWarp) DoublesKernel(double* out) {
  const double value = 1.0 / (1.0 + threadIdx.x);
  out[threadIdx.x] = __shfl_xor_sync(kAll, value, 31);
}

SIMT_KERNEL(kMaxThreads) AtomicsKernel(int32_t* signed_out, uint32_t* out) {
  SIMT_SHARED(uint32_t, histogram, 4);
  const uint32_t i = threadIdx.x;
  if (i < 4) histogram[i] = 0;
  __syncthreads();
  atomicAdd(&histogram[i % 4], i);
  __syncthreads();
  if (i < 4) out[i] = histogram[i];
  atomicAdd(&signed_out[0], -1);
  atomicMax(&signed_out[1], static_cast<int>(i) - 7);
  atomicMin(&signed_out[2], 7 - static_cast<int>(i));
  atomicAdd(&out[4], 0x80000000u);
  atomicOr(&out[5], 1u << i % 32);
  uint32_t seen = out[6];
  while (true) {
    const uint32_t old = atomicCAS(&out[6], seen, seen + 2);
    if (old == seen) break;
    seen = old;
  }
}

SIMT_KERNEL(kMaxThreads)
NestedBarriersKernel(int rounds, const float* x, int64_t n, float* out) {
  SIMT_SHARED(float, partial, kWarp);
  SIMT_DYNAMIC_SHARED(float, tile);
  const int i = static_cast<int>(threadIdx.x);
  const int threads = static_cast<int>(blockDim.x);
  float total = 0.0f;
  for (int round = 0; round < rounds; ++round) {
    float sum = 0.0f;
    for (int64_t j = i; j < n; j += threads) sum += x[j];
    tile[i] = sum;
    for (int half = threads / 2; half > 0; half /= 2) {
      __syncthreads();
      if (i < half) tile[i] += tile[i + half];
    }
    if (i == 0) partial[0] = tile[0];
    __syncthreads();
    total += partial[0];
    __syncthreads();
  }
  if (i == threads - 1) out[blockIdx.x] = total * static_cast<float>(blockIdx.x + 1);
}

SIMT_KERNEL(kMaxThreads) WarpPrefixKernel(int* out) {
  SIMT_SHARED(int, values, kMaxThreads);
  const int i = static_cast<int>(threadIdx.x);
  values[i] = i;
  for (int step = 1; step < kWarp; step *= 2) {
    __syncwarp();
    const int left = i % kWarp >= step ? values[i - step] : 0;
    __syncwarp();
    values[i] += left;
  }
  out[i] = values[i];
}

// Lane 0 writes; its half sees that after the half's barrier, the other half after one more, of two
// lanes that stand for their halves, and its own.
SIMT_KERNEL(kWarp) HalvesThenWarpKernel(int* out) {
  SIMT_SHARED(int, value, 1);
  const int lane = static_cast<int>(threadIdx.x);
  const bool is_low = lane < 16;
  if (lane == 0) value[0] = 7;
  if (is_low) {
    __syncwarp(0x0000FFFFu);
    out[lane] = value[0];
  }
  if (lane == 15 || lane == 16) __syncwarp(0x00018000u);
  if (!is_low) {
    __syncwarp(0xFFFF0000u);
    out[lane] = value[0];
  }
  __syncwarp();
  if (lane == 31) value[0] = 8;
}

// The barrier of a half orders what its lanes have read before what one of them writes.
SIMT_KERNEL(kWarp) HalfAfterReadsKernel(int* out) {
  SIMT_SHARED(int, value, 1);
  const int lane = static_cast<int>(threadIdx.x);
  if (lane == 0) value[0] = 3;
  __syncwarp();
  if (lane >= 16) return;
  out[lane] = value[0];
  __syncwarp(0x0000FFFFu);
  if (lane == 5) value[0] = 4;
  __syncwarp(0x0000FFFFu);
  out[lane] += value[0];
}

template <typename T>
SIMT_KERNEL(kWarp)
TypeKernel(T* out) {
  SIMT_SHARED(T, values, kWarp);
  values[threadIdx.x] = static_cast<T>(threadIdx.x) / 3;
  __syncthreads();
  out[threadIdx.x] = values[kWarp - 1 - threadIdx.x];
}

dim3 Dim(const int (&sizes)[3]) {
  return dim3(static_cast<unsigned>(sizes[0]), static_cast<unsigned>(sizes[1]),
              static_cast<unsigned>(sizes[2]));
}

}  // namespace

Status WriteIndices(const Shape& shape, int64_t* threads, int64_t* blocks) {
  SIMT_LAUNCH(IndicesKernel, Dim(shape.blocks), Dim(shape.threads), shape.shared_bytes, nullptr,
              threads, blocks);
  return OkStatus();
}

Status Shuffles(int threads, uint32_t mask, int width, int* out) {
  SIMT_LAUNCH(ShufflesKernel, 1, threads, 0, nullptr, mask, width, out);
  return OkStatus();
}

Status Votes(int threads, uint32_t mask, uint32_t* out) {
  SIMT_LAUNCH(VotesKernel, 1, threads, 0, nullptr, mask, out);
  return OkStatus();
}

Status Halves(uint32_t* out) {
  SIMT_LAUNCH(HalvesKernel, 1, kWarp, 0, nullptr, out);
  return OkStatus();
}

Status Doubles(double* out) {
  SIMT_LAUNCH(DoublesKernel, 1, kWarp, 0, nullptr, out);
  return OkStatus();
}

Status Atomics(int threads, int32_t* signed_out, uint32_t* out) {
  SIMT_LAUNCH(AtomicsKernel, 1, threads, 0, nullptr, signed_out, out);
  return OkStatus();
}

Status NestedBarriers(int blocks, int threads, int rounds, const float* x, int64_t n, float* out) {
  SIMT_LAUNCH(NestedBarriersKernel, blocks, threads, threads * sizeof(float), nullptr, rounds, x, n,
              out);
  return OkStatus();
}

Status HalvesThenWarp(int* out) {
  SIMT_LAUNCH(HalvesThenWarpKernel, 1, kWarp, 0, nullptr, out);
  return OkStatus();
}

Status HalfAfterReads(int* out) {
  SIMT_LAUNCH(HalfAfterReadsKernel, 1, kWarp, 0, nullptr, out);
  return OkStatus();
}

Status WarpPrefix(int warps, int* out) {
  SIMT_LAUNCH(WarpPrefixKernel, 1, warps * kWarp, 0, nullptr, out);
  return OkStatus();
}

Status TwoTypes(float* floats, double* doubles) {
  SIMT_LAUNCH((TypeKernel<float>), 1, kWarp, 0, nullptr, floats);
  SIMT_LAUNCH((TypeKernel<double>), 1, kWarp, 0, nullptr, doubles);
  return OkStatus();
}

}  // namespace tandem::testing
