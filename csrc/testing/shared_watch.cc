#include "csrc/testing/shared_watch.h"

#include <algorithm>

namespace simt::emulator {

void SharedWatch::OnWarpSync(int warp, uint32_t lanes) {
  WarpClock& clock = clocks_[warp];
  std::array<uint32_t, kWarp> joined = {};
  for (int lane = 0; lane < kWarp; ++lane) {
    if ((lanes >> lane & 1) == 0) continue;
    for (int k = 0; k < kWarp; ++k) joined[k] = std::max(joined[k], clock.seen[lane][k]);
  }
  for (int lane = 0; lane < kWarp; ++lane) {
    if (lanes >> lane & 1) joined[lane] = clock.now;
  }
  for (int lane = 0; lane < kWarp; ++lane) {
    if (lanes >> lane & 1) clock.seen[lane] = joined;
  }
  ++clock.now;
}

bool SharedWatch::IsOrdered(int before, uint32_t time, int now) const {
  if (before == now) return true;
  if (before / kWarp != now / kWarp) return false;
  return clocks_[now / kWarp].seen[now % kWarp][before % kWarp] >= time;
}

bool SharedWatch::AreReadersOrdered(const Cell& cell, int now) const {
  if (cell.reader >= 0) return IsOrdered(cell.reader, cell.read_time, now);
  const int warp = now / kWarp;
  if (cell.reader != kSeveralLanes - warp) return false;
  const auto& seen = clocks_[warp].seen[now % kWarp];
  return *std::min_element(seen.begin(), seen.end()) >= cell.read_time;
}

void SharedWatch::RecordRead(int thread, Cell* cell) const {
  const int warp = thread / kWarp;
  // What came before this read comes before all that this read comes before.
  if (cell->read_epoch != epoch_ || AreReadersOrdered(*cell, thread)) {
    cell->reader = static_cast<int16_t>(thread);
  } else if (cell->reader >= 0) {
    const bool is_same_warp = cell->reader / kWarp == warp;
    cell->reader = static_cast<int16_t>(is_same_warp ? kSeveralLanes - warp : kSeveralWarps);
  } else if (cell->reader != kSeveralLanes - warp) {
    cell->reader = kSeveralWarps;
  }
  cell->read_epoch = epoch_;
  cell->read_time = clocks_[warp].now;
}

Finding SharedWatch::OnByte(int thread, Cell* cell, Access access) const {
  if (access != Access::kWrite && cell->write_epoch < block_start_) {
    return {Finding::kUninitialised};
  }
  const bool are_atomic = access == Access::kAtomic && cell->is_atomic;
  if (cell->write_epoch == epoch_ && !are_atomic &&
      !IsOrdered(cell->writer, cell->write_time, thread)) {
    return {Finding::kRace, 0, cell->writer, true};
  }
  if (access == Access::kRead) {
    RecordRead(thread, cell);
    return {};
  }
  if (cell->read_epoch == epoch_ && !AreReadersOrdered(*cell, thread)) {
    return {Finding::kRace, 0, cell->reader < 0 ? -1 : cell->reader, false};
  }
  cell->write_epoch = epoch_;
  cell->write_time = clocks_[thread / kWarp].now;
  cell->writer = static_cast<int16_t>(thread);
  cell->is_atomic = access == Access::kAtomic;
  return {};
}

Finding SharedWatch::OnAccess(int thread, int64_t offset, int64_t bytes, Access access) {
  for (int64_t i = offset; i < offset + bytes; ++i) {
    Finding finding = OnByte(thread, &cells_[static_cast<size_t>(i)], access);
    if (finding.kind == Finding::kNone) continue;
    finding.offset = i;
    return finding;
  }
  return {};
}

}  // namespace simt::emulator
