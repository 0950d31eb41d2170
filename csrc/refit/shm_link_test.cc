// The link over shared memory within one process: order, contents, epochs, geometry, names, faults.
// Peers that die or stop: shm_peers_test.cc.
#include "csrc/refit/shm_link.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "csrc/testing/status_checks.h"

namespace tandem {
namespace {

LinkGeometry SmallGeometry(int32_t num_readers) {
  LinkGeometry geometry;
  geometry.plan_digest = 0x1234;
  geometry.slot_bytes = 5000;
  geometry.num_slots = 3;
  geometry.num_readers = num_readers;
  geometry.root = 2;
  return geometry;
}

Deadline Soon() { return Deadline::In(20); }

std::string UniqueName() {
  static int count = 0;
  return "tdm-test-link-" + std::to_string(getpid()) + "-" + std::to_string(++count);
}

bool Exists(const std::string& name) {
  struct stat found;
  return stat(("/dev/shm/" + name).c_str(), &found) == 0;
}

// One sender and its readers, joined, all in this process.
class Ends {
 public:
  explicit Ends(LinkGeometry geometry) : geometry_(geometry) {}

  void Open() {
    ASSERT_OK(CreateShmSendLink(UniqueName(), geometry_, &sender));
    for (int32_t r = 0; r < geometry_.num_readers; ++r) {
      readers.emplace_back();
      ASSERT_OK(AttachShmReceiveLink(sender->address(), geometry_, r, &readers.back()));
    }
  }
  void Join() {
    std::vector<Status> results(readers.size());
    std::vector<std::thread> threads;
    for (size_t r = 0; r < readers.size(); ++r) {
      threads.emplace_back([this, r, &results] { results[r] = readers[r]->Join(Soon()); });
    }
    const Status status = sender->Join(Soon());
    for (std::thread& thread : threads) thread.join();
    ASSERT_OK(status);
    for (const Status& result : results) ASSERT_OK(result);
  }
  void Begin(uint64_t epoch) {
    ASSERT_OK(sender->Begin(epoch, Soon()));
    for (auto& reader : readers) ASSERT_OK(reader->Begin(epoch, Soon()));
  }
  Status Post(const std::string& text) {
    uint8_t* slot = nullptr;
    if (Status status = sender->Acquire(Soon(), &slot); !status.ok()) return status;
    std::memcpy(slot, text.data(), text.size());
    return sender->Post(static_cast<int64_t>(text.size()), Soon());
  }
  Status Take(size_t reader, std::string* text) {
    const uint8_t* slot = nullptr;
    int64_t bytes = 0;
    if (Status status = readers[reader]->Receive(Soon(), &slot, &bytes); !status.ok()) {
      return status;
    }
    text->assign(reinterpret_cast<const char*>(slot), static_cast<size_t>(bytes));
    return readers[reader]->Release();
  }

  std::unique_ptr<SendLink> sender;
  std::vector<std::unique_ptr<ReceiveLink>> readers;

 private:
  LinkGeometry geometry_;
};

// Lengths from 0 to the whole slot.
std::string TextOf(uint64_t epoch, int number) {
  const size_t size = number % 7 == 0 ? 0 : number % 7 == 6 ? 5000 : 100 * (number % 7) + epoch;
  return std::string(size, static_cast<char>('a' + (number + epoch) % 26));
}

TEST(ShmLink, SlotsArriveInOrderAndWholeOverSeveralEpochs) {
  Ends ends(SmallGeometry(3));
  ends.Open();
  ends.Join();
  constexpr int kNumSlots = 200;
  for (const uint64_t epoch : {1, 5, 6}) {
    ends.Begin(epoch);
    std::vector<std::thread> threads;
    std::vector<int> num_equal(3);
    for (size_t r = 0; r < 3; ++r) {
      threads.emplace_back([&ends, &num_equal, r, epoch] {
        for (int i = 0; i < kNumSlots; ++i) {
          std::string text;
          if (!ends.Take(r, &text).ok()) return;
          num_equal[r] += text == TextOf(epoch, i);
        }
      });
    }
    Status status;
    for (int i = 0; i < kNumSlots && status.ok(); ++i) status = ends.Post(TextOf(epoch, i));
    if (status.ok()) status = ends.sender->Flush(Soon());
    for (std::thread& thread : threads) thread.join();
    ASSERT_OK(status);
    EXPECT_EQ(num_equal, std::vector<int>(3, kNumSlots));
  }
}

TEST(ShmLink, SlotsBeginAtTheAlignmentOfTheContract) {
  Ends ends(SmallGeometry(1));
  ends.Open();
  ends.Join();
  ends.Begin(1);
  uint8_t* slot = nullptr;
  const uint8_t* received = nullptr;
  int64_t bytes = 0;
  for (int i = 0; i < 3; ++i) {
    ASSERT_OK(ends.sender->Acquire(Soon(), &slot));
    EXPECT_EQ(reinterpret_cast<uintptr_t>(slot) % kSlotAlignment, 0u);
    ASSERT_OK(ends.sender->Post(5000, Soon()));
    ASSERT_OK(ends.readers[0]->Receive(Soon(), &received, &bytes));
    EXPECT_EQ(reinterpret_cast<uintptr_t>(received) % kSlotAlignment, 0u);
    EXPECT_EQ(bytes, 5000);
    ASSERT_OK(ends.readers[0]->Release());
  }
}

TEST(ShmLink, TheSlowestReaderGatesTheSender) {
  Ends ends(SmallGeometry(2));
  ends.Open();
  ends.Join();
  ends.Begin(1);
  std::string text;
  for (int i = 0; i < 3; ++i) {
    ASSERT_OK(ends.Post("x"));
    ASSERT_OK(ends.Take(0, &text));
  }
  uint8_t* slot = nullptr;
  EXPECT_FAILS(ends.sender->Acquire(Deadline::In(0.02), &slot), kDeadlineExceeded, "reader 1");
  const Fault fault = ends.readers[0]->fault();
  EXPECT_EQ(fault.code, StatusCode::kDeadlineExceeded);
  EXPECT_EQ(fault.rank, kFirstReader + 1);
  EXPECT_NE(fault.message.find("slot 0 of epoch 1 to be released"), std::string::npos)
      << fault.message;
}

TEST(ShmLink, EveryWaitEndsAtItsDeadline) {
  const LinkGeometry geometry = SmallGeometry(2);
  std::unique_ptr<SendLink> sender;
  ASSERT_OK(CreateShmSendLink(UniqueName(), geometry, &sender));
  std::unique_ptr<ReceiveLink> reader;
  ASSERT_OK(AttachShmReceiveLink(sender->address(), geometry, 1, &reader));
  EXPECT_FAILS(reader->Join(Deadline::In(0.02)), kDeadlineExceeded, "sender 2");
  EXPECT_FAILS(sender->Join(Deadline::In(0.02)), kDeadlineExceeded, "all readers to join");

  Ends ends(SmallGeometry(1));
  ends.Open();
  ends.Join();
  ends.Begin(7);
  const uint8_t* slot = nullptr;
  int64_t bytes = 0;
  EXPECT_FAILS(ends.readers[0]->Receive(Deadline::In(0.02), &slot, &bytes), kDeadlineExceeded,
               "slot 0 of epoch 7 to be posted");
  EXPECT_FAILS(ends.sender->Flush(Deadline::In(0.02)), kDeadlineExceeded, "sender 2");
}

TEST(ShmLink, ASenderSaysWhichReadersHaveNotJoined) {
  const LinkGeometry geometry = SmallGeometry(3);
  std::unique_ptr<SendLink> sender;
  ASSERT_OK(CreateShmSendLink(UniqueName(), geometry, &sender));
  std::unique_ptr<ReceiveLink> reader;
  ASSERT_OK(AttachShmReceiveLink(sender->address(), geometry, 0, &reader));
  Status joined;
  std::thread thread([&] { joined = reader->Join(Soon()); });
  const Status status = sender->Join(Deadline::In(0.05));
  thread.join();
  EXPECT_EQ(status.code(), StatusCode::kDeadlineExceeded);
  EXPECT_EQ(status.message(),
            "reader 1 (not attached) is late: the deadline passed while we waited for 2 of 3 "
            "readers to join");
  EXPECT_EQ(joined.message(), status.message());
  EXPECT_EQ(reader->fault().rank, kFirstReader + 1);
}

struct FieldCase {
  const char* name;
  void (*change)(LinkGeometry*);
};

TEST(ShmLink, AMismatchNamesTheFieldOnBothEnds) {
  const FieldCase cases[] = {
      {"plan_digest", [](LinkGeometry* geometry) { geometry->plan_digest = 0x99; }},
      {"slot_bytes", [](LinkGeometry* geometry) { geometry->slot_bytes = 5001; }},
      {"num_slots", [](LinkGeometry* geometry) { geometry->num_slots = 4; }},
      {"num_readers", [](LinkGeometry* geometry) { geometry->num_readers = 7; }},
      {"root", [](LinkGeometry* geometry) { geometry->root = 0; }},
  };
  for (const FieldCase& field : cases) {
    const LinkGeometry geometry = SmallGeometry(2);
    LinkGeometry other = geometry;
    field.change(&other);
    std::unique_ptr<SendLink> sender;
    ASSERT_OK(CreateShmSendLink(UniqueName(), geometry, &sender));
    std::unique_ptr<ReceiveLink> reader;
    ASSERT_OK(AttachShmReceiveLink(sender->address(), other, 1, &reader));
    EXPECT_FAILS(reader->Join(Soon()), kMismatch, field.name);
    EXPECT_FAILS(sender->Join(Soon()), kMismatch, field.name);
    EXPECT_EQ(sender->fault().rank, kFirstReader + 1);
  }
}

TEST(ShmLink, AReaderBeyondTheLastIsRefused) {
  std::unique_ptr<SendLink> sender;
  ASSERT_OK(CreateShmSendLink(UniqueName(), SmallGeometry(2), &sender));
  std::unique_ptr<ReceiveLink> reader;
  EXPECT_FAILS(AttachShmReceiveLink(sender->address(), SmallGeometry(3), 2, &reader), kMismatch,
               "num_readers");
  EXPECT_FAILS(AttachShmReceiveLink(sender->address(), SmallGeometry(3), -1, &reader), kMismatch,
               "num_readers");
}

TEST(ShmLink, AReaderIsThereOnce) {
  const LinkGeometry geometry = SmallGeometry(2);
  std::unique_ptr<SendLink> sender;
  ASSERT_OK(CreateShmSendLink(UniqueName(), geometry, &sender));
  std::unique_ptr<ReceiveLink> reader;
  std::unique_ptr<ReceiveLink> other;
  ASSERT_OK(AttachShmReceiveLink(sender->address(), geometry, 1, &reader));
  EXPECT_FAILS(AttachShmReceiveLink(sender->address(), geometry, 1, &other), kUnavailable,
               "reader 1 of " + sender->address() + " is process " + std::to_string(getpid()));
  reader.reset();
  EXPECT_FAILS(AttachShmReceiveLink(sender->address(), geometry, 1, &other), kUnavailable,
               "which has gone");
  EXPECT_FAILS(sender->Join(Soon()), kPeerLost, "reader 1");
}

TEST(ShmLink, TheNameGoesWhenAllAreThereAndNobodyJoinsLater) {
  Ends ends(SmallGeometry(1));
  ends.Open();
  const std::string name = ends.sender->address();
  EXPECT_TRUE(Exists(name));
  ends.Join();
  EXPECT_FALSE(Exists(name));
  std::unique_ptr<ReceiveLink> late;
  EXPECT_FAILS(AttachShmReceiveLink(name, SmallGeometry(1), 0, &late), kUnavailable,
               "has all its readers already");
  // The link is none the worse for it.
  ends.Begin(1);
  ASSERT_OK(ends.Post("x"));
  std::string text;
  ASSERT_OK(ends.Take(0, &text));
}

TEST(ShmLink, TheNameGoesWithASenderThatNobodyJoined) {
  std::unique_ptr<SendLink> sender;
  ASSERT_OK(CreateShmSendLink(UniqueName(), SmallGeometry(1), &sender));
  const std::string name = sender->address();
  EXPECT_TRUE(Exists(name));
  sender.reset();
  EXPECT_FALSE(Exists(name));
}

TEST(ShmLink, ALiveNameIsNotTaken) {
  const std::string name = UniqueName();
  std::unique_ptr<SendLink> sender;
  std::unique_ptr<SendLink> other;
  ASSERT_OK(CreateShmSendLink(name, SmallGeometry(1), &sender));
  EXPECT_FAILS(CreateShmSendLink(name, SmallGeometry(1), &other), kUnavailable, name);
  EXPECT_TRUE(Exists(name));
  std::unique_ptr<ReceiveLink> reader;
  ASSERT_OK(AttachShmReceiveLink(name, SmallGeometry(1), 0, &reader));
}

TEST(ShmLink, NamesAndSizesThatCannotBeAreRefused) {
  std::unique_ptr<SendLink> sender;
  EXPECT_FAILS(CreateShmSendLink("", SmallGeometry(1), &sender), kInvalidArgument, "name");
  EXPECT_FAILS(CreateShmSendLink("a/b", SmallGeometry(1), &sender), kInvalidArgument, "a/b");
  LinkGeometry geometry = SmallGeometry(1);
  geometry.num_slots = 1;
  EXPECT_FAILS(CreateShmSendLink("x", geometry, &sender), kInvalidArgument, "num_slots");
  geometry = SmallGeometry(0);
  EXPECT_FAILS(CreateShmSendLink("x", geometry, &sender), kInvalidArgument, "num_readers");
  geometry = SmallGeometry(1);
  geometry.slot_bytes = int64_t{1} << 62;
  EXPECT_FAILS(CreateShmSendLink("x", geometry, &sender), kInvalidArgument, "slot_bytes");
}

TEST(ShmLink, AFullFileSystemIsRefusedBeforeItIsWrittenTo) {
  LinkGeometry geometry = SmallGeometry(1);
  geometry.slot_bytes = int64_t{1} << 50;
  const std::string name = UniqueName();
  std::unique_ptr<SendLink> sender;
  const Status status = CreateShmSendLink(name, geometry, &sender);
  EXPECT_EQ(status.code(), StatusCode::kUnavailable);
  EXPECT_NE(status.message().find("MiB free, the refit needs 3221225473 MiB"), std::string::npos)
      << status.message();
  EXPECT_NE(status.message().find("policy.generation.refit_cfg.bucket_mib"), std::string::npos);
  EXPECT_FALSE(Exists(name));
}

TEST(ShmLink, AnOldEpochIsRefused) {
  Ends ends(SmallGeometry(1));
  ends.Open();
  ends.Join();
  ends.Begin(4);
  EXPECT_FAILS(ends.readers[0]->Begin(4, Soon()), kMismatch, "epoch 4 was begun after epoch 4");
  EXPECT_FAILS(ends.sender->Begin(5, Soon()), kMismatch, "epoch 4");
  EXPECT_EQ(ends.sender->fault().rank, kFirstReader);
}

TEST(ShmLink, ASlotOfAnotherEpochIsRefused) {
  Ends ends(SmallGeometry(1));
  ends.Open();
  ends.Join();
  ends.Begin(4);
  ASSERT_OK(ends.Post("old"));
  ASSERT_OK(ends.readers[0]->Begin(5, Soon()));
  const uint8_t* slot = nullptr;
  int64_t bytes = 0;
  EXPECT_FAILS(ends.readers[0]->Receive(Soon(), &slot, &bytes), kMismatch,
               "in epoch 5, found slot 0 in epoch 4");
  EXPECT_FAILS(ends.sender->Flush(Soon()), kMismatch, "epoch 5");
}

TEST(ShmLink, AnAbortReachesEveryWaiterWithAllThatItSays) {
  Ends ends(SmallGeometry(2));
  ends.Open();
  ends.Join();
  ends.Begin(1);
  Status waited[2];
  std::vector<std::thread> threads;
  for (size_t r = 0; r < 2; ++r) {
    threads.emplace_back([&ends, &waited, r] {
      std::string text;
      waited[r] = ends.Take(r, &text);
    });
  }
  Fault fault;
  fault.code = StatusCode::kDataLoss;
  fault.rank = kFirstReader + 1;
  fault.bucket = 17;
  fault.message = "bucket 17: digest differs";
  ends.readers[1]->Abort(fault);
  for (std::thread& thread : threads) thread.join();
  EXPECT_FAILS(waited[0], kDataLoss, "bucket 17: digest differs");
  EXPECT_FAILS(waited[1], kDataLoss, "bucket 17: digest differs");
  EXPECT_FAILS(ends.Post("x"), kDataLoss, "bucket 17");
  EXPECT_FAILS(ends.sender->Flush(Soon()), kDataLoss, "bucket 17");
  EXPECT_FAILS(ends.sender->Begin(2, Soon()), kDataLoss, "bucket 17");
  // The first fault stays.
  fault.message = "another";
  ends.sender->Abort(fault);
  for (const Fault& seen : {ends.sender->fault(), ends.readers[0]->fault()}) {
    EXPECT_EQ(seen.code, StatusCode::kDataLoss);
    EXPECT_EQ(seen.rank, kFirstReader + 1);
    EXPECT_EQ(seen.bucket, 17);
    EXPECT_EQ(seen.message, "bucket 17: digest differs");
  }
}

TEST(ShmLink, AnAbortBeforeJoiningEndsTheJoinOfAll) {
  Ends ends(SmallGeometry(2));
  ends.Open();
  Fault fault;
  fault.code = StatusCode::kUnavailable;
  fault.message = "no memory here";
  ends.readers[1]->Abort(fault);
  EXPECT_FAILS(ends.sender->Join(Soon()), kUnavailable, "no memory here");
  EXPECT_FAILS(ends.readers[0]->Join(Soon()), kUnavailable, "no memory here");
  EXPECT_EQ(ends.sender->fault().rank, kFirstReader + 1) << "who aborts without a rank is meant";
}

TEST(ShmLink, ALongMessageIsCutBetweenCharacters) {
  Ends ends(SmallGeometry(1));
  ends.Open();
  Fault fault;
  fault.message = std::string(399, 'x') + "\xc3\xa4 and more";
  ends.sender->Abort(fault);
  EXPECT_EQ(ends.readers[0]->fault().message, std::string(399, 'x'));
}

TEST(ShmLink, AReaderTakesWhatWasPostedBeforeItsSenderClosed) {
  Ends ends(SmallGeometry(1));
  ends.Open();
  ends.Join();
  ends.Begin(1);
  ASSERT_OK(ends.Post("one"));
  ASSERT_OK(ends.Post("two"));
  ends.sender.reset();
  std::string text;
  ASSERT_OK(ends.Take(0, &text));
  ASSERT_OK(ends.Take(0, &text));
  EXPECT_EQ(text, "two");
  EXPECT_FAILS(ends.Take(0, &text), kPeerLost, "has closed its link");
  EXPECT_EQ(ends.readers[0]->fault().rank, 2);
}

TEST(ShmLink, AReaderThatHasAllMayLeaveBeforeTheOthers) {
  Ends ends(SmallGeometry(2));
  ends.Open();
  ends.Join();
  ends.Begin(1);
  ASSERT_OK(ends.Post("one"));
  std::string text;
  ASSERT_OK(ends.Take(0, &text));
  ends.readers[0].reset();
  Status flushed;
  std::thread thread([&] { flushed = ends.sender->Flush(Soon()); });
  const Status taken = ends.Take(1, &text);
  thread.join();
  ASSERT_OK(taken);
  ASSERT_OK(flushed);
  // But there is no further refit without it.
  EXPECT_FAILS(ends.sender->Begin(2, Soon()), kPeerLost, "reader 0");
}

TEST(ShmLink, MisuseIsNamed) {
  Ends ends(SmallGeometry(1));
  ends.Open();
  ends.Join();
  ends.Begin(1);
  uint8_t* slot = nullptr;
  ASSERT_OK(ends.sender->Acquire(Soon(), &slot));
  EXPECT_FAILS(ends.sender->Post(5001, Soon()), kInvalidArgument, "bytes=5001");
  EXPECT_FAILS(ends.readers[0]->Release(), kInvalidArgument, "bytes=5001");
}

}  // namespace
}  // namespace tandem
