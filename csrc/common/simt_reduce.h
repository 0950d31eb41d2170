// Reductions over a warp or a block for kernel files, each in one fixed order: same values, same
// bits, on every run. `op(a, b)` must be commutative to the bit, as + and max are.
//
//   SIMT_SHARED(float, scratch, simt::kMaxWarps);
//   const float sum = simt::BlockReduce(value, simt::Add{}, scratch);   // in every thread
#pragma once

#include "csrc/common/simt.h"
#include "csrc/common/simt_qualifiers.h"

namespace simt {

inline constexpr int kWarpSize = 32;
inline constexpr int kMaxWarps = 32;
inline constexpr unsigned kFullMask = 0xFFFFFFFFu;

struct Add {
  template <typename T>
  SIMT_DEVICE T operator()(T a, T b) const {
    return a + b;
  }
};

// Of a NaN and a number: the number, as fmaxf has it.
struct Max {
  template <typename T>
  SIMT_DEVICE T operator()(T a, T b) const {
    return a < b || a != a ? b : a;
  }
  SIMT_DEVICE float operator()(float a, float b) const { return fmaxf(a, b); }
};

// Every lane gets the result; all 32 lanes of the warp must come here.
template <typename T, typename Op>
SIMT_DEVICE T WarpReduce(T value, Op op) {
  SIMT_UNROLL
  for (int offset = kWarpSize / 2; offset > 0; offset /= 2) {
    value = op(value, __shfl_xor_sync(kFullMask, value, offset));
  }
  return value;
}

// Every thread gets the result; all threads of the block must come here, and blocks are
// one-dimensional and of whole warps. `scratch` is shared memory of one T per warp. Before it is
// written again, a barrier must follow: two reductions in turn take two arrays, and each one's
// barrier serves the other.
template <typename T, typename Op>
SIMT_DEVICE T BlockReduce(T value, Op op, T* scratch) {
  value = WarpReduce(value, op);
  if (threadIdx.x % kWarpSize == 0) scratch[threadIdx.x / kWarpSize] = value;
  __syncthreads();
  T result = scratch[0];
  const int warps = static_cast<int>(blockDim.x) / kWarpSize;
  for (int warp = 1; warp < warps; ++warp) result = op(result, scratch[warp]);
  return result;
}

}  // namespace simt
