#include "csrc/testing/loopback_link.h"

#include <algorithm>
#include <condition_variable>
#include <mutex>
#include <utility>

namespace tandem {
namespace {

// What both ends see. Everything is guarded by the mutex, but the memory of a slot between Acquire
// and Post, and between Receive and Release.
class Channel {
 public:
  explicit Channel(LoopbackOptions options)
      : options_(std::move(options)),
        released_(static_cast<size_t>(options_.geometry.num_readers)),
        reader_epochs_(released_.size()) {
    for (int32_t i = 0; i < options_.geometry.num_slots; ++i) {
      slots_.emplace_back(static_cast<size_t>(options_.geometry.slot_bytes));
      sizes_.push_back(0);
    }
  }

  const LoopbackOptions& options() const { return options_; }

  Status Join(const Deadline& deadline) {
    std::unique_lock<std::mutex> lock(mutex_);
    ++joined_;
    changed_.notify_all();
    return WaitFor(&lock, deadline, "all ends",
                   [&] { return joined_ > static_cast<int64_t>(released_.size()); });
  }

  Status BeginSender(uint64_t epoch) {
    const std::lock_guard<std::mutex> lock(mutex_);
    posts_ = 0;
    return Advance(epoch, &epoch_);
  }

  Status BeginReader(size_t reader, uint64_t epoch) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return Advance(epoch, &reader_epochs_[reader]);
  }

  Status Acquire(const Deadline& deadline, uint8_t** slot) {
    std::unique_lock<std::mutex> lock(mutex_);
    const auto num_slots = static_cast<int64_t>(slots_.size());
    Status status =
        WaitFor(&lock, deadline, "a slot", [&] { return posted_ - SlowestReader() < num_slots; });
    *slot = Slot(posted_).data();
    return status;
  }

  Status Post(int64_t bytes) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (fault_.code != StatusCode::kOk) return ToStatus();
    if (options_.spoil) options_.spoil(posts_, Slot(posted_).data(), &bytes);
    sizes_[static_cast<size_t>(posted_) % sizes_.size()] = bytes;
    ++posted_;
    ++posts_;
    changed_.notify_all();
    return OkStatus();
  }

  Status Flush(const Deadline& deadline) {
    std::unique_lock<std::mutex> lock(mutex_);
    return WaitFor(&lock, deadline, "readers", [&] { return SlowestReader() == posted_; });
  }

  Status Receive(size_t reader, const Deadline& deadline, const uint8_t** slot, int64_t* bytes) {
    std::unique_lock<std::mutex> lock(mutex_);
    Status status =
        WaitFor(&lock, deadline, "a bucket", [&] { return posted_ > released_[reader]; });
    if (!status.ok()) return status;
    *slot = Slot(released_[reader]).data();
    *bytes = sizes_[static_cast<size_t>(released_[reader]) % sizes_.size()];
    return OkStatus();
  }

  Status Release(size_t reader) {
    const std::lock_guard<std::mutex> lock(mutex_);
    ++released_[reader];
    changed_.notify_all();
    return ToStatus();
  }

  void Abort(const Fault& fault) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (fault_.code == StatusCode::kOk) fault_ = fault;
    changed_.notify_all();
  }

  Fault fault() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return fault_;
  }

 private:
  std::vector<uint8_t>& Slot(int64_t number) {
    return slots_[static_cast<size_t>(number) % slots_.size()];
  }
  int64_t SlowestReader() const { return *std::min_element(released_.begin(), released_.end()); }
  Status ToStatus() const { return Status(fault_.code, fault_.message); }

  Status Advance(uint64_t epoch, uint64_t* last) {
    if (fault_.code != StatusCode::kOk) return ToStatus();
    if (epoch <= *last) return Status(StatusCode::kMismatch, "an old epoch");
    *last = epoch;
    return OkStatus();
  }

  template <typename Condition>
  Status WaitFor(std::unique_lock<std::mutex>* lock, const Deadline& deadline, const char* what,
                 Condition condition) {
    const bool in_time = changed_.wait_until(
        *lock, deadline.end(), [&] { return fault_.code != StatusCode::kOk || condition(); });
    if (fault_.code != StatusCode::kOk) return ToStatus();
    return in_time ? OkStatus()
                   : Status(StatusCode::kDeadlineExceeded, std::string("waited for ") + what);
  }

  const LoopbackOptions options_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::vector<uint8_t>> slots_;
  std::vector<int64_t> sizes_;
  int64_t joined_ = 0;
  int64_t posted_ = 0;
  int64_t posts_ = 0;  // of this refit
  std::vector<int64_t> released_;
  uint64_t epoch_ = 0;
  std::vector<uint64_t> reader_epochs_;
  Fault fault_{StatusCode::kOk, kNoRank, -1, ""};
};

class LoopbackSendLink final : public SendLink {
 public:
  explicit LoopbackSendLink(std::shared_ptr<Channel> channel) : channel_(std::move(channel)) {}

  std::string address() const override { return "loopback"; }
  Executor* executor() override { return channel_->options().send_executor; }
  Status Join(const Deadline& deadline) override { return channel_->Join(deadline); }
  Status Begin(uint64_t epoch, const Deadline&) override { return channel_->BeginSender(epoch); }
  Status Acquire(const Deadline& deadline, uint8_t** slot) override {
    return channel_->Acquire(deadline, slot);
  }
  Status Post(int64_t bytes, const Deadline& deadline) override {
    Status status = executor()->Wait(deadline);  // as a wire does that is ordered after the stream
    return status.ok() ? channel_->Post(bytes) : status;
  }
  Status Flush(const Deadline& deadline) override { return channel_->Flush(deadline); }
  void Abort(const Fault& fault) override { channel_->Abort(fault); }
  Fault fault() const override { return channel_->fault(); }

 private:
  const std::shared_ptr<Channel> channel_;
};

// A reader whose executor is not immediate gets a copy of its own that lives until Flush, so that
// nothing of a bucket needs to have happened when it is released.
class LoopbackReceiveLink final : public ReceiveLink {
 public:
  LoopbackReceiveLink(std::shared_ptr<Channel> channel, size_t reader)
      : channel_(std::move(channel)), reader_(reader) {}

  Executor* executor() override { return channel_->options().receive_executor; }
  Status Join(const Deadline& deadline) override { return channel_->Join(deadline); }
  Status Begin(uint64_t epoch, const Deadline&) override {
    return channel_->BeginReader(reader_, epoch);
  }
  Status Receive(const Deadline& deadline, const uint8_t** slot, int64_t* bytes) override {
    Status status = channel_->Receive(reader_, deadline, slot, bytes);
    if (!status.ok() || executor()->is_immediate()) return status;
    copies_.push_back(std::make_unique<std::vector<uint8_t>>(*slot, *slot + *bytes));
    *slot = copies_.back()->data();
    return OkStatus();
  }
  Status Release() override { return channel_->Release(reader_); }
  Status Flush(const Deadline& deadline) override {
    Status status = executor()->Wait(deadline);
    copies_.clear();
    return status;
  }
  void Abort(const Fault& fault) override { channel_->Abort(fault); }
  Fault fault() const override { return channel_->fault(); }

 private:
  const std::shared_ptr<Channel> channel_;
  const size_t reader_;
  std::vector<std::unique_ptr<std::vector<uint8_t>>> copies_;
};

}  // namespace

LoopbackEnds MakeLoopback(LoopbackOptions options) {
  auto channel = std::make_shared<Channel>(std::move(options));
  LoopbackEnds ends;
  ends.sender = std::make_unique<LoopbackSendLink>(channel);
  for (int32_t i = 0; i < channel->options().geometry.num_readers; ++i) {
    ends.readers.push_back(std::make_unique<LoopbackReceiveLink>(channel, static_cast<size_t>(i)));
  }
  return ends;
}

}  // namespace tandem
