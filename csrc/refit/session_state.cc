#include "csrc/refit/session_state.h"

namespace tandem {

Fault FaultLatch::Set(const Fault& fault) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (fault_.code == StatusCode::kOk) {
    fault_ = fault;
    is_set_.store(true, std::memory_order_release);
  }
  return fault_;
}

Fault FaultLatch::get() const {
  if (!is_mine()) return {StatusCode::kOk, kNoRank, -1, ""};
  const std::lock_guard<std::mutex> lock(mutex_);
  return fault_;
}

Status FaultLatch::ToStatus() const {
  if (!is_mine()) {
    return InvalidArgument("the links belong to the parent of this process, which forked");
  }
  if (!is_set_.load(std::memory_order_acquire)) return OkStatus();
  const Fault fault = get();
  return Status(fault.code, fault.message);
}

Status SessionState::Joined() {
  is_joined_ = true;
  return OkStatus();
}

Status SessionState::Begin(const RefitId& refit, const Deadline& deadline) {
  if (!is_joined_) return InvalidArgument("begin: join the link first");
  if (is_under_way_) {
    return Status(StatusCode::kMismatch, "begin of epoch " + std::to_string(refit.epoch) +
                                             ": that of epoch " + std::to_string(refit_.epoch) +
                                             " is not finished");
  }
  if (refit.epoch <= refit_.epoch) {
    return Status(StatusCode::kMismatch, "begin of epoch " + std::to_string(refit.epoch) +
                                             ": it must be larger than the last, " +
                                             std::to_string(refit_.epoch));
  }
  refit_ = refit;
  deadline_ = deadline;
  start_ = Deadline::Clock::now();
  times = SessionTimes{};
  is_under_way_ = true;
  return OkStatus();
}

Status SessionState::CheckUnderWay(const char* verb) const {
  Status status = faults.ToStatus();
  if (!status.ok() || is_under_way_) return status;
  return Status(StatusCode::kMismatch, std::string(verb) +
                                           ": no refit is under way; the last had epoch " +
                                           std::to_string(refit_.epoch));
}

void SessionState::End() {
  is_under_way_ = false;
  times.total = std::chrono::duration<double>(Deadline::Clock::now() - start_).count();
}

Fault SessionState::FirstFault(const Status& status, const Fault& link_fault, int64_t bucket,
                               const Plan& plan) {
  Fault fault = link_fault;
  if (fault.code == StatusCode::kOk) fault = {status.code(), rank_, -1, status.message()};
  if (fault.bucket < 0 && bucket >= 0) {
    fault.bucket = bucket;
    fault.message = DescribeBucket(plan, bucket) + ": " + fault.message;
  }
  return faults.Set(fault);
}

}  // namespace tandem
