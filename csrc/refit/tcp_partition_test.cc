// The TCP link between two network namespaces whose connection is cut in the middle of a transfer.
// Every process lives in a namespace of its own making, which ends with it; needs root and the
// programs ip and nsenter, and says SKIPPED where it has them not.
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>

#include "csrc/refit/tcp_roles.h"

namespace tandem {
namespace {

constexpr double kSilenceS = 1.5;

Deadline Soon() { return Deadline::In(60); }

bool Runs(const std::string& command) { return std::system(command.c_str()) == 0; }

// Runs a command in the network namespace of a process.
bool RunsAt(const Peer& peer, const std::string& command) {
  return Runs("nsenter --net=/proc/" + std::to_string(peer.pid()) + "/ns/net " + command);
}

LinkSetting Setting() {
  LinkSetting setting;
  setting.geometry.plan_digest = 5;
  setting.geometry.slot_bytes = 4 << 20;
  setting.geometry.num_slots = 3;
  setting.geometry.num_readers = 2;
  setting.silence_s = kSilenceS;
  return setting;
}

// The sender and reader 0 are two hosts joined by a cable; reader 1 is on the sender's host.
class TcpPartition : public testing::Test {
 protected:
  void SetUp() override {
    if (geteuid() != 0 || !Runs("ip -V > /dev/null 2>&1 && nsenter -V > /dev/null 2>&1") ||
        !Runs("nsenter --net=/proc/self/ns/net true")) {
      GTEST_SKIP() << "SKIPPED: a partition needs root, ip and nsenter; nothing was tested";
    }
    sender_ = std::make_unique<Peer>(kSenderRole, Peer::kOwnNetwork);
    far_ = std::make_unique<Peer>(kReaderRole, Peer::kOwnNetwork);
    if (!RunsAt(*sender_, "ip link set lo up") || !RunsAt(*far_, "ip link set lo up")) {
      GTEST_SKIP() << "SKIPPED: no namespace of networks can be made here; nothing was tested";
    }
    const std::string far_pid = std::to_string(far_->pid());
    ASSERT_TRUE(RunsAt(*sender_, "ip link add cable0 type veth peer name cable1 netns " + far_pid));
    ASSERT_TRUE(RunsAt(*sender_, "ip address add 10.77.0.1/24 dev cable0"));
    ASSERT_TRUE(RunsAt(*far_, "ip address add 10.77.0.2/24 dev cable1"));
    ASSERT_TRUE(RunsAt(*sender_, "ip link set cable0 up"));
    ASSERT_TRUE(RunsAt(*far_, "ip link set cable1 up"));
    near_ = std::make_unique<Peer>(kReaderRole, sender_->pid());
  }

  void Connect(int epoch) {
    const Outcome opened = sender_->Do("open 10.77.0.1 0 " + Setting().words(), Soon());
    ASSERT_TRUE(opened.is_ok) << opened.text;
    int number = 0;
    for (Peer* reader : {far_.get(), near_.get()}) {
      const Outcome outcome = reader->Do(
          "open " + Setting().words() + " " + std::to_string(number++) + " " + opened.text, Soon());
      ASSERT_TRUE(outcome.is_ok) << outcome.text;
    }
    ASSERT_NO_FATAL_FAILURE(AllDo("join 30"));
    ASSERT_NO_FATAL_FAILURE(AllDo("begin " + std::to_string(epoch) + " 30"));
  }
  void AllDo(const std::string& command) {
    for (Peer* peer : {sender_.get(), far_.get(), near_.get()}) peer->Tell(command);
    for (Peer* peer : {sender_.get(), far_.get(), near_.get()}) {
      const Outcome outcome = peer->Answer(Soon());
      ASSERT_TRUE(outcome.is_ok) << outcome.text;
    }
  }
  void Transfer(int count) {
    sender_->Tell("send " + std::to_string(count) + " 30");
    for (Peer* reader : {far_.get(), near_.get()}) {
      reader->Tell("take " + std::to_string(count) + " 30");
    }
    for (Peer* peer : {sender_.get(), far_.get(), near_.get()}) {
      const Outcome outcome = peer->Answer(Soon());
      ASSERT_TRUE(outcome.is_ok) << outcome.text;
    }
    ASSERT_TRUE(sender_->Do("flush 30", Soon()).is_ok);
  }
  void ExpectLost(const char* end, Peer* peer, int32_t rank) {
    const Outcome outcome = peer->Answer(Soon());
    std::printf("| network cut, silence %.1f s   | %-8s | %6.3f s | code %d | rank %6d | %s |\n",
                kSilenceS, end, outcome.seconds, static_cast<int>(outcome.code), outcome.rank,
                outcome.text.c_str());
    EXPECT_EQ(outcome.code, StatusCode::kPeerLost) << outcome.text;
    EXPECT_EQ(outcome.rank, rank) << outcome.text;
    EXPECT_LT(outcome.seconds, 10);
  }

  std::unique_ptr<Peer> sender_;
  std::unique_ptr<Peer> far_;
  std::unique_ptr<Peer> near_;
};

TEST_F(TcpPartition, BothSidesNoticeTheCutAndTheNextRefitWorks) {
  ASSERT_NO_FATAL_FAILURE(Connect(1));
  sender_->Tell("send 100000000 60");
  for (Peer* reader : {far_.get(), near_.get()}) reader->Tell("take 100000000 60");
  for (Peer* reader : {far_.get(), near_.get()}) ASSERT_TRUE(reader->AwaitGoing(Soon()));
  ASSERT_TRUE(RunsAt(*sender_, "ip link set cable0 down"));
  for (Peer* peer : {sender_.get(), far_.get(), near_.get()}) peer->RestartClock();
  ExpectLost("sender", sender_.get(), kFirstReader);
  ExpectLost("reader 1", near_.get(), kFirstReader);
  ExpectLost("reader 0", far_.get(), 0);  // which can only say that the sender is gone
  ASSERT_TRUE(RunsAt(*sender_, "ip link set cable0 up"));
  ASSERT_NO_FATAL_FAILURE(Connect(2));
  ASSERT_NO_FATAL_FAILURE(Transfer(5));
}

TEST_F(TcpPartition, ACutWhileNobodySendsIsNoticedToo) {
  ASSERT_NO_FATAL_FAILURE(Connect(1));
  ASSERT_TRUE(RunsAt(*sender_, "ip link set cable0 down"));
  for (Peer* reader : {far_.get(), near_.get()}) reader->Tell("take 100 60");
  ExpectLost("reader 1", near_.get(), kFirstReader);
  ExpectLost("reader 0", far_.get(), 0);
  sender_->Tell("send 1 60");
  ExpectLost("sender", sender_.get(), kFirstReader);
}

TEST_F(TcpPartition, JoiningAcrossACutEndsAtTheDeadline) {
  const Outcome opened = sender_->Do("open 10.77.0.1 0 " + Setting().words(), Soon());
  ASSERT_TRUE(opened.is_ok) << opened.text;
  ASSERT_TRUE(RunsAt(*sender_, "ip link set cable0 down"));
  ASSERT_TRUE(far_->Do("open " + Setting().words() + " 0 " + opened.text, Soon()).is_ok);
  sender_->Tell("join 1");
  const Outcome reader = far_->Do("join 1", Soon());
  const Outcome sender = sender_->Answer(Soon());
  EXPECT_EQ(reader.code, StatusCode::kDeadlineExceeded) << reader.text;
  EXPECT_LT(reader.seconds, 10);
  EXPECT_EQ(sender.code, StatusCode::kDeadlineExceeded) << sender.text;
  EXPECT_NE(sender.text.find("missing: 0 1"), std::string::npos) << sender.text;
}

}  // namespace
}  // namespace tandem

int main(int argc, char** argv) { return tandem::MainWithRoles(argc, argv, tandem::TcpRoles()); }
