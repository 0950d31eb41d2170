// The sender's half of session.h.
#include <algorithm>
#include <utility>

#include "csrc/refit/bucket_mover.h"
#include "csrc/refit/session.h"
#include "csrc/refit/session_state.h"

namespace tandem {

class SendSession::Impl {
 public:
  Impl(const Plan& plan, int32_t root, std::unique_ptr<SendLink> link, SessionOptions options)
      : plan_(plan),
        link_(std::move(link)),
        mover_(plan, BucketMover::Direction::kPack, options.digests),
        state_(root) {
    for (size_t i = 0; i < plan.buckets.size(); ++i) {
      if (plan.buckets[i].root == root) buckets_.push_back(static_cast<int64_t>(i));
    }
  }

  std::string address() const { return link_->address(); }
  Fault fault() const { return state_.faults.get(); }
  SessionTimes times() const { return state_.times; }

  Status Join(const Deadline& deadline) {
    Status status = state_.faults.ToStatus();
    if (!status.ok()) return status;
    status = link_->Join(deadline);
    if (status.ok()) status = mover_.Prepare(link_->executor());
    return status.ok() ? state_.Joined() : Fail(status, -1);
  }

  Status Begin(const RefitId& refit, const Deadline& deadline) {
    Status status = state_.faults.ToStatus();
    if (!status.ok()) return status;
    status = state_.Begin(refit, deadline);
    if (status.ok()) {
      next_ = 0;
      status = state_.TimeWire([&] { return link_->Begin(refit.epoch, deadline); });
    }
    return status.ok() ? status : Fail(status, -1);
  }

  Status Send(int64_t bucket, const TensorMemory* tensors) {
    Status status = state_.CheckUnderWay("send");
    if (!status.ok()) return status;
    status = SendNext(bucket, tensors);
    return status.ok() ? status : Fail(status, bucket);
  }

  Status Finish(uint64_t* digests) {
    Status status = state_.CheckUnderWay("finish");
    if (!status.ok()) return status;
    status = CheckAllSent();
    if (status.ok()) status = state_.TimeWire([&] { return link_->Flush(state_.deadline()); });
    int64_t bucket = -1;
    if (status.ok()) {
      std::fill_n(digests, plan_.tensors.size(), uint64_t{0});
      status = mover_.Collect(state_.refit(), buckets_, state_.deadline(), digests, &bucket);
    }
    if (!status.ok()) return Fail(status, bucket);
    state_.End();
    return OkStatus();
  }

  bool is_mine() const { return state_.faults.is_mine(); }
  void Abort(const Fault& fault) {
    if (is_mine()) link_->Abort(state_.faults.Set(fault));
  }

 private:
  Status SendNext(int64_t bucket, const TensorMemory* tensors) {
    if (next_ >= buckets_.size() || buckets_[next_] != bucket) {
      return Status(StatusCode::kMismatch,
                    "send of bucket " + std::to_string(bucket) + ": the next of this root is " +
                        (next_ < buckets_.size() ? std::to_string(buckets_[next_]) : "none"));
    }
    uint8_t* slot = nullptr;
    Status status = state_.TimeWire([&] { return link_->Acquire(state_.deadline(), &slot); });
    if (!status.ok()) return status;
    status = mover_.Pack(bucket, state_.refit(), tensors, slot, &state_.times);
    if (!status.ok()) return status;
    const int64_t bytes = kHeaderBytes + plan_.buckets[static_cast<size_t>(bucket)].bytes;
    ++next_;
    return state_.TimeWire([&] { return link_->Post(bytes, state_.deadline()); });
  }

  Status CheckAllSent() const {
    if (next_ == buckets_.size()) return OkStatus();
    return Status(StatusCode::kMismatch, "finish after " + std::to_string(next_) + " of " +
                                             std::to_string(buckets_.size()) + " buckets; " +
                                             DescribeBucket(plan_, buckets_[next_]) + " is next");
  }

  // Tells the readers, and keeps the first fault for every later call.
  Status Fail(const Status& status, int64_t bucket) {
    link_->Abort(state_.FirstFault(status, link_->fault(), bucket, plan_));
    return state_.faults.ToStatus();
  }

  const Plan& plan_;
  const std::unique_ptr<SendLink> link_;
  std::vector<int64_t> buckets_;  // of this root
  size_t next_ = 0;               // in buckets_
  BucketMover mover_;
  SessionState state_;
};

SendSession::SendSession(const Plan& plan, int32_t root, std::unique_ptr<SendLink> link,
                         SessionOptions options)
    : impl_(std::make_unique<Impl>(plan, root, std::move(link), options)) {}
SendSession::~SendSession() {
  if (!impl_->is_mine()) static_cast<void>(impl_.release());  // the parent's, with its threads
}
std::string SendSession::address() const { return impl_->address(); }
Status SendSession::Join(const Deadline& deadline) { return impl_->Join(deadline); }
Status SendSession::Begin(uint64_t epoch, uint64_t version, const Deadline& deadline) {
  return impl_->Begin({epoch, version}, deadline);
}
Status SendSession::Send(int64_t bucket, const TensorMemory* tensors) {
  return impl_->Send(bucket, tensors);
}
Status SendSession::Finish(uint64_t* digests) { return impl_->Finish(digests); }
void SendSession::Abort(const Fault& fault) { impl_->Abort(fault); }
Fault SendSession::fault() const { return impl_->fault(); }
SessionTimes SendSession::times() const { return impl_->times(); }

}  // namespace tandem
