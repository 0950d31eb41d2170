#include "csrc/refit/shm_end.h"

#include <fcntl.h>
#include <unistd.h>

#include <cstring>

#include "csrc/refit/failure.h"

namespace tandem {
namespace {

// The state letter of a process in /proc, 0 if there is none to read.
char StateOf(int32_t process) {
  const std::string path = "/proc/" + std::to_string(process) + "/stat";
  const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (file < 0) return 0;
  char text[512];
  const ssize_t size = read(file, text, sizeof(text) - 1);
  close(file);
  if (size <= 0) return 0;
  text[size] = 0;
  const char* end_of_name = std::strrchr(text, ')');
  return end_of_name != nullptr && end_of_name[1] == ' ' ? end_of_name[2] : '\0';
}

// Not within a UTF-8 character.
size_t CutAt(const std::string& text, size_t limit) {
  if (text.size() <= limit) return text.size();
  while (limit > 0 && (static_cast<uint8_t>(text[limit]) & 0xc0) == 0x80) --limit;
  return limit;
}

}  // namespace

ShmEnd::~ShmEnd() {
  if (!segment_.is_mine()) return;
  segment_.record(segment_.end()).presence.store(Presence::kLeft, std::memory_order_release);
}

int32_t ShmEnd::RankOf(int32_t end) const {
  return end == 0 ? segment_.header().geometry.root : kFirstReader + end - 1;
}

Status ShmEnd::Check() const {
  if (!segment_.is_mine()) {
    return Failure(StatusCode::kInvalidArgument,
                   "the link of %s belongs to the parent of this process, which forked",
                   segment_.name().c_str());
  }
  if (segment_.header().first_fault.load(std::memory_order_acquire) == 0) return OkStatus();
  const Fault found = fault();
  return Status(found.code, found.message);
}

Fault ShmEnd::fault() const {
  Fault none;
  none.code = StatusCode::kOk;
  if (!segment_.is_mine()) return none;
  const SegmentHeader& header = segment_.header();
  const uint32_t first = header.first_fault.load(std::memory_order_acquire);
  if (first == 0 || first > 1u + header.geometry.num_readers) return none;
  const FaultRecord& record = segment_.record(static_cast<int32_t>(first - 1)).fault;
  const int64_t size = std::clamp<int64_t>(record.size, 0, kMaxFaultMessage);
  Fault found;
  found.code = static_cast<StatusCode>(record.code);
  found.rank = record.rank;
  found.bucket = record.bucket;
  found.message.assign(record.message, size);
  return found;
}

Status ShmEnd::Raise(const Fault& fault) {
  if (!segment_.is_mine()) return Check();
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::atomic<uint32_t>& first = segment_.header().first_fault;
    if (!has_raised_ && first.load(std::memory_order_acquire) == 0) {
      has_raised_ = true;
      FaultRecord& record = segment_.record(segment_.end()).fault;
      const bool is_fault = fault.code != StatusCode::kOk;
      record.code = static_cast<int32_t>(is_fault ? fault.code : StatusCode::kAborted);
      record.rank = fault.rank == kNoRank ? RankOf(segment_.end()) : fault.rank;
      record.bucket = fault.bucket;
      record.size = static_cast<int32_t>(CutAt(fault.message, kMaxFaultMessage));
      std::memcpy(record.message, fault.message.data(), record.size);
      uint32_t none = 0;
      first.compare_exchange_strong(none, 1 + segment_.end(), std::memory_order_acq_rel);
    }
  }
  CloseCounters();
  return Check();
}

Status ShmEnd::Raise(StatusCode code, int32_t end, std::string message) {
  Fault fault;
  fault.code = code;
  fault.rank = RankOf(end);
  fault.message = std::move(message);
  return Raise(fault);
}

void ShmEnd::CloseCounters() {
  SegmentHeader& header = segment_.header();
  header.joined.Close();
  header.complete.Close();
  for (int32_t end = 0; end <= header.geometry.num_readers; ++end) {
    segment_.record(end).counter.Close();
  }
}

Fault ShmEnd::Examine(int32_t end, const char* waited_for) const {
  Fault fault;
  fault.code = StatusCode::kOk;
  const EndRecord& record = segment_.record(end);
  const bool has_left = record.presence.load(std::memory_order_acquire) == Presence::kLeft;
  if (!has_left && segment_.IsHeld(end)) return fault;
  fault.code = StatusCode::kPeerLost;
  fault.rank = RankOf(end);
  fault.message = Describe(end) + (has_left ? " has closed its link" : " has died") +
                  " while we waited for " + waited_for;
  return fault;
}

Fault ShmEnd::Late(int32_t end, const char* waited_for) const {
  Fault fault;
  fault.code = StatusCode::kDeadlineExceeded;
  fault.rank = RankOf(end);
  fault.message = Describe(end) + " is late: the deadline passed while we waited for " + waited_for;
  return fault;
}

std::string ShmEnd::Describe(int32_t end) const {
  const EndRecord& record = segment_.record(end);
  std::string text = end == 0 ? "sender " + std::to_string(segment_.header().geometry.root)
                              : "reader " + std::to_string(end - 1);
  const int32_t process = record.process.load(std::memory_order_relaxed);
  if (process == 0) return text + " (not attached)";
  text += " (process " + std::to_string(process);
  if (segment_.IsHeld(end)) {
    const char state = StateOf(process);
    if (state == 'T' || state == 't') text += ", stopped";
  }
  return text + ")";
}

}  // namespace tandem
