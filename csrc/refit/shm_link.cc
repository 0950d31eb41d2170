#include "csrc/refit/shm_link.h"

#include <cinttypes>
#include <cstdio>
#include <utility>

#include "csrc/refit/failure.h"
#include "csrc/refit/shm_end.h"
#include "csrc/refit/shm_segment.h"

namespace tandem {
namespace {

// Which slot of which refit, for messages.
class SlotName {
 public:
  SlotName(const char* verb, uint64_t slot, uint64_t epoch) {
    std::snprintf(text_, sizeof(text_), "slot %" PRIu64 " of epoch %" PRIu64 " to be %s", slot,
                  epoch, verb);
  }
  const char* c_str() const { return text_; }

 private:
  char text_[96];
};

// Shared by both ends: an epoch is larger than the last one.
Status StartEpoch(ShmEnd& end, uint64_t epoch, uint64_t* current) {
  if (epoch > *current) {
    *current = epoch;
    return OkStatus();
  }
  char text[128];
  std::snprintf(text, sizeof(text), "epoch %" PRIu64 " was begun after epoch %" PRIu64, epoch,
                *current);
  return end.Raise(StatusCode::kMismatch, end.segment().end(), text);
}

class ShmSendLink : public SendLink {
 public:
  explicit ShmSendLink(ShmSegment segment)
      : end_(std::move(segment)), geometry_(end_.segment().header().geometry) {}

  std::string address() const override { return end_.segment().name(); }
  Executor* executor() override { return HostExecutor(); }
  void Abort(const Fault& fault) override { static_cast<void>(end_.Raise(fault)); }
  Fault fault() const override { return end_.fault(); }

  Status Join(const Deadline& deadline) override {
    if (Status status = end_.Check(); !status.ok()) return status;
    SegmentHeader& header = end_.segment().header();
    Status status = end_.Await(header.joined, geometry_.num_readers, deadline,
                               [this](bool is_late) { return ExamineJoining(is_late); });
    if (!status.ok()) return status;
    end_.segment().Unlink();
    header.complete.Advance();
    return end_.Check();
  }

  Status Begin(uint64_t epoch, const Deadline&) override {
    if (Status status = end_.Check(); !status.ok()) return status;
    for (int32_t end = 1; end <= geometry_.num_readers; ++end) {
      const Fault fault = end_.Examine(end, "the refit to begin");
      if (fault.code != StatusCode::kOk) return end_.Raise(fault);
    }
    first_of_epoch_ = num_posted_;
    return StartEpoch(end_, epoch, &epoch_);
  }

  Status Acquire(const Deadline& deadline, uint8_t** slot) override {
    if (Status status = end_.Check(); !status.ok()) return status;
    const uint64_t num_slots = geometry_.num_slots;
    if (num_posted_ >= num_slots) {
      Status status = AwaitReleased(num_posted_ + 1 - num_slots, deadline);
      if (!status.ok()) return status;
    }
    *slot = end_.segment().slot(num_posted_ % num_slots);
    has_slot_ = true;
    return OkStatus();
  }

  Status Post(int64_t bytes, const Deadline&) override {
    if (Status status = end_.Check(); !status.ok()) return status;
    if (!std::exchange(has_slot_, false) || bytes < 0 || bytes > geometry_.slot_bytes) {
      return end_.Raise(
          StatusCode::kInvalidArgument, 0,
          "a slot of " + std::to_string(geometry_.slot_bytes) +
              " bytes must be acquired before each Post; bytes=" + std::to_string(bytes));
    }
    SlotRecord& record = end_.segment().slot_record(num_posted_ % geometry_.num_slots);
    record.number = num_posted_;
    record.epoch = epoch_;
    record.bytes = bytes;
    ++num_posted_;
    const uint32_t before = end_.segment().record(0).counter.Advance();
    return (before & SharedCounter::kClosed) != 0 ? end_.Check() : OkStatus();
  }

  Status Flush(const Deadline& deadline) override {
    if (Status status = end_.Check(); !status.ok()) return status;
    return AwaitReleased(num_posted_, deadline);
  }

 private:
  // Until every reader has released `count` slots.
  Status AwaitReleased(uint64_t count, const Deadline& deadline) {
    for (int32_t end = 1; end <= geometry_.num_readers; ++end) {
      SharedCounter& released = end_.segment().record(end).counter;
      Status status = end_.Await(released, count, deadline, [this, count](bool is_late) {
        return ExamineReaders(count, is_late);
      });
      if (!status.ok()) return status;
    }
    return OkStatus();
  }

  // A reader that owes nothing may have gone: it had all that there was.
  Fault ExamineReaders(uint64_t count, bool is_late) const {
    Fault late;
    late.code = StatusCode::kOk;
    const SlotName name("released", count - 1 - std::min(count - 1, first_of_epoch_), epoch_);
    for (int32_t end = 1; end <= geometry_.num_readers; ++end) {
      const uint32_t word = end_.segment().record(end).counter.Load();
      if (SharedCounter::HasReached(word, num_posted_)) continue;
      Fault fault = end_.Examine(end, name.c_str());
      if (fault.code != StatusCode::kOk) return fault;
      const bool is_slow = is_late && !SharedCounter::HasReached(word, count);
      if (is_slow && late.code == StatusCode::kOk) late = end_.Late(end, name.c_str());
    }
    return late;
  }

  Fault ExamineJoining(bool is_late) const {
    Fault late;
    late.code = StatusCode::kOk;
    int32_t num_missing = 0;
    int32_t first_missing = 0;
    for (int32_t end = 1; end <= geometry_.num_readers; ++end) {
      const Presence presence = end_.segment().record(end).presence.load();
      if (presence != Presence::kAbsent) {
        Fault fault = end_.Examine(end, "all readers to join");
        if (fault.code != StatusCode::kOk) return fault;
      }
      if (presence == Presence::kJoined) continue;
      if (num_missing++ == 0) first_missing = end;
    }
    if (!is_late || num_missing == 0) return late;
    char text[96];
    std::snprintf(text, sizeof(text), "%d of %d readers to join", num_missing,
                  geometry_.num_readers);
    return end_.Late(first_missing, text);
  }

  ShmEnd end_;
  const LinkGeometry geometry_;
  uint64_t epoch_ = 0;
  uint64_t num_posted_ = 0;
  uint64_t first_of_epoch_ = 0;
  bool has_slot_ = false;
};

class ShmReceiveLink : public ReceiveLink {
 public:
  ShmReceiveLink(ShmSegment segment, const LinkGeometry& geometry)
      : end_(std::move(segment)), geometry_(geometry) {}

  Executor* executor() override { return HostExecutor(); }
  void Abort(const Fault& fault) override { static_cast<void>(end_.Raise(fault)); }
  Fault fault() const override { return end_.fault(); }

  Status Join(const Deadline& deadline) override {
    if (Status status = end_.Check(); !status.ok()) return status;
    const std::string difference = DifferentField();
    if (!difference.empty()) {
      return end_.Raise(StatusCode::kMismatch, end_.segment().end(), difference);
    }
    SegmentHeader& header = end_.segment().header();
    // In this order: while the counter is short, some reader is not marked.
    header.joined.Advance();
    own().presence.store(Presence::kJoined, std::memory_order_release);
    return end_.Await(header.complete, 1, deadline, [this](bool is_late) {
      return ExamineSender("all readers to join", is_late);
    });
  }

  Status Begin(uint64_t epoch, const Deadline&) override {
    if (Status status = end_.Check(); !status.ok()) return status;
    const Fault fault = end_.Examine(0, "the refit to begin");
    if (fault.code != StatusCode::kOk) return end_.Raise(fault);
    first_of_epoch_ = num_taken_;
    return StartEpoch(end_, epoch, &epoch_);
  }

  Status Receive(const Deadline& deadline, const uint8_t** slot, int64_t* bytes) override {
    if (Status status = end_.Check(); !status.ok()) return status;
    if (has_slot_) return Misuse("Receive before the last slot was released");
    Status status = end_.Await(
        end_.segment().record(0).counter, num_taken_ + 1, deadline, [this](bool is_late) {
          const SlotName name("posted", num_taken_ - first_of_epoch_, epoch_);
          return ExamineSender(name.c_str(), is_late);
        });
    if (!status.ok()) return status;
    const int64_t index = num_taken_ % geometry_.num_slots;
    const SlotRecord record = end_.segment().slot_record(index);
    const bool is_expected = record.number == num_taken_ && record.epoch == epoch_ &&
                             record.bytes >= 0 && record.bytes <= geometry_.slot_bytes;
    if (!is_expected) return WrongSlot(record);
    *slot = end_.segment().slot(index);
    *bytes = record.bytes;
    has_slot_ = true;
    return OkStatus();
  }

  Status Release() override {
    if (Status status = end_.Check(); !status.ok()) return status;
    if (!std::exchange(has_slot_, false)) return Misuse("Release without a slot");
    ++num_taken_;
    const uint32_t before = own().counter.Advance();
    return (before & SharedCounter::kClosed) != 0 ? end_.Check() : OkStatus();
  }

 private:
  EndRecord& own() { return end_.segment().record(end_.segment().end()); }

  Fault ExamineSender(const char* waited_for, bool is_late) const {
    Fault fault = end_.Examine(0, waited_for);
    if (fault.code == StatusCode::kOk && is_late) fault = end_.Late(0, waited_for);
    return fault;
  }

  Status Misuse(const char* what) {
    return end_.Raise(StatusCode::kInvalidArgument, end_.segment().end(), what);
  }

  Status WrongSlot(const SlotRecord& record) {
    const Status status = Failure(
        StatusCode::kMismatch,
        "reader %d expected slot %" PRIu64 " of the link in epoch %" PRIu64 ", found slot %" PRIu64
        " in epoch %" PRIu64 " with %" PRId64 " of at most %" PRId64 " bytes",
        end_.segment().end() - 1, num_taken_, epoch_, record.number, record.epoch, record.bytes,
        geometry_.slot_bytes);
    return end_.Raise(status.code(), end_.segment().end(), status.message());
  }

  // The first field in which the two ends differ, in words; "" if none.
  std::string DifferentField() const {
    const LinkGeometry& sender = end_.segment().header().geometry;
    const int32_t reader = end_.segment().end() - 1;
    char text[160];
    if (sender.plan_digest != geometry_.plan_digest) {
      std::snprintf(text, sizeof(text),
                    "plan_digest of reader %d is %016" PRIx64 ", the sender's is %016" PRIx64,
                    reader, geometry_.plan_digest, sender.plan_digest);
      return text;
    }
    const struct {
      const char* name;
      int64_t here;
      int64_t there;
    } fields[] = {{"slot_bytes", geometry_.slot_bytes, sender.slot_bytes},
                  {"num_slots", geometry_.num_slots, sender.num_slots},
                  {"num_readers", geometry_.num_readers, sender.num_readers},
                  {"root", geometry_.root, sender.root}};
    for (const auto& field : fields) {
      if (field.here == field.there) continue;
      std::snprintf(text, sizeof(text), "%s of reader %d is %" PRId64 ", the sender's is %" PRId64,
                    field.name, reader, field.here, field.there);
      return text;
    }
    return "";
  }

  ShmEnd end_;
  const LinkGeometry geometry_;
  uint64_t epoch_ = 0;
  uint64_t num_taken_ = 0;
  uint64_t first_of_epoch_ = 0;
  bool has_slot_ = false;
};

}  // namespace

Status CreateShmSendLink(const std::string& name, const LinkGeometry& geometry,
                         std::unique_ptr<SendLink>* link) {
  ShmSegment segment;
  if (Status status = ShmSegment::Create(name, geometry, &segment); !status.ok()) return status;
  *link = std::make_unique<ShmSendLink>(std::move(segment));
  return OkStatus();
}

Status AttachShmReceiveLink(const std::string& address, const LinkGeometry& geometry,
                            int32_t reader, std::unique_ptr<ReceiveLink>* link) {
  ShmSegment segment;
  if (Status status = ShmSegment::Attach(address, reader, &segment); !status.ok()) return status;
  *link = std::make_unique<ShmReceiveLink>(std::move(segment), geometry);
  return OkStatus();
}

}  // namespace tandem
