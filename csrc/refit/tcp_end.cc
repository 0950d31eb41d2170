#include "csrc/refit/tcp_end.h"

#include <poll.h>
#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <utility>

namespace tandem::tcp {
namespace {

double SecondsSince(Deadline::Clock::time_point time) {
  return std::chrono::duration<double>(Deadline::Clock::now() - time).count();
}

// Writes what is left of a batch and what is queued; true when all of it is out.
bool WriteRest(Channel* channel) {
  while (!channel->is_batch_done() || channel->has_queued()) {
    if (channel->is_batch_done()) channel->BeginBatch();
    if (!channel->Write().ok()) return false;
    if (!channel->is_batch_done()) return false;
  }
  return true;
}

}  // namespace

Status CheckGeometry(const LinkGeometry& geometry, const TcpOptions& options) {
  if (Status status = tandem::CheckGeometry(geometry); !status.ok()) return status;
  if (!(options.silence_s >= kMinSilenceS && options.silence_s <= 86400)) {
    return InvalidArgument("tcp link: silence_s=%g, must be from %g to 86400", options.silence_s,
                           kMinSilenceS);
  }
  return OkStatus();
}

Fault MakeFault(StatusCode code, int32_t rank, const char* format, ...) {
  char text[512];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(text, sizeof(text), format, arguments);
  va_end(arguments);
  return {code, rank, -1, text};
}

SlotMemory::~SlotMemory() {
  if (base_ != nullptr) munmap(base_, static_cast<size_t>(stride_ * num_slots_));
}

Status SlotMemory::Allocate(const LinkGeometry& geometry) {
  const int64_t stride =
      (geometry.slot_bytes + kSlotAlignment - 1) / kSlotAlignment * kSlotAlignment;
  const auto size = static_cast<size_t>(stride * geometry.num_slots);
  void* memory = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) {
    return Status(StatusCode::kUnavailable,
                  std::string("tcp link: no memory for ") + std::to_string(geometry.num_slots) +
                      " slots of " + std::to_string(geometry.slot_bytes) + " bytes: " +
                      std::strerror(errno) + "; lower policy.generation.refit_cfg.num_buffers");
  }
  madvise(memory, size, MADV_HUGEPAGE);  // only saves time; small slots and old kernels refuse
  base_ = static_cast<uint8_t*>(memory);
  stride_ = stride;
  num_slots_ = geometry.num_slots;
  return OkStatus();
}

void EndState::SetFault(const Fault& fault) {
  const std::lock_guard<std::mutex> lock(mutex_);
  SetFaultLocked(fault);
}

void EndState::SetFaultLocked(const Fault& fault) {
  if (fault_.code != StatusCode::kOk) return;
  fault_ = fault;
  if (fault_.code == StatusCode::kOk) fault_.code = StatusCode::kAborted;
  changed_.notify_all();
  wakeup_.Notify();
}

Status EndState::Fail(const Fault& fault) {
  const std::lock_guard<std::mutex> lock(mutex_);
  return FailLocked(fault);
}

Status EndState::FailLocked(const Fault& fault) {
  SetFaultLocked(fault);
  return StatusLocked();
}

Fault EndState::fault() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return fault_;
}

bool EndState::IsOver() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return IsOverLocked();
}

void EndState::StopAndJoin(std::thread* thread) {
  if (!thread->joinable()) return;
  if (num_forks_ != NumForks()) return thread->detach();
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    is_stopping_ = true;
    wakeup_.Notify();
  }
  thread->join();
}

bool OwnPause::HasEnded(Deadline::Clock::time_point now, double silence_s) {
  const auto paused = now - std::exchange(last_turn_, now);
  return std::chrono::duration<double>(paused).count() > silence_s / 2;
}

void KeepAlive(Channel* channel) {
  if (channel->has_queued() || !channel->is_batch_done()) return;
  if (SecondsSince(channel->last_sent()) >= kHeartbeatS) {
    channel->QueueControl(FrameType::kHeartbeat);
  }
}

double SilenceOf(const Channel& channel, Deadline::Clock::time_point now, double limit_s) {
  const double silence_s = std::chrono::duration<double>(now - channel.last_heard()).count();
  return silence_s < limit_s ? 0 : silence_s;
}

std::string SilenceMessage(double silence_s) {
  char text[120];
  std::snprintf(text, sizeof(text),
                "nothing was heard for %.1f s: stopped, hung, or the network is cut", silence_s);
  return text;
}

void BidFarewell(const std::vector<Channel*>& channels, const Fault& fault) {
  const FaultRecord record = ToRecord(fault);
  for (Channel* channel : channels) {
    const bool is_peace = fault.code == StatusCode::kOk;
    channel->QueueControl(is_peace ? FrameType::kGoodbye : FrameType::kAbort, 0, &record);
  }
  const Deadline deadline = Deadline::In(kFarewellS);
  std::vector<bool> is_out(channels.size(), false);
  while (!deadline.HasPassed()) {
    std::vector<pollfd> polled;
    for (size_t i = 0; i < channels.size(); ++i) {
      Channel* channel = channels[i];
      if (!is_out[i] && !channel->has_ended() && WriteRest(channel)) {
        is_out[i] = true;
        channel->ShutdownWrite();
      }
      if (!channel->has_ended()) channel->Discard();
      const int16_t events = is_out[i] ? POLLIN : POLLIN | POLLOUT;
      if (!channel->has_ended()) polled.push_back({channel->fd(), events, 0});
    }
    if (polled.empty()) return;
    poll(polled.data(), polled.size(), static_cast<int>(deadline.Seconds() * 1e3) + 1);
  }
}

}  // namespace tandem::tcp
