// A process that dies at any instruction of any operation of the link leaves the others with a
// typed error, whole slots and a name that can be used again. The victim is a traced child that
// runs up to the operation, then instruction by instruction to the one where it is killed.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/ptrace.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "csrc/refit/shm_link.h"
#include "csrc/testing/child_process.h"

namespace tandem {
namespace {

constexpr int kNumPlaces = 16;  // per operation, from its first instruction to its last
constexpr char kReason[] = "the victim gives up with a message of some length";

LinkGeometry Geometry() {
  LinkGeometry geometry;
  geometry.slot_bytes = 4096;
  geometry.num_slots = 2;
  geometry.num_readers = 1;
  return geometry;
}

Deadline Soon() { return Deadline::In(30); }

// The operation under test lies between two of these; the tracer sees them.
void Mark() { raise(SIGSTOP); }

bool FillAndPost(SendLink* link, int number) {
  uint8_t* slot = nullptr;
  if (!link->Acquire(Soon(), &slot).ok()) return false;
  std::memset(slot, number, 4096);
  return link->Post(4096, Soon()).ok();
}

// arguments: name, operation ("create", "join", "post", "abort")
int SendingVictim(const std::vector<std::string>& arguments) {
  const std::string& operation = arguments[1];
  if (ptrace(PTRACE_TRACEME, 0, nullptr, nullptr) != 0) return 3;
  std::unique_ptr<SendLink> link;
  if (operation == "create") Mark();
  if (!CreateShmSendLink(arguments[0], Geometry(), &link).ok()) return 1;
  if (operation == "create") Mark();
  PrintLine("open");
  if (operation == "join") Mark();
  if (!link->Join(Soon()).ok()) return 1;
  if (operation == "join") Mark();
  if (!link->Begin(1, Soon()).ok() || !FillAndPost(link.get(), 1)) return 1;
  Mark();
  if (operation == "post") {
    FillAndPost(link.get(), 2);
  } else {
    Fault fault;
    fault.message = kReason;
    link->Abort(fault);
  }
  Mark();
  return 0;
}

// arguments: name, operation ("attach", "receive", "abort")
int ReceivingVictim(const std::vector<std::string>& arguments) {
  const std::string& operation = arguments[1];
  if (ptrace(PTRACE_TRACEME, 0, nullptr, nullptr) != 0) return 3;
  std::unique_ptr<ReceiveLink> link;
  if (operation == "attach") Mark();
  if (!AttachShmReceiveLink(arguments[0], Geometry(), 0, &link).ok()) return 1;
  if (operation == "attach") Mark();
  if (!link->Join(Soon()).ok() || !link->Begin(1, Soon()).ok()) return 1;
  Mark();
  if (operation == "receive") {
    const uint8_t* slot = nullptr;
    int64_t bytes = 0;
    if (!link->Receive(Soon(), &slot, &bytes).ok() || !link->Release().ok()) return 1;
  } else {
    Fault fault;
    fault.message = kReason;
    link->Abort(fault);
  }
  Mark();
  return 0;
}

bool Exists(const std::string& name) {
  struct stat found;
  return lstat(("/dev/shm/" + name).c_str(), &found) == 0;
}

// A traced child.
class Victim {
 public:
  Victim(const std::string& role, const std::string& name, const std::string& operation)
      : child_(role, {name, operation}) {}

  ChildProcess& child() { return child_; }
  // Runs to the next mark; false when the child ended instead.
  bool RunToMark() {
    if (is_stopped_ && ptrace(PTRACE_CONT, child_.pid(), nullptr, nullptr) != 0) return false;
    return AwaitStop() && is_at_mark_;
  }
  // Runs `count` instructions; returns how many it ran before the next mark.
  int64_t Step(int64_t count) {
    for (int64_t i = 0; i < count; ++i) {
      if (ptrace(PTRACE_SINGLESTEP, child_.pid(), nullptr, nullptr) != 0) return i;
      if (!AwaitStop() || is_at_mark_) return i;
    }
    return count;
  }
  void Kill() {
    child_.Kill(SIGKILL);
    EXPECT_EQ(child_.Wait(Soon()), -SIGKILL);
  }

 private:
  // Each stop is at once or the child is lost: it waits for nothing between its marks.
  bool AwaitStop() {
    int status = 0;
    if (waitpid(child_.pid(), &status, 0) != child_.pid() || !WIFSTOPPED(status)) return false;
    is_stopped_ = true;
    is_at_mark_ = WSTOPSIG(status) == SIGSTOP;
    return true;
  }

  ChildProcess child_;
  bool is_stopped_ = false;
  bool is_at_mark_ = false;
};

// What is left of a link when its other end was killed.
struct Aftermath {
  Status status;
  Fault fault;
  std::vector<int> slots;  // that were received whole
};

Aftermath ReceiveUntilToldToStop(ReceiveLink* link) {
  Aftermath after;
  after.status = link->Join(Soon());
  if (after.status.ok()) after.status = link->Begin(1, Soon());
  while (after.status.ok()) {
    const uint8_t* slot = nullptr;
    int64_t bytes = 0;
    after.status = link->Receive(Soon(), &slot, &bytes);
    if (!after.status.ok()) break;
    const bool is_whole = bytes == 4096 && std::memcmp(slot, slot + 1, 4095) == 0;
    after.slots.push_back(is_whole ? slot[0] : -1);
    after.status = link->Release();
  }
  after.fault = link->fault();
  return after;
}

Aftermath SendUntilToldToStop(SendLink* link, double join_timeout_s) {
  Aftermath after;
  after.status = link->Join(Deadline::In(join_timeout_s));
  if (after.status.ok()) after.status = link->Begin(1, Soon());
  while (after.status.ok()) {
    uint8_t* slot = nullptr;
    after.status = link->Acquire(Soon(), &slot);
    if (after.status.ok()) after.status = link->Post(4096, Soon());
  }
  after.fault = link->fault();
  return after;
}

class ShmDeath : public testing::Test {
 protected:
  void SetUp() override {
    Victim victim("sending_victim", name_, "create");
    if (!victim.RunToMark()) GTEST_SKIP() << "this machine lets no process trace its child";
  }

  // Runs scene(instructions until the kill) -> instructions of the operation, from its first to
  // its last.
  template <typename Scene>
  void AtManyInstructions(Scene scene) {
    const int64_t length = scene(int64_t{1} << 40);
    ASSERT_GT(length, 20) << "the operation was not seen";
    for (int64_t place = 0; place < kNumPlaces && !HasFailure(); ++place) {
      const int64_t instructions = length * place / kNumPlaces;
      SCOPED_TRACE("killed after " + std::to_string(instructions) + " of " +
                   std::to_string(length) + " instructions");
      scene(instructions);
    }
    RecordProperty("instructions", std::to_string(length));
    std::printf("killed at %d of %lld instructions\n", kNumPlaces, static_cast<long long>(length));
  }

  // Kills a victim at one place of the operation while `survivor` runs beside it.
  template <typename Survivor>
  int64_t KillBeside(Victim* victim, int64_t instructions, Survivor survivor) {
    Aftermath after;
    std::thread thread([&] { after = survivor(); });
    const bool is_there = victim->RunToMark();
    const int64_t length = is_there ? victim->Step(instructions) : 0;
    victim->Kill();
    thread.join();
    EXPECT_TRUE(is_there);
    after_ = after;
    return length;
  }

  // The survivor was told that its peer is gone, or all that the peer said.
  void ExpectTyped(int32_t rank, bool may_be_late) {
    const StatusCode code = after_.status.code();
    const bool is_told = code == StatusCode::kAborted && after_.status.message() == kReason;
    const bool is_late = may_be_late && code == StatusCode::kDeadlineExceeded;
    EXPECT_TRUE(code == StatusCode::kPeerLost || is_told || is_late) << after_.status.message();
    EXPECT_EQ(after_.fault.rank, rank) << after_.status.message();
  }

  int64_t SenderDies(const char* operation, int64_t instructions) {
    Victim victim("sending_victim", name_, operation);
    EXPECT_EQ(victim.child().ReadLine(Soon()), "open");
    std::unique_ptr<ReceiveLink> link;
    const Status status = AttachShmReceiveLink(name_, Geometry(), 0, &link);
    EXPECT_TRUE(status.ok()) << status.message();
    if (!status.ok()) return 0;
    const int64_t length =
        KillBeside(&victim, instructions, [&] { return ReceiveUntilToldToStop(link.get()); });
    ExpectTyped(0, false);
    std::vector<int> sent = {1, 2};
    sent.resize(std::min(sent.size(), after_.slots.size()));
    EXPECT_EQ(after_.slots, sent) << "a torn slot, or one that was not sent";
    return length;
  }

  int64_t ReaderDies(const char* operation, int64_t instructions) {
    std::unique_ptr<SendLink> link;
    const Status status = CreateShmSendLink(name_, Geometry(), &link);
    EXPECT_TRUE(status.ok()) << status.message();
    if (!status.ok()) return 0;
    Victim victim("receiving_victim", name_, operation);
    // Who dies before it is attached was never seen: the deadline finds it.
    const bool is_attach = std::string(operation) == "attach";
    const double join_timeout_s = is_attach ? 0.2 : 30;
    const int64_t length = KillBeside(
        &victim, instructions, [&] { return SendUntilToldToStop(link.get(), join_timeout_s); });
    ExpectTyped(kFirstReader, is_attach);
    return length;
  }

  void ExpectTheNameWorks() {
    std::unique_ptr<SendLink> sender;
    const Status status = CreateShmSendLink(name_, Geometry(), &sender);
    EXPECT_TRUE(status.ok()) << status.message();
    sender.reset();
    EXPECT_FALSE(Exists(name_));
  }

  const std::string name_ = "tdm-test-death-" + std::to_string(getpid());
  Aftermath after_;
};

TEST_F(ShmDeath, OfASenderThatCreatesLeavesTheNameUsable) {
  AtManyInstructions([this](int64_t instructions) {
    Victim victim("sending_victim", name_, "create");
    EXPECT_TRUE(victim.RunToMark());
    const int64_t length = victim.Step(instructions);
    victim.Kill();
    ExpectTheNameWorks();
    return length;
  });
}

TEST_F(ShmDeath, OfASenderThatJoinsIsTold) {
  AtManyInstructions([this](int64_t instructions) { return SenderDies("join", instructions); });
  ExpectTheNameWorks();
}

TEST_F(ShmDeath, OfASenderThatPostsLeavesWholeSlots) {
  AtManyInstructions([this](int64_t instructions) { return SenderDies("post", instructions); });
  ExpectTheNameWorks();
}

TEST_F(ShmDeath, OfASenderThatGivesUpIsTold) {
  AtManyInstructions([this](int64_t instructions) { return SenderDies("abort", instructions); });
  ExpectTheNameWorks();
}

TEST_F(ShmDeath, OfAReaderThatAttachesEndsTheJoin) {
  AtManyInstructions([this](int64_t instructions) { return ReaderDies("attach", instructions); });
}

TEST_F(ShmDeath, OfAReaderThatReceivesIsTold) {
  AtManyInstructions([this](int64_t instructions) { return ReaderDies("receive", instructions); });
}

TEST_F(ShmDeath, OfAReaderThatGivesUpIsTold) {
  AtManyInstructions([this](int64_t instructions) { return ReaderDies("abort", instructions); });
}

}  // namespace
}  // namespace tandem

int main(int argc, char** argv) {
  return tandem::MainWithRoles(
      argc, argv,
      {{"sending_victim", tandem::SendingVictim}, {"receiving_victim", tandem::ReceivingVictim}});
}
