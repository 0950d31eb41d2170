#include "csrc/refit/tcp_channel.h"

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

namespace tandem::tcp {

Channel::Channel(UniqueFd fd, std::string peer) : fd_(std::move(fd)), peer_(std::move(peer)) {
  last_heard_ = last_sent_ = Deadline::Clock::now();
  queued_.reserve(1024);
  control_.reserve(1024);
}

void Channel::QueueControl(FrameType type, uint64_t value, const void* payload) {
  FrameHeader header;
  header.type = type;
  header.value = value;
  header.length = PayloadOf(type);
  const auto* bytes = reinterpret_cast<const uint8_t*>(&header);
  queued_.insert(queued_.end(), bytes, bytes + sizeof(header));
  if (header.length == 0) return;
  const auto* rest = static_cast<const uint8_t*>(payload);
  queued_.insert(queued_.end(), rest, rest + header.length);
}

void Channel::BeginBatch() {
  control_.swap(queued_);
  queued_.clear();
  first_ = count_ = num_frames_ = 0;
  batch_bytes_ = 0;
  if (!control_.empty()) vectors_[count_++] = {control_.data(), control_.size()};
}

bool Channel::has_room() const { return num_frames_ < kMaxFrames && batch_bytes_ < kMaxBatch; }

void Channel::AddData(const FrameHeader& header, const uint8_t* payload) {
  headers_[num_frames_] = header;
  vectors_[count_++] = {&headers_[num_frames_++], sizeof(FrameHeader)};
  if (header.length > 0) vectors_[count_++] = {const_cast<uint8_t*>(payload), header.length};
  batch_bytes_ += static_cast<int64_t>(header.length);
}

Status Channel::Write() {
  is_blocked_ = false;
  while (!is_batch_done()) {
    msghdr message = {};
    message.msg_iov = vectors_ + first_;
    message.msg_iovlen = static_cast<size_t>(count_ - first_);
    const ssize_t sent = sendmsg(fd_.get(), &message, MSG_NOSIGNAL);
    if (sent < 0) {
      if (errno == EINTR) continue;
      is_blocked_ = errno == EAGAIN || errno == EWOULDBLOCK;
      return is_blocked_ ? OkStatus() : Broken(errno);  // reading goes on: there may be a reason
    }
    last_sent_ = Deadline::Clock::now();
    auto rest = static_cast<size_t>(sent);
    while (first_ < count_ && rest >= vectors_[first_].iov_len) rest -= vectors_[first_++].iov_len;
    if (first_ < count_) {
      vectors_[first_].iov_base = static_cast<uint8_t*>(vectors_[first_].iov_base) + rest;
      vectors_[first_].iov_len -= rest;
    }
  }
  return OkStatus();
}

Status Channel::Read(FrameSink* sink, int64_t max_bytes) {
  for (int64_t total = 0; total < max_bytes && !has_ended_;) {
    const int64_t wanted = is_in_payload_ ? missing_ : 0;
    iovec vectors[2] = {{target_, static_cast<size_t>(wanted)},
                        {staging_ + staged_, static_cast<size_t>(kStaging - staged_)}};
    msghdr message = {};
    message.msg_iov = wanted > 0 ? vectors : vectors + 1;
    message.msg_iovlen = wanted > 0 ? 2 : 1;
    const ssize_t got = recvmsg(fd_.get(), &message, 0);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return OkStatus();
    has_ended_ = got <= 0;
    if (got < 0) return Broken(errno);
    if (got == 0) return OkStatus();
    last_heard_ = Deadline::Clock::now();
    total += got;
    const int64_t in_place = std::min<int64_t>(got, wanted);
    if (wanted > 0) {
      target_ += in_place;
      missing_ -= in_place;
      if (missing_ == 0) {
        const Status status = EndFrame(sink);
        if (!status.ok()) return status;
      }
    }
    const Status status = ParseStaged(sink, staged_ + got - in_place);
    if (!status.ok()) return status;
  }
  return OkStatus();
}

// staging_ holds `size` bytes that follow what was taken so far: the rest of a payload, frames, and
// at the end perhaps a part of a header, which stays.
Status Channel::ParseStaged(FrameSink* sink, int64_t size) {
  int64_t position = 0;
  staged_ = 0;
  while (position < size) {
    if (is_in_payload_) {
      const int64_t taken = std::min(missing_, size - position);
      TakePayload(staging_ + position, taken);
      position += taken;
    } else {
      if (size - position < static_cast<int64_t>(sizeof(FrameHeader))) break;
      const Status status = BeginFrame(sink, staging_ + position);
      if (!status.ok()) return status;
      position += sizeof(FrameHeader);
    }
    if (is_in_payload_ && missing_ == 0) {
      const Status status = EndFrame(sink);
      if (!status.ok()) return status;
    }
  }
  staged_ = size - position;
  std::memmove(staging_, staging_ + position, static_cast<size_t>(staged_));
  return OkStatus();
}

Status Channel::BeginFrame(FrameSink* sink, const uint8_t* bytes) {
  std::memcpy(&header_, bytes, sizeof(header_));
  const bool is_data = header_.type == FrameType::kData;
  if (header_.magic != kFrameMagic || header_.type < FrameType::kHello ||
      header_.type > FrameType::kGoodbye ||
      (!is_data && header_.length != PayloadOf(header_.type))) {
    return Status(StatusCode::kMismatch, peer_ + " sent what is no frame of a refit");
  }
  is_in_payload_ = true;
  missing_ = static_cast<int64_t>(header_.length);
  target_ = control_payload_;
  return is_data ? sink->OnDataBegin(header_, &target_) : OkStatus();
}

Status Channel::EndFrame(FrameSink* sink) {
  is_in_payload_ = false;
  return header_.type == FrameType::kData ? sink->OnDataEnd(header_)
                                          : sink->OnControl(header_, control_payload_);
}

void Channel::TakePayload(const uint8_t* bytes, int64_t size) {
  std::memcpy(target_, bytes, static_cast<size_t>(size));
  target_ += size;
  missing_ -= size;
}

void Channel::Discard() {
  while (true) {
    const ssize_t got = recv(fd_.get(), staging_, sizeof(staging_), 0);
    if (got > 0 || (got < 0 && errno == EINTR)) continue;
    has_ended_ = has_ended_ || got == 0 || (errno != EAGAIN && errno != EWOULDBLOCK);
    return;
  }
}

void Channel::ShutdownWrite() { shutdown(fd_.get(), SHUT_WR); }

Status Channel::Broken(int error) { return Status(StatusCode::kPeerLost, std::strerror(error)); }

}  // namespace tandem::tcp
