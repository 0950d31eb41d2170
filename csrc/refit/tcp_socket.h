// Sockets of the TCP link: addresses, listening, connecting, options, waking a thread that polls.
// Descriptors do not block; nothing here knows frames.
#pragma once

#include <sys/socket.h>

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "csrc/common/status.h"
#include "csrc/refit/deadline.h"

namespace tandem::tcp {

// A descriptor of this process alone: forked children close it, or a connection would stay up for
// as long as a child of a dead process lives.
class UniqueFd {
 public:
  UniqueFd() = default;
  explicit UniqueFd(int fd) { Reset(fd); }
  UniqueFd(UniqueFd&& other) noexcept
      : fd_(std::exchange(other.fd_, -1)), num_forks_(other.num_forks_) {}
  UniqueFd& operator=(UniqueFd&& other) noexcept {
    std::swap(fd_, other.fd_);
    std::swap(num_forks_, other.num_forks_);
    other.Reset(-1);
    return *this;
  }
  ~UniqueFd() { Reset(-1); }

  int get() const { return fd_; }
  bool is_open() const { return fd_ >= 0; }
  void Reset(int fd);

 private:
  int fd_ = -1;
  uint32_t num_forks_ = 0;  // when it was opened
};

// Ends another thread's poll on fd(); may be called from any thread.
class Wakeup {
 public:
  Status Open();
  int fd() const { return fd_.get(); }
  void Notify() const;
  void Clear() const;

 private:
  UniqueFd fd_;
};

struct SocketAddress {
  sockaddr_storage storage = {};
  socklen_t length = 0;
};

// "10.0.0.1:4711", "[::1]:4711", "node-3:4711"; an IPv6 address without brackets is refused, since
// its last group could be taken for a port.
Status SplitAddress(const std::string& address, std::string* host, int* port);
std::string JoinAddress(const std::string& host, int port);
std::string NameOf(const SocketAddress& address);

// Numbers at once; names by the system's resolver, in a thread that is left behind when the
// deadline passes or is_cancelled says so (asked every 20 ms), as a resolver cannot be interrupted.
Status Resolve(const std::string& host, int port, const Deadline& deadline,
               const std::function<bool()>& is_cancelled, std::vector<SocketAddress>* addresses);

// port 0: any free one; bound_port says which.
Status Listen(const std::string& host, int port, UniqueFd* listener, int* bound_port);
// The next connection, not open when there is none. Sets kUnavailable when the process or the
// machine has no descriptor left.
Status Accept(int listener, UniqueFd* connection, std::string* peer);
// Tries all addresses until the deadline; wake_fd readable: kAborted. Nobody listening is kPeerLost
// at once, because a sender listens before anyone can know its address.
Status Connect(const std::vector<SocketAddress>& addresses, const std::string& name, int wake_fd,
               const Deadline& deadline, UniqueFd* connection);
// No delay; keep-alive and user time-out, so that the kernel too gives up after silence_s.
void TuneConnection(int fd, double silence_s);

}  // namespace tandem::tcp
