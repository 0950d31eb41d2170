// Every way in which two ends of the pipeline can disagree, or one can end: each is told on both
// sides, with who gave up and the bucket.
#include <gtest/gtest.h>

#include <chrono>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "csrc/refit/session.h"
#include "csrc/testing/deferred_executor.h"
#include "csrc/testing/refit_problem.h"

namespace tandem {
namespace {

struct Outcome {
  Status sender;
  Status receiver;
  Fault sender_fault;
  Fault receiver_fault;
};

Outcome RunWith(const GroupOptions& options, const RefitCall& send_call,
                const RefitCall& receive_call, std::vector<DeferredExecutor>* executors = nullptr) {
  const Plan plan = ThreeBuckets();
  EXPECT_EQ(plan.buckets.size(), 3u);
  RefitGroup group = MakeGroup(plan, options, executors);
  TensorStore source(plan);
  std::mt19937_64 random(1);
  source.Fill(&random);
  std::vector<TensorStore> targets(1, TensorStore(plan));
  const RefitGroup::Results results = group.Run(plan, &source, &targets, send_call, receive_call);
  return {results.senders[0].status, results.receivers[0].status, group.senders[0]->fault(),
          group.receivers[0]->fault()};
}

void ExpectFault(const Outcome& outcome, StatusCode code, int64_t bucket,
                 const std::string& words) {
  EXPECT_EQ(outcome.receiver.code(), code) << outcome.receiver.message();
  EXPECT_EQ(outcome.receiver_fault.rank, kFirstReader);
  EXPECT_EQ(outcome.receiver_fault.bucket, bucket);
  EXPECT_NE(outcome.receiver.message().find(words), std::string::npos)
      << outcome.receiver.message();
}

class SessionFaultTest : public testing::TestWithParam<bool> {
 protected:
  // With executors that finish later a fault is found at the end, and named the same.
  Outcome Run(const GroupOptions& options, const RefitCall& send_call = {},
              const RefitCall& receive_call = {}) {
    return RunWith(options, send_call, receive_call, GetParam() ? &executors_ : nullptr);
  }

 private:
  std::vector<DeferredExecutor> executors_ = std::vector<DeferredExecutor>(2);
};

TEST_P(SessionFaultTest, AByteThatChangedOnTheWayIsTracedToItsTensor) {
  GroupOptions options;
  options.spoil = [](int64_t post, uint8_t* slot, int64_t*) {
    if (post == 1) slot[kHeaderBytes + 2048 + 5] ^= 1;  // behind the 2000 bytes of "second"
  };
  const Outcome outcome = Run(options);
  ExpectFault(outcome, StatusCode::kDataLoss, 1, "tensor 'third', bytes 0 to 1600");
  EXPECT_NE(outcome.receiver.message().find("bucket 1 of root 0 ('second' to 'third')"),
            std::string::npos);
}

TEST_P(SessionFaultTest, ARepeatedEpochIsNamed) {
  const Outcome outcome = Run({}, {4, 7}, {5, 7});
  ExpectFault(outcome, StatusCode::kMismatch, 0, "epoch 4, this end expects 5");
}

TEST_P(SessionFaultTest, AnotherVersionIsNamed) {
  const Outcome outcome = Run({}, {5, 6}, {5, 7});
  ExpectFault(outcome, StatusCode::kMismatch, 0, "version 6, this end expects 7");
}

TEST_P(SessionFaultTest, ATruncatedBucketIsNamed) {
  GroupOptions options;
  options.spoil = [](int64_t post, uint8_t*, int64_t* bytes) {
    if (post == 2) *bytes -= 1000;
  };
  const Outcome outcome = Run(options);
  ExpectFault(outcome, StatusCode::kDataLoss, 2, "4024 bytes arrived, the plan has 5024");
}

TEST_P(SessionFaultTest, ABucketOutOfOrderIsNamed) {
  GroupOptions options;
  options.spoil = [](int64_t post, uint8_t* slot, int64_t*) {
    if (post == 1) reinterpret_cast<SlotHeader*>(slot)->bucket = 2;
  };
  const Outcome outcome = Run(options);
  ExpectFault(outcome, StatusCode::kMismatch, 1, "bucket 2, this end expects 1");
}

TEST_P(SessionFaultTest, WhatIsNoBucketIsSaidToBeNone) {
  GroupOptions options;
  options.spoil = [](int64_t, uint8_t* slot, int64_t*) { slot[0] ^= 1; };
  ExpectFault(Run(options), StatusCode::kDataLoss, 0, "no bucket");
}

TEST_P(SessionFaultTest, ASenderWithoutDigestsIsRefusedByAReaderThatChecksThem) {
  GroupOptions options;
  options.sender_digests = false;
  ExpectFault(Run(options), StatusCode::kMismatch, 0, "no digests");
}

TEST_P(SessionFaultTest, WithoutDigestsNobodyNotices) {
  GroupOptions options;
  options.sender_digests = options.receiver_digests = false;
  options.spoil = [](int64_t, uint8_t* slot, int64_t*) { slot[kHeaderBytes] ^= 1; };
  const Outcome outcome = Run(options);
  EXPECT_TRUE(outcome.receiver.ok()) << outcome.receiver.message();
  EXPECT_TRUE(outcome.sender.ok()) << outcome.sender.message();
}

INSTANTIATE_TEST_SUITE_P(All, SessionFaultTest, testing::Bool(),
                         [](const auto& info) { return info.param ? "Deferred" : "Immediate"; });

TEST(SessionFaultsTest, AFaultOfOneReaderReachesTheSenderAndTheOthers) {
  std::vector<TensorEntry> tensors;
  for (int i = 0; i < 6; ++i) tensors.push_back({TensorName(i), WireType::kFloat32, {1000}});
  const Plan plan = MakePlan(std::move(tensors), 4096);
  GroupOptions options;
  options.num_readers = 3;
  RefitGroup group = MakeGroup(plan, options);  // two slots: nobody gets past the third bucket
  TensorStore source(plan);
  std::vector<TensorStore> targets(3, TensorStore(plan));
  std::vector<WireType> types = TensorStore::WireTypes(plan);
  types[1] = WireType::kInt8;
  targets[1] = TensorStore(plan, types);
  const RefitGroup::Results results = group.Run(plan, &source, &targets, {}, {});
  EXPECT_FALSE(results.senders[0].status.ok());
  for (size_t r = 0; r < 3; ++r) {
    const Fault fault = group.receivers[r]->fault();
    EXPECT_EQ(fault.code, StatusCode::kMismatch) << r;
    EXPECT_EQ(fault.rank, kFirstReader + 1) << r;
    EXPECT_EQ(fault.bucket, 1) << r;
  }
}

TEST(SessionFaultsTest, AnAbortFromAnotherThreadEndsAllWaits) {
  const Plan plan = ThreeBuckets();
  RefitGroup group = MakeGroup(plan, {});
  std::vector<TensorStore> targets(1, TensorStore(plan));
  const auto start = Deadline::Clock::now();
  EndResult result;
  std::thread receiver([&] {  // waits for a sender that never sends
    result = ReceiveAll(plan, group.receivers[0].get(), &targets[0], {1, 1, 60});
  });
  group.senders[0]->Abort({StatusCode::kAborted, 0, 2, "the trainer stops"});
  receiver.join();
  EXPECT_LT(std::chrono::duration<double>(Deadline::Clock::now() - start).count(), 30);
  EXPECT_EQ(result.status.code(), StatusCode::kAborted);
  EXPECT_EQ(result.status.message(), "the trainer stops");
  EXPECT_EQ(group.receivers[0]->fault().bucket, 2);
  // And for good: new links are needed.
  EXPECT_EQ(group.receivers[0]->Begin(2, 2, Deadline::In(1)).code(), StatusCode::kAborted);
}

TEST(SessionFaultsTest, ADeadlineNamesTheBucketThatWasWaitedFor) {
  const Plan plan = ThreeBuckets();
  RefitGroup group = MakeGroup(plan, {});
  std::vector<TensorStore> targets(1, TensorStore(plan));
  const EndResult result = ReceiveAll(plan, group.receivers[0].get(), &targets[0], {1, 1, 0.05});
  EXPECT_EQ(result.status.code(), StatusCode::kDeadlineExceeded);
  EXPECT_EQ(group.receivers[0]->fault().bucket, 0);
  EXPECT_NE(result.status.message().find("bucket 0 of root 0 ('first')"), std::string::npos);
  TensorStore source(plan);
  const EndResult sender = SendAll(plan, 0, group.senders[0].get(), &source, {1, 1, 60});
  EXPECT_EQ(sender.status.code(), StatusCode::kDeadlineExceeded);  // told, not waited for
  EXPECT_EQ(group.senders[0]->fault().rank, kFirstReader);
}

}  // namespace
}  // namespace tandem
