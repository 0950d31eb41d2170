// Who may join a TCP link: readers of the same geometry, each once, in time; strangers are dropped
// and disturb nobody.
#include "csrc/refit/tcp_door.h"

#include <gtest/gtest.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "csrc/refit/tcp_ends.h"
#include "csrc/refit/tcp_frame.h"
#include "csrc/refit/tcp_socket.h"

namespace tandem {
namespace {

using TcpDoor = TcpEnds;

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
  // What a refusal says.
  Fault Refusal() {
    uint8_t answer[sizeof(tcp::FrameHeader) + sizeof(tcp::FaultRecord)] = {};
    size_t size = 0;
    for (ssize_t got = 1; got > 0 && size < sizeof(answer); size += static_cast<size_t>(got)) {
      pollfd polled = {fd_.get(), POLLIN, 0};
      poll(&polled, 1, 20000);
      got = std::max<ssize_t>(0, recv(fd_.get(), answer + size, sizeof(answer) - size, 0));
    }
    tcp::FaultRecord record;
    std::memcpy(&record, answer + sizeof(tcp::FrameHeader), sizeof(record));
    return FromRecord(record);
  }

 private:
  bool is_connected_ = false;
  tcp::UniqueFd fd_;
};

TEST_F(TcpDoor, GeometryIsComparedBeforeAnythingElse) {
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

TEST_F(TcpDoor, ARepeatedNumberAndALateOneAreRefusedAndDisturbNobody) {
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

TEST_F(TcpDoor, ANumberThatHasJoinedIsRefusedWhileOthersAreAwaited) {
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

TEST_F(TcpDoor, NumbersThatNoReaderHasAreRefusedAndDisturbNobody) {
  ASSERT_NO_FATAL_FAILURE(Open(Geometry(2)));
  testing::internal::CaptureStderr();
  for (const int32_t number : {2, -1, INT32_MAX, INT32_MIN}) {
    tcp::FrameHeader header;
    header.type = tcp::FrameType::kHello;
    header.length = sizeof(tcp::Hello);
    const tcp::Hello hello = tcp::MakeHello(Geometry(2), number);
    std::string text(reinterpret_cast<const char*>(&header), sizeof(header));
    text.append(reinterpret_cast<const char*>(&hello), sizeof(hello));
    Stranger stranger(sender_->address());
    stranger.Say(text);
    const Fault verdict = stranger.Refusal();
    EXPECT_EQ(verdict.code, StatusCode::kMismatch) << number;
    EXPECT_EQ(verdict.rank, kNoRank) << number;
  }
  testing::internal::GetCapturedStderr();
  ASSERT_NO_FATAL_FAILURE(Join());
}

TEST_F(TcpDoor, AReaderOfNobodyIsToldSo) {
  ASSERT_NO_FATAL_FAILURE(Open(Geometry(1)));
  sender_.reset();
  EXPECT_FAILS(readers_[0]->Join(Soon()), kPeerLost, "nobody listens at 127.0.0.1:");
}

TEST_F(TcpDoor, JoinSaysWhoIsMissing) {
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

TEST_F(TcpDoor, StrangersAreDroppedAndDisturbNobody) {
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

TEST_F(TcpDoor, ACrowdOfStrangersDoesNotKeepReadersOut) {
  ASSERT_NO_FATAL_FAILURE(Open(Geometry(1)));
  testing::internal::CaptureStderr();
  std::vector<std::unique_ptr<Stranger>> crowd;
  for (int i = 0; i < 200; ++i) crowd.push_back(std::make_unique<Stranger>(sender_->address()));
  ASSERT_NO_FATAL_FAILURE(Join());
  EXPECT_TRUE(crowd.front()->IsDropped());
  const std::string log = testing::internal::GetCapturedStderr();
  EXPECT_NE(log.find("further ones are not logged"), std::string::npos) << log;
}

// Descriptors of this process that can still be opened.
class FewDescriptors {
 public:
  explicit FewDescriptors(rlim_t left) {
    EXPECT_EQ(getrlimit(RLIMIT_NOFILE, &before_), 0);
    const int next = dup(0);
    close(next);
    const rlimit few = {static_cast<rlim_t>(next) + left, before_.rlim_max};
    EXPECT_EQ(setrlimit(RLIMIT_NOFILE, &few), 0);
  }
  ~FewDescriptors() { setrlimit(RLIMIT_NOFILE, &before_); }

 private:
  rlimit before_;
};

// Nobody is there yet whose turn would wake the sender.
TEST_F(TcpDoor, AListenerWithoutDescriptorsGoesOnWhenThereAreSome) {
  ASSERT_NO_FATAL_FAILURE(Open(Geometry(1)));
  std::string host;
  sockaddr_in sender = {};
  int port = 0;
  ASSERT_OK(tcp::SplitAddress(sender_->address(), &host, &port));
  sender.sin_family = AF_INET;
  sender.sin_port = htons(static_cast<uint16_t>(port));
  sender.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  {
    const FewDescriptors one(1);  // for the stranger's end, and none for the listener's
    const tcp::UniqueFd stranger(socket(AF_INET, SOCK_STREAM, 0));
    const auto* address = reinterpret_cast<const sockaddr*>(&sender);
    ASSERT_EQ(connect(stranger.get(), address, sizeof(sender)), 0);
    ASSERT_EQ(send(stranger.get(), "no hello", 8, MSG_NOSIGNAL), 8);
    pollfd polled = {stranger.get(), POLLIN, 0};
    EXPECT_EQ(poll(&polled, 1, 300), 0) << "it was answered, so it was let in";
  }
  ASSERT_NO_FATAL_FAILURE(Join());
}

TEST_F(TcpDoor, WhoAnswersAReaderMustBeASender) {
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

TEST_F(TcpDoor, OpeningRefusesASizeThatNoLinkCanHave) {
  struct Row {
    const char* field;
    void (*change)(LinkGeometry*);
  };
  const Row rows[] = {
      {"num_slots", [](LinkGeometry* g) { g->num_slots = 1; }},
      {"num_slots", [](LinkGeometry* g) { g->num_slots = INT32_MAX; }},
      {"num_readers", [](LinkGeometry* g) { g->num_readers = 0; }},
      {"num_readers", [](LinkGeometry* g) { g->num_readers = INT32_MAX; }},
      {"slot_bytes", [](LinkGeometry* g) { g->slot_bytes = 0; }},
      {"slot_bytes", [](LinkGeometry* g) { g->slot_bytes = (int64_t{1} << 62) + 1; }},
  };
  for (const Row& row : rows) {
    LinkGeometry bad = Geometry(1);
    row.change(&bad);
    std::unique_ptr<SendLink> sender;
    std::unique_ptr<ReceiveLink> reader;
    EXPECT_FAILS(CreateTcpSendLink("127.0.0.1", 0, bad, {}, &sender), kInvalidArgument, row.field);
    EXPECT_FAILS(ConnectTcpReceiveLink("127.0.0.1:1", bad, 0, {}, &reader), kInvalidArgument,
                 row.field);
  }
}

TEST_F(TcpDoor, OpeningRefusesWhatCannotWork) {
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
