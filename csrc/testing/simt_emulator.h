// CUDA on a C++ compiler: what csrc/common/simt.h becomes under -DTANDEM_SIMT_EMULATOR. Kernels run
// on the calling thread, block after block, each CUDA thread as a fiber that runs until it waits.
//
// A launch that breaks a rule stops and returns kDeviceError with the kernel, the block and, for
// each group of threads, the source line where it waits:
//   deadlock      nobody can run: a barrier or warp intrinsic that some thread never reaches
//   divergence    threads of a block at different barriers, or lanes of a mask at different warp
//                 intrinsics
//   mask          a lane that its own mask does not name; lanes with different masks
//   early exit    (strict) a barrier, or a mask, whose other threads have returned
//   uninitialised a byte of shared memory is read that the block has not written
//   race          threads use a byte of shared memory, one to write, and no barrier orders them
//   shared memory a write outside an array; more than a device has
// Uninitialised and race need kernels compiled with -fsanitize=thread (and not linked with it: see
// access_hooks.cc). Without, shared memory still starts as NaNs or huge values, by the seed.
//
// Environment, read at each launch: SIMT_SEED=k (order of threads and blocks; 0 is ascending),
// SIMT_STRICT=1, SIMT_COVERAGE=file (gets the names of the kernels that ran). Not modelled:
// lockstep and anything that needs two threads to run at once, fences, clusters, asynchronous
// copies, rounding of the approximate instructions.
#pragma once

#include <cstdint>
#include <cstring>
#include <source_location>
#include <type_traits>

#include "csrc/common/status.h"
#include "csrc/testing/simt_cuda_names.h"
#include "csrc/testing/simt_functions.h"

extern constinit thread_local uint3 threadIdx;
extern constinit thread_local uint3 blockIdx;
extern constinit thread_local dim3 blockDim;
extern constinit thread_local dim3 gridDim;

namespace simt::emulator {

using Location = std::source_location;

struct LaunchConfig {
  const char* kernel;
  dim3 grid;
  dim3 block;
  int64_t shared_bytes;
};

enum class WarpOperation { kSync, kShuffle, kBallot };

// What one lane brings to a warp intrinsic.
struct WarpArrival {
  WarpOperation operation;
  const char* name;
  uint32_t mask;
  uint64_t value;
  int source_lane;  // of a shuffle
  Location where;
};

// These suspend the calling thread until the others are there.
void ArriveAtBarrier(Location where);
uint64_t ArriveAtWarp(const WarpArrival& arrival);  // gives the shuffled value or the ballot
uint32_t ActiveLanes();
int LaneId();

void* SharedArray(const void* site, const char* name, int64_t bytes, int64_t alignment);
void* DynamicShared();
void OnAtomic(const void* address, int64_t bytes);

// Runs body(context) once per CUDA thread.
tandem::Status RunGrid(const LaunchConfig& config, void (*body)(void*), void* context);

template <typename... Parameters>
tandem::Status Launch(const LaunchConfig& config, void (*kernel)(Parameters...),
                      std::type_identity_t<Parameters>... arguments) {
  auto call = [&] { kernel(arguments...); };
  return RunGrid(config, [](void* context) { (*static_cast<decltype(call)*>(context))(); }, &call);
}

template <typename T>
T Shuffle(const char* name, uint32_t mask, T value, int source_lane, Location where) {
  static_assert(sizeof(T) <= sizeof(uint64_t) && std::is_trivially_copyable_v<T>);
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  bits = ArriveAtWarp({WarpOperation::kShuffle, name, mask, bits, source_lane, where});
  std::memcpy(&value, &bits, sizeof(T));
  return value;
}

inline uint32_t Ballot(const char* name, uint32_t mask, bool predicate, Location where) {
  return static_cast<uint32_t>(
      ArriveAtWarp({WarpOperation::kBallot, name, mask, predicate, 0, where}));
}

// The lane itself where CUDA leaves the segment of `width` lanes.
inline int LaneWithin(int lane, int source, int width) {
  return (source ^ lane) & ~(width - 1) ? lane : source;
}

}  // namespace simt::emulator

#define SIMT_KERNEL(max_threads) void
#define SIMT_SHARED(type, name, count)                                             \
  static const char simt_site_##name = 0;                                          \
  type(&name)[count] = *static_cast<type(*)[count]>(::simt::emulator::SharedArray( \
      &simt_site_##name, #name, static_cast<int64_t>(sizeof(type) * (count)), alignof(type)))
#define SIMT_DYNAMIC_SHARED(type, name) \
  type* name = static_cast<type*>(::simt::emulator::DynamicShared())
#define SIMT_LAUNCH(kernel, grid, block, shared_bytes, stream, ...)         \
  do {                                                                      \
    static_cast<void>(stream);                                              \
    if (::tandem::Status simt_status = ::simt::emulator::Launch(            \
            {#kernel, (grid), (block), static_cast<int64_t>(shared_bytes)}, \
            kernel __VA_OPT__(, ) __VA_ARGS__);                             \
        !simt_status.ok()) {                                                \
      return simt_status;                                                   \
    }                                                                       \
  } while (false)

inline void __syncthreads(simt::emulator::Location where = simt::emulator::Location::current()) {
  simt::emulator::ArriveAtBarrier(where);
}

inline void __syncwarp(uint32_t mask = 0xFFFFFFFFu,
                       simt::emulator::Location where = simt::emulator::Location::current()) {
  simt::emulator::ArriveAtWarp(
      {simt::emulator::WarpOperation::kSync, "__syncwarp", mask, 0, 0, where});
}

inline uint32_t __activemask() { return simt::emulator::ActiveLanes(); }

template <typename T>
T __shfl_sync(uint32_t mask, T value, int source, int width = 32,
              simt::emulator::Location where = simt::emulator::Location::current()) {
  const int segment = simt::emulator::LaneId() & ~(width - 1);
  return simt::emulator::Shuffle("__shfl_sync", mask, value, segment | (source & (width - 1)),
                                 where);
}

template <typename T>
T __shfl_xor_sync(uint32_t mask, T value, int lane_mask, int width = 32,
                  simt::emulator::Location where = simt::emulator::Location::current()) {
  const int lane = simt::emulator::LaneId();
  // Lanes of earlier segments may be read, of later ones not.
  const int source = lane ^ lane_mask;
  const bool is_later = source >= (lane & ~(width - 1)) + width;
  return simt::emulator::Shuffle("__shfl_xor_sync", mask, value, is_later ? lane : source, where);
}

template <typename T>
T __shfl_down_sync(uint32_t mask, T value, unsigned delta, int width = 32,
                   simt::emulator::Location where = simt::emulator::Location::current()) {
  const int lane = simt::emulator::LaneId();
  const int source = simt::emulator::LaneWithin(lane, lane + static_cast<int>(delta), width);
  return simt::emulator::Shuffle("__shfl_down_sync", mask, value, source, where);
}

template <typename T>
T __shfl_up_sync(uint32_t mask, T value, unsigned delta, int width = 32,
                 simt::emulator::Location where = simt::emulator::Location::current()) {
  const int lane = simt::emulator::LaneId();
  const int source = simt::emulator::LaneWithin(lane, lane - static_cast<int>(delta), width);
  return simt::emulator::Shuffle("__shfl_up_sync", mask, value, source, where);
}

inline uint32_t __ballot_sync(
    uint32_t mask, int predicate,
    simt::emulator::Location where = simt::emulator::Location::current()) {
  return simt::emulator::Ballot("__ballot_sync", mask, predicate != 0, where);
}

inline int __any_sync(uint32_t mask, int predicate,
                      simt::emulator::Location where = simt::emulator::Location::current()) {
  return simt::emulator::Ballot("__any_sync", mask, predicate != 0, where) != 0;
}

inline int __all_sync(uint32_t mask, int predicate,
                      simt::emulator::Location where = simt::emulator::Location::current()) {
  return simt::emulator::Ballot("__all_sync", mask, predicate == 0, where) == 0;
}

// Threads run one at a time, and blocks one after another: plain code is atomic. Integers only, as
// sums of floats would depend on the order.

namespace simt::emulator {

// new_value(old) -> what is stored; gives the old value.
template <typename T, typename F>
[[gnu::no_sanitize("thread")]] T Exchange(T* address, F new_value) {
  static_assert(std::is_integral_v<T>);
  OnAtomic(address, sizeof(T));
  const T old = *address;
  *address = new_value(old);
  return old;
}

}  // namespace simt::emulator

template <typename T>
T atomicAdd(T* address, std::type_identity_t<T> value) {
  using Unsigned = std::make_unsigned_t<T>;
  return simt::emulator::Exchange(address, [=](T old) {
    return static_cast<T>(static_cast<Unsigned>(old) + static_cast<Unsigned>(value));
  });
}

template <typename T>
T atomicMax(T* address, std::type_identity_t<T> value) {
  return simt::emulator::Exchange(address, [=](T old) { return old < value ? value : old; });
}

template <typename T>
T atomicMin(T* address, std::type_identity_t<T> value) {
  return simt::emulator::Exchange(address, [=](T old) { return value < old ? value : old; });
}

template <typename T>
T atomicOr(T* address, std::type_identity_t<T> value) {
  return simt::emulator::Exchange(address, [=](T old) { return static_cast<T>(old | value); });
}

template <typename T>
T atomicCAS(T* address, std::type_identity_t<T> expected, std::type_identity_t<T> value) {
  return simt::emulator::Exchange(address, [=](T old) { return old == expected ? value : old; });
}
