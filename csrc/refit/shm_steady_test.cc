// While nobody has to wait, a slot costs neither a system call nor an allocation nor a look at the
// clock. The process that moves the slots may do no system call but read and write (the kernel
// would kill it), and has no time stamp counter (it would fault).
#include <gtest/gtest.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <memory>
#include <new>
#include <string>
#include <thread>
#include <vector>

#include "csrc/refit/shm_link.h"
#include "csrc/testing/child_process.h"

namespace {
std::atomic<int64_t> num_allocations{0};
}  // namespace

void* operator new(size_t size) {
  ++num_allocations;
  void* memory = std::malloc(size);
  if (memory == nullptr) std::abort();
  return memory;
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { std::free(memory); }

namespace tandem {
namespace {

constexpr int kNumSlotsSent = 1000;

// Both ends in one process, in turns.
int MoveSlots(SendLink* sender, ReceiveLink* reader, const Deadline& deadline) {
  int num_equal = 0;
  for (int i = 0; i < kNumSlotsSent; ++i) {
    uint8_t* slot = nullptr;
    if (!sender->Acquire(deadline, &slot).ok()) break;
    slot[0] = static_cast<uint8_t>(i);
    if (!sender->Post(1 + i % 4000, deadline).ok()) break;
    const uint8_t* received = nullptr;
    int64_t bytes = 0;
    if (!reader->Receive(deadline, &received, &bytes).ok()) break;
    num_equal += received[0] == static_cast<uint8_t>(i) && bytes == 1 + i % 4000;
    if (!reader->Release().ok()) break;
  }
  return sender->Flush(deadline).ok() ? num_equal : -1;
}

int Mover(const std::vector<std::string>& arguments) {
  LinkGeometry geometry;
  geometry.slot_bytes = 4096;
  geometry.num_slots = 3;
  geometry.num_readers = 1;
  std::unique_ptr<SendLink> sender;
  std::unique_ptr<ReceiveLink> reader;
  if (!CreateShmSendLink(arguments[0], geometry, &sender).ok()) return 1;
  if (!AttachShmReceiveLink(arguments[0], geometry, 0, &reader).ok()) return 1;
  Status joined;
  std::thread thread([&] { joined = reader->Join(Deadline::In(30)); });
  const Status status = sender->Join(Deadline::In(30));
  thread.join();
  if (!status.ok() || !joined.ok() || !sender->Begin(1, Deadline::In(30)).ok()) return 1;
  if (!reader->Begin(1, Deadline::In(30)).ok()) return 1;
  const Deadline deadline = Deadline::In(30);
  PrintLine("joined");  // makes the stream's buffer
  if (prctl(PR_SET_SECCOMP, SECCOMP_MODE_STRICT) != 0) return 2;
  const int64_t before = num_allocations.load();
  const int num_equal = MoveSlots(sender.get(), reader.get(), deadline);
  const int64_t allocated = num_allocations.load() - before;
  PrintLine(std::to_string(num_equal) + " slots, " + std::to_string(allocated) + " allocations");
  syscall(SYS_exit, 0);  // exit_group is one call too many
  return 0;
}

TEST(ShmSteady, ASlotCostsNoSystemCallAndNoAllocation) {
  ChildProcess child("mover", {"tdm-test-steady-" + std::to_string(getpid())});
  ASSERT_EQ(child.ReadLine(Deadline::In(60)), "joined");
  EXPECT_EQ(child.ReadLine(Deadline::In(60)), "1000 slots, 0 allocations");
  EXPECT_EQ(child.Wait(Deadline::In(60)), 0) << "-9: a system call; -11: a look at the clock";
}

}  // namespace
}  // namespace tandem

int main(int argc, char** argv) {
  return tandem::MainWithRoles(argc, argv, {{"mover", tandem::Mover}});
}
