// NCCL links over the strict NCCL on host memory (csrc/testing/nccl): whole refits in threads and
// in processes, both dialects, ends that disagree, die, never come or give up, and what is left
// behind. TANDEM_TEST_NCCL is the library's path.
#include "csrc/refit/nccl_link.h"

#include <dlfcn.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <filesystem>
#include <future>
#include <random>
#include <utility>

#include "csrc/refit/session.h"
#include "csrc/testing/child_process.h"
#include "csrc/testing/refit_problem.h"

namespace tandem {
namespace {

constexpr double kTimeout = 20;

std::string Library() {
  const char* path = std::getenv("TANDEM_TEST_NCCL");
  EXPECT_NE(path, nullptr) << "TANDEM_TEST_NCCL is not set";
  return path == nullptr ? "" : path;
}

// Made and alive: device memory, pinned memory, streams, events.
std::array<int64_t, 8> DeviceCounts() {
  static const auto counts_of = reinterpret_cast<void (*)(int64_t*)>(
      dlsym(dlopen(Library().c_str(), RTLD_NOW), "tandem_test_device_counts"));
  std::array<int64_t, 8> counts;
  counts_of(counts.data());
  return counts;
}

// For the time of a test, of this process and its children.
class Setting {
 public:
  explicit Setting(const char* name, const char* value = "1") : name_(name) {
    setenv(name, value, 1);
  }
  ~Setting() { unsetenv(name_); }

 private:
  const char* name_;
};

std::string NewId() {
  std::string id;
  const Status status = MakeNcclUniqueId(Library(), &id);
  EXPECT_TRUE(status.ok()) << status.message();
  return id;
}

std::string ToHex(const std::string& bytes) {
  std::string text;
  for (const char byte : bytes) {
    constexpr char kDigits[] = "0123456789abcdef";
    text += {kDigits[(byte >> 4) & 15], kDigits[byte & 15]};
  }
  return text;
}
std::string FromHex(const std::string& text) {
  std::string bytes;
  for (size_t i = 0; i + 1 < text.size(); i += 2) {
    bytes += static_cast<char>(std::stoi(text.substr(i, 2), nullptr, 16));
  }
  return bytes;
}

// Many small tensors, mixed types, empty ones, one that fills many buckets.
Plan MakePlan(int32_t num_roots = 1) {
  std::vector<TensorEntry> tensors;
  for (int i = 0; i < 40; ++i) {
    const WireType types[] = {WireType::kFloat32, WireType::kBFloat16, WireType::kInt8};
    tensors.push_back({"small." + std::to_string(i), types[i % 3], {i % 7, 3, 37}});
  }
  tensors.push_back({"scalar", WireType::kFloat32, {}});
  tensors.push_back({"large", WireType::kBFloat16, {300, 1000}});
  Plan plan;
  const Status status = BuildPlan(std::move(tensors), 16384, num_roots, &plan);
  EXPECT_TRUE(status.ok()) << status.message();
  return plan;
}

NcclOptions Options(const std::string& id, NcclDialect dialect = NcclDialect::kBroadcast,
                    int device = 0) {
  return {Library(), Library(), id, dialect, device};
}

LinkGeometry Geometry(const Plan& plan, int32_t num_readers, int32_t root = 0) {
  return {plan.digest, kHeaderBytes + plan.bucket_bytes, 3, num_readers, root};
}

std::unique_ptr<SendLink> MakeSender(const NcclOptions& options, const LinkGeometry& geometry) {
  std::unique_ptr<SendLink> link;
  const Status status = CreateNcclSendLink(options, geometry, &link);
  EXPECT_TRUE(status.ok()) << status.message();
  return link;
}

std::unique_ptr<ReceiveLink> MakeReader(const NcclOptions& options, const LinkGeometry& geometry,
                                        int32_t reader) {
  std::unique_ptr<ReceiveLink> link;
  const Status status = CreateNcclReceiveLink(options, geometry, reader, &link);
  EXPECT_TRUE(status.ok()) << status.message();
  return link;
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

// The contents that everybody knows of an epoch.
void FillFor(uint64_t epoch, TensorStore* store) {
  std::mt19937_64 random(epoch);
  store->Fill(&random);
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

// ---- Processes ----

// id, reader, num_readers, dialect, first epoch, timeout: receives a refit for every line, and says
// how it went.
int ReaderRole(const std::vector<std::string>& arguments) {
  const Plan plan = MakePlan();
  const auto dialect = static_cast<NcclDialect>(std::stoi(arguments[3]));
  const int32_t reader = std::stoi(arguments[1]);
  std::vector<std::unique_ptr<ReceiveLink>> links;
  links.push_back(MakeReader(Options(FromHex(arguments[0]), dialect),
                             Geometry(plan, std::stoi(arguments[2])), reader));
  ReceiveSession session(plan, reader, std::move(links), {});
  Status status = session.Join(Deadline::In(kTimeout));
  PrintLine(status.ok() ? "joined" : status.message());
  TensorStore store(plan), want(plan);
  for (uint64_t epoch = std::stoull(arguments[4]); AwaitLine(); ++epoch) {
    const EndResult result =
        ReceiveAll(plan, &session, &store, {epoch, epoch, std::stod(arguments[5])});
    FillFor(epoch, &want);
    bool is_equal = true;
    for (size_t i = 0; i < plan.tensors.size(); ++i) is_equal = is_equal && store[i] == want[i];
    if (!result.status.ok()) {
      PrintLine(std::to_string(static_cast<int>(result.status.code())) + " " +
                result.status.message());
    } else {
      PrintLine(is_equal ? "equal" : "different");
    }
  }
  return 0;
}

struct Fleet {
  std::unique_ptr<SendSession> sender;
  std::vector<std::unique_ptr<ChildProcess>> readers;
};

Fleet StartFleet(const Plan& plan, int num_readers, NcclDialect dialect, uint64_t first_epoch = 1,
                 double timeout = kTimeout) {
  Fleet fleet;
  const std::string id = NewId();
  for (int reader = 0; reader < num_readers; ++reader) {
    fleet.readers.push_back(std::make_unique<ChildProcess>(
        "reader",
        std::vector<std::string>{ToHex(id), std::to_string(reader), std::to_string(num_readers),
                                 std::to_string(static_cast<int>(dialect)),
                                 std::to_string(first_epoch), std::to_string(timeout)}));
  }
  fleet.sender = std::make_unique<SendSession>(
      plan, 0, MakeSender(Options(id, dialect), Geometry(plan, num_readers)), SessionOptions{});
  const Status status = fleet.sender->Join(Deadline::In(kTimeout));
  EXPECT_TRUE(status.ok()) << status.message();
  for (const auto& reader : fleet.readers) {
    EXPECT_EQ(reader->ReadLine(Deadline::In(kTimeout)), "joined");
  }
  return fleet;
}

void ExpectFleetRefits(const Plan& plan, Fleet* fleet, uint64_t first_epoch, uint64_t num_epochs) {
  TensorStore source(plan);
  for (uint64_t epoch = first_epoch; epoch < first_epoch + num_epochs; ++epoch) {
    FillFor(epoch, &source);
    for (const auto& reader : fleet->readers) reader->WriteLine("go");
    const EndResult result =
        SendAll(plan, 0, fleet->sender.get(), &source, {epoch, epoch, kTimeout});
    ASSERT_TRUE(result.status.ok()) << result.status.message();
    for (const auto& reader : fleet->readers) {
      EXPECT_EQ(reader->ReadLine(Deadline::In(kTimeout)), "equal");
    }
  }
}

TEST_P(NcclLinkDialects, ProcessesRefitEpochAfterEpoch) {
  const Setting jitter("TANDEM_TEST_DEVICE_JITTER_US", "200");
  const Plan plan = MakePlan();
  Fleet fleet = StartFleet(plan, 2, GetParam());
  ExpectFleetRefits(plan, &fleet, 1, 3);
}

TEST(NcclLinkProcesses, AReaderThatDiesIsNamedAndTheNextLinksWork) {
  const Plan plan = MakePlan();
  {
    Fleet fleet = StartFleet(plan, 2, NcclDialect::kBroadcast);
    ExpectFleetRefits(plan, &fleet, 1, 1);
    fleet.readers[0]->WriteLine("go");
    fleet.readers[1]->Kill(SIGKILL);
    TensorStore source(plan);
    const EndResult result = SendAll(plan, 0, fleet.sender.get(), &source, {2, 2, kTimeout});
    EXPECT_EQ(result.status.code(), StatusCode::kPeerLost) << result.status.message();
    EXPECT_NE(result.status.message().find("the process of rank 2 died"), std::string::npos)
        << result.status.message();
    const std::string line = fleet.readers[0]->ReadLine(Deadline::In(kTimeout));
    EXPECT_EQ(line.substr(0, 2), std::to_string(static_cast<int>(StatusCode::kPeerLost)) + " ");
  }
  Fleet fleet = StartFleet(plan, 2, NcclDialect::kBroadcast, 3);
  ExpectFleetRefits(plan, &fleet, 3, 2);
}

TEST(NcclLinkProcesses, ASilentDeathEndsAtTheDeadlineOnAll) {
  const Setting silent("TANDEM_TEST_NCCL_SILENT");
  const Plan plan = MakePlan();
  Fleet fleet = StartFleet(plan, 2, NcclDialect::kBroadcast, 1, 1.0);
  fleet.readers[1]->Kill(SIGKILL);
  fleet.readers[0]->WriteLine("go");
  TensorStore source(plan);
  const auto start = Deadline::Clock::now();
  const EndResult result = SendAll(plan, 0, fleet.sender.get(), &source, {1, 1, 1.0});
  EXPECT_EQ(result.status.code(), StatusCode::kDeadlineExceeded) << result.status.message();
  const std::string line = fleet.readers[0]->ReadLine(Deadline::In(kTimeout));
  EXPECT_EQ(line.substr(0, 2),
            std::to_string(static_cast<int>(StatusCode::kDeadlineExceeded)) + " ")
      << line;
  EXPECT_LT(std::chrono::duration<double>(Deadline::Clock::now() - start).count(), 10);
}

TEST(NcclLinkProcesses, AStoppedReaderEndsAtTheDeadline) {
  const Plan plan = MakePlan();
  Fleet fleet = StartFleet(plan, 1, NcclDialect::kBroadcast);
  fleet.readers[0]->Kill(SIGSTOP);
  TensorStore source(plan);
  const EndResult result = SendAll(plan, 0, fleet.sender.get(), &source, {1, 1, 0.5});
  EXPECT_EQ(result.status.code(), StatusCode::kDeadlineExceeded) << result.status.message();
}

}  // namespace
}  // namespace tandem

int main(int argc, char** argv) {
  return tandem::MainWithRoles(argc, argv, {{"reader", tandem::ReaderRole}});
}
