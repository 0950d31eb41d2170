#include "csrc/refit/nccl_link.h"

#include <utility>

#include "csrc/refit/failure.h"
#include "csrc/refit/nccl_end.h"

namespace tandem {
namespace {

class NcclSendLink : public SendLink {
 public:
  NcclSendLink(const NcclOptions& options, const LinkGeometry& geometry)
      : end_(options, geometry, /*rank=*/0, geometry.root) {}

  Status Init() { return end_.Init(); }
  // Nobody is looked up: the unique id brings the ranks together.
  std::string address() const override { return "nccl"; }
  Executor* executor() override { return end_.executor(); }
  Status Join(const Deadline& deadline) override { return end_.Join(deadline); }

  Status Begin(uint64_t epoch, const Deadline& deadline) override {
    is_acquired_ = false;
    return end_.Begin(epoch, deadline);
  }

  Status Acquire(const Deadline& deadline, uint8_t** slot) override {
    Status status = end_.Enter();
    if (!status.ok()) return status;
    if (is_acquired_) return end_.Fail(InvalidArgument("acquire: the last slot was not posted"));
    end_.executor()->set_deadline(deadline);
    if (status = end_.WaitForWire(next_); !status.ok()) return status;
    is_acquired_ = true;
    *slot = end_.slot(next_);
    return OkStatus();
  }

  Status Post(int64_t bytes, const Deadline& deadline) override {
    Status status = end_.Enter();
    if (!status.ok()) return status;
    if (!is_acquired_ || bytes < 1 || bytes > end_.geometry().slot_bytes) {
      return end_.Fail(InvalidArgument("post: want an acquired slot and 1 to %lld bytes, got %lld",
                                       static_cast<long long>(end_.geometry().slot_bytes),
                                       static_cast<long long>(bytes)));
    }
    is_acquired_ = false;
    if (status = end_.Broadcast(next_, bytes, /*after_read=*/false, deadline); !status.ok()) {
      return status;
    }
    next_ = (next_ + 1) % end_.geometry().num_slots;
    return OkStatus();
  }

  Status Flush(const Deadline& deadline) override {
    Status status = end_.Enter();
    return status.ok() ? end_.Meet(deadline) : status;
  }

  void Abort(const Fault& fault) override { end_.Abort(fault); }
  Fault fault() const override { return end_.fault(); }

 private:
  NcclEnd end_;
  int64_t next_ = 0;
  bool is_acquired_ = false;
};

class NcclReceiveLink : public ReceiveLink {
 public:
  NcclReceiveLink(const NcclOptions& options, const LinkGeometry& geometry, int32_t reader)
      : end_(options, geometry, 1 + reader, kFirstReader + reader) {}

  Status Init() { return end_.Init(); }
  Executor* executor() override { return end_.executor(); }
  Status Join(const Deadline& deadline) override { return end_.Join(deadline); }

  Status Begin(uint64_t epoch, const Deadline& deadline) override {
    expected_ = 0;
    return end_.Begin(epoch, deadline);
  }

  Status Expect(int64_t bytes) override {
    if (bytes < 1 || bytes > end_.geometry().slot_bytes) {
      return end_.Fail(InvalidArgument("expect: want 1 to %lld bytes, got %lld",
                                       static_cast<long long>(end_.geometry().slot_bytes),
                                       static_cast<long long>(bytes)));
    }
    expected_ = bytes;
    return OkStatus();
  }

  Status Receive(const Deadline& deadline, const uint8_t** slot, int64_t* bytes) override {
    Status status = end_.Enter();
    if (!status.ok()) return status;
    if (expected_ == 0) {
      return end_.Fail(InvalidArgument("receive: NCCL must be told by Expect what comes"));
    }
    end_.executor()->set_deadline(deadline);
    status = end_.Broadcast(next_, expected_, /*after_read=*/true, deadline);
    if (status.ok()) status = end_.WaitForWire(next_);
    if (!status.ok()) return status;
    *slot = end_.slot(next_);
    *bytes = std::exchange(expected_, 0);
    return OkStatus();
  }

  Status Release() override {
    Status status = end_.Enter();
    if (status.ok()) status = end_.MarkRead(next_);
    if (!status.ok()) return status;
    next_ = (next_ + 1) % end_.geometry().num_slots;
    return OkStatus();
  }

  Status Flush(const Deadline& deadline) override {
    Status status = end_.Enter();
    return status.ok() ? end_.Meet(deadline) : status;
  }

  void Abort(const Fault& fault) override { end_.Abort(fault); }
  Fault fault() const override { return end_.fault(); }

 private:
  NcclEnd end_;
  int64_t next_ = 0;
  int64_t expected_ = 0;
};

}  // namespace

Status MakeNcclUniqueId(const std::string& library, std::string* unique_id) {
  const nccl::Api* api = nullptr;
  if (Status status = nccl::LoadApi(library, &api); !status.ok()) return status;
  return MakeUniqueIdWith(*api, unique_id);
}

Status CreateNcclSendLink(const NcclOptions& options, const LinkGeometry& geometry,
                          std::unique_ptr<SendLink>* link) {
  auto made = std::make_unique<NcclSendLink>(options, geometry);
  if (Status status = made->Init(); !status.ok()) return status;
  *link = std::move(made);
  return OkStatus();
}

Status CreateNcclReceiveLink(const NcclOptions& options, const LinkGeometry& geometry,
                             int32_t reader, std::unique_ptr<ReceiveLink>* link) {
  if (reader < 0 || reader >= geometry.num_readers) {
    return InvalidArgument("reader: want one of %d, got %d", geometry.num_readers, reader);
  }
  auto made = std::make_unique<NcclReceiveLink>(options, geometry, reader);
  if (Status status = made->Init(); !status.ok()) return status;
  *link = std::move(made);
  return OkStatus();
}

}  // namespace tandem
