#include "csrc/refit/tcp_socket.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <cstring>
#include <memory>
#include <mutex>
#include <thread>

#include "csrc/refit/fork_guard.h"
#include "csrc/refit/thread_start.h"

namespace tandem::tcp {
namespace {

// Between two attempts when no address could be reached: a route or an interface that comes back is
// noticed soon, and a host that is down is not flooded.
constexpr int kRetryMs = 100;

Status Unavailable(const std::string& what, int error) {
  return Status(StatusCode::kUnavailable, what + ": " + std::strerror(error));
}

bool ParsePort(const std::string& text, int* port) {
  if (text.empty() || text.size() > 5) return false;
  int value = 0;
  for (char digit : text) {
    if (digit < '0' || digit > '9') return false;
    value = value * 10 + (digit - '0');
  }
  *port = value;
  return value >= 1 && value <= 65535;
}

int LookUp(const std::string& host, int port, int flags, std::vector<SocketAddress>* addresses) {
  addrinfo hints = {};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = flags | AI_NUMERICSERV;
  addrinfo* list = nullptr;
  const int error = getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &list);
  if (error != 0) return error;
  for (const addrinfo* entry = list; entry != nullptr; entry = entry->ai_next) {
    SocketAddress address;
    address.length = std::min<socklen_t>(entry->ai_addrlen, sizeof(address.storage));
    std::memcpy(&address.storage, entry->ai_addr, address.length);
    addresses->push_back(address);
  }
  freeaddrinfo(list);
  return 0;
}

// What a look-up thread and the one that waits for it share.
struct PendingLookUp {
  std::mutex mutex;
  std::condition_variable done;
  bool is_done = false;
  int error = 0;
  std::vector<SocketAddress> addresses;
};

// A port in the ephemeral range to which nobody listens can be connected to itself.
bool IsConnectedToItself(int fd) {
  SocketAddress own, other;
  own.length = other.length = sizeof(sockaddr_storage);
  if (getsockname(fd, reinterpret_cast<sockaddr*>(&own.storage), &own.length) != 0) return false;
  if (getpeername(fd, reinterpret_cast<sockaddr*>(&other.storage), &other.length) != 0) {
    return false;
  }
  return own.length == other.length && std::memcmp(&own.storage, &other.storage, own.length) == 0;
}

// 0 or the errno of one attempt; ECANCELED when wake_fd became readable.
int ConnectOnce(const SocketAddress& address, int wake_fd, const Deadline& deadline,
                UniqueFd* connection) {
  const int family = address.storage.ss_family;
  UniqueFd fd(socket(family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!fd.is_open()) return errno;
  const auto* where = reinterpret_cast<const sockaddr*>(&address.storage);
  if (connect(fd.get(), where, address.length) != 0 && errno != EINPROGRESS) return errno;
  while (true) {
    pollfd polled[2] = {{fd.get(), POLLOUT, 0}, {wake_fd, POLLIN, 0}};
    const int wait_ms = static_cast<int>(std::min(deadline.Seconds() * 1e3 + 1, 3.6e6));
    const int ready = poll(polled, 2, wait_ms);
    if (ready < 0 && errno != EINTR) return errno;
    if (polled[1].revents != 0) return ECANCELED;
    if (ready > 0 && polled[0].revents != 0) break;
    if (deadline.HasPassed()) return ETIMEDOUT;
  }
  int error = 0;
  socklen_t size = sizeof(error);
  if (getsockopt(fd.get(), SOL_SOCKET, SO_ERROR, &error, &size) != 0) return errno;
  if (error == 0 && IsConnectedToItself(fd.get())) error = ECONNREFUSED;
  if (error == 0) *connection = std::move(fd);
  return error;
}

}  // namespace

void UniqueFd::Reset(int fd) {
  // In a forked child the number may be another file's by now.
  if (fd_ >= 0 && num_forks_ == NumForks()) CloseUnforked(fd_);
  fd_ = fd;
  num_forks_ = NumForks();
  if (fd_ >= 0) KeepUnforked(fd_);
}

Status Wakeup::Open() {
  fd_.Reset(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC));
  return fd_.is_open() ? OkStatus() : Unavailable("tcp link: no eventfd", errno);
}

void Wakeup::Notify() const {
  const uint64_t one = 1;
  // Fails only when the counter is full, and then the thread wakes anyway.
  [[maybe_unused]] const ssize_t written = write(fd_.get(), &one, sizeof(one));
}

void Wakeup::Clear() const {
  uint64_t count;
  [[maybe_unused]] const ssize_t got = read(fd_.get(), &count, sizeof(count));
}

Status SplitAddress(const std::string& address, std::string* host, int* port) {
  const size_t colon = address.rfind(':');
  if (colon != std::string::npos) {
    *host = address.substr(0, colon);
    const bool has_brackets = host->size() > 2 && host->front() == '[' && host->back() == ']';
    if (has_brackets) *host = host->substr(1, host->size() - 2);
    const bool is_host = !host->empty() && host->find_first_of("[]/ ") == std::string::npos &&
                         (has_brackets || host->find(':') == std::string::npos);
    if (is_host && ParsePort(address.substr(colon + 1), port)) return OkStatus();
  }
  return InvalidArgument(
      "tcp address \"%.160s\" is not host:port (IPv6 in brackets, port 1 to 65535)",
      address.c_str());
}

std::string JoinAddress(const std::string& host, int port) {
  const bool is_ipv6 = host.find(':') != std::string::npos;
  return (is_ipv6 ? "[" + host + "]" : host) + ":" + std::to_string(port);
}

std::string NameOf(const SocketAddress& address) {
  char host[NI_MAXHOST] = "?";
  char port[NI_MAXSERV] = "0";
  getnameinfo(reinterpret_cast<const sockaddr*>(&address.storage), address.length, host,
              sizeof(host), port, sizeof(port), NI_NUMERICHOST | NI_NUMERICSERV);
  return JoinAddress(host, std::atoi(port));
}

Status Resolve(const std::string& host, int port, const Deadline& deadline,
               const std::function<bool()>& is_cancelled, std::vector<SocketAddress>* addresses) {
  if (LookUp(host, port, AI_NUMERICHOST, addresses) == 0) return OkStatus();
  auto pending = std::make_shared<PendingLookUp>();
  std::thread resolver;
  const auto look_up = [pending, host, port] {
    std::vector<SocketAddress> found;
    const int error = LookUp(host, port, 0, &found);
    const std::lock_guard<std::mutex> lock(pending->mutex);
    pending->error = error;
    pending->addresses = std::move(found);
    pending->is_done = true;
    pending->done.notify_one();
  };
  Status status = StartThread("looking up a host's name", look_up, &resolver);
  if (!status.ok()) return status;
  resolver.detach();
  std::unique_lock<std::mutex> lock(pending->mutex);
  while (!pending->is_done) {
    if (is_cancelled()) return Status(StatusCode::kAborted, "cancelled");
    if (deadline.HasPassed()) {
      return Status(StatusCode::kDeadlineExceeded,
                    "the name \"" + host + "\" was not resolved in time; give a numeric address");
    }
    pending->done.wait_for(lock, std::chrono::milliseconds(20));
  }
  if (pending->error != 0) {
    return Status(StatusCode::kUnavailable,
                  "the name \"" + host + "\" is not known: " + gai_strerror(pending->error));
  }
  *addresses = pending->addresses;
  return OkStatus();
}

Status Listen(const std::string& host, int port, UniqueFd* listener, int* bound_port) {
  std::vector<SocketAddress> addresses;
  const Deadline deadline = Deadline::In(10);  // of a resolver that hangs
  const Status status = Resolve(host, port, deadline, [] { return false; }, &addresses);
  if (!status.ok()) return status;
  int error = EADDRNOTAVAIL;
  for (const SocketAddress& address : addresses) {
    UniqueFd fd(socket(address.storage.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
    const int on = 1;
    // A fixed port is free again although connections of the run before are in TIME_WAIT.
    if (fd.is_open()) setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
    SocketAddress bound = address;
    auto* where = reinterpret_cast<sockaddr*>(&bound.storage);
    if (!fd.is_open() || bind(fd.get(), where, bound.length) != 0 ||
        listen(fd.get(), SOMAXCONN) != 0 || getsockname(fd.get(), where, &bound.length) != 0) {
      error = errno;
      continue;
    }
    *bound_port = ntohs(bound.storage.ss_family == AF_INET6
                            ? reinterpret_cast<sockaddr_in6*>(where)->sin6_port
                            : reinterpret_cast<sockaddr_in*>(where)->sin_port);
    *listener = std::move(fd);
    return OkStatus();
  }
  std::string advice;
  if (error == EADDRINUSE) advice = "; another process has the port: give another one, or 0";
  if (error == EADDRNOTAVAIL) advice = "; give an address of this host";
  return Unavailable("tcp link cannot listen on " + JoinAddress(host, port) + advice, error);
}

Status Accept(int listener, UniqueFd* connection, std::string* peer) {
  SocketAddress address;
  address.length = sizeof(address.storage);
  connection->Reset(accept4(listener, reinterpret_cast<sockaddr*>(&address.storage),
                            &address.length, SOCK_NONBLOCK | SOCK_CLOEXEC));
  if (connection->is_open()) {
    *peer = NameOf(address);
    return OkStatus();
  }
  const bool is_short = errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM;
  return is_short ? Unavailable("tcp link cannot accept a connection", errno) : OkStatus();
}

Status Connect(const std::vector<SocketAddress>& addresses, const std::string& name, int wake_fd,
               const Deadline& deadline, UniqueFd* connection) {
  while (true) {
    bool is_refused = true;
    int error = ECONNREFUSED;
    for (const SocketAddress& address : addresses) {
      error = ConnectOnce(address, wake_fd, deadline, connection);
      if (error == 0) return OkStatus();
      if (error == ECANCELED) return Status(StatusCode::kAborted, "cancelled");
      is_refused = is_refused && error == ECONNREFUSED;
    }
    if (is_refused) {
      return Status(StatusCode::kPeerLost,
                    "nobody listens at " + name + ": the sender is gone, or has made new links");
    }
    if (!deadline.HasPassed()) {
      pollfd polled = {wake_fd, POLLIN, 0};
      poll(&polled, 1, std::min(kRetryMs, static_cast<int>(deadline.Seconds() * 1e3) + 1));
    }
    if (deadline.HasPassed()) {
      return Status(StatusCode::kDeadlineExceeded,
                    "no connection to " + name + " before the deadline: " + std::strerror(error));
    }
  }
}

void TuneConnection(int fd, double silence_s) {
  const int on = 1;
  const int silence_ms = static_cast<int>(silence_s * 1e3);
  const int third_s = std::max(1, static_cast<int>(silence_s / 3));
  const int probes = 3;
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
  setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof(on));
  setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &third_s, sizeof(third_s));
  setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &third_s, sizeof(third_s));
  setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &probes, sizeof(probes));
  setsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &silence_ms, sizeof(silence_ms));
}

}  // namespace tandem::tcp
