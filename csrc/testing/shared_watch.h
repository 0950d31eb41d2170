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
  static constexpr int16_t kSeveralLanes = -2;  // and below: of warp -2 - reader

  // Epochs count barriers and blocks and never start again: old cells need no clearing.
  struct Cell {
    uint32_t write_epoch = 0;
    uint32_t write_time = 0;
    uint32_t read_epoch = 0;
    uint32_t read_time = 0;
    int16_t writer = 0;
    int16_t reader = 0;
    bool is_atomic = false;
  };

  bool IsOrdered(int before, uint32_t time, int now) const;
  bool AreReadersOrdered(const Cell& cell, int now) const;
  void RecordRead(int thread, Cell* cell) const;
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
