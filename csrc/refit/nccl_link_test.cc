// NCCL links over the strict NCCL on host memory (csrc/testing/nccl), ends in threads: whole refits
// in both dialects, ends that disagree, never come or give up, and what is left behind.
#include "csrc/refit/nccl_link.h"

#include <dlfcn.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <future>
#include <utility>

#include "csrc/refit/nccl_ends.h"
#include "csrc/refit/session.h"
#include "csrc/testing/refit_problem.h"

namespace tandem {
namespace {

// Made and alive: device memory, pinned memory, streams, events.
std::array<int64_t, 8> DeviceCounts() {
  static const auto counts_of = reinterpret_cast<void (*)(int64_t*)>(
      dlsym(dlopen(Library().c_str(), RTLD_NOW), "tandem_test_device_counts"));
  std::array<int64_t, 8> counts;
  counts_of(counts.data());
  return counts;
}

RefitGroup MakeGroup(const Plan& plan, int32_t num_readers,
                     NcclDialect dialect = NcclDialect::kBroadcast) {
  RefitGroup group;
  std::vector<std::vector<std::unique_ptr<ReceiveLink>>> wires(static_cast<size_t>(num_readers));
  for (int32_t root = 0; root < plan.num_roots; ++root) {
    const NcclOptions options = Options(NewId(), dialect);
    const LinkGeometry geometry = Geometry(plan, num_readers, root);
    group.senders.push_back(
        std::make_unique<SendSession>(plan, root, MakeSender(options, geometry), SessionOptions{}));
    for (int32_t reader = 0; reader < num_readers; ++reader) {
      wires[static_cast<size_t>(reader)].push_back(MakeReader(options, geometry, reader));
    }
  }
  for (int32_t reader = 0; reader < num_readers; ++reader) {
    group.receivers.push_back(std::make_unique<ReceiveSession>(
        plan, reader, std::move(wires[static_cast<size_t>(reader)]), SessionOptions{}));
  }
  return group;
}

void ExpectEqual(const Plan& plan, const TensorStore& want, const TensorStore& got) {
  for (size_t i = 0; i < plan.tensors.size(); ++i) {
    EXPECT_EQ(want[i], got[i]) << plan.tensors[i].name;
  }
}

void ExpectRefits(const Plan& plan, RefitGroup* group, uint64_t first_epoch, uint64_t num_epochs) {
  TensorStore source(plan);
  std::vector<TensorStore> targets(group->receivers.size(), TensorStore(plan));
  for (uint64_t epoch = first_epoch; epoch < first_epoch + num_epochs; ++epoch) {
    FillFor(epoch, &source);
    const RefitCall call = {epoch, 10 * epoch, kTimeout};
    const RefitGroup::Results results = group->Run(plan, &source, &targets, call, call);
    for (const EndResult& end : results.senders) {
      ASSERT_TRUE(end.status.ok()) << end.status.message();
    }
    for (size_t i = 0; i < targets.size(); ++i) {
      ASSERT_TRUE(results.receivers[i].status.ok()) << results.receivers[i].status.message();
      ExpectEqual(plan, source, targets[i]);
      if (plan.num_roots == 1) {
        EXPECT_EQ(results.receivers[i].digests, results.senders[0].digests);
      }
    }
  }
}

void ExpectAllOk(const std::vector<Status>& statuses) {
  for (const Status& status : statuses) ASSERT_TRUE(status.ok()) << status.message();
}

class NcclLinkDialects : public testing::TestWithParam<NcclDialect> {};

TEST_P(NcclLinkDialects, RefitsOfSeveralEpochsArriveBitForBit) {
  const Plan plan = MakePlan();
  RefitGroup group = MakeGroup(plan, 3, GetParam());
  ExpectAllOk(group.Join());
  ExpectRefits(plan, &group, 1, 4);
}

INSTANTIATE_TEST_SUITE_P(Both, NcclLinkDialects,
                         testing::Values(NcclDialect::kBroadcast, NcclDialect::kAllReduce));

TEST(NcclLink, SeveralRootsEachHaveACommunicator) {
  const Plan plan = MakePlan(3);
  RefitGroup group = MakeGroup(plan, 2);
  ExpectAllOk(group.Join());
  ExpectRefits(plan, &group, 1, 3);
}

TEST(NcclLink, MakesNothingInTheSteadyState) {
  const Plan plan = MakePlan();
  RefitGroup group = MakeGroup(plan, 2);
  ExpectAllOk(group.Join());
  ExpectRefits(plan, &group, 1, 1);
  const std::array<int64_t, 8> before = DeviceCounts();
  ExpectRefits(plan, &group, 2, 5);
  EXPECT_EQ(DeviceCounts(), before);
}

TEST(NcclLink, LeavesNothingBehind) {
  const Plan plan = MakePlan();
  const auto num_files = [] {
    const std::filesystem::directory_iterator files("/proc/self/fd");
    return std::distance(begin(files), end(files));
  };
  const std::array<int64_t, 8> before = DeviceCounts();
  const auto files_before = num_files();
  for (uint64_t round = 0; round < 5; ++round) {
    RefitGroup group = MakeGroup(plan, 2);
    ExpectAllOk(group.Join());
    ExpectRefits(plan, &group, 1, 1);
    if (round % 2 == 1) group.senders[0]->Abort({StatusCode::kAborted, 0, -1, "enough"});
  }
  const std::array<int64_t, 8> after = DeviceCounts();
  for (size_t kind = 4; kind < 8; ++kind) EXPECT_EQ(after[kind], before[kind]) << kind;
  EXPECT_EQ(num_files(), files_before);
}

TEST(NcclLink, WhatEndsDisagreeAboutIsNamedOnAll) {
  const Plan plan = MakePlan();
  const NcclOptions options = Options(NewId());
  LinkGeometry other = Geometry(plan, 1);
  other.plan_digest ^= 1;
  const auto sender = MakeSender(options, Geometry(plan, 1));
  const auto reader = MakeReader(options, other, 0);
  Status sent;
  std::thread thread([&] { sent = sender->Join(Deadline::In(kTimeout)); });
  const Status received = reader->Join(Deadline::In(kTimeout));
  thread.join();
  for (const Status& status : {sent, received}) {
    EXPECT_EQ(status.code(), StatusCode::kMismatch);
    EXPECT_NE(status.message().find("plan_digest (lower half)"), std::string::npos)
        << status.message();
  }
  // The link has ended, for good and with its first fault.
  EXPECT_EQ(sender->Begin(1, Deadline::In(kTimeout)).message(), sent.message());
}

TEST(NcclLink, DialectsThatDifferAreRefusedNamingBoth) {
  const Plan plan = MakePlan();
  const std::string id = NewId();
  const auto sender = MakeSender(Options(id, NcclDialect::kBroadcast), Geometry(plan, 1));
  const auto reader = MakeReader(Options(id, NcclDialect::kAllReduce), Geometry(plan, 1), 0);
  Status sent;
  std::thread thread([&] { sent = sender->Join(Deadline::In(kTimeout)); });
  const Status received = reader->Join(Deadline::In(kTimeout));
  thread.join();
  EXPECT_FALSE(sent.ok());
  EXPECT_FALSE(received.ok());
  // Whoever sees it first says what it was, the other may only see that one give up.
  const std::string both = sent.message() + received.message();
  EXPECT_NE(both.find("rank 0 calls broadcast(1 x uint8, root 0), rank 1 calls all-reduce(1 x "
                      "float32, op 0)"),
            std::string::npos)
      << both;
}

TEST(NcclLink, SizesThatDifferAreRefusedNamingBoth) {
  const Plan plan = MakePlan();
  const NcclOptions options = Options(NewId());
  const auto sender = MakeSender(options, Geometry(plan, 1));
  const auto reader = MakeReader(options, Geometry(plan, 1), 0);
  const Deadline deadline = Deadline::In(kTimeout);
  Status sent;
  std::thread thread([&] {
    uint8_t* slot = nullptr;
    sent = sender->Join(deadline);
    if (sent.ok()) sent = sender->Begin(1, deadline);
    if (sent.ok()) sent = sender->Acquire(deadline, &slot);
    if (sent.ok()) sent = sender->Post(4096, deadline);
    if (sent.ok()) sent = sender->Flush(deadline);
  });
  const uint8_t* slot = nullptr;
  int64_t bytes = 0;
  Status received = reader->Join(deadline);
  if (received.ok()) received = reader->Begin(1, deadline);
  if (received.ok()) received = reader->Expect(2048);
  if (received.ok()) received = reader->Receive(deadline, &slot, &bytes);
  if (received.ok()) received = reader->Release();
  if (received.ok()) received = reader->Flush(deadline);
  thread.join();
  const std::string both = sent.message() + received.message();
  EXPECT_NE(both.find("rank 0 calls broadcast(4096 x uint8, root 0), rank 1 calls "
                      "broadcast(2048 x uint8, root 0)"),
            std::string::npos)
      << both;
  EXPECT_TRUE(sent.code() == StatusCode::kMismatch || received.code() == StatusCode::kMismatch);
  EXPECT_FALSE(sent.ok());
  EXPECT_FALSE(received.ok());
}

TEST(NcclLink, ARankThatNeverComesIsADeadline) {
  const Plan plan = MakePlan();
  const auto sender = MakeSender(Options(NewId()), Geometry(plan, 2));
  const auto start = Deadline::Clock::now();
  const Status status = sender->Join(Deadline::In(0.3));
  EXPECT_EQ(status.code(), StatusCode::kDeadlineExceeded);
  EXPECT_NE(status.message().find("3 ranks"), std::string::npos) << status.message();
  EXPECT_LT(std::chrono::duration<double>(Deadline::Clock::now() - start).count(), 5);
}

TEST(NcclLink, AnOldEpochIsRefused) {
  const Plan plan = MakePlan();
  RefitGroup group = MakeGroup(plan, 1);
  ExpectAllOk(group.Join());
  ExpectRefits(plan, &group, 5, 1);
  EXPECT_EQ(group.senders[0]->Begin(5, 1, Deadline::In(kTimeout)).code(), StatusCode::kMismatch);
}

TEST(NcclLink, AbortByAnotherThreadEndsAWaitAtOnce) {
  const Plan plan = MakePlan();
  const NcclOptions options = Options(NewId());
  const auto sender = MakeSender(options, Geometry(plan, 1));
  const auto reader = MakeReader(options, Geometry(plan, 1), 0);
  Status flushed;
  std::promise<void> has_begun;
  std::thread thread([&] {
    ASSERT_TRUE(sender->Join(Deadline::In(kTimeout)).ok());
    ASSERT_TRUE(sender->Begin(1, Deadline::In(kTimeout)).ok());
    has_begun.set_value();
    flushed = sender->Flush(Deadline::In(kTimeout));  // the reader does not come
  });
  ASSERT_TRUE(reader->Join(Deadline::In(kTimeout)).ok());
  has_begun.get_future().wait();
  sender->Abort({StatusCode::kAborted, kFirstReader, 7, "the driver says stop"});
  thread.join();
  EXPECT_EQ(flushed.message(), "the driver says stop");
  EXPECT_EQ(sender->fault().rank, kFirstReader);
  EXPECT_EQ(sender->fault().bucket, 7);
}

TEST(NcclLink, AfterAnAbortNewLinksWork) {
  const Plan plan = MakePlan();
  {
    RefitGroup group = MakeGroup(plan, 2);
    ExpectAllOk(group.Join());
    ExpectRefits(plan, &group, 1, 1);
    group.receivers[1]->Abort({StatusCode::kAborted, kFirstReader + 1, -1, "planted"});
    TensorStore source(plan);
    std::vector<TensorStore> targets(2, TensorStore(plan));
    const RefitCall call = {2, 2, kTimeout};
    const RefitGroup::Results results = group.Run(plan, &source, &targets, call, call);
    EXPECT_EQ(results.senders[0].status.code(), StatusCode::kPeerLost)
        << results.senders[0].status.message();
    EXPECT_EQ(results.receivers[0].status.code(), StatusCode::kPeerLost);
    EXPECT_NE(results.receivers[1].status.message().find("planted"), std::string::npos);
  }
  RefitGroup group = MakeGroup(plan, 2);
  ExpectAllOk(group.Join());
  ExpectRefits(plan, &group, 3, 2);
}

TEST(NcclLink, TwoRanksOnOneDeviceAreRefusedWhereTheLibraryRefuses) {
  const Setting setting("TANDEM_TEST_NCCL_ONE_RANK_PER_DEVICE");
  const Plan plan = MakePlan();
  RefitGroup group = MakeGroup(plan, 1);
  const std::vector<Status> statuses = group.Join();
  EXPECT_FALSE(statuses[0].ok());
  EXPECT_FALSE(statuses[1].ok());
  EXPECT_NE((statuses[0].message() + statuses[1].message()).find("Duplicate GPU"),
            std::string::npos)
      << statuses[0].message();
}

TEST(NcclLink, LibrariesThatWillNotDoAreNamed) {
  const Plan plan = MakePlan();
  NcclOptions options = Options(NewId());
  std::unique_ptr<SendLink> link;
  options.library = "/no/such/libnccl.so.2";
  Status status = CreateNcclSendLink(options, Geometry(plan, 1), &link);
  EXPECT_EQ(status.code(), StatusCode::kUnavailable);
  EXPECT_NE(status.message().find("/no/such/libnccl.so.2"), std::string::npos);
  options.library = "libm.so.6";
  status = CreateNcclSendLink(options, Geometry(plan, 1), &link);
  EXPECT_NE(status.message().find("it has no ncclGetVersion"), std::string::npos);
  options.library = Library();
  options.device_library = "libm.so.6";
  status = CreateNcclSendLink(options, Geometry(plan, 1), &link);
  EXPECT_NE(status.message().find("it has no TandemDeviceOps"), std::string::npos);
}

}  // namespace
}  // namespace tandem
