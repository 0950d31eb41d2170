// The receiver's half of session.h.
#include <algorithm>
#include <utility>

#include "csrc/refit/bucket_mover.h"
#include "csrc/refit/session.h"
#include "csrc/refit/session_state.h"

namespace tandem {

class ReceiveSession::Impl {
 public:
  Impl(const Plan& plan, int32_t reader, std::vector<std::unique_ptr<ReceiveLink>> links,
       SessionOptions options)
      : plan_(plan), state_(kFirstReader + reader) {
    for (std::unique_ptr<ReceiveLink>& link : links) {
      roots_.push_back(std::make_unique<Root>(plan, std::move(link), options));
    }
    for (size_t i = 0; i < plan.buckets.size(); ++i) {
      const auto root = static_cast<size_t>(plan.buckets[i].root);
      if (root < roots_.size()) roots_[root]->buckets.push_back(static_cast<int64_t>(i));
    }
  }

  Fault fault() const { return state_.faults.get(); }
  SessionTimes times() const { return state_.times; }

  Status Join(const Deadline& deadline) {
    Status status = state_.faults.ToStatus();
    if (!status.ok()) return status;
    if (static_cast<int64_t>(roots_.size()) != plan_.num_roots) {
      return InvalidArgument("links: want one for each of the plan's %d roots, got %lld",
                             plan_.num_roots, static_cast<long long>(roots_.size()));
    }
    for (std::unique_ptr<Root>& root : roots_) {
      status = root->link->Join(deadline);
      if (status.ok()) status = root->mover.Prepare(root->link->executor());
      if (!status.ok()) return Fail(status, root.get(), -1);
    }
    return state_.Joined();
  }

  Status Begin(const RefitId& refit, const Deadline& deadline) {
    Status status = state_.faults.ToStatus();
    if (!status.ok()) return status;
    status = state_.Begin(refit, deadline);
    if (!status.ok()) return Fail(status, nullptr, -1);
    next_ = 0;
    for (std::unique_ptr<Root>& root : roots_) {
      status = state_.TimeWire([&] { return root->link->Begin(refit.epoch, deadline); });
      if (!status.ok()) return Fail(status, root.get(), -1);
    }
    return OkStatus();
  }

  Status Receive(int64_t bucket, const TensorMemory* tensors) {
    Status status = state_.CheckUnderWay("receive");
    if (!status.ok()) return status;
    const auto count = static_cast<int64_t>(plan_.buckets.size());
    if (next_ >= count || bucket != next_) {
      const std::string next = next_ < count ? std::to_string(next_) : "none";
      return Fail(Status(StatusCode::kMismatch,
                         "receive of bucket " + std::to_string(bucket) + ": the next is " + next),
                  nullptr, bucket);
    }
    Root& root = *roots_[static_cast<size_t>(plan_.buckets[static_cast<size_t>(bucket)].root)];
    status = ReceiveNext(&root, tensors);
    return status.ok() ? status : Fail(status, &root, bucket);
  }

  Status Finish(uint64_t* digests) {
    Status status = state_.CheckUnderWay("finish");
    if (!status.ok()) return status;
    const auto count = static_cast<int64_t>(plan_.buckets.size());
    if (next_ != count) {
      return Fail(Status(StatusCode::kMismatch, "finish after " + std::to_string(next_) + " of " +
                                                    std::to_string(count) + " buckets; " +
                                                    DescribeBucket(plan_, next_) + " is next"),
                  nullptr, -1);
    }
    std::fill_n(digests, plan_.tensors.size(), uint64_t{0});
    for (std::unique_ptr<Root>& root : roots_) {
      int64_t bucket = -1;
      status =
          root->mover.Collect(state_.refit(), root->buckets, state_.deadline(), digests, &bucket);
      if (!status.ok()) return Fail(status, root.get(), bucket);
    }
    for (std::unique_ptr<Root>& root : roots_) {
      status = state_.TimeWire([&] { return root->link->Flush(state_.deadline()); });
      if (!status.ok()) return Fail(status, root.get(), -1);
    }
    state_.End();
    return OkStatus();
  }

  bool is_mine() const { return state_.faults.is_mine(); }
  void Abort(const Fault& fault) {
    if (is_mine()) AbortAll(state_.faults.Set(fault));
  }

 private:
  // One root's wire and what unpacks its buckets.
  struct Root {
    Root(const Plan& plan, std::unique_ptr<ReceiveLink> wire, const SessionOptions& options)
        : link(std::move(wire)), mover(plan, BucketMover::Direction::kUnpack, options.digests) {}
    const std::unique_ptr<ReceiveLink> link;
    BucketMover mover;
    std::vector<int64_t> buckets;
  };

  Status ReceiveNext(Root* root, const TensorMemory* tensors) {
    const int64_t expected = kHeaderBytes + plan_.buckets[static_cast<size_t>(next_)].bytes;
    const uint8_t* slot = nullptr;
    int64_t bytes = 0;
    Status status = state_.TimeWire([&] {
      Status told = root->link->Expect(expected);
      return told.ok() ? root->link->Receive(state_.deadline(), &slot, &bytes) : told;
    });
    if (!status.ok()) return status;
    if (bytes != expected) {
      return Status(StatusCode::kDataLoss, std::to_string(bytes) + " bytes arrived, the plan has " +
                                               std::to_string(expected) + " with the header");
    }
    status = root->mover.Unpack(next_, state_.refit(), tensors, slot, &state_.times);
    if (!status.ok()) return status;
    ++next_;
    return root->link->Release();
  }

  // root: whose link the failed step was about, or none.
  Status Fail(const Status& status, const Root* root, int64_t bucket) {
    const Fault known =
        root == nullptr ? Fault{StatusCode::kOk, kNoRank, -1, ""} : root->link->fault();
    AbortAll(state_.FirstFault(status, known, bucket, plan_));
    return state_.faults.ToStatus();
  }

  void AbortAll(const Fault& fault) {
    for (std::unique_ptr<Root>& root : roots_) root->link->Abort(fault);
  }

  const Plan& plan_;
  std::vector<std::unique_ptr<Root>> roots_;
  int64_t next_ = 0;
  SessionState state_;
};

ReceiveSession::ReceiveSession(const Plan& plan, int32_t reader,
                               std::vector<std::unique_ptr<ReceiveLink>> links,
                               SessionOptions options)
    : impl_(std::make_unique<Impl>(plan, reader, std::move(links), options)) {}
ReceiveSession::~ReceiveSession() {
  if (!impl_->is_mine()) static_cast<void>(impl_.release());  // the parent's, with its threads
}
Status ReceiveSession::Join(const Deadline& deadline) { return impl_->Join(deadline); }
Status ReceiveSession::Begin(uint64_t epoch, uint64_t version, const Deadline& deadline) {
  return impl_->Begin({epoch, version}, deadline);
}
Status ReceiveSession::Receive(int64_t bucket, const TensorMemory* tensors) {
  return impl_->Receive(bucket, tensors);
}
Status ReceiveSession::Finish(uint64_t* digests) { return impl_->Finish(digests); }
void ReceiveSession::Abort(const Fault& fault) { impl_->Abort(fault); }
Fault ReceiveSession::fault() const { return impl_->fault(); }
SessionTimes ReceiveSession::times() const { return impl_->times(); }

}  // namespace tandem
