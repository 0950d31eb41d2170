// What a kernel file (*.cu) is written in: CUDA under nvcc, and the same source under a C++
// compiler with -DTANDEM_SIMT_EMULATOR, where csrc/testing runs it on the CPU and watches it.
//
//   template <typename T>
//   SIMT_KERNEL(kThreads) SumKernel(const T* x, int64_t n, float* out) {
//     SIMT_SHARED(float, partial, kWarps);            // __shared__ float partial[kWarps]
//     SIMT_DYNAMIC_SHARED(float, tile);               // extern __shared__ float tile[]
//     ...
//     __syncthreads();
//   }
//   SIMT_LAUNCH((SumKernel<T>), grid, block, shared_bytes, stream, x, n, out);
//
// Kernels may use: threadIdx, blockIdx, blockDim, gridDim, __syncthreads, __syncwarp,
// __shfl_sync / _xor_ / _down_ / _up_, __ballot_sync, __any_sync, __all_sync, __activemask,
// atomicAdd / atomicMax / atomicMin / atomicOr / atomicCAS on integers, float2, float4, uint2,
// uint4, and what namespace simt offers (Exp2; 16-byte vectors in simt_vector.h; reductions in
// simt_reduce.h). Anything else of CUDA's goes into a function of namespace simt with a
// plain body for the emulator. No `<<<` and no `__shared__` outside this file and csrc/testing.
#pragma once

#include "csrc/common/simt_qualifiers.h"

#ifdef TANDEM_SIMT_EMULATOR
#include "csrc/testing/simt_emulator.h"
#else

#include <cuda_runtime.h>

#include <cstdint>

#include "csrc/common/cuda_check.h"

#define SIMT_KERNEL(max_threads) __global__ void __launch_bounds__(max_threads)
#define SIMT_SHARED(type, name, count) __shared__ type name[count]
// One name for all types: CUDA refuses one extern array under two types.
#define SIMT_DYNAMIC_SHARED(type, name)                         \
  extern __shared__ __align__(16) unsigned char simt_dynamic[]; \
  type* name = reinterpret_cast<type*>(simt_dynamic)
// Returns a Status from the calling function when the launch fails.
#define SIMT_LAUNCH(kernel, grid, block, shared_bytes, stream, ...)                              \
  do {                                                                                           \
    kernel<<<(grid), (block), (shared_bytes), static_cast<cudaStream_t>(stream)>>>(__VA_ARGS__); \
    TANDEM_RETURN_IF_CUDA_ERROR(cudaGetLastError());                                             \
  } while (false)

namespace simt {

// 2^x, about 2 ulp; results below 2^-126 are 0.
__device__ inline float Exp2(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

}  // namespace simt

#endif

#include "csrc/common/simt_vector.h"
