#include "csrc/refit/tcp_socket.h"

#include <gtest/gtest.h>
#include <poll.h>

#include <string>
#include <thread>
#include <vector>

namespace tandem::tcp {
namespace {

Deadline Soon() { return Deadline::In(30); }

TEST(SplitAddress, TakesApartWhatJoinAddressMakes) {
  struct Row {
    const char* host;
    int port;
    const char* address;
  };
  const Row rows[] = {
      {"10.0.0.1", 4711, "10.0.0.1:4711"},
      {"::1", 4711, "[::1]:4711"},
      {"fe80::1%eth0", 65535, "[fe80::1%eth0]:65535"},
      {"node-3.cluster", 1, "node-3.cluster:1"},
  };
  for (const Row& row : rows) {
    EXPECT_EQ(JoinAddress(row.host, row.port), row.address);
    std::string host;
    int port = 0;
    EXPECT_TRUE(SplitAddress(row.address, &host, &port).ok()) << row.address;
    EXPECT_EQ(host, row.host);
    EXPECT_EQ(port, row.port);
  }
}

TEST(SplitAddress, RefusesEverythingElse) {
  for (const char* address :
       {"", "host", "host:", ":4711", "::1:4711", "[::1]", "[]:4711", "[::1:4711", "::1]:4711",
        "host:0", "host:65536", "host:-1", "host:4711x", "host: 4711", "http://host:4711"}) {
    std::string host;
    int port = 0;
    const Status status = SplitAddress(address, &host, &port);
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument) << address;
    EXPECT_NE(status.message().find(std::string("\"") + address + "\""), std::string::npos);
  }
}

TEST(Resolve, NumbersNeedNoResolverAndUnknownNamesAreSaidToBe) {
  std::vector<SocketAddress> addresses;
  ASSERT_TRUE(Resolve("::1", 80, Soon(), [] { return false; }, &addresses).ok());
  ASSERT_EQ(addresses.size(), 1u);
  EXPECT_EQ(NameOf(addresses[0]), "[::1]:80");
  const Status status =
      Resolve("no-such-host.invalid", 80, Deadline::In(20), [] { return false; }, &addresses);
  EXPECT_FALSE(status.ok());
  EXPECT_NE(status.message().find("no-such-host.invalid"), std::string::npos) << status.message();
}

TEST(Resolve, EndsAtTheDeadlineAndWhenCancelled) {
  std::vector<SocketAddress> addresses;
  EXPECT_EQ(Resolve(
                "a.invalid", 80, Deadline::In(-1), [] { return false; }, &addresses)
                .code(),
            StatusCode::kDeadlineExceeded);
  EXPECT_EQ(Resolve(
                "a.invalid", 80, Soon(), [] { return true; }, &addresses)
                .code(),
            StatusCode::kAborted);
}

TEST(Connect, EndsWhenWoken) {
  // A listener whose queue is full answers nobody.
  UniqueFd listener;
  int port = 0;
  ASSERT_TRUE(Listen("127.0.0.1", 0, &listener, &port).ok());
  ASSERT_EQ(listen(listener.get(), 0), 0);
  std::vector<SocketAddress> addresses;
  ASSERT_TRUE(Resolve("127.0.0.1", port, Soon(), [] { return false; }, &addresses).ok());
  Wakeup wakeup;
  ASSERT_TRUE(wakeup.Open().ok());
  const std::string name = JoinAddress("127.0.0.1", port);
  UniqueFd taken[4];
  Status status;
  for (UniqueFd& fd : taken) {
    status = Connect(addresses, name, wakeup.fd(), Deadline::In(0.2), &fd);
    if (!status.ok()) break;
  }
  EXPECT_EQ(status.code(), StatusCode::kDeadlineExceeded) << status.message();
  EXPECT_NE(status.message().find(name), std::string::npos) << status.message();
  std::thread waking([&] { wakeup.Notify(); });
  UniqueFd fd;
  status = Connect(addresses, name, wakeup.fd(), Soon(), &fd);
  waking.join();
  EXPECT_EQ(status.code(), StatusCode::kAborted) << status.message();
}

TEST(Wakeup, IsReadableUntilCleared) {
  Wakeup wakeup;
  ASSERT_TRUE(wakeup.Open().ok());
  pollfd polled = {wakeup.fd(), POLLIN, 0};
  EXPECT_EQ(poll(&polled, 1, 0), 0);
  wakeup.Notify();
  wakeup.Notify();
  EXPECT_EQ(poll(&polled, 1, 0), 1);
  wakeup.Clear();
  EXPECT_EQ(poll(&polled, 1, 0), 0);
}

}  // namespace
}  // namespace tandem::tcp
