// Runs the threads of one emulated block, one at a time, and decides when those that wait may go
// on. Everything that makes a launch fail is found here.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "csrc/testing/fiber.h"
#include "csrc/testing/shared_memory.h"
#include "csrc/testing/shared_watch.h"
#include "csrc/testing/simt_emulator.h"

namespace simt::emulator {

inline constexpr int kMaxThreads = 1024;

struct Schedule {
  uint64_t seed = 0;  // 0: ascending threads and blocks
  bool is_strict = false;
};

// splitmix64: every seed gives a good sequence.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}
  uint64_t Next() {
    uint64_t z = (state_ += 0x9E3779B97F4A7C15u);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
  }

 private:
  uint64_t state_;
};

// Whether kernels were compiled to report their accesses (access_hooks.cc).
extern bool is_watching;

// Of whatever runs on this OS thread.
void OnAccess(const void* address, int64_t bytes, Access access);

class BlockRunner {
 public:
  BlockRunner();

  // Empty, or what went wrong.
  std::string Run(const LaunchConfig& config, const Schedule& schedule, uint64_t block_number,
                  void (*body)(void*), void* context);

  // Of the running thread.
  void ArriveAtBarrier(Location where);
  uint64_t ArriveAtWarp(const WarpArrival& arrival);
  uint32_t ActiveLanes() const;
  int LaneId() const { return running_ % 32; }
  void* SharedArray(const void* site, const char* name, int64_t bytes, int64_t alignment);
  void* DynamicShared() const { return shared_.Dynamic(); }
  void OnAccess(const void* address, int64_t bytes, Access access);

 private:
  enum class State : uint8_t { kReady, kAtBarrier, kAtWarp, kExited };

  struct Thread {
    Fiber fiber;
    uint3 index;
    State state;
    WarpArrival arrival;  // its `where` also of a barrier
    uint64_t result;
  };

  struct Warp {
    uint32_t born = 0;
    uint32_t live = 0;
    uint32_t waiting = 0;
  };

  static void ThreadMain();

  void StartThreads(uint64_t block_number);
  void MakeReady(int thread);
  int NextReady();             // -1: none
  void Suspend(bool is_last);  // lets others run
  void Exit();
  void CompleteBarrier();
  void CompleteWarp(int thread);  // whose mask may be all there now
  bool IsTogether(int thread, uint32_t group);
  bool HaveCrossedMasks(int warp) const;
  void FailDeadlock();
  void Deliver(int warp, uint32_t group);
  void Fail(const std::string& message, int warp = -1);  // which says what threads wait at
  void FailAccess(const Finding& finding, Access access);
  std::string DescribeThreads(int begin, int end) const;

  FiberStacks stacks_;
  SharedMemory shared_;
  SharedWatch watch_;
  Fiber main_;
  std::vector<Thread> threads_;
  std::vector<Warp> warps_;

  // The launch.
  Schedule schedule_;
  Random random_{0};
  void (*body_)(void*) = nullptr;
  void* context_ = nullptr;

  // The block.
  std::string failure_;
  int num_threads_ = 0;
  int num_live_ = 0;
  int num_at_barrier_ = 0;
  int running_ = 0;
  Fiber* left_ = nullptr;  // whom a starting thread takes over from
  uint32_t ready_head_ = 0;
  uint32_t ready_tail_ = 0;
  std::vector<int> ready_;  // ring of kMaxThreads
};

}  // namespace simt::emulator
