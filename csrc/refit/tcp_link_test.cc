// The TCP link within one process: order, contents, epochs, geometry, strangers, faults. Peers that
// die, stop or are cut off: tcp_peers_test.cc, tcp_partition_test.cc.
#include "csrc/refit/tcp_link.h"

#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>

#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "csrc/refit/tcp_socket.h"

namespace tandem {
namespace {

LinkGeometry Geometry(int32_t num_readers, int64_t slot_bytes = 5000) {
  LinkGeometry geometry;
  geometry.plan_digest = 0x1234;
  geometry.slot_bytes = slot_bytes;
  geometry.num_slots = 3;
  geometry.num_readers = num_readers;
  geometry.root = 2;
  return geometry;
}

Deadline Soon() { return Deadline::In(30); }

#define ASSERT_OK(expression)                       \
  do {                                              \
    const Status status_ = (expression);            \
    ASSERT_TRUE(status_.ok()) << status_.message(); \
  } while (false)

#define EXPECT_FAILS(expression, expected_code, expected_text)                                \
  do {                                                                                        \
    const Status status_ = (expression);                                                      \
    EXPECT_EQ(status_.code(), StatusCode::expected_code) << status_.message();                \
    EXPECT_NE(status_.message().find(expected_text), std::string::npos) << status_.message(); \
  } while (false)

// A connection that says what it likes.
class Stranger {
 public:
  explicit Stranger(const std::string& address) {
    std::string host;
    int port = 0;
    std::vector<tcp::SocketAddress> found;
    tcp::Wakeup never;
    is_connected_ = tcp::SplitAddress(address, &host, &port).ok() &&
                    tcp::Resolve(
                        host, port, Soon(), [] { return false; }, &found)
                        .ok() &&
                    never.Open().ok() &&
                    tcp::Connect(found, address, never.fd(), Soon(), &fd_).ok();
  }
  void Say(const std::string& text) {
    EXPECT_EQ(send(fd_.get(), text.data(), text.size(), MSG_NOSIGNAL),
              static_cast<ssize_t>(text.size()));
  }
  bool IsDropped() {
    pollfd polled = {fd_.get(), POLLIN, 0};
    char byte;
    return is_connected_ && poll(&polled, 1, 20000) == 1 && recv(fd_.get(), &byte, 1, 0) <= 0;
  }

 private:
  bool is_connected_ = false;
  tcp::UniqueFd fd_;
};

// One sender and its readers in this process.
class TcpLink : public testing::Test {
 protected:
  void Open(const LinkGeometry& geometry, const std::string& host = "127.0.0.1") {
    ASSERT_OK(CreateTcpSendLink(host, 0, geometry, {}, &sender_));
    for (int32_t r = 0; r < geometry.num_readers; ++r) {
      readers_.emplace_back();
      ASSERT_OK(ConnectTcpReceiveLink(sender_->address(), geometry, r, {}, &readers_.back()));
    }
  }
  void Join() {
    std::vector<Status> results(readers_.size());
    std::vector<std::thread> threads;
    for (size_t r = 0; r < readers_.size(); ++r) {
      threads.emplace_back([this, r, &results] { results[r] = readers_[r]->Join(Soon()); });
    }
    const Status status = sender_->Join(Soon());
    for (std::thread& thread : threads) thread.join();
    ASSERT_OK(status);
    for (const Status& result : results) ASSERT_OK(result);
  }
  void OpenAndJoin(const LinkGeometry& geometry, const std::string& host = "127.0.0.1") {
    ASSERT_NO_FATAL_FAILURE(Open(geometry, host));
    ASSERT_NO_FATAL_FAILURE(Join());
  }
  void Begin(uint64_t epoch) {
    ASSERT_OK(sender_->Begin(epoch, Soon()));
    for (auto& reader : readers_) ASSERT_OK(reader->Begin(epoch, Soon()));
  }
  Status Post(const std::string& text) {
    uint8_t* slot = nullptr;
    const Status status = sender_->Acquire(Soon(), &slot);
    if (!status.ok()) return status;
    std::memcpy(slot, text.data(), text.size());
    return sender_->Post(static_cast<int64_t>(text.size()), Soon());
  }
  // What reader r gets next; an error's message in brackets.
  std::string Take(size_t r) {
    const uint8_t* slot = nullptr;
    int64_t bytes = 0;
    Status status = readers_[r]->Receive(Soon(), &slot, &bytes);
    if (!status.ok()) return "[" + status.message() + "]";
    std::string text(reinterpret_cast<const char*>(slot), static_cast<size_t>(bytes));
    status = readers_[r]->Release();
    return status.ok() ? text : "[" + status.message() + "]";
  }

  std::unique_ptr<SendLink> sender_;
  std::vector<std::unique_ptr<ReceiveLink>> readers_;
};

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
    ASSERT_OK(Post("s" + std::to_string(i)));
    EXPECT_EQ(Take(0), "s" + std::to_string(i));
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
    for (int i = 0; i < 100; ++i) ASSERT_OK(Post("slot " + std::to_string(i)));
    ASSERT_OK(sender_->Flush(Soon()));
  });
  for (int i = 0; i < 100; ++i) EXPECT_EQ(Take(0), "slot " + std::to_string(i));
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

TEST_F(TcpLink, GeometryIsComparedBeforeAnythingElse) {
  struct Row {
    const char* field;
    void (*change)(LinkGeometry*);
  };
  const Row rows[] = {
      {"plan_digest", [](LinkGeometry* g) { g->plan_digest = 5; }},
      {"slot_bytes", [](LinkGeometry* g) { g->slot_bytes = 6000; }},
      {"num_slots", [](LinkGeometry* g) { g->num_slots = 4; }},
      {"num_readers", [](LinkGeometry* g) { g->num_readers = 3; }},
      {"root", [](LinkGeometry* g) { g->root = 1; }},
  };
  for (const Row& row : rows) {
    LinkGeometry other = Geometry(2);
    row.change(&other);
    std::unique_ptr<SendLink> sender;
    std::unique_ptr<ReceiveLink> reader;
    ASSERT_OK(CreateTcpSendLink("127.0.0.1", 0, Geometry(2), {}, &sender));
    ASSERT_OK(ConnectTcpReceiveLink(sender->address(), other, 1, {}, &reader));
    EXPECT_FAILS(reader->Join(Soon()), kMismatch, row.field);
    EXPECT_FAILS(sender->Join(Soon()), kMismatch, row.field);
    EXPECT_EQ(sender->fault().rank, kFirstReader + 1);
  }
}

TEST_F(TcpLink, ARepeatedNumberAndALateOneAreRefusedAndDisturbNobody) {
  ASSERT_NO_FATAL_FAILURE(Open(Geometry(2)));
  std::thread first([this] { ASSERT_OK(readers_[0]->Join(Soon())); });
  // The same number twice: whichever of the two comes second is refused; here both try until the
  // first is known to be in.
  std::unique_ptr<ReceiveLink> twin;
  Status refused;
  ASSERT_OK(ConnectTcpReceiveLink(sender_->address(), Geometry(2), 1, {}, &twin));
  std::thread second([&] { ASSERT_OK(readers_[1]->Join(Soon())); });
  first.join();
  second.join();
  EXPECT_FAILS(twin->Join(Soon()), kUnavailable, "all 2 readers have joined");
  ASSERT_OK(sender_->Join(Soon()));
  ASSERT_NO_FATAL_FAILURE(Begin(1));
  ASSERT_OK(Post("after the late one"));
  EXPECT_EQ(Take(0), "after the late one");
  EXPECT_EQ(Take(1), "after the late one");
}

TEST_F(TcpLink, ANumberThatHasJoinedIsRefusedWhileOthersAreAwaited) {
  ASSERT_NO_FATAL_FAILURE(Open(Geometry(2)));
  std::unique_ptr<ReceiveLink> twin;
  ASSERT_OK(ConnectTcpReceiveLink(sender_->address(), Geometry(2), 0, {}, &twin));
  Status results[2];
  std::thread first([&] { results[0] = readers_[0]->Join(Soon()); });
  std::thread second([&] { results[1] = twin->Join(Soon()); });
  // One of them is refused at once; the other one waits for reader 1.
  const auto is_refused = [](ReceiveLink* link) {
    return link->fault().code == StatusCode::kMismatch;
  };
  const Deadline deadline = Soon();
  while (!is_refused(twin.get()) && !is_refused(readers_[0].get()) && !deadline.HasPassed()) {
    std::this_thread::yield();
  }
  const size_t loser = is_refused(twin.get()) ? 1 : 0;
  ASSERT_OK(readers_[1]->Join(Soon()));
  first.join();
  second.join();
  ASSERT_OK(sender_->Join(Soon()));
  ASSERT_OK(results[1 - loser]);
  EXPECT_FAILS(results[loser], kMismatch, "this number has joined from 127.0.0.1:");
}

TEST_F(TcpLink, AReaderOfNobodyIsToldSo) {
  ASSERT_NO_FATAL_FAILURE(Open(Geometry(1)));
  sender_.reset();
  EXPECT_FAILS(readers_[0]->Join(Soon()), kPeerLost, "nobody listens at 127.0.0.1:");
}

TEST_F(TcpLink, JoinSaysWhoIsMissing) {
  ASSERT_NO_FATAL_FAILURE(Open(Geometry(3)));
  Status results[2];
  std::thread threads[2];
  for (size_t i : {0, 1}) {
    threads[i] = std::thread([&, i] { results[i] = readers_[2 * i]->Join(Soon()); });
  }
  Status status = sender_->Join(Deadline::In(0.5));
  for (std::thread& thread : threads) thread.join();
  EXPECT_FAILS(status, kDeadlineExceeded, "missing: 1");
  EXPECT_EQ(sender_->fault().rank, kFirstReader + 1);
  for (const Status& result : results) EXPECT_FAILS(result, kDeadlineExceeded, "missing: 1");
}

TEST_F(TcpLink, StrangersAreDroppedAndDisturbNobody) {
  ASSERT_NO_FATAL_FAILURE(Open(Geometry(2)));
  testing::internal::CaptureStderr();
  Stranger web(sender_->address()), silent(sender_->address()), scan(sender_->address());
  web.Say("GET / HTTP/1.1\r\nHost: x\r\n\r\n");
  scan.Say("T");  // as our own frames begin, but no more comes
  EXPECT_TRUE(web.IsDropped());
  ASSERT_NO_FATAL_FAILURE(Join());
  ASSERT_NO_FATAL_FAILURE(Begin(1));
  Stranger later(sender_->address());
  later.Say(std::string(1 << 16, '\xff'));
  EXPECT_TRUE(later.IsDropped());
  for (int i = 0; i < 10; ++i) {
    ASSERT_OK(Post("undisturbed"));
    for (size_t r = 0; r < 2; ++r) EXPECT_EQ(Take(r), "undisturbed");
  }
  ASSERT_OK(sender_->Flush(Soon()));
  // Who says nothing has to go as well, after a while.
  EXPECT_TRUE(silent.IsDropped());
  EXPECT_TRUE(scan.IsDropped());
  const std::string log = testing::internal::GetCapturedStderr();
  EXPECT_NE(log.find("its first bytes are no hello of a reader"), std::string::npos) << log;
  EXPECT_NE(log.find("it did not say who it is in time"), std::string::npos) << log;
}

TEST_F(TcpLink, ACrowdOfStrangersDoesNotKeepReadersOut) {
  ASSERT_NO_FATAL_FAILURE(Open(Geometry(1)));
  testing::internal::CaptureStderr();
  std::vector<std::unique_ptr<Stranger>> crowd;
  for (int i = 0; i < 200; ++i) crowd.push_back(std::make_unique<Stranger>(sender_->address()));
  ASSERT_NO_FATAL_FAILURE(Join());
  EXPECT_TRUE(crowd.front()->IsDropped());
  const std::string log = testing::internal::GetCapturedStderr();
  EXPECT_NE(log.find("further ones are not logged"), std::string::npos) << log;
}

TEST_F(TcpLink, WhoAnswersAReaderMustBeASender) {
  tcp::UniqueFd listener;
  int port = 0;
  ASSERT_OK(tcp::Listen("127.0.0.1", 0, &listener, &port));
  std::unique_ptr<ReceiveLink> reader;
  ASSERT_OK(
      ConnectTcpReceiveLink(tcp::JoinAddress("127.0.0.1", port), Geometry(1), 0, {}, &reader));
  Status status;
  std::thread joining([&] { status = reader->Join(Soon()); });
  tcp::UniqueFd connection;
  std::string peer;
  pollfd polled = {listener.get(), POLLIN, 0};
  ASSERT_EQ(poll(&polled, 1, 20000), 1);
  ASSERT_OK(tcp::Accept(listener.get(), &connection, &peer));
  const char answer[] = "HTTP/1.1 400 Bad Request\r\n\r\n";
  ASSERT_GT(send(connection.get(), answer, sizeof(answer), MSG_NOSIGNAL), 0);
  joining.join();
  EXPECT_FAILS(status, kMismatch, "what is no frame of a refit");
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

TEST_F(TcpLink, OpeningRefusesWhatCannotWork) {
  std::unique_ptr<SendLink> link;
  std::unique_ptr<ReceiveLink> reader;
  const LinkGeometry good = Geometry(1);
  EXPECT_FAILS(CreateTcpSendLink("", 0, good, {}, &link), kInvalidArgument, "host=\"\"");
  EXPECT_FAILS(CreateTcpSendLink("0.0.0.0", 0, good, {}, &link), kInvalidArgument, "wildcard");
  EXPECT_FAILS(CreateTcpSendLink("::", 0, good, {}, &link), kInvalidArgument, "wildcard");
  EXPECT_FAILS(CreateTcpSendLink("127.0.0.1", 70000, good, {}, &link), kInvalidArgument, "70000");
  EXPECT_FAILS(CreateTcpSendLink("127.0.0.1", 0, good, {0.1}, &link), kInvalidArgument, "0.1");
  EXPECT_FAILS(CreateTcpSendLink("192.0.2.1", 0, good, {}, &link), kUnavailable,
               "give an address of this host");
  LinkGeometry bad = good;
  bad.num_slots = 1;
  EXPECT_FAILS(CreateTcpSendLink("127.0.0.1", 0, bad, {}, &link), kInvalidArgument, "num_slots=1");
  EXPECT_FAILS(ConnectTcpReceiveLink("127.0.0.1:1", good, 1, {}, &reader), kInvalidArgument,
               "reader=1");
  EXPECT_FAILS(ConnectTcpReceiveLink("::1:4711", good, 0, {}, &reader), kInvalidArgument,
               "IPv6 in brackets");
  ASSERT_NO_FATAL_FAILURE(Open(good));
  const std::string address = sender_->address();
  const int port = std::stoi(address.substr(address.rfind(':') + 1));
  EXPECT_FAILS(CreateTcpSendLink("127.0.0.1", port, good, {}, &link), kUnavailable,
               "another process has the port");
}

}  // namespace
}  // namespace tandem
