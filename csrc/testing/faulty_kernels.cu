// One broken kernel per rule. Threads that break it come from the middle of the block.
#include "csrc/common/simt.h"
#include "csrc/testing/emulator_kernels.h"

namespace tandem::testing {
namespace {

constexpr unsigned kAll = 0xFFFFFFFFu;
constexpr int kThreads = 64;
constexpr int kOdd = 37;  // the thread that does something else

SIMT_KERNEL(kThreads) CorrectKernel(float* out) {
  SIMT_SHARED(float, values, kThreads);
  values[threadIdx.x] = 1.0f;
  __syncthreads();
  out[threadIdx.x] = values[kThreads - 1 - threadIdx.x];
}

SIMT_KERNEL(kThreads) BarrierNotReached(float* out) {
  if (threadIdx.x != kOdd) __syncthreads();
  out[threadIdx.x] = static_cast<float>(__ballot_sync(kAll, 1));
}

SIMT_KERNEL(kThreads) TwoBarriers(float* out) {
  if (threadIdx.x < kOdd) {
    __syncthreads();
  } else {
    __syncthreads();
  }
  out[threadIdx.x] = 1.0f;
}

SIMT_KERNEL(kThreads) LaneOutsideItsMask(float* out) {
  out[threadIdx.x] = __shfl_xor_sync(0x7FFFFFFFu, 1.0f, 1);
}

SIMT_KERNEL(kThreads) DifferentMasks(float* out) {
  const unsigned mask = threadIdx.x % 32 < 16 ? 0x00FFFFFFu : kAll;
  out[threadIdx.x] = __shfl_xor_sync(mask, 1.0f, 1);
}

SIMT_KERNEL(kThreads) TwoShuffles(float* out) {
  if (threadIdx.x % 32 < 16) {
    out[threadIdx.x] = __shfl_xor_sync(kAll, 1.0f, 1);
  } else {
    out[threadIdx.x] = __shfl_xor_sync(kAll, 2.0f, 1);
  }
}

SIMT_KERNEL(kThreads) LaneNeverArrives(float* out) {
  if (threadIdx.x != kOdd) __syncwarp();
  __syncthreads();
  out[threadIdx.x] = 1.0f;
}

SIMT_KERNEL(kThreads) ExitBeforeBarrier(float* out) {
  out[threadIdx.x] = 1.0f;
  if (threadIdx.x == kOdd) return;
  __syncthreads();
}

SIMT_KERNEL(kThreads) ExitedLaneInMask(float* out) {
  out[threadIdx.x] = 1.0f;
  if (threadIdx.x == kOdd) return;
  out[threadIdx.x] = __shfl_down_sync(kAll, 1.0f, 16);
}

SIMT_KERNEL(kThreads) UninitialisedStatic(float* out) {
  SIMT_SHARED(float, values, kThreads);
  if (threadIdx.x != kOdd) values[threadIdx.x] = 1.0f;
  __syncthreads();
  out[threadIdx.x] = values[kThreads - 1 - threadIdx.x];
}

SIMT_KERNEL(kThreads) UninitialisedDynamic(float* out) {
  SIMT_DYNAMIC_SHARED(float, values);
  if (threadIdx.x != kOdd) values[threadIdx.x] = 1.0f;
  __syncthreads();
  out[threadIdx.x] = values[kThreads - 1 - threadIdx.x];
}

SIMT_KERNEL(kThreads) RaceBetweenWarps(float* out) {
  SIMT_SHARED(float, values, kThreads);
  values[threadIdx.x] = 0.0f;
  __syncthreads();
  values[threadIdx.x] = 1.0f;
  out[threadIdx.x] = values[kThreads - 1 - threadIdx.x];
}

SIMT_KERNEL(kThreads) RaceInWarp(float* out) {
  SIMT_SHARED(float, values, kThreads);
  values[threadIdx.x] = 0.0f;
  __syncthreads();
  values[threadIdx.x] = __shfl_xor_sync(kAll, 1.0f, 1);
  out[threadIdx.x] = values[threadIdx.x ^ 1];
}

// The barrier of each half orders nothing between them.
SIMT_KERNEL(kThreads) RaceBetweenHalves(float* out) {
  SIMT_SHARED(float, values, kThreads);
  values[threadIdx.x] = 1.0f;
  __syncwarp(threadIdx.x % 32 < 16 ? 0x0000FFFFu : 0xFFFF0000u);
  out[threadIdx.x] = values[threadIdx.x ^ 16];
}

// The last thread knows of its own atomic, and of nobody else's.
SIMT_KERNEL(kThreads) RaceWithAtomics(float* out) {
  SIMT_SHARED(int, values, 1);
  if (threadIdx.x == 0) values[0] = 0;
  __syncthreads();
  atomicAdd(&values[0], 1);
  if (threadIdx.x == kThreads - 1) out[0] = static_cast<float>(values[0]);
}

// The barrier of the first warp orders its atomics after the write, and not those of the second.
SIMT_KERNEL(kThreads) RaceOfAnAtomic(float* out) {
  SIMT_SHARED(int, values, 1);
  if (threadIdx.x == 0) values[0] = 0;
  __syncthreads();
  if (threadIdx.x == 0) values[0] = 1;
  __syncwarp();
  atomicAdd(&values[0], 1);
  out[threadIdx.x] = 1.0f;
}

SIMT_KERNEL(kThreads) WriteAfterRead(float* out) {
  SIMT_SHARED(float, values, kThreads);
  values[threadIdx.x] = 1.0f;
  __syncthreads();
  out[threadIdx.x] = values[kThreads - 1 - threadIdx.x];
  values[threadIdx.x] = 2.0f;
}

SIMT_KERNEL(kThreads) OverrunStatic(float* out, int end) {
  SIMT_SHARED(float, values, kThreads);
  values[threadIdx.x] = 1.0f;
  float* first = values;  // of whose length the compiler knows nothing
  if (threadIdx.x == kOdd) first[end] = 1.0f;
  out[threadIdx.x] = 1.0f;
}

SIMT_KERNEL(kThreads) UnderrunDynamic(float* out, int before) {
  SIMT_DYNAMIC_SHARED(float, values);
  if (threadIdx.x == kOdd) values[before] = 1.0f;
  out[threadIdx.x] = 1.0f;
}

SIMT_KERNEL(kThreads) TooMuchStatic(float* out) {
  SIMT_SHARED(float, first, 8 * 1024);
  SIMT_SHARED(float, second, 4 * 1024 + 1);
  first[threadIdx.x] = second[threadIdx.x] = 1.0f;
  out[threadIdx.x] = first[threadIdx.x];
}

using Kernel = void (*)(float*);

Kernel KernelOf(Fault fault) {
  switch (fault) {
    case Fault::kBarrierNotReached:
      return BarrierNotReached;
    case Fault::kTwoBarriers:
      return TwoBarriers;
    case Fault::kLaneOutsideItsMask:
      return LaneOutsideItsMask;
    case Fault::kDifferentMasks:
      return DifferentMasks;
    case Fault::kTwoShuffles:
      return TwoShuffles;
    case Fault::kLaneNeverArrives:
      return LaneNeverArrives;
    case Fault::kExitBeforeBarrier:
      return ExitBeforeBarrier;
    case Fault::kExitedLaneInMask:
      return ExitedLaneInMask;
    case Fault::kUninitialisedStatic:
      return UninitialisedStatic;
    case Fault::kUninitialisedDynamic:
      return UninitialisedDynamic;
    case Fault::kRaceBetweenWarps:
      return RaceBetweenWarps;
    case Fault::kRaceInWarp:
      return RaceInWarp;
    case Fault::kRaceBetweenHalves:
      return RaceBetweenHalves;
    case Fault::kRaceWithAtomics:
      return RaceWithAtomics;
    case Fault::kRaceOfAnAtomic:
      return RaceOfAnAtomic;
    case Fault::kWriteAfterRead:
      return WriteAfterRead;
    case Fault::kTooMuchStatic:
      return TooMuchStatic;
    default:
      return CorrectKernel;
  }
}

}  // namespace

Status Break(Fault fault, float* out) {
  const int64_t shared_bytes = kThreads * sizeof(float);
  if (fault == Fault::kOverrunStatic) {
    SIMT_LAUNCH(OverrunStatic, 2, kThreads, 0, nullptr, out, kThreads);
  } else if (fault == Fault::kUnderrunDynamic) {
    SIMT_LAUNCH(UnderrunDynamic, 2, kThreads, shared_bytes, nullptr, out, -1);
  } else {
    SIMT_LAUNCH(KernelOf(fault), 2, kThreads, shared_bytes, nullptr, out);
  }
  return OkStatus();
}

}  // namespace tandem::testing
