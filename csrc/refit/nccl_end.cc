#include "csrc/refit/nccl_end.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <utility>

#include "csrc/refit/failure.h"
#include "csrc/refit/thread_start.h"

namespace tandem {
namespace {

// How many broadcasts the host may be ahead of the wire. It bounds what a driver queues, and is far
// more than is needed to keep the device busy.
constexpr size_t kMostAhead = 16;
constexpr int64_t kScratchBytes = 1024;
// Errors of NCCL announce themselves to nobody; a tenth of a second is soon enough to stop a refit.
constexpr auto kWatchInterval = std::chrono::milliseconds(100);
// To take leave of ranks that are still there; those that are not are found by the abort.
constexpr double kLeaveSeconds = 5;
// What is left on the streams of a communicator that was aborted runs through at once.
constexpr double kDrainSeconds = 10;
constexpr auto kDrainPause = std::chrono::microseconds(100);

int64_t RoundUp(int64_t bytes) {
  return (bytes + kSlotAlignment - 1) / kSlotAlignment * kSlotAlignment;
}

std::array<NcclField, 7> FieldsOf(const LinkGeometry& geometry, int version) {
  return {{{"plan_digest (upper half)", static_cast<int64_t>(geometry.plan_digest >> 32)},
           {"plan_digest (lower half)", static_cast<int64_t>(geometry.plan_digest & 0xFFFFFFFFu)},
           {"slot_bytes", geometry.slot_bytes},
           {"num_slots", geometry.num_slots},
           {"num_readers", geometry.num_readers},
           {"root", geometry.root},
           {"version of NCCL", version}}};
}

}  // namespace

NcclEnd::NcclEnd(const NcclOptions& options, const LinkGeometry& geometry, int rank,
                 int32_t own_rank)
    : options_(options),
      geometry_(geometry),
      rank_(rank),
      own_rank_(own_rank),
      slot_stride_(RoundUp(geometry.slot_bytes)) {}

NcclEnd::~NcclEnd() {
  StopWatching();
  if (ops_ != nullptr) (void)ops_->use_device(options_.device);
  // With nothing under way all ranks have met; else somebody may be waited for in vain.
  if (comm_ != nullptr) {
    const bool in_peace = fault().code == StatusCode::kOk && has_joined_ && !is_under_way_;
    if (!in_peace || !comm_->Close(Deadline::In(kLeaveSeconds)).ok()) comm_->Abort();
  }
  if (ops_ == nullptr) return;
  if (wire_ != nullptr) ops_->destroy_stream(wire_);
  executor_.reset();
  for (const Slot& slot : slot_events_) {
    if (slot.on_wire != nullptr) ops_->destroy_event(slot.on_wire);
    if (slot.read != nullptr) ops_->destroy_event(slot.read);
  }
  for (Event event : earlier_) ops_->destroy_event(event);
  if (work_done_ != nullptr) ops_->destroy_event(work_done_);
  if (wire_done_ != nullptr) ops_->destroy_event(wire_done_);
  if (drained_ != nullptr) ops_->destroy_event(drained_);
  if (has_nccl_memory_) {
    api_->mem_free(slots_);
  } else {
    ops_->release(slots_);
  }
  ops_->release(scratch_);
}

Status NcclEnd::Init() {
  if (Status status = CheckGeometry(geometry_); !status.ok()) return status;
  Status status = nccl::LoadApi(options_.library, &api_);
  const DeviceOps* ops = nullptr;
  if (status.ok()) status = LoadDeviceOps(options_.device_library, &ops);
  if (status.ok()) status = ops->use_device(options_.device);
  if (!status.ok()) return status;
  ops_ = ops;
  comm_ = std::make_unique<NcclComm>(api_);
  status = DeviceExecutor::Make(ops_, this, &executor_);
  if (status.ok()) status = ops_->create_stream(/*is_ordered_with_default=*/false, &wire_);
  if (status.ok()) status = ops_->create_event(&work_done_);
  if (status.ok()) status = ops_->create_event(&wire_done_);
  if (status.ok()) status = ops_->create_event(&drained_);
  for (size_t i = 0; status.ok() && i < kMostAhead; ++i) {
    Event event = nullptr;
    status = ops_->create_event(&event);
    if (status.ok()) earlier_.push_back(event);
  }
  if (status.ok()) status = ops_->allocate(kScratchBytes, &scratch_);
  return status.ok() ? MakeSlots() : status;
}

Status NcclEnd::MakeSlots() {
  slot_events_.resize(static_cast<size_t>(geometry_.num_slots));
  for (Slot& slot : slot_events_) {
    Status status = ops_->create_event(&slot.on_wire);
    if (status.ok()) status = ops_->create_event(&slot.read);
    if (!status.ok()) return status;
  }
  // NCCL's own allocator gives memory that it can register for direct access by every wire.
  const int64_t bytes = slot_stride_ * geometry_.num_slots;
  void* memory = nullptr;
  if (api_->mem_alloc != nullptr && api_->mem_free != nullptr &&
      api_->mem_alloc(&memory, static_cast<size_t>(bytes)) == nccl::kSuccess) {
    has_nccl_memory_ = true;
  } else if (Status status = ops_->allocate(bytes, &memory); !status.ok()) {
    return status;
  }
  slots_ = static_cast<uint8_t*>(memory);
  return OkStatus();
}

Status NcclEnd::Join(const Deadline& deadline) {
  Status status = Enter();
  if (!status.ok()) return status;
  if (has_joined_) return Fail(Failure(StatusCode::kInvalidArgument, "link: it joined already"));
  executor_->set_deadline(deadline);
  status = comm_->Init(options_.unique_id, 1 + geometry_.num_readers, rank_, deadline);
  if (status.ok()) status = SayHello(deadline);
  if (status.ok()) status = CompareGeometry(deadline);
  if (status.ok()) status = comm_->Register(slots_, slot_stride_ * geometry_.num_slots);
  if (status.ok()) status = StartThread("watching a refit", [this] { WatchOver(); }, &watcher_);
  if (!status.ok()) return Fail(status);
  has_joined_ = true;
  return OkStatus();
}

// The first operation makes the connections, which takes seconds in a large group: not the refit's
// seconds.
Status NcclEnd::SayHello(const Deadline& deadline) {
  const std::array<float, 1> nothing = {0};
  Status status = executor_->FromHost(scratch_, nothing.data(), sizeof(nothing));
  if (status.ok()) status = ops_->record(work_done_, executor_->stream());
  if (status.ok()) status = ops_->stream_wait(wire_, work_done_);
  if (!status.ok()) return status;
  status = options_.dialect == NcclDialect::kBroadcast
               ? comm_->Broadcast(scratch_, 1, wire_, deadline)
               : comm_->AllReduce(scratch_, 1, nccl::kFloat32, nccl::kSum, wire_, deadline);
  if (status.ok()) status = ops_->record(wire_done_, wire_);
  if (!status.ok()) return status;
  return WaitForEvent(*ops_, wire_done_, this, deadline, "the first operation of all ranks");
}

// The largest and the smallest value among the ranks, in one reduction: all ranks see the same.
Status NcclEnd::CompareGeometry(const Deadline& deadline) {
  int version = 0;
  (void)api_->get_version(&version);
  const Fields fields = FieldsOf(geometry_, version);
  Extremes extremes;
  for (size_t i = 0; i < fields.size(); ++i) {
    extremes[2 * i] = fields[i].value;
    extremes[2 * i + 1] = -fields[i].value;
  }
  static_assert(sizeof(extremes) <= kScratchBytes);
  Status status = executor_->FromHost(scratch_, extremes.data(), sizeof(extremes));
  if (status.ok()) {
    status = ReduceOnWire(scratch_, extremes.size(), nccl::kInt64, nccl::kMax, deadline);
  }
  if (status.ok()) status = executor_->ToHost(extremes.data(), scratch_, sizeof(extremes));
  if (status.ok()) status = executor_->Wait(deadline);
  if (!status.ok()) return status;
  const Status verdict = Compare(fields, extremes);
  if (verdict.ok()) return verdict;
  // Nobody gives up before all have read the result.
  status = ReduceOnWire(scratch_, 1, nccl::kInt64, nccl::kMax, deadline);
  if (status.ok()) (void)executor_->Wait(deadline);
  return verdict;
}

Status NcclEnd::Compare(const Fields& fields, const Extremes& extremes) const {
  for (size_t i = 0; i < fields.size(); ++i) {
    const int64_t most = extremes[2 * i];
    const int64_t least = -extremes[2 * i + 1];
    if (most == least) continue;
    return Failure(StatusCode::kMismatch,
                   "%s: %lld here (rank %d of the communicator), from %lld to %lld among all ranks",
                   fields[i].name, static_cast<long long>(fields[i].value), rank_,
                   static_cast<long long>(least), static_cast<long long>(most));
  }
  return OkStatus();
}

// After what the executor was given, and before what it will be given.
Status NcclEnd::ReduceOnWire(void* data, int64_t count, nccl::DataType type, nccl::RedOp op,
                             const Deadline& deadline) {
  Status status = ops_->record(work_done_, executor_->stream());
  if (status.ok()) status = ops_->stream_wait(wire_, work_done_);
  if (status.ok()) status = comm_->AllReduce(data, count, type, op, wire_, deadline);
  if (status.ok()) status = ops_->record(wire_done_, wire_);
  if (status.ok()) status = ops_->stream_wait(executor_->stream(), wire_done_);
  return status;
}

Status NcclEnd::Begin(uint64_t epoch, const Deadline& deadline) {
  Status status = Enter();
  if (!status.ok()) return status;
  if (!has_joined_) return Fail(Failure(StatusCode::kInvalidArgument, "begin before join"));
  if (epoch <= epoch_) {
    return Fail(Failure(StatusCode::kMismatch, "epoch %llu: want one above %llu",
                        static_cast<unsigned long long>(epoch),
                        static_cast<unsigned long long>(epoch_)));
  }
  epoch_ = epoch;
  SetDeadline(deadline);
  return OkStatus();
}

Status NcclEnd::HoldBack(const Deadline& deadline) {
  return WaitForEvent(*ops_, earlier_[next_earlier_], this, deadline, "an earlier broadcast");
}

Status NcclEnd::Broadcast(int64_t slot, int64_t bytes, bool after_read, const Deadline& deadline) {
  const Slot& events = slot_events_[static_cast<size_t>(slot)];
  Status status = HoldBack(deadline);
  if (status.ok() && !after_read) status = ops_->record(work_done_, executor_->stream());
  if (status.ok()) status = ops_->stream_wait(wire_, after_read ? events.read : work_done_);
  if (status.ok()) status = comm_->Broadcast(this->slot(slot), bytes, wire_, deadline);
  if (status.ok()) status = ops_->record(events.on_wire, wire_);
  if (status.ok()) status = ops_->record(earlier_[next_earlier_], wire_);
  if (!status.ok()) return Fail(status);
  next_earlier_ = (next_earlier_ + 1) % earlier_.size();
  return OkStatus();
}

Status NcclEnd::WaitForWire(int64_t slot) {
  Status status = ops_->stream_wait(executor_->stream(), slot_events_[slot].on_wire);
  return status.ok() ? status : Fail(status);
}

Status NcclEnd::MarkRead(int64_t slot) {
  Status status = ops_->record(slot_events_[slot].read, executor_->stream());
  return status.ok() ? status : Fail(status);
}

Status NcclEnd::Meet(const Deadline& deadline) {
  SetDeadline(deadline);
  const int32_t nothing = 0;
  Status status = executor_->FromHost(scratch_, &nothing, sizeof(nothing));
  if (status.ok()) status = ReduceOnWire(scratch_, 1, nccl::kInt32, nccl::kMax, deadline);
  if (status.ok()) {
    status = WaitForEvent(*ops_, wire_done_, this, deadline, "the end of the refit on all ranks");
  }
  if (!status.ok()) return Fail(status);
  Relax();
  return OkStatus();
}

Status NcclEnd::Enter() {
  const Fault first = fault();
  if (first.code != StatusCode::kOk) return Status(first.code, first.message);
  Status status = ops_->use_device(options_.device);
  return status.ok() ? status : Fail(status);
}

Status NcclEnd::Fail(const Status& status) {
  Abort({status.code(), own_rank_, -1, status.message()});
  const Fault first = fault();
  return Status(first.code, first.message);
}

void NcclEnd::Abort(const Fault& fault) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (fault_.code == StatusCode::kOk) fault_ = fault;
    is_under_way_ = false;
  }
  (void)ops_->use_device(options_.device);
  comm_->Abort();
  Drain();
}

void NcclEnd::Drain() {
  const std::lock_guard<std::mutex> lock(draining_);
  const Deadline deadline = Deadline::In(kDrainSeconds);
  for (Stream stream : {wire_, executor_->stream()}) {
    bool is_done = false;
    if (!ops_->record(drained_, stream).ok()) return;
    while (ops_->is_done(drained_, &is_done).ok() && !is_done && !deadline.HasPassed()) {
      std::this_thread::sleep_for(kDrainPause);
    }
  }
}

Fault NcclEnd::fault() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return fault_;
}

Status NcclEnd::Check() {
  const Fault first = fault();
  if (first.code != StatusCode::kOk) return Status(first.code, first.message);
  return comm_->Check();
}

void NcclEnd::SetDeadline(const Deadline& deadline) {
  executor_->set_deadline(deadline);
  const std::lock_guard<std::mutex> lock(mutex_);
  deadline_ = deadline;
  is_under_way_ = fault_.code == StatusCode::kOk;
  changed_.notify_all();
}

void NcclEnd::Relax() {
  const std::lock_guard<std::mutex> lock(mutex_);
  is_under_way_ = false;
}

void NcclEnd::WatchOver() {
  (void)ops_->use_device(options_.device);
  std::unique_lock<std::mutex> lock(mutex_);
  while (!is_ending_) {
    if (!is_under_way_) {
      changed_.wait(lock);
      continue;
    }
    const auto next = std::min(Deadline::Clock::now() + kWatchInterval, deadline_.end());
    changed_.wait_until(lock, next);
    if (is_ending_ || !is_under_way_) continue;
    const bool is_late = deadline_.HasPassed();
    lock.unlock();
    Status status = comm_->Check();
    if (status.ok() && is_late) {
      status = Failure(StatusCode::kDeadlineExceeded,
                       "the refit of epoch %llu was not done at its deadline",
                       static_cast<unsigned long long>(epoch_));
    }
    if (!status.ok()) (void)Fail(status);
    lock.lock();
  }
}

void NcclEnd::StopWatching() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    is_ending_ = true;
    changed_.notify_all();
  }
  if (watcher_.joinable()) watcher_.join();
}

}  // namespace tandem
