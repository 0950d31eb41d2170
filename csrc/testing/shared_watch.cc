#include "csrc/testing/shared_watch.h"

#include <algorithm>
#include <bit>

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

int SharedWatch::Users::Single() const {
  return std::has_single_bit(lanes) && warp != kSeveralWarps
             ? warp * kWarp + std::countr_zero(lanes)
             : -1;
}

bool SharedWatch::IsOrdered(const Users& before, int now) const {
  if (before.warp != now / kWarp) return false;
  const auto& seen = clocks_[now / kWarp].seen[now % kWarp];
  for (uint32_t others = before.lanes & ~(1u << now % kWarp); others != 0; others &= others - 1) {
    if (seen[std::countr_zero(others)] < before.time) return false;
  }
  return true;
}

void SharedWatch::Add(int thread, Users* users) const {
  const auto warp = static_cast<int16_t>(thread / kWarp);
  const uint32_t lane = 1u << thread % kWarp;
  // Whom this thread comes after need not be kept: what comes after it comes after them.
  if (users->epoch != epoch_ || IsOrdered(*users, thread)) {
    *users = {epoch_, 0, lane, warp};
  } else {
    users->lanes |= lane;
    if (users->warp != warp) users->warp = kSeveralWarps;
  }
  users->time = clocks_[warp].now;
}

Finding SharedWatch::OnByte(int thread, Cell* cell, Access access) const {
  const uint32_t written = std::max(cell->writers.epoch, cell->atomics.epoch);
  if (access != Access::kWrite && written < block_start_) return {Finding::kUninitialised};
  if (Races(cell->writers, thread)) return {Finding::kRace, 0, cell->writers.Single(), true};
  if (access != Access::kAtomic && Races(cell->atomics, thread)) {
    return {Finding::kRace, 0, cell->atomics.Single(), true};
  }
  if (access != Access::kRead && Races(cell->readers, thread)) {
    return {Finding::kRace, 0, cell->readers.Single(), false};
  }
  Users* users = access == Access::kRead    ? &cell->readers
                 : access == Access::kWrite ? &cell->writers
                                            : &cell->atomics;
  Add(thread, users);
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
