// Follows every access of a block to its shared memory, byte by byte, and names the first that no
// barrier orders: a byte that nobody wrote, or that another thread may write or read at the same
// time. It does not depend on the order in which threads happened to run.
//
// Orders: __syncthreads for the block, __syncwarp for the lanes of its mask. Shuffles and ballots
// exchange values, not memory.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace simt::emulator {

enum class Access : uint8_t { kRead, kWrite, kAtomic };

struct Finding {
  enum Kind { kNone, kUninitialised, kRace } kind = kNone;
  int64_t offset = 0;  // of the byte
  int other = -1;      // the other thread of a race, or -1 for one of several
  bool other_wrote = false;
};

class SharedWatch {
 public:
  explicit SharedWatch(int64_t bytes) : cells_(static_cast<size_t>(bytes)) {}

  void StartBlock() { block_start_ = ++epoch_; }
  void OnBarrier() { ++epoch_; }
  void OnWarpSync(int warp, uint32_t lanes);

  Finding OnAccess(int thread, int64_t offset, int64_t bytes, Access access);

 private:
  static constexpr int kWarp = 32;
  static constexpr int kMaxWarps = 32;
  static constexpr int16_t kSeveralWarps = -1;

  // Threads that used a byte in one epoch, none of them before another: lanes of a warp.
  struct Users {
    uint32_t epoch = 0;
    uint32_t time = 0;  // of the last one
    uint32_t lanes = 0;
    int16_t warp = 0;  // or kSeveralWarps

    int Single() const;  // -1: several
  };

  // Epochs count barriers and blocks and never start again: old cells need no clearing.
  struct Cell {
    Users writers;
    Users atomics;
    Users readers;
  };

  bool IsOrdered(const Users& before, int now) const;
  bool Races(const Users& before, int now) const {
    return before.epoch == epoch_ && !IsOrdered(before, now);
  }
  void Add(int thread, Users* users) const;
  Finding OnByte(int thread, Cell* cell, Access access) const;

  std::vector<Cell> cells_;
  uint32_t epoch_ = 0;
  uint32_t block_start_ = 0;
  // A clock per warp, and a vector clock per lane: what lane k did up to seen[l][k] came before
  // whatever lane l does now.
  struct WarpClock {
    uint32_t now = 1;
    std::array<std::array<uint32_t, kWarp>, kWarp> seen = {};
  };
  std::array<WarpClock, kMaxWarps> clocks_;
};

}  // namespace simt::emulator
