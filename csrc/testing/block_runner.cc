#include "csrc/testing/block_runner.h"

#include <bit>
#include <cstdio>
#include <map>
#include <tuple>

namespace simt::emulator {
namespace {

constexpr int kWarp = 32;

// Bytes of poison: a NaN of every float type, a huge and a hugely negative float, so that neither
// a sum nor a maximum nor a minimum swallows all of them.
uint8_t PoisonOf(uint64_t seed) {
  constexpr uint8_t kPoison[] = {0xFF, 0x7E, 0xFE};
  return kPoison[seed % 3];
}

bool IsSamePlace(const Location& a, const Location& b) {
  return a.line() == b.line() && a.column() == b.column() &&
         std::string_view(a.file_name()) == b.file_name();
}

std::string Format(const char* format, auto... values) {
  char buffer[512];
  std::snprintf(buffer, sizeof(buffer), format, values...);
  return buffer;
}

// The runner whose block runs on this OS thread.
constinit thread_local BlockRunner* current_runner = nullptr;

}  // namespace

constinit bool is_watching = false;

BlockRunner::BlockRunner()
    : stacks_(kMaxThreads),
      watch_(SharedMemory::kMemoryBytes),
      threads_(kMaxThreads),
      warps_(kMaxThreads / kWarp),
      ready_(kMaxThreads) {
  for (int i = 0; i < kMaxThreads; ++i) stacks_.Assign(i, &threads_[i].fiber);
}

std::string BlockRunner::Run(const LaunchConfig& config, const Schedule& schedule,
                             uint64_t block_number, void (*body)(void*), void* context) {
  num_threads_ = static_cast<int>(config.block.x * config.block.y * config.block.z);
  schedule_ = schedule;
  body_ = body;
  context_ = context;
  shared_.StartBlock(config.shared_bytes, PoisonOf(schedule.seed));
  watch_.StartBlock();
  StartThreads(block_number);

  BlockRunner* outer = current_runner;
  current_runner = this;
  running_ = NextReady();
  left_ = &main_;
  SwitchFiber(&main_, &threads_[running_].fiber);
  current_runner = outer;

  if (failure_.empty() && num_live_ > 0) FailDeadlock();
  if (std::string array = shared_.FindOverrun(); failure_.empty() && !array.empty()) {
    failure_ = "shared memory: something was written outside of " + array;
  }
  return failure_;
}

void BlockRunner::StartThreads(uint64_t block_number) {
  failure_.clear();
  random_ = Random(schedule_.seed ^ (block_number * 0xD1342543DE82EF95u));
  num_live_ = num_threads_;
  num_at_barrier_ = 0;
  ready_head_ = ready_tail_ = 0;
  for (int w = 0; w * kWarp < num_threads_; ++w) {
    const int lanes = std::min(kWarp, num_threads_ - w * kWarp);
    const uint32_t born = static_cast<uint32_t>((uint64_t{1} << lanes) - 1);
    warps_[w] = {born, born, 0};
  }
  uint3 index = {0, 0, 0};
  for (int i = 0; i < num_threads_; ++i) {
    threads_[i].index = index;
    PrepareFiber(&threads_[i].fiber, &ThreadMain);
    MakeReady(i);
    if (++index.x < blockDim.x) continue;
    index.x = 0;
    if (++index.y < blockDim.y) continue;
    index.y = 0;
    ++index.z;
  }
}

void BlockRunner::ThreadMain() {
  BlockRunner& runner = *current_runner;
  EnterFiber(runner.left_);
  threadIdx = runner.threads_[runner.running_].index;
  runner.body_(runner.context_);
  runner.Exit();
}

void BlockRunner::MakeReady(int thread) {
  threads_[thread].state = State::kReady;
  ready_[ready_tail_++ % kMaxThreads] = thread;
}

int BlockRunner::NextReady() {
  if (ready_head_ == ready_tail_ || !failure_.empty()) return -1;
  if (schedule_.seed != 0) {
    const auto pick = static_cast<uint32_t>(random_.Next() % (ready_tail_ - ready_head_));
    std::swap(ready_[ready_head_ % kMaxThreads], ready_[(ready_head_ + pick) % kMaxThreads]);
  }
  return ready_[ready_head_++ % kMaxThreads];
}

void BlockRunner::Suspend(bool is_last) {
  const int self = running_;
  const int next = NextReady();
  if (next == self) return;
  Fiber* fiber = &threads_[self].fiber;
  Fiber* target = next < 0 ? &main_ : &threads_[next].fiber;
  running_ = next;
  left_ = fiber;
  if (is_last) LeaveFiber(fiber, target);
  SwitchFiber(fiber, target);
  threadIdx = threads_[self].index;
}

void BlockRunner::Exit() {
  threads_[running_].state = State::kExited;
  --num_live_;
  const int w = running_ / kWarp;
  Warp& warp = warps_[w];
  warp.live &= ~(1u << LaneId());
  for (uint32_t left = warp.waiting; left != 0 && failure_.empty(); left &= left - 1) {
    const int lane = std::countr_zero(left);
    if (warp.waiting >> lane & 1) CompleteWarp(w * kWarp + lane);
  }
  CompleteBarrier();
  Suspend(true);
}

void BlockRunner::ArriveAtBarrier(Location where) {
  Thread& self = threads_[running_];
  self.state = State::kAtBarrier;
  self.arrival = {WarpOperation::kSync, "__syncthreads", 0, 0, 0, where};
  ++num_at_barrier_;
  CompleteBarrier();
  Suspend(false);
}

void BlockRunner::CompleteBarrier() {
  if (num_at_barrier_ == 0 || num_at_barrier_ < num_live_ || !failure_.empty()) return;
  if (schedule_.is_strict && num_live_ < num_threads_) {
    return Fail("early exit: a barrier that some threads of the block returned without reaching");
  }
  const Location* first = nullptr;
  for (int i = 0; i < num_threads_; ++i) {
    if (threads_[i].state != State::kAtBarrier) continue;
    if (first == nullptr) first = &threads_[i].arrival.where;
    if (!IsSamePlace(*first, threads_[i].arrival.where)) {
      return Fail("divergence: the threads of a block wait at different barriers");
    }
  }
  num_at_barrier_ = 0;
  watch_.OnBarrier();
  for (int i = 0; i < num_threads_; ++i) {
    if (threads_[i].state == State::kAtBarrier) MakeReady(i);
  }
}

uint64_t BlockRunner::ArriveAtWarp(const WarpArrival& arrival) {
  Thread& self = threads_[running_];
  self.state = State::kAtWarp;
  self.arrival = arrival;
  const int w = running_ / kWarp;
  warps_[w].waiting |= 1u << LaneId();
  if ((arrival.mask >> LaneId() & 1) == 0) {
    Fail(Format("mask: lane %d is not in the mask that it names", LaneId()), w);
  } else {
    CompleteWarp(running_);
  }
  Suspend(false);
  return self.result;
}

void BlockRunner::CompleteWarp(int thread) {
  const int w = thread / kWarp;
  const uint32_t mask = threads_[thread].arrival.mask;
  Warp& warp = warps_[w];
  const uint32_t gone = mask & warp.born & ~warp.live;
  if (schedule_.is_strict && gone != 0) {
    return Fail(Format("early exit: lane %d is in a mask that others wait with, and has returned",
                       std::countr_zero(gone)),
                w);
  }
  const uint32_t group = mask & warp.live;
  if ((group & ~warp.waiting) != 0 || !IsTogether(thread, group)) return;
  Deliver(w, group);
  if (threads_[thread].arrival.operation == WarpOperation::kSync) watch_.OnWarpSync(w, group);
  warp.waiting &= ~group;
  for (uint32_t left = group; left != 0; left &= left - 1) {
    MakeReady(w * kWarp + std::countr_zero(left));
  }
}

bool BlockRunner::IsTogether(int thread, uint32_t group) {
  const WarpArrival& own = threads_[thread].arrival;
  for (uint32_t left = group; left != 0; left &= left - 1) {
    const int lane = std::countr_zero(left);
    const WarpArrival& other = threads_[thread / kWarp * kWarp + lane].arrival;
    // It may come to this mask after its own.
    if (other.mask != own.mask) return false;
    if (IsSamePlace(own.where, other.where)) continue;
    Fail("divergence: the lanes of a mask wait at different warp intrinsics", thread / kWarp);
    return false;
  }
  return true;
}

bool BlockRunner::HaveCrossedMasks(int w) const {
  const Thread* lanes = &threads_[w * kWarp];
  for (uint32_t left = warps_[w].waiting; left != 0; left &= left - 1) {
    const int a = std::countr_zero(left);
    const uint32_t mask = lanes[a].arrival.mask;
    for (uint32_t others = warps_[w].waiting & mask; others != 0; others &= others - 1) {
      const uint32_t other_mask = lanes[std::countr_zero(others)].arrival.mask;
      if (other_mask != mask && (other_mask >> a & 1) != 0) return true;
    }
  }
  return false;
}

void BlockRunner::FailDeadlock() {
  for (int w = 0; w * kWarp < num_threads_; ++w) {
    if (HaveCrossedMasks(w)) {
      return Fail("mask: lanes that wait for each other name different masks", w);
    }
  }
  Fail("deadlock: no thread can go on");
}

void BlockRunner::Deliver(int w, uint32_t group) {
  uint32_t ballot = 0;
  for (uint32_t left = group; left != 0; left &= left - 1) {
    const int lane = std::countr_zero(left);
    ballot |= static_cast<uint32_t>(threads_[w * kWarp + lane].arrival.value & 1) << lane;
  }
  for (uint32_t left = group; left != 0; left &= left - 1) {
    Thread& thread = threads_[w * kWarp + std::countr_zero(left)];
    const int source = thread.arrival.source_lane;
    if (thread.arrival.operation != WarpOperation::kShuffle) {
      thread.result = ballot;
    } else if (group >> source & 1) {
      thread.result = threads_[w * kWarp + source].arrival.value;
    } else {
      thread.result = ~uint64_t{0};  // undefined in CUDA; here a NaN
    }
  }
}

uint32_t BlockRunner::ActiveLanes() const { return warps_[running_ / kWarp].live; }

void* BlockRunner::SharedArray(const void* site, const char* name, int64_t bytes,
                               int64_t alignment) {
  void* data = shared_.Static(site, name, bytes, alignment);
  if (data == nullptr) {
    Fail(Format("shared memory: no room for %s [%lld bytes]; static arrays end at %lld bytes", name,
                static_cast<long long>(bytes),
                static_cast<long long>(SharedMemory::kMaxStaticBytes)));
    Suspend(true);
  }
  return data;
}

void BlockRunner::OnAccess(const void* address, int64_t bytes, Access access) {
  const int64_t offset = shared_.OffsetOf(address);
  if (offset < 0) return;
  const Finding finding = watch_.OnAccess(running_, offset, bytes, access);
  if (finding.kind == Finding::kNone) return;
  FailAccess(finding, access);
  Suspend(true);
}

void BlockRunner::FailAccess(const Finding& finding, Access access) {
  const auto name = [this](int thread) {
    const uint3& index = threads_[thread].index;
    return Format("thread (%u, %u, %u)", index.x, index.y, index.z);
  };
  const std::string where = shared_.Describe(finding.offset);
  const char* verb = access == Access::kRead    ? "reads"
                     : access == Access::kWrite ? "writes"
                                                : "changes";
  const std::string self = name(running_) + " " + verb + " " + where;
  if (finding.kind == Finding::kUninitialised) {
    failure_ = "uninitialised: " + self + ", which nobody has written in this block";
    return;
  }
  const std::string other = finding.other < 0 ? "several threads" : name(finding.other);
  failure_ = "race: " + self + ", which " + other + (finding.other_wrote ? " wrote" : " read") +
             " with no barrier between";
}

void BlockRunner::Fail(const std::string& message, int warp) {
  const int end = warp < 0 ? num_threads_ : std::min(num_threads_, (warp + 1) * kWarp);
  failure_ = message + DescribeThreads(std::max(warp, 0) * kWarp, end);
}

std::string BlockRunner::DescribeThreads(int begin, int end) const {
  struct Group {
    int first;
    int count = 0;
  };
  // By what they wait at; groups in the order of their first threads.
  std::map<std::tuple<State, uint32_t, uint32_t, uint32_t>, Group> by_wait;
  for (int i = begin; i < end; ++i) {
    const Thread& thread = threads_[i];
    const bool is_waiting = thread.state == State::kAtBarrier || thread.state == State::kAtWarp;
    const WarpArrival& at = thread.arrival;
    auto key = is_waiting ? std::tuple(thread.state, at.where.line(), at.where.column(), at.mask)
                          : std::tuple(thread.state, 0u, 0u, 0u);
    Group& group = by_wait.try_emplace(key, Group{i}).first->second;
    ++group.count;
  }
  std::map<int, std::string> lines;
  for (const auto& [key, group] : by_wait) {
    const Thread& first = threads_[group.first];
    const WarpArrival& at = first.arrival;
    std::string line =
        Format("\n  %d thread%s from (%u, %u, %u): ", group.count, group.count == 1 ? "" : "s",
               first.index.x, first.index.y, first.index.z);
    if (first.state == State::kExited) {
      line += "returned";
    } else if (first.state == State::kReady) {
      line += "can run";
    } else {
      line += at.name;
      if (first.state == State::kAtWarp) line += Format("(0x%08x)", at.mask);
      line += Format(" at %s:%u", at.where.file_name(), at.where.line());
    }
    lines[group.first] = line;
  }
  std::string text;
  for (const auto& [first, line] : lines) text += line;
  return text;
}

void OnAccess(const void* address, int64_t bytes, Access access) {
  if (current_runner != nullptr && is_watching) current_runner->OnAccess(address, bytes, access);
}
void OnAtomic(const void* address, int64_t bytes) { OnAccess(address, bytes, Access::kAtomic); }
void ArriveAtBarrier(Location where) { current_runner->ArriveAtBarrier(where); }
uint64_t ArriveAtWarp(const WarpArrival& arrival) { return current_runner->ArriveAtWarp(arrival); }
uint32_t ActiveLanes() { return current_runner->ActiveLanes(); }
int LaneId() { return current_runner->LaneId(); }
void* SharedArray(const void* site, const char* name, int64_t bytes, int64_t alignment) {
  return current_runner->SharedArray(site, name, bytes, alignment);
}
void* DynamicShared() { return current_runner->DynamicShared(); }

}  // namespace simt::emulator
