// NCCL links between processes over the strict NCCL on host memory: whole refits, and readers that
// die, with and without the library noticing, or are stopped.
#include <gtest/gtest.h>
#include <signal.h>

#include "csrc/refit/nccl_ends.h"
#include "csrc/testing/child_process.h"

namespace tandem {
namespace {

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

class NcclPeersDialects : public testing::TestWithParam<NcclDialect> {};

INSTANTIATE_TEST_SUITE_P(Both, NcclPeersDialects,
                         testing::Values(NcclDialect::kBroadcast, NcclDialect::kAllReduce));

TEST_P(NcclPeersDialects, ProcessesRefitEpochAfterEpoch) {
  const Setting jitter("TANDEM_TEST_DEVICE_JITTER_US", "200");
  const Plan plan = MakePlan();
  Fleet fleet = StartFleet(plan, 2, GetParam());
  ExpectFleetRefits(plan, &fleet, 1, 3);
}

TEST(NcclPeers, AReaderThatDiesIsNamedAndTheNextLinksWork) {
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

TEST(NcclPeers, ASilentDeathEndsAtTheDeadlineOnAll) {
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

TEST(NcclPeers, AStoppedReaderEndsAtTheDeadline) {
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
