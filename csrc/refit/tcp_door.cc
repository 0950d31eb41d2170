#include "csrc/refit/tcp_door.h"

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <utility>

namespace tandem::tcp {
namespace {

constexpr size_t kHelloFrame = sizeof(FrameHeader) + sizeof(Hello);

// The message fits into the buffer of a connection that has sent nothing yet.
void Refuse(int fd, const Fault& fault) {
  FrameHeader header;
  header.type = FrameType::kRefuse;
  header.length = sizeof(FaultRecord);
  const FaultRecord record = ToRecord(fault);
  uint8_t bytes[sizeof(header) + sizeof(record)];
  std::memcpy(bytes, &header, sizeof(header));
  std::memcpy(bytes + sizeof(header), &record, sizeof(record));
  [[maybe_unused]] const ssize_t sent = send(fd, bytes, sizeof(bytes), MSG_NOSIGNAL);
  shutdown(fd, SHUT_WR);
}

}  // namespace

struct Door::Guest {
  UniqueFd fd;
  std::string peer;
  Deadline deadline;
  uint8_t bytes[kHelloFrame] = {};
  size_t size = 0;
  bool is_refused = false;  // stays until it has closed its side, so that it can read why
};

Door::Door(UniqueFd listener, double hello_s, Judge judge, Admit admit)
    : listener_(std::move(listener)),
      hello_s_(hello_s),
      judge_(std::move(judge)),
      admit_(std::move(admit)) {}

Door::~Door() = default;

void Door::AddTo(std::vector<pollfd>* polled) const {
  polled->push_back({listener_.get(), static_cast<int16_t>(is_paused_ ? 0 : POLLIN), 0});
  for (const auto& guest : guests_) polled->push_back({guest->fd.get(), POLLIN, 0});
}

void Door::Serve(const pollfd* polled) {
  is_paused_ = false;
  const bool has_new = (polled[0].revents & POLLIN) != 0;
  std::vector<std::unique_ptr<Guest>> staying;
  for (size_t i = 0; i < guests_.size(); ++i) {
    Guest* guest = guests_[i].get();
    bool stays = polled[1 + i].revents == 0 || Attend(guest);
    if (stays && guest->deadline.HasPassed()) {
      if (!guest->is_refused) Drop(*guest, "it did not say who it is in time");
      stays = false;
    }
    if (stays) staying.push_back(std::move(guests_[i]));
  }
  guests_ = std::move(staying);
  if (has_new) AcceptAll();
}

void Door::Close() {
  listener_.Reset(-1);
  guests_.clear();
}

void Door::AcceptAll() {
  while (true) {
    auto guest = std::make_unique<Guest>(Guest{{}, "", Deadline::In(hello_s_)});
    const Status status = Accept(listener_.get(), &guest->fd, &guest->peer);
    is_paused_ = !status.ok();
    if (!guest->fd.is_open()) return;
    if (guests_.size() >= kMaxGuests) {
      Drop(*guests_.front(), "too many connections that do not say who they are");
      guests_.erase(guests_.begin());
    }
    if (Attend(guest.get())) guests_.push_back(std::move(guest));
  }
}

bool Door::Attend(Guest* guest) {
  while (guest->size < kHelloFrame || guest->is_refused) {
    uint8_t dropped[256];
    uint8_t* target = guest->is_refused ? dropped : guest->bytes + guest->size;
    const size_t room = guest->is_refused ? sizeof(dropped) : kHelloFrame - guest->size;
    const ssize_t got = recv(guest->fd.get(), target, room, 0);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return true;
    if (got <= 0) {
      if (!guest->is_refused) Drop(*guest, "it left before it said who it is");
      return false;
    }
    if (guest->is_refused) continue;
    guest->size += static_cast<size_t>(got);
    const FrameHeader expected = {kFrameMagic, FrameType::kHello, 0, sizeof(Hello), 0};
    if (std::memcmp(guest->bytes, &expected, std::min(guest->size, sizeof(expected))) != 0) {
      Drop(*guest, "its first bytes are no hello of a reader");
      return false;
    }
  }
  Hello hello;
  std::memcpy(&hello, guest->bytes + sizeof(FrameHeader), sizeof(hello));
  const Fault verdict = judge_(hello, guest->peer);
  if (verdict.code == StatusCode::kOk) {
    admit_(hello, std::move(guest->fd), guest->peer);
    return false;
  }
  std::fprintf(stderr, "tandem: refit: %s is refused: %s\n", guest->peer.c_str(),
               verdict.message.c_str());
  Refuse(guest->fd.get(), verdict);
  guest->is_refused = true;
  return Attend(guest);
}

void Door::Drop(const Guest& guest, const char* why) {
  if (++num_dropped_ > kMaxLogLines) return;
  std::fprintf(stderr, "tandem: refit: a connection from %s is dropped: %s%s\n", guest.peer.c_str(),
               why, num_dropped_ == kMaxLogLines ? "; further ones are not logged" : "");
}

}  // namespace tandem::tcp
