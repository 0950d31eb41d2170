// Small kernels for the tests of the emulator: correct ones, and one for each rule that it watches.
#pragma once

#include <cstdint>

#include "csrc/common/status.h"

namespace tandem::testing {

struct Shape {
  int blocks[3] = {1, 1, 1};
  int threads[3] = {32, 1, 1};
  int64_t shared_bytes = 0;
};

// out[i] = linear id of the thread that runs as number i of the grid, 1 + its block's, its lane.
Status WriteIndices(const Shape& shape, int64_t* threads, int64_t* blocks);

// What every lane of one warp-wide call got, by intrinsic: [8][threads] of the values 100 + lane.
// Lanes whose bit in `mask` is 0 do not call; their results stay.
Status Shuffles(int threads, uint32_t mask, int width, int* out);
Status Votes(int threads, uint32_t mask, uint32_t* out);  // [4][threads]
Status Halves(uint32_t* out);  // ballots of the two halves of a warp, with disjoint masks
Status Doubles(double* out);   // 8 bytes through a shuffle

Status Atomics(int threads, int32_t* signed_out, uint32_t* out);

// out[b] = sum of x[0 ... n - 1] times b + 1, by static and dynamic shared memory, in `rounds`
// rounds with barriers in nested loops.
Status NestedBarriers(int blocks, int threads, int rounds, const float* x, int64_t n, float* out);
Status HalvesThenWarp(
    int* out);  // reads ordered by the masks of halves, and by their union after them
Status HalfAfterReads(int* out);                  // a half's barrier orders a write after its reads
Status WarpPrefix(int warps, int* out);           // prefix sums over __syncwarp and shared memory
Status TwoTypes(float* floats, double* doubles);  // one template's static array per instance

// Broken kernels.
enum class Fault {
  kNone,
  kBarrierNotReached,
  kTwoBarriers,
  kLaneOutsideItsMask,
  kDifferentMasks,
  kTwoShuffles,
  kLaneNeverArrives,
  kExitBeforeBarrier,
  kExitedLaneInMask,
  kUninitialisedStatic,
  kUninitialisedDynamic,
  kRaceBetweenWarps,
  kRaceInWarp,
  kRaceBetweenHalves,
  kRaceWithAtomics,
  kRaceOfAnAtomic,
  kWriteAfterRead,
  kOverrunStatic,
  kUnderrunDynamic,
  kTooMuchStatic,
};
Status Break(Fault fault, float* out);

}  // namespace tandem::testing
