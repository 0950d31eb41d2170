// One connection of the TCP link: frames in, frames out, without blocking. Used by the I/O thread
// of an end alone. Data goes from and to slots without a copy, but for what arrives together with a
// header; nothing is allocated once the first frames have passed.
#pragma once

#include <sys/uio.h>

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "csrc/common/status.h"
#include "csrc/refit/deadline.h"
#include "csrc/refit/tcp_frame.h"
#include "csrc/refit/tcp_socket.h"

namespace tandem::tcp {

// Payload of one data frame. Several readers get a chunk while it is in the cache.
inline constexpr int64_t kChunkBytes = 256 * 1024;

// Takes the frames that a channel reads, in order.
class FrameSink {
 public:
  virtual ~FrameSink() = default;
  virtual Status OnControl(const FrameHeader& header, const uint8_t* payload) = 0;
  // Says where header.length bytes go.
  virtual Status OnDataBegin(const FrameHeader& header, uint8_t** target) = 0;
  virtual Status OnDataEnd(const FrameHeader& header) = 0;
};

class Channel {
 public:
  Channel(UniqueFd fd, std::string peer);

  int fd() const { return fd_.get(); }
  const std::string& peer() const { return peer_; }
  Deadline::Clock::time_point last_heard() const { return last_heard_; }
  Deadline::Clock::time_point last_sent() const { return last_sent_; }
  // As if the peer had spoken just now.
  void ForgetSilence() { last_heard_ = Deadline::Clock::now(); }
  // The peer has closed its side, or the connection is broken.
  bool has_ended() const { return has_ended_; }
  // Bytes of a frame are missing: an end here cuts it.
  bool is_inside_frame() const { return staged_ > 0 || is_in_payload_; }

  // Queues a frame other than data; goes out with the next batch.
  void QueueControl(FrameType type, uint64_t value = 0, const void* payload = nullptr);
  // A batch is what is being written. A new one begins, with all queued control frames, when the
  // last one is out; then data frames can be added while there is room.
  bool is_batch_done() const { return first_ == count_; }
  bool has_queued() const { return !queued_.empty(); }
  void BeginBatch();
  bool has_room() const;
  void AddData(const FrameHeader& header, const uint8_t* payload);
  // Writes as much of the batch as the socket takes. kPeerLost when the connection is broken.
  Status Write();
  bool is_blocked() const { return is_blocked_; }

  // Reads what is there, up to about max_bytes. kPeerLost when the connection is broken, kMismatch
  // for what is no frame, or the sink's error.
  Status Read(FrameSink* sink, int64_t max_bytes);
  // Reads and drops what is there.
  void Discard();
  void ShutdownWrite();

 private:
  static constexpr int kMaxFrames = 16;
  static constexpr int64_t kMaxBatch = 4 * kChunkBytes;
  static constexpr int64_t kStaging = 4096;

  Status ParseStaged(FrameSink* sink, int64_t size);
  Status BeginFrame(FrameSink* sink, const uint8_t* bytes);
  Status EndFrame(FrameSink* sink);
  void TakePayload(const uint8_t* bytes, int64_t size);
  static Status Broken(int error);

  UniqueFd fd_;
  std::string peer_;
  Deadline::Clock::time_point last_heard_;
  Deadline::Clock::time_point last_sent_;
  bool has_ended_ = false;

  std::vector<uint8_t> queued_;
  std::vector<uint8_t> control_;  // of the batch
  FrameHeader headers_[kMaxFrames];
  iovec vectors_[1 + 2 * kMaxFrames];
  int num_frames_ = 0;
  int64_t batch_bytes_ = 0;
  int first_ = 0;  // vectors_[first_ .. count_) are still to be written
  int count_ = 0;
  bool is_blocked_ = false;

  FrameHeader header_;  // of the frame whose payload is arriving
  bool is_in_payload_ = false;
  int64_t missing_ = 0;        // of the payload
  uint8_t* target_ = nullptr;  // of its next byte
  uint8_t control_payload_[kMaxControlPayload];
  uint8_t staging_[kStaging];
  int64_t staged_ = 0;  // bytes of a header that is not complete, at the start of staging_
};

}  // namespace tandem::tcp
