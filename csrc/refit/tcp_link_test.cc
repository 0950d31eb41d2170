// The TCP link within one process: order, contents, back-pressure, epochs, aborts, leaving. Who may
// join: tcp_door_test.cc; peers that die, stop or are cut off: tcp_peers_test.cc,
// tcp_partition_test.cc.
#include "csrc/refit/tcp_link.h"

#include <dirent.h>
#include <gtest/gtest.h>
#include <pthread.h>

#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "csrc/refit/tcp_ends.h"

namespace tandem {
namespace {

using TcpLink = TcpEnds;

TEST_F(TcpLink, EveryReaderGetsEverySlotInOrder) {
  ASSERT_NO_FATAL_FAILURE(OpenAndJoin(Geometry(3)));
  for (uint64_t epoch = 1; epoch <= 3; ++epoch) {
    ASSERT_NO_FATAL_FAILURE(Begin(epoch));
    for (int i = 0; i < 20; ++i) {
      const std::string text = std::to_string(epoch) + std::string(static_cast<size_t>(i), 'x');
      ASSERT_OK(Post(text));
      for (size_t r = 0; r < 3; ++r) EXPECT_EQ(Take(r), text);
    }
    ASSERT_OK(sender_->Flush(Soon()));
  }
}

TEST_F(TcpLink, SlotsOfAnySizeArriveWhole) {
  const int64_t slot_bytes = (1 << 20) + 77;
  ASSERT_NO_FATAL_FAILURE(OpenAndJoin(Geometry(2, slot_bytes)));
  ASSERT_NO_FATAL_FAILURE(Begin(1));
  std::string text(static_cast<size_t>(slot_bytes), '\0');
  for (size_t i = 0; i < text.size(); ++i) text[i] = static_cast<char>(i * 2654435761u >> 13);
  const int64_t sizes[] = {0, 1, 23, 4096, 256 * 1024 - 1, 256 * 1024, 256 * 1024 + 1, slot_bytes};
  for (const int64_t size : sizes) {
    ASSERT_OK(Post(text.substr(0, static_cast<size_t>(size))));
    for (size_t r = 0; r < 2; ++r) {
      EXPECT_TRUE(Take(r) == text.substr(0, static_cast<size_t>(size))) << size;
    }
  }
  ASSERT_OK(sender_->Flush(Soon()));
}

// No thread can be started: none has room for so large a stack.
class WithoutThreads {
 public:
  WithoutThreads() {
    pthread_getattr_default_np(&before_);
    pthread_attr_t large;
    pthread_attr_init(&large);
    pthread_attr_setstacksize(&large, size_t{1} << 47);
    pthread_setattr_default_np(&large);
    pthread_attr_destroy(&large);
  }
  ~WithoutThreads() {
    pthread_setattr_default_np(&before_);
    pthread_attr_destroy(&before_);
  }

 private:
  pthread_attr_t before_;
};

TEST_F(TcpLink, AProcessThatCanHaveNoThreadIsToldSo) {
  ASSERT_NO_FATAL_FAILURE(Open(Geometry(1)));
  const WithoutThreads without;
  std::unique_ptr<SendLink> second;
  EXPECT_FAILS(CreateTcpSendLink("127.0.0.1", 0, Geometry(1), {}, &second), kUnavailable,
               "no thread for a sender's connections");
  EXPECT_FAILS(CreateTcpSendLink("localhost", 0, Geometry(1), {}, &second), kUnavailable,
               "no thread for looking up a host's name");
  EXPECT_FAILS(readers_[0]->Join(Soon()), kUnavailable, "no thread for a reader's connection");
}

TEST_F(TcpLink, AddressesOfBothFamiliesAndNames) {
  for (const std::string host : {"127.0.0.1", "::1", "[::1]", "localhost"}) {
    readers_.clear();
    ASSERT_NO_FATAL_FAILURE(OpenAndJoin(Geometry(1), host));
    const std::string shown = host == "::1" ? "[::1]" : host;
    EXPECT_EQ(sender_->address().rfind(shown + ":", 0), 0u) << sender_->address();
    ASSERT_NO_FATAL_FAILURE(Begin(1));
    ASSERT_OK(Post("over " + host));
    EXPECT_EQ(Take(0), "over " + host);
  }
}

TEST_F(TcpLink, SenderWaitsForTheSlowestReader) {
  ASSERT_NO_FATAL_FAILURE(OpenAndJoin(Geometry(2)));
  ASSERT_NO_FATAL_FAILURE(Begin(1));
  // Reader 0 takes all; reader 1 nothing: its 3 slots and the sender's 3 fill up.
  for (int i = 0; i < 6; ++i) {
    ASSERT_OK(Post(std::string("s") + std::to_string(i)));
    EXPECT_EQ(Take(0), std::string("s") + std::to_string(i));
  }
  uint8_t* slot = nullptr;
  EXPECT_FAILS(sender_->Acquire(Deadline::In(0.2), &slot), kDeadlineExceeded,
               "slowest is reader 1");
  EXPECT_EQ(sender_->fault().rank, kFirstReader + 1);
  // The others learn why.
  const uint8_t* next = nullptr;
  int64_t bytes = 0;
  for (auto& reader : readers_) {
    Status status;
    while (status.ok()) status = reader->Receive(Soon(), &next, &bytes);
    EXPECT_EQ(status.code(), StatusCode::kDeadlineExceeded) << status.message();
    EXPECT_EQ(reader->fault().rank, kFirstReader + 1);
  }
}

TEST_F(TcpLink, SlotsThatWaitWhileTheReaderIsBusyAreTakenLater) {
  ASSERT_NO_FATAL_FAILURE(OpenAndJoin(Geometry(1)));
  ASSERT_NO_FATAL_FAILURE(Begin(1));
  std::thread sender([this] {
    for (int i = 0; i < 100; ++i) ASSERT_OK(Post(std::string("slot ") + std::to_string(i)));
    ASSERT_OK(sender_->Flush(Soon()));
  });
  for (int i = 0; i < 100; ++i) EXPECT_EQ(Take(0), std::string("slot ") + std::to_string(i));
  sender.join();
}

TEST_F(TcpLink, AnAbortReachesAllEndsWithItsReason) {
  for (const bool is_sender : {true, false}) {
    readers_.clear();
    ASSERT_NO_FATAL_FAILURE(OpenAndJoin(Geometry(2)));
    ASSERT_NO_FATAL_FAILURE(Begin(7));
    const Fault fault = {StatusCode::kDataLoss, kFirstReader + 1, 12, "tensor w: digest differs"};
    if (is_sender) {
      sender_->Abort(fault);
    } else {
      readers_[1]->Abort(fault);
    }
    const uint8_t* slot = nullptr;
    int64_t bytes = 0;
    for (auto& reader : readers_) {
      EXPECT_FAILS(reader->Receive(Soon(), &slot, &bytes), kDataLoss, "tensor w: digest differs");
      EXPECT_EQ(reader->fault().bucket, 12);
      EXPECT_EQ(reader->fault().rank, kFirstReader + 1);
      EXPECT_FAILS(reader->Begin(8, Soon()), kDataLoss, "tensor w");
    }
    Status status;
    while (status.ok()) status = Post("x");
    EXPECT_FAILS(sender_->Flush(Soon()), kDataLoss, "tensor w: digest differs");
  }
}

TEST_F(TcpLink, ALongReasonIsCutBetweenCharacters) {
  ASSERT_NO_FATAL_FAILURE(OpenAndJoin(Geometry(1)));
  std::string reason = "x";
  while (reason.size() < 600) reason += "\xc3\xa9";
  sender_->Abort({StatusCode::kAborted, 2, -1, reason});
  EXPECT_FAILS(readers_[0]->Begin(1, Soon()), kAborted, "x");
  EXPECT_EQ(readers_[0]->fault().message, reason.substr(0, 399));
}

TEST_F(TcpLink, AbortEndsAWaitInAnotherThread) {
  ASSERT_NO_FATAL_FAILURE(OpenAndJoin(Geometry(1)));
  std::thread waiting([this] { EXPECT_EQ(Take(0), "[stop]"); });
  readers_[0]->Abort({StatusCode::kAborted, kNoRank, -1, "stop"});
  waiting.join();
  // Also a wait for a sender that does not answer.
  std::unique_ptr<SendLink> lonely;
  ASSERT_OK(CreateTcpSendLink("127.0.0.1", 0, Geometry(2), {}, &lonely));
  std::unique_ptr<ReceiveLink> reader;
  ASSERT_OK(ConnectTcpReceiveLink(lonely->address(), Geometry(2), 0, {}, &reader));
  std::thread joining([&] { EXPECT_FAILS(reader->Join(Soon()), kAborted, "stop"); });
  reader->Abort({StatusCode::kAborted, kNoRank, -1, "stop"});
  joining.join();
}

TEST_F(TcpLink, EpochsGrowAndAgree) {
  ASSERT_NO_FATAL_FAILURE(OpenAndJoin(Geometry(1)));
  ASSERT_NO_FATAL_FAILURE(Begin(5));
  EXPECT_FAILS(sender_->Begin(5, Soon()), kMismatch, "epoch 5 is not larger than the last one, 5");
  readers_.clear();
  ASSERT_NO_FATAL_FAILURE(OpenAndJoin(Geometry(1)));
  ASSERT_OK(sender_->Begin(3, Soon()));
  EXPECT_FAILS(readers_[0]->Begin(2, Soon()), kMismatch, "begins epoch 2, the sender 3");
  Status status;
  while (status.ok()) status = Post("x");
  EXPECT_FAILS(status, kMismatch, "begins epoch 2, the sender 3");
}

TEST_F(TcpLink, ReadersMayLeaveWhenTheyHaveEverything) {
  ASSERT_NO_FATAL_FAILURE(OpenAndJoin(Geometry(2)));
  ASSERT_NO_FATAL_FAILURE(Begin(1));
  ASSERT_OK(Post("last"));
  for (size_t r = 0; r < 2; ++r) EXPECT_EQ(Take(r), "last");
  readers_.clear();
  ASSERT_OK(sender_->Flush(Soon()));
  EXPECT_FAILS(sender_->Begin(2, Soon()), kPeerLost, "has closed its link");
}

TEST_F(TcpLink, AReaderThatHasEverythingMayLeaveBeforeTheOthersHave) {
  ASSERT_NO_FATAL_FAILURE(OpenAndJoin(Geometry(2)));
  ASSERT_NO_FATAL_FAILURE(Begin(1));
  ASSERT_OK(Post("last"));
  EXPECT_EQ(Take(0), "last");
  readers_[0].reset();  // returns when the sender knows
  EXPECT_FAILS(sender_->Flush(Deadline::In(0.1)), kDeadlineExceeded, "slowest is reader 1");
}

TEST_F(TcpLink, AReaderThatLeavesTooEarlyIsNamed) {
  ASSERT_NO_FATAL_FAILURE(OpenAndJoin(Geometry(2)));
  ASSERT_NO_FATAL_FAILURE(Begin(1));
  ASSERT_OK(Post("one"));
  EXPECT_EQ(Take(0), "one");
  readers_[1].reset();
  EXPECT_FAILS(sender_->Flush(Soon()), kPeerLost, "reader 1");
  EXPECT_EQ(Take(0).substr(0, 9), "[reader 1");
}

TEST_F(TcpLink, WhatArrivedCanBeTakenAfterTheSenderLeft) {
  ASSERT_NO_FATAL_FAILURE(OpenAndJoin(Geometry(1)));
  ASSERT_NO_FATAL_FAILURE(Begin(1));
  ASSERT_OK(Post("one"));
  EXPECT_EQ(Take(0), "one");
  ASSERT_OK(sender_->Flush(Soon()));
  sender_.reset();
  EXPECT_NE(Take(0).find("closed its link after 1 slots"), std::string::npos);
}

int CountOpenFiles() {
  int count = 0;
  DIR* files = opendir("/proc/self/fd");
  while (readdir(files) != nullptr) ++count;
  closedir(files);
  return count;
}

TEST_F(TcpLink, NothingIsLeftOfLinksThatAreGone) {
  const int before = CountOpenFiles();
  for (int round = 0; round < 60; ++round) {
    readers_.clear();
    ASSERT_NO_FATAL_FAILURE(OpenAndJoin(Geometry(2)));
    ASSERT_NO_FATAL_FAILURE(Begin(1));
    ASSERT_OK(Post("x"));
    // In peace, by an abort, and with a slot on the way.
    if (round % 3 == 0) {
      for (size_t r = 0; r < 2; ++r) EXPECT_EQ(Take(r), "x");
    } else if (round % 3 == 1) {
      readers_[0]->Abort({StatusCode::kAborted, kNoRank, -1, "stop"});
    }
  }
  readers_.clear();
  sender_.reset();
  EXPECT_EQ(CountOpenFiles(), before);
}

TEST_F(TcpLink, MisuseIsRefused) {
  ASSERT_NO_FATAL_FAILURE(Open(Geometry(1)));
  uint8_t* slot = nullptr;
  EXPECT_FAILS(sender_->Acquire(Soon(), &slot), kInvalidArgument, "before Join");
  sender_.reset();
  readers_.clear();
  ASSERT_NO_FATAL_FAILURE(OpenAndJoin(Geometry(1)));
  EXPECT_FAILS(readers_[0]->Release(), kInvalidArgument, "without a slot");
  readers_.clear();
  ASSERT_NO_FATAL_FAILURE(OpenAndJoin(Geometry(1)));
  ASSERT_NO_FATAL_FAILURE(Begin(1));
  EXPECT_FAILS(sender_->Post(1, Soon()), kInvalidArgument, "no slot is held");
  readers_.clear();
  ASSERT_NO_FATAL_FAILURE(OpenAndJoin(Geometry(1)));
  ASSERT_NO_FATAL_FAILURE(Begin(1));
  ASSERT_OK(sender_->Acquire(Soon(), &slot));
  EXPECT_FAILS(sender_->Post(5001, Soon()), kInvalidArgument, "Post of 5001 bytes");
}

}  // namespace
}  // namespace tandem
