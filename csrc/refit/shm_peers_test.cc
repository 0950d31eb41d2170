// The link over shared memory between real processes that are killed, stopped, forked, late or
// wrong. Every end is a child of the test; the test directs. Prints one row per fault: what was
// detected after how long, who was named, and what is left.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "csrc/refit/shm_link.h"
#include "csrc/testing/child_process.h"

namespace tandem {
namespace {

constexpr int kNumSlotsSent = 12;
constexpr int kNever = 1000;
constexpr double kPatience = 60;  // of the test for a child, on a busy machine

LinkGeometry Geometry(int32_t num_readers) {
  LinkGeometry geometry;
  geometry.plan_digest = 7;
  geometry.slot_bytes = 100000;
  geometry.num_slots = 3;
  geometry.num_readers = num_readers;
  return geometry;
}

uint8_t ByteOf(int slot) { return static_cast<uint8_t>(31 * slot + 5); }

Fault NoFault() {
  Fault none;
  none.code = StatusCode::kOk;
  return none;
}

// "code rank bucket message" of what ended a link; "0 -1 -1 " after a refit without a fault.
void PrintOutcome(const Status& status, Fault fault) {
  if (fault.code == StatusCode::kOk) fault.message = status.message();
  PrintLine(std::to_string(static_cast<int>(status.code())) + " " + std::to_string(fault.rank) +
            " " + std::to_string(fault.bucket) + " " + fault.message);
}

// Says where it is and waits for the test: here processes are killed and stopped.
void Halt(const char* place) {
  PrintLine(place);
  AwaitLine();
}

Status SendAll(SendLink* link, int halt_at, double timeout_s) {
  if (Status status = link->Join(Deadline::In(timeout_s)); !status.ok()) return status;
  PrintLine("joined");
  if (Status status = link->Begin(1, Deadline::In(timeout_s)); !status.ok()) return status;
  for (int i = 0; i < kNumSlotsSent; ++i) {
    uint8_t* slot = nullptr;
    if (Status status = link->Acquire(Deadline::In(timeout_s), &slot); !status.ok()) return status;
    std::memset(slot, ByteOf(i), 50000);
    if (i == halt_at) Halt("half");
    std::memset(slot + 50000, ByteOf(i), 50000);
    if (Status status = link->Post(100000, Deadline::In(timeout_s)); !status.ok()) return status;
  }
  return link->Flush(Deadline::In(timeout_s));
}

// arguments: name, readers, slot to halt at, timeout
int Sender(const std::vector<std::string>& arguments) {
  std::unique_ptr<SendLink> link;
  Status status = CreateShmSendLink(arguments[0], Geometry(std::stoi(arguments[1])), &link);
  if (!status.ok()) {
    PrintOutcome(status, NoFault());
    return 1;
  }
  PrintLine("open");
  status = SendAll(link.get(), std::stoi(arguments[2]), std::stod(arguments[3]));
  PrintOutcome(status, link->fault());
  AwaitLine();
  return 0;
}

// As Sender, with a child that was forked from it and outlives it.
int ForkingSender(const std::vector<std::string>& arguments) {
  std::unique_ptr<SendLink> link;
  if (!CreateShmSendLink(arguments[0], Geometry(1), &link).ok()) return 1;
  const pid_t child = fork();
  if (child == 0) {
    Fault fault;
    fault.message = "a child of the sender meddles";
    link->Abort(fault);
    const Status status = link->Begin(3, Deadline::In(1));
    link.reset();
    PrintLine(std::to_string(static_cast<int>(status.code())) + " " + status.message());
    AwaitLine();  // until the test is over, beyond the death of its parent
    _exit(0);
  }
  PrintOutcome(SendAll(link.get(), 5, 30), link->fault());
  return 0;
}

Status ReceiveAll(ReceiveLink* link, int halt_at, double timeout_s) {
  if (Status status = link->Join(Deadline::In(timeout_s)); !status.ok()) return status;
  PrintLine("joined");
  if (Status status = link->Begin(1, Deadline::In(timeout_s)); !status.ok()) return status;
  for (int i = 0; i < kNumSlotsSent; ++i) {
    const uint8_t* slot = nullptr;
    int64_t bytes = 0;
    Status status = link->Receive(Deadline::In(timeout_s), &slot, &bytes);
    if (!status.ok()) return status;
    if (i == halt_at) Halt("half");
    const bool is_whole = bytes == 100000 && slot[0] == ByteOf(i) && slot[99999] == ByteOf(i) &&
                          std::memcmp(slot, slot + 1, 99999) == 0;
    if (!is_whole) return Status(StatusCode::kDataLoss, "slot " + std::to_string(i));
    if (status = link->Release(); !status.ok()) return status;
  }
  return OkStatus();
}

// arguments: name, readers, slot to halt at, timeout, own number, plan digest
int Reader(const std::vector<std::string>& arguments) {
  LinkGeometry geometry = Geometry(std::stoi(arguments[1]));
  geometry.plan_digest = std::stoull(arguments[5]);
  const int halt_at = std::stoi(arguments[2]);
  std::unique_ptr<ReceiveLink> link;
  Status status = AttachShmReceiveLink(arguments[0], geometry, std::stoi(arguments[4]), &link);
  if (!status.ok()) {
    PrintOutcome(status, NoFault());
    return 1;
  }
  if (halt_at < 0) Halt("attached");
  status = ReceiveAll(link.get(), halt_at, std::stod(arguments[3]));
  PrintOutcome(status, link->fault());
  AwaitLine();
  return 0;
}

// Takes two slots, then gives up.
int AbortingReader(const std::vector<std::string>& arguments) {
  std::unique_ptr<ReceiveLink> link;
  if (!AttachShmReceiveLink(arguments[0], Geometry(2), 1, &link).ok()) return 1;
  if (!link->Join(Deadline::In(30)).ok() || !link->Begin(1, Deadline::In(30)).ok()) return 1;
  const uint8_t* slot = nullptr;
  int64_t bytes = 0;
  for (int i = 0; i < 2; ++i) {
    if (!link->Receive(Deadline::In(30), &slot, &bytes).ok() || !link->Release().ok()) return 1;
  }
  Halt("half");
  Fault fault;
  fault.code = StatusCode::kDataLoss;
  fault.rank = kFirstReader + 1;
  fault.bucket = 2;
  fault.message = "tensor \"w\" does not fit";
  link->Abort(fault);
  AwaitLine();
  return 0;
}

struct Outcome {
  int code = -1;
  int rank = 0;
  int64_t bucket = 0;
  std::string message;
};

std::string UniqueName() {
  static int count = 0;
  return "tdm-test-peers-" + std::to_string(getpid()) + "-" + std::to_string(++count);
}

bool Exists(const std::string& name) {
  struct stat found;
  return lstat(("/dev/shm/" + name).c_str(), &found) == 0;
}

class ShmPeers : public testing::Test {
 protected:
  using Clock = std::chrono::steady_clock;

  ChildProcess* StartSender(int num_readers, int halt_at, double timeout_s) {
    sender_ = std::make_unique<ChildProcess>(
        "sender", std::vector<std::string>{name_, std::to_string(num_readers),
                                           std::to_string(halt_at), std::to_string(timeout_s)});
    ExpectLine(sender_.get(), "open");
    return sender_.get();
  }
  ChildProcess* StartReader(int num_readers, int reader, int halt_at, double timeout_s,
                            int plan_digest = 7) {
    const std::vector<std::string> arguments = {name_,
                                                std::to_string(num_readers),
                                                std::to_string(halt_at),
                                                std::to_string(timeout_s),
                                                std::to_string(reader),
                                                std::to_string(plan_digest)};
    readers_.push_back(std::make_unique<ChildProcess>("reader", arguments));
    return readers_.back().get();
  }
  static void ExpectLine(ChildProcess* child, const std::string& expected) {
    ASSERT_EQ(child->ReadLine(Deadline::In(kPatience)), expected);
  }
  // What an end says when it is done, past the places where it was.
  static Outcome OutcomeOf(ChildProcess* child) {
    std::string line = child->ReadLine(Deadline::In(kPatience));
    while (line == "joined" || line == "half") line = child->ReadLine(Deadline::In(kPatience));
    Outcome outcome;
    int length = 0;
    long long bucket = 0;
    const int fields =
        std::sscanf(line.c_str(), "%d %d %lld %n", &outcome.code, &outcome.rank, &bucket, &length);
    EXPECT_EQ(fields, 3) << line;
    outcome.bucket = bucket;
    outcome.message = line.substr(static_cast<size_t>(length));
    return outcome;
  }
  void Strike() { struck_ = Clock::now(); }

  // All of `survivors` report this fault. The row says how long the last one took since Strike.
  void ExpectAll(const char* fault, const std::vector<ChildProcess*>& survivors, StatusCode code,
                 int rank, const std::string& text) {
    Outcome outcome;
    double slowest = 0;
    for (ChildProcess* survivor : survivors) {
      outcome = OutcomeOf(survivor);
      const std::chrono::duration<double> took = Clock::now() - struck_;
      slowest = std::max(slowest, took.count());
      EXPECT_EQ(outcome.code, static_cast<int>(code)) << outcome.message;
      EXPECT_EQ(outcome.rank, rank) << outcome.message;
      EXPECT_NE(outcome.message.find(text), std::string::npos) << outcome.message;
    }
    detected_after_ = slowest;
    ExpectCleanAndUsable();
    std::printf("| %-34s | %4.0f ms | %s | name gone, next refit works |\n", fault, slowest * 1e3,
                outcome.message.c_str());
  }

  // Nothing of the link is left once its processes are gone, and the same name works again.
  void ExpectCleanAndUsable() {
    sender_.reset();
    readers_.clear();
    ExpectARefit();
    EXPECT_FALSE(Exists(name_)) << name_;
  }
  void ExpectARefit() {
    ChildProcess* sender = StartSender(2, kNever, kPatience);
    for (int r = 0; r < 2; ++r) StartReader(2, r, kNever, kPatience);
    EXPECT_EQ(OutcomeOf(sender).code, 0);
    for (const auto& reader : readers_) EXPECT_EQ(OutcomeOf(reader.get()).code, 0);
    sender_.reset();
    readers_.clear();
  }

  const std::string name_ = UniqueName();
  std::unique_ptr<ChildProcess> sender_;
  std::vector<std::unique_ptr<ChildProcess>> readers_;
  Clock::time_point struck_;
  double detected_after_ = 0;
};

constexpr double kSoon = 10;  // seconds within which a death is seen, on a busy machine

TEST_F(ShmPeers, AKilledSenderIsNamedByAllReaders) {
  ChildProcess* sender = StartSender(3, 5, kPatience);
  std::vector<ChildProcess*> readers;
  for (int r = 0; r < 3; ++r) readers.push_back(StartReader(3, r, kNever, kPatience));
  ExpectLine(sender, "joined");
  ExpectLine(sender, "half");
  Strike();
  sender->Kill(SIGKILL);
  ExpectAll("sender killed in the middle of a slot", readers, StatusCode::kPeerLost, 0,
            "sender 0 (process " + std::to_string(sender->pid()) +
                ") has died while we waited for slot 5 of epoch 1 to be posted");
  EXPECT_LT(detected_after_, kSoon);
}

TEST_F(ShmPeers, AKilledReaderIsNamedByAllOthers) {
  ChildProcess* sender = StartSender(3, kNever, kPatience);
  std::vector<ChildProcess*> others = {sender};
  for (int r = 0; r < 3; ++r) {
    ChildProcess* reader = StartReader(3, r, r == 1 ? 4 : kNever, kPatience);
    if (r != 1) others.push_back(reader);
  }
  ChildProcess* victim = readers_[1].get();
  ExpectLine(victim, "joined");
  ExpectLine(victim, "half");
  Strike();
  victim->Kill(SIGKILL);
  ExpectAll("reader killed with a slot in hand", others, StatusCode::kPeerLost, kFirstReader + 1,
            "reader 1 (process " + std::to_string(victim->pid()) + ") has died");
  EXPECT_LT(detected_after_, kSoon);
}

TEST_F(ShmPeers, AReaderKilledBeforeItJoinedIsNamed) {
  ChildProcess* sender = StartSender(2, kNever, kPatience);
  ChildProcess* other = StartReader(2, 0, kNever, kPatience);
  ChildProcess* victim = StartReader(2, 1, -1, kPatience);
  ExpectLine(victim, "attached");
  Strike();
  victim->Kill(SIGKILL);
  ExpectAll("reader killed before it joined", {sender, other}, StatusCode::kPeerLost,
            kFirstReader + 1, "has died while we waited for all readers to join");
  EXPECT_LT(detected_after_, kSoon);
}

TEST_F(ShmPeers, AStoppedReaderIsFoundByTheDeadline) {
  ChildProcess* sender = StartSender(2, kNever, 2);
  ChildProcess* other = StartReader(2, 0, kNever, kPatience);
  ChildProcess* victim = StartReader(2, 1, 4, kPatience);
  ExpectLine(victim, "joined");
  ExpectLine(victim, "half");
  Strike();
  victim->Kill(SIGSTOP);
  EXPECT_EQ(sender->ReadLine(Deadline::In(kPatience)), "joined");
  const Outcome first = OutcomeOf(sender);
  EXPECT_EQ(first.code, static_cast<int>(StatusCode::kDeadlineExceeded)) << first.message;
  // It learns of it when it goes on.
  victim->Kill(SIGCONT);
  victim->WriteLine("go on");
  ExpectAll("reader stopped (deadline 2 s)", {other, victim}, StatusCode::kDeadlineExceeded,
            kFirstReader + 1, ", stopped) is late");
  EXPECT_LT(detected_after_, 2 + kSoon);
}

TEST_F(ShmPeers, AStoppedSenderIsFoundByTheDeadline) {
  ChildProcess* sender = StartSender(2, 5, kPatience);
  std::vector<ChildProcess*> readers = {StartReader(2, 0, kNever, 2), StartReader(2, 1, kNever, 2)};
  ExpectLine(sender, "joined");
  ExpectLine(sender, "half");
  Strike();
  sender->Kill(SIGSTOP);
  ExpectAll("sender stopped (deadline 2 s)", readers, StatusCode::kDeadlineExceeded, 0,
            ", stopped) is late: the deadline passed while we waited for slot 5 of epoch 1");
  EXPECT_LT(detected_after_, 2 + kSoon);
}

TEST_F(ShmPeers, AnAbortOfAReaderReachesAllOthers) {
  ChildProcess* sender = StartSender(2, kNever, kPatience);
  ChildProcess* other = StartReader(2, 0, kNever, kPatience);
  ChildProcess aborting("aborting_reader", {name_});
  ExpectLine(&aborting, "half");
  Strike();
  aborting.WriteLine("go on");
  ExpectAll("reader gives up", {sender, other}, StatusCode::kDataLoss, kFirstReader + 1,
            "tensor \"w\" does not fit");
  EXPECT_LT(detected_after_, kSoon);
}

TEST_F(ShmPeers, AReaderThatNeverComesIsFoundByTheDeadline) {
  ChildProcess* sender = StartSender(2, kNever, 1);
  ChildProcess* other = StartReader(2, 0, kNever, kPatience);
  Strike();
  ExpectAll("reader never comes (deadline 1 s)", {sender, other}, StatusCode::kDeadlineExceeded,
            kFirstReader + 1, "1 of 2 readers to join");
}

TEST_F(ShmPeers, AWrongPlanIsNamedBeforeAByteMoves) {
  ChildProcess* sender = StartSender(2, kNever, kPatience);
  ChildProcess* other = StartReader(2, 0, kNever, kPatience);
  Strike();
  ChildProcess* wrong = StartReader(2, 1, kNever, kPatience, 8);
  ExpectAll("reader with another plan", {sender, other, wrong}, StatusCode::kMismatch,
            kFirstReader + 1, "plan_digest of reader 1 is 0000000000000008, the sender's is");
}

TEST_F(ShmPeers, ALateJoinerIsRefusedAndTheRefitGoesOn) {
  ChildProcess* sender = StartSender(1, 5, kPatience);
  ChildProcess* reader = StartReader(1, 0, kNever, kPatience);
  ExpectLine(sender, "joined");
  ExpectLine(sender, "half");
  Strike();
  ChildProcess* late = StartReader(1, 0, kNever, kPatience);
  const Outcome refused = OutcomeOf(late);
  EXPECT_EQ(refused.code, static_cast<int>(StatusCode::kUnavailable)) << refused.message;
  sender->WriteLine("go on");
  EXPECT_EQ(OutcomeOf(sender).code, 0);
  EXPECT_EQ(OutcomeOf(reader).code, 0);
  ExpectCleanAndUsable();
  std::printf("| %-34s | at once | %s | the refit under way ends well |\n", "reader joins late",
              refused.message.c_str());
}

TEST_F(ShmPeers, AForkedChildNeitherHidesADeathNorMeddles) {
  ChildProcess sender("forking_sender", {name_});
  const std::string refused = sender.ReadLine(Deadline::In(kPatience));
  EXPECT_NE(refused.find("belongs to the parent of this process"), std::string::npos) << refused;
  ChildProcess* reader = StartReader(1, 0, kNever, kPatience);
  ExpectLine(&sender, "joined");
  ExpectLine(&sender, "half");
  Strike();
  sender.Kill(SIGKILL);
  ExpectAll("sender killed, its fork lives on", {reader}, StatusCode::kPeerLost, 0, "has died");
  EXPECT_LT(detected_after_, kSoon);
}

TEST_F(ShmPeers, AStartOverTheLeftoverOfAKilledSenderWorks) {
  ChildProcess* sender = StartSender(2, kNever, kPatience);
  ChildProcess* attached = StartReader(2, 1, -1, kPatience);
  ExpectLine(attached, "attached");
  sender->Kill(SIGKILL);
  attached->Kill(SIGKILL);
  EXPECT_EQ(sender->Wait(Deadline::In(kPatience)), -SIGKILL);
  EXPECT_EQ(attached->Wait(Deadline::In(kPatience)), -SIGKILL);
  EXPECT_TRUE(Exists(name_)) << "before all have joined, the name is left to a reaper";
  ExpectCleanAndUsable();
}

TEST_F(ShmPeers, NothingIsLeftWhenAllAreKilledInARefit) {
  ChildProcess* sender = StartSender(2, 5, kPatience);
  for (int r = 0; r < 2; ++r) StartReader(2, r, kNever, kPatience);
  ExpectLine(sender, "joined");
  ExpectLine(sender, "half");
  sender->Kill(SIGKILL);
  for (const auto& reader : readers_) reader->Kill(SIGKILL);
  EXPECT_EQ(sender->Wait(Deadline::In(kPatience)), -SIGKILL);
  EXPECT_FALSE(Exists(name_));
}

TEST_F(ShmPeers, TwoRunsDoNotMeet) {
  ChildProcess other("sender", {name_ + "-other", "1", "5", std::to_string(kPatience)});
  ExpectLine(&other, "open");
  ChildProcess reader("reader", {name_ + "-other", "1", std::to_string(kNever),
                                 std::to_string(kPatience), "0", "7"});
  ExpectLine(&other, "joined");
  ExpectLine(&other, "half");
  ExpectARefit();
  other.WriteLine("go on");
  EXPECT_EQ(OutcomeOf(&other).code, 0);
  EXPECT_EQ(OutcomeOf(&reader).code, 0);
}

TEST_F(ShmPeers, ALiveNameIsNotTakenFromAnotherProcess) {
  StartSender(1, kNever, kPatience);
  ChildProcess second("sender", {name_, "1", "0", "1"});
  const Outcome refused = OutcomeOf(&second);
  EXPECT_EQ(refused.code, static_cast<int>(StatusCode::kUnavailable));
  EXPECT_NE(refused.message.find("belongs to a living process"), std::string::npos)
      << refused.message;
  EXPECT_EQ(OutcomeOf(StartReader(1, 0, kNever, kPatience)).code, 0);
}

}  // namespace
}  // namespace tandem

int main(int argc, char** argv) {
  return tandem::MainWithRoles(argc, argv,
                               {{"sender", tandem::Sender},
                                {"forking_sender", tandem::ForkingSender},
                                {"reader", tandem::Reader},
                                {"aborting_reader", tandem::AbortingReader}});
}
