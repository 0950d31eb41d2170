// The TCP link between processes that are killed, stopped, slow, late, or many. Each fault is
// reported by every end that lives, with its kind and the rank that caused it, and the next refit
// works. Prints one line per fault and end: the link's rows of the chaos table.
#include <gtest/gtest.h>
#include <signal.h>

#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "csrc/refit/tcp_roles.h"

namespace tandem {
namespace {

Deadline Soon() { return Deadline::In(60); }

LinkSetting Setting(int32_t num_readers, int64_t slot_bytes = 4 << 20, double silence_s = 20) {
  LinkSetting setting;
  setting.geometry.plan_digest = 77;
  setting.geometry.slot_bytes = slot_bytes;
  setting.geometry.num_slots = 3;
  setting.geometry.num_readers = num_readers;
  setting.silence_s = silence_s;
  return setting;
}

void PrintRow(const char* fault, const std::string& end, const Outcome& outcome) {
  std::printf("| %-28s | %-8s | %6.3f s | code %d | rank %6d | %s |\n", fault, end.c_str(),
              outcome.seconds, static_cast<int>(outcome.code), outcome.rank, outcome.text.c_str());
}

// Senders (roots) and readers, each a process.
class TcpPeers : public testing::Test {
 protected:
  void Start(int num_roots, int num_readers) {
    for (int i = 0; i < num_roots; ++i) senders_.push_back(std::make_unique<Peer>(kSenderRole));
    for (int i = 0; i < num_readers; ++i) readers_.push_back(std::make_unique<Peer>(kReaderRole));
  }
  // New links between all of them, joined, in refit `epoch`.
  void Connect(const LinkSetting& setting, int epoch, const std::string& port = "0") {
    setting_ = setting;
    std::string addresses;
    for (size_t root = 0; root < senders_.size(); ++root) {
      LinkSetting own = setting;
      own.geometry.root = static_cast<int32_t>(root);
      const Outcome opened =
          senders_[root]->Do("open 127.0.0.1 " + port + " " + own.words(), Soon());
      ASSERT_TRUE(opened.is_ok) << opened.text;
      addresses += " " + opened.text;
    }
    for (size_t reader = 0; reader < readers_.size(); ++reader) {
      const Outcome opened = readers_[reader]->Do(
          "open " + setting.words() + " " + std::to_string(reader) + addresses, Soon());
      ASSERT_TRUE(opened.is_ok) << opened.text;
    }
    address_ = addresses.substr(1);
    ASSERT_NO_FATAL_FAILURE(AllDo("join 30"));
    ASSERT_NO_FATAL_FAILURE(AllDo("begin " + std::to_string(epoch) + " 30"));
  }
  std::vector<Peer*> All() {
    std::vector<Peer*> all;
    for (const auto& peer : senders_) all.push_back(peer.get());
    for (const auto& peer : readers_) all.push_back(peer.get());
    return all;
  }
  void AllDo(const std::string& command) {
    for (Peer* peer : All()) peer->Tell(command);
    for (Peer* peer : All()) {
      const Outcome outcome = peer->Answer(Soon());
      ASSERT_TRUE(outcome.is_ok) << command << ": " << outcome.text;
    }
  }
  // `count` slots from every root to every reader.
  void Transfer(int count) {
    for (const auto& sender : senders_) sender->Tell("send " + std::to_string(count) + " 30");
    for (const auto& reader : readers_) reader->Tell("take " + std::to_string(count) + " 30");
    for (Peer* peer : All()) {
      const Outcome outcome = peer->Answer(Soon());
      ASSERT_TRUE(outcome.is_ok) << outcome.text;
    }
    for (const auto& sender : senders_) ASSERT_TRUE(sender->Do("flush 30", Soon()).is_ok);
  }
  // A transfer without end, until every reader is in the middle of it.
  void BeginTransfer() {
    for (const auto& sender : senders_) sender->Tell("send 100000000 60");
    for (const auto& reader : readers_) reader->Tell("take 100000000 60");
    for (const auto& reader : readers_) ASSERT_TRUE(reader->AwaitGoing(Soon()));
    for (Peer* peer : All()) peer->RestartClock();
  }
  void ExpectFault(const char* fault, const std::string& end, Peer* peer, int32_t rank,
                   double within_s) {
    const Outcome outcome = peer->Answer(Soon());
    PrintRow(fault, end, outcome);
    EXPECT_EQ(outcome.code, StatusCode::kPeerLost) << outcome.text;
    EXPECT_EQ(outcome.rank, rank) << outcome.text;
    EXPECT_LT(outcome.seconds, within_s);
  }

  LinkSetting setting_;
  std::string address_;
  std::vector<std::unique_ptr<Peer>> senders_;
  std::vector<std::unique_ptr<Peer>> readers_;
};

// Far below the silence of 20 s after which a peer that is only quiet is given up.
constexpr double kSoonS = 8;

TEST_F(TcpPeers, OneToThreeManyLargeAndTinySlots) {
  Start(1, 3);
  for (const int64_t slot_bytes : {8, 4096, 300000, 4 << 20}) {
    ASSERT_NO_FATAL_FAILURE(Connect(Setting(3, slot_bytes), 1));
    ASSERT_NO_FATAL_FAILURE(Transfer(slot_bytes < 5000 ? 3000 : 12));
    ASSERT_NO_FATAL_FAILURE(AllDo("begin 2 30"));
    ASSERT_NO_FATAL_FAILURE(Transfer(7));
    ASSERT_NO_FATAL_FAILURE(AllDo("close"));
  }
}

TEST_F(TcpPeers, SeveralRootsAndTwoRunsOnOneHost) {
  Start(2, 2);
  ASSERT_NO_FATAL_FAILURE(Connect(Setting(2, 300000), 1));
  Peer other_sender(kSenderRole);
  Peer other_reader(kReaderRole);
  const LinkSetting other = Setting(1, 300000);
  const Outcome opened = other_sender.Do("open 127.0.0.1 0 " + other.words(), Soon());
  ASSERT_TRUE(opened.is_ok) << opened.text;
  ASSERT_TRUE(other_reader.Do("open " + other.words() + " 0 " + opened.text, Soon()).is_ok);
  for (const char* command : {"join 30", "begin 5 30"}) {
    other_sender.Tell(command);
    other_reader.Tell(command);
    ASSERT_TRUE(other_sender.Answer(Soon()).is_ok);
    ASSERT_TRUE(other_reader.Answer(Soon()).is_ok);
  }
  other_sender.Tell("send 200 30");
  other_reader.Tell("take 200 30");
  ASSERT_NO_FATAL_FAILURE(Transfer(50));
  EXPECT_TRUE(other_sender.Answer(Soon()).is_ok);
  EXPECT_TRUE(other_reader.Answer(Soon()).is_ok);
}

TEST_F(TcpPeers, ASenderKilledInTheMiddleOfABucket) {
  Start(1, 3);
  ASSERT_NO_FATAL_FAILURE(Connect(Setting(3), 1));
  ASSERT_NO_FATAL_FAILURE(BeginTransfer());
  senders_[0]->Kill(SIGKILL);
  for (size_t r = 0; r < 3; ++r) {
    ExpectFault("sender killed mid-bucket", "reader " + std::to_string(r), readers_[r].get(), 0,
                kSoonS);
  }
  // The next sender takes the same port, over what the killed one has left.
  senders_[0] = std::make_unique<Peer>(kSenderRole);
  ASSERT_NO_FATAL_FAILURE(Connect(Setting(3), 2, address_.substr(address_.rfind(':') + 1)));
  ASSERT_NO_FATAL_FAILURE(Transfer(6));
}

TEST_F(TcpPeers, AReaderKilledInTheMiddleOfABucket) {
  Start(1, 3);
  ASSERT_NO_FATAL_FAILURE(Connect(Setting(3), 1));
  ASSERT_NO_FATAL_FAILURE(BeginTransfer());
  readers_[1]->Kill(SIGKILL);
  const int32_t rank = kFirstReader + 1;
  ExpectFault("reader 1 killed mid-bucket", "sender", senders_[0].get(), rank, kSoonS);
  ExpectFault("reader 1 killed mid-bucket", "reader 0", readers_[0].get(), rank, kSoonS);
  ExpectFault("reader 1 killed mid-bucket", "reader 2", readers_[2].get(), rank, kSoonS);
  readers_[1] = std::make_unique<Peer>(kReaderRole);
  ASSERT_NO_FATAL_FAILURE(Connect(Setting(3), 2));
  ASSERT_NO_FATAL_FAILURE(Transfer(6));
}

TEST_F(TcpPeers, AForkedChildDoesNotKeepADeadReaderAlive) {
  Start(1, 2);
  ASSERT_NO_FATAL_FAILURE(Connect(Setting(2), 1));
  const Outcome forked = readers_[1]->Do("fork", Soon());
  ASSERT_TRUE(forked.is_ok) << forked.text;
  ASSERT_NO_FATAL_FAILURE(BeginTransfer());
  readers_[1]->Kill(SIGKILL);
  ExpectFault("killed, its child lives", "sender", senders_[0].get(), kFirstReader + 1, kSoonS);
  ExpectFault("killed, its child lives", "reader 0", readers_[0].get(), kFirstReader + 1, kSoonS);
  EXPECT_EQ(kill(std::stoi(forked.text), SIGKILL), 0);
}

TEST_F(TcpPeers, AReaderStopped) {
  Start(1, 3);
  ASSERT_NO_FATAL_FAILURE(Connect(Setting(3, 1 << 20, 1.5), 1));
  ASSERT_NO_FATAL_FAILURE(BeginTransfer());
  readers_[1]->Kill(SIGSTOP);
  const int32_t rank = kFirstReader + 1;
  ExpectFault("reader 1 stopped, silence 1.5 s", "sender", senders_[0].get(), rank, kSoonS);
  ExpectFault("reader 1 stopped, silence 1.5 s", "reader 0", readers_[0].get(), rank, kSoonS);
  ExpectFault("reader 1 stopped, silence 1.5 s", "reader 2", readers_[2].get(), rank, kSoonS);
  // When it goes on it learns that the others have given up, and can take part in the next refit.
  readers_[1]->Kill(SIGCONT);
  readers_[1]->RestartClock();
  const Outcome woken = readers_[1]->Answer(Soon());
  PrintRow("reader 1 goes on", "reader 1", woken);
  EXPECT_EQ(woken.code, StatusCode::kPeerLost) << woken.text;
  ASSERT_NO_FATAL_FAILURE(Connect(Setting(3), 2));
  ASSERT_NO_FATAL_FAILURE(Transfer(6));
}

TEST_F(TcpPeers, ASenderStopped) {
  Start(1, 2);
  ASSERT_NO_FATAL_FAILURE(Connect(Setting(2, 1 << 20, 1.5), 1));
  ASSERT_NO_FATAL_FAILURE(BeginTransfer());
  senders_[0]->Kill(SIGSTOP);
  ExpectFault("sender stopped, silence 1.5 s", "reader 0", readers_[0].get(), 0, kSoonS);
  ExpectFault("sender stopped, silence 1.5 s", "reader 1", readers_[1].get(), 0, kSoonS);
  senders_[0]->Kill(SIGCONT);
  senders_[0]->RestartClock();
  const Outcome woken = senders_[0]->Answer(Soon());
  PrintRow("sender goes on", "sender", woken);
  EXPECT_EQ(woken.code, StatusCode::kPeerLost) << woken.text;
  ASSERT_NO_FATAL_FAILURE(Connect(Setting(2), 2));
  ASSERT_NO_FATAL_FAILURE(Transfer(6));
}

TEST_F(TcpPeers, AJobThatIsSuspendedForTwoSilencesGoesOn) {
  Start(1, 2);
  ASSERT_NO_FATAL_FAILURE(Connect(Setting(2, 1 << 20, 0.5), 1));
  ASSERT_NO_FATAL_FAILURE(Transfer(3));
  Peer* const ends[] = {senders_[0].get(), readers_[0].get(), readers_[1].get()};
  for (Peer* end : ends) end->Kill(SIGSTOP);
  EXPECT_EQ(senders_[0]->ReadLine(Deadline::In(1)), "<late>");
  for (Peer* end : ends) end->Kill(SIGCONT);
  ASSERT_NO_FATAL_FAILURE(AllDo("begin 2 30"));
  ASSERT_NO_FATAL_FAILURE(Transfer(3));
}

TEST_F(TcpPeers, ABusyReaderHoldsTheSenderBackAndIsNotTakenForDead) {
  Start(1, 2);
  ASSERT_NO_FATAL_FAILURE(Connect(Setting(2, 1 << 20, 0.5), 1));
  senders_[0]->Tell("send 20 30");
  readers_[0]->Tell("take 20 30");
  ASSERT_TRUE(readers_[0]->AwaitGoing(Soon()));
  // Reader 1 takes nothing: for four silences the sender waits, and nobody gives up.
  EXPECT_EQ(senders_[0]->ReadLine(Deadline::In(2)), "<late>");
  EXPECT_TRUE(readers_[1]->Do("take 20 30", Soon()).is_ok);
  EXPECT_TRUE(senders_[0]->Answer(Soon()).is_ok);
  EXPECT_TRUE(readers_[0]->Answer(Soon()).is_ok);
  EXPECT_TRUE(senders_[0]->Do("flush 30", Soon()).is_ok);
  // The same with nothing on the way: all wait for the driver.
  EXPECT_EQ(senders_[0]->ReadLine(Deadline::In(2)), "<late>");
  ASSERT_NO_FATAL_FAILURE(AllDo("begin 2 30"));
  ASSERT_NO_FATAL_FAILURE(Transfer(5));
}

TEST_F(TcpPeers, AReaderTooSlowForTheDeadlineIsNamed) {
  Start(1, 2);
  ASSERT_NO_FATAL_FAILURE(Connect(Setting(2, 1 << 20), 1));
  readers_[0]->Tell("take 20 30");
  const Outcome sender = senders_[0]->Do("send 20 1", Soon());
  PrintRow("reader 1 slow, deadline 1 s", "sender", sender);
  EXPECT_EQ(sender.code, StatusCode::kDeadlineExceeded) << sender.text;
  EXPECT_EQ(sender.rank, kFirstReader + 1);
  for (const int r : {0, 1}) {
    const Outcome reader =
        r == 0 ? readers_[0]->Answer(Soon()) : readers_[1]->Do("take 20 9", Soon());
    PrintRow("reader 1 slow, deadline 1 s", "reader " + std::to_string(r), reader);
    EXPECT_EQ(reader.code, StatusCode::kDeadlineExceeded) << reader.text;
    EXPECT_EQ(reader.rank, kFirstReader + 1);
  }
  ASSERT_NO_FATAL_FAILURE(Connect(Setting(2), 2));
  ASSERT_NO_FATAL_FAILURE(Transfer(6));
}

TEST_F(TcpPeers, ALateJoinerIsRefusedInTheMiddleOfATransfer) {
  Start(1, 1);
  ASSERT_NO_FATAL_FAILURE(Connect(Setting(1), 1));
  senders_[0]->Tell("send 100 30");
  readers_[0]->Tell("take 100 30");
  ASSERT_TRUE(readers_[0]->AwaitGoing(Soon()));
  Peer late(kReaderRole);
  ASSERT_TRUE(late.Do("open " + setting_.words() + " 0 " + address_, Soon()).is_ok);
  const Outcome refused = late.Do("join 30", Soon());
  PrintRow("late joiner", "late one", refused);
  EXPECT_EQ(refused.code, StatusCode::kUnavailable) << refused.text;
  EXPECT_NE(refused.text.find("all 1 readers have joined"), std::string::npos) << refused.text;
  EXPECT_TRUE(readers_[0]->Answer(Soon()).is_ok);
  EXPECT_TRUE(senders_[0]->Answer(Soon()).is_ok);
}

TEST_F(TcpPeers, AReaderOfAnotherPlanIsNamedByBothEnds) {
  Start(1, 1);
  LinkSetting setting = Setting(1);
  const Outcome opened = senders_[0]->Do("open 127.0.0.1 0 " + setting.words(), Soon());
  ASSERT_TRUE(opened.is_ok) << opened.text;
  setting.geometry.plan_digest = 78;
  ASSERT_TRUE(readers_[0]->Do("open " + setting.words() + " 0 " + opened.text, Soon()).is_ok);
  senders_[0]->Tell("join 30");
  for (Peer* peer : {readers_[0].get(), senders_[0].get()}) {
    if (peer == readers_[0].get()) peer->Tell("join 30");
    const Outcome outcome = peer->Answer(Soon());
    PrintRow("another plan", peer == senders_[0].get() ? "sender" : "reader 0", outcome);
    EXPECT_EQ(outcome.code, StatusCode::kMismatch) << outcome.text;
    EXPECT_EQ(outcome.rank, kFirstReader);
    EXPECT_NE(outcome.text.find("plan_digest"), std::string::npos) << outcome.text;
  }
  ASSERT_NO_FATAL_FAILURE(Connect(Setting(1), 2));
  ASSERT_NO_FATAL_FAILURE(Transfer(3));
}

TEST_F(TcpPeers, AnAbortCrossesToAllEnds) {
  Start(1, 3);
  ASSERT_NO_FATAL_FAILURE(Connect(Setting(3, 1 << 20), 1));
  senders_[0]->Tell("send 100000000 60");
  readers_[0]->Tell("take 100000000 60");
  readers_[1]->Tell("take 100000000 60");
  ASSERT_TRUE(readers_[2]->Do("take 2 30", Soon()).is_ok);
  ASSERT_TRUE(readers_[2]->Do("abort the-engine-refused-a-tensor", Soon()).is_ok);
  for (Peer* peer : {senders_[0].get(), readers_[0].get(), readers_[1].get()}) {
    const Outcome outcome = peer->Answer(Soon());
    PrintRow("reader 2 aborts", peer == senders_[0].get() ? "sender" : "reader", outcome);
    EXPECT_EQ(outcome.code, StatusCode::kAborted);
    EXPECT_EQ(outcome.text, "the-engine-refused-a-tensor");
  }
  ASSERT_NO_FATAL_FAILURE(Connect(Setting(3), 2));
  ASSERT_NO_FATAL_FAILURE(Transfer(6));
}

}  // namespace
}  // namespace tandem

int main(int argc, char** argv) { return tandem::MainWithRoles(argc, argv, tandem::TcpRoles()); }
