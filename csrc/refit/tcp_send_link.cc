// The sender's end of the TCP link. The caller's thread fills slots; the I/O thread owns all
// connections, writes slots to every reader that has a free one, and reads what readers say.
#include <poll.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "csrc/refit/tcp_door.h"
#include "csrc/refit/tcp_end.h"
#include "csrc/refit/tcp_link.h"
#include "csrc/refit/thread_start.h"

namespace tandem {
namespace {

using tcp::Channel;
using tcp::FrameHeader;
using tcp::FrameType;
using tcp::Hello;
using tcp::MakeFault;

// Strangers have this long to say hello; readers say it at once.
constexpr double kHelloS = 5;
constexpr int64_t kReadBytes = 64 * 1024;

class TcpSendLink final : public SendLink {
 public:
  TcpSendLink(std::string address, tcp::UniqueFd listener, const LinkGeometry& geometry,
              const TcpOptions& options);
  ~TcpSendLink() override;
  Status Start();

  std::string address() const override { return address_; }
  Executor* executor() override { return HostExecutor(); }
  Status Join(const Deadline& deadline) override;
  Status Begin(uint64_t epoch, const Deadline& deadline) override;
  Status Acquire(const Deadline& deadline, uint8_t** slot) override;
  Status Post(int64_t bytes, const Deadline& deadline) override;
  Status Flush(const Deadline& deadline) override;
  void Abort(const Fault& fault) override { state_.SetFault(fault); }
  Fault fault() const override { return state_.fault(); }

 private:
  struct Reader final : tcp::FrameSink {
    Status OnControl(const FrameHeader& header, const uint8_t* payload) override;
    Status OnDataBegin(const FrameHeader& header, uint8_t** target) override;
    Status OnDataEnd(const FrameHeader& header) override;
    std::string name() const;
    int32_t rank() const { return kFirstReader + number; }

    TcpSendLink* link = nullptr;
    int32_t number = 0;
    std::string peer;
    std::unique_ptr<Channel> channel;  // of the I/O thread
    int64_t queued = 0;                // slots whose last byte is in a batch; I/O thread
    int64_t offset = 0;                // what is queued of the slot after these
    // Under the mutex; written by the I/O thread alone.
    int64_t written = 0;
    int64_t released = 0;
    bool has_joined = false;
    bool has_left = false;
  };

  bool IsCompleteLocked() const { return num_joined_ == geometry_.num_readers; }
  Status JoinedLocked();
  Status ReadyLocked();
  const Reader& SlowestLocked() const;
  Fault LateLocked(const char* what) const;
  Fault Judge(const Hello& hello, const std::string& peer);
  void Admit(const Hello& hello, tcp::UniqueFd fd, const std::string& peer);

  void Run();
  bool Turn(bool* is_busy);
  bool Pump(Reader* reader, int64_t posted);
  void Fill(Reader* reader, int64_t posted);
  void MarkWritten(Reader* reader);
  void ReadFrom(Reader* reader);
  void Lose(const Reader& reader, const std::string& why);

  const std::string address_;
  const LinkGeometry geometry_;
  const TcpOptions options_;
  tcp::SlotMemory slots_;
  tcp::EndState state_;
  std::vector<std::unique_ptr<Reader>> readers_;
  tcp::Door door_;
  std::vector<pollfd> polled_;
  tcp::OwnPause pause_;

  // Under the mutex.
  int32_t num_joined_ = 0;
  std::string refusal_;  // the last one, for the message of Join
  uint64_t epoch_ = 0;
  std::deque<uint64_t> epochs_;  // begun, and not yet announced
  int64_t posted_ = 0;
  bool has_acquired_ = false;
  std::vector<int64_t> bytes_;  // of each slot

  std::thread thread_;
};

TcpSendLink::TcpSendLink(std::string address, tcp::UniqueFd listener, const LinkGeometry& geometry,
                         const TcpOptions& options)
    : address_(std::move(address)),
      geometry_(geometry),
      options_(options),
      door_(
          std::move(listener), kHelloS,
          [this](const Hello& hello, const std::string& peer) { return Judge(hello, peer); },
          [this](const Hello& hello, tcp::UniqueFd fd, const std::string& peer) {
            Admit(hello, std::move(fd), peer);
          }),
      bytes_(static_cast<size_t>(geometry.num_slots), 0) {
  for (int32_t number = 0; number < geometry.num_readers; ++number) {
    readers_.push_back(std::make_unique<Reader>());
    readers_.back()->link = this;
    readers_.back()->number = number;
  }
}

Status TcpSendLink::Start() {
  Status status = slots_.Allocate(geometry_);
  if (status.ok()) status = state_.wakeup().Open();
  if (!status.ok()) return status;
  return StartThread("a sender's connections", [this] { Run(); }, &thread_);
}

TcpSendLink::~TcpSendLink() { state_.StopAndJoin(&thread_); }

// ---- The caller's thread ----

Status TcpSendLink::Join(const Deadline& deadline) {
  std::unique_lock<std::mutex> lock(state_.mutex());
  return state_.WaitLocked(
      lock, deadline, [this] { return IsCompleteLocked(); },
      [this] {
        std::string missing;
        int32_t first = kNoRank;
        for (const auto& reader : readers_) {
          if (reader->has_joined) continue;
          if (first == kNoRank) first = reader->rank();
          if (missing.size() < 100) missing += std::string(" ") + std::to_string(reader->number);
        }
        return MakeFault(StatusCode::kDeadlineExceeded, first,
                         "%d of %d readers joined %s before the deadline; missing:%s%s%s",
                         num_joined_, geometry_.num_readers, address_.c_str(), missing.c_str(),
                         refusal_.empty() ? "" : "; last refused: ", refusal_.c_str());
      });
}

Status TcpSendLink::JoinedLocked() {
  if (state_.IsOverLocked()) return state_.StatusLocked();
  if (IsCompleteLocked()) return OkStatus();
  return state_.FailLocked(MakeFault(StatusCode::kInvalidArgument, geometry_.root,
                                     "the link is used before Join has succeeded"));
}

Status TcpSendLink::ReadyLocked() {
  const Status status = JoinedLocked();
  if (!status.ok()) return status;
  for (const auto& reader : readers_) {
    if (!reader->has_left) continue;
    return state_.FailLocked(MakeFault(StatusCode::kPeerLost, reader->rank(),
                                       "%s has closed its link", reader->name().c_str()));
  }
  return OkStatus();
}

Status TcpSendLink::Begin(uint64_t epoch, const Deadline& deadline) {
  Status status = Flush(deadline);  // at once, after a refit that was flushed
  if (!status.ok()) return status;
  const std::lock_guard<std::mutex> lock(state_.mutex());
  status = ReadyLocked();
  if (!status.ok()) return status;
  if (epoch <= epoch_) {
    return state_.FailLocked(
        MakeFault(StatusCode::kMismatch, geometry_.root,
                  "epoch %llu is not larger than the last one, %llu: every attempt needs its own",
                  static_cast<unsigned long long>(epoch), static_cast<unsigned long long>(epoch_)));
  }
  epoch_ = epoch;
  epochs_.push_back(epoch);
  state_.wakeup().Notify();
  return OkStatus();
}

Status TcpSendLink::Acquire(const Deadline& deadline, uint8_t** slot) {
  std::unique_lock<std::mutex> lock(state_.mutex());
  Status status = ReadyLocked();
  if (!status.ok()) return status;
  if (epoch_ == 0) {
    return state_.FailLocked(
        MakeFault(StatusCode::kInvalidArgument, geometry_.root, "Acquire comes before Begin"));
  }
  // The slot is free when the one that it held is on the wire to everybody.
  const auto is_free = [this] {
    const int64_t needed = posted_ - geometry_.num_slots + 1;
    return std::all_of(readers_.begin(), readers_.end(),
                       [needed](const auto& reader) { return reader->written >= needed; });
  };
  status = state_.WaitLocked(lock, deadline, is_free, [this] { return LateLocked("a free slot"); });
  if (!status.ok()) return status;
  has_acquired_ = true;
  *slot = slots_.at(posted_);
  return OkStatus();
}

Status TcpSendLink::Post(int64_t bytes, const Deadline&) {
  const std::lock_guard<std::mutex> lock(state_.mutex());
  const Status status = ReadyLocked();
  if (!status.ok()) return status;
  if (!has_acquired_ || bytes < 0 || bytes > geometry_.slot_bytes) {
    return state_.FailLocked(MakeFault(
        StatusCode::kInvalidArgument, geometry_.root, "Post of %lld bytes, slot_bytes=%lld, %s",
        static_cast<long long>(bytes), static_cast<long long>(geometry_.slot_bytes),
        has_acquired_ ? "a slot is held" : "no slot is held"));
  }
  bytes_[static_cast<size_t>(posted_ % geometry_.num_slots)] = bytes;
  has_acquired_ = false;
  ++posted_;
  state_.wakeup().Notify();
  return OkStatus();
}

Status TcpSendLink::Flush(const Deadline& deadline) {
  std::unique_lock<std::mutex> lock(state_.mutex());
  const auto is_done = [this] {
    return std::all_of(readers_.begin(), readers_.end(),
                       [this](const auto& reader) { return reader->released == posted_; });
  };
  // Not ReadyLocked: readers may close their links as soon as they have everything.
  const Status status = JoinedLocked();
  if (!status.ok()) return status;
  return state_.WaitLocked(lock, deadline, is_done,
                           [this] { return LateLocked("all readers to take the last slots"); });
}

const TcpSendLink::Reader& TcpSendLink::SlowestLocked() const {
  return **std::min_element(readers_.begin(), readers_.end(), [](const auto& a, const auto& b) {
    return std::pair(a->released, a->written) < std::pair(b->released, b->written);
  });
}

Fault TcpSendLink::LateLocked(const char* what) const {
  const Reader& slowest = SlowestLocked();
  return MakeFault(StatusCode::kDeadlineExceeded, slowest.rank(),
                   "waited for %s until the deadline; slowest is %s: of %lld slots posted, %lld "
                   "sent to it, %lld given back",
                   what, slowest.name().c_str(), static_cast<long long>(posted_),
                   static_cast<long long>(slowest.written),
                   static_cast<long long>(slowest.released));
}

// ---- The I/O thread ----

std::string TcpSendLink::Reader::name() const {
  return "reader " + std::to_string(number) + " (" + peer + ")";
}

Fault TcpSendLink::Judge(const Hello& hello, const std::string& peer) {
  const std::lock_guard<std::mutex> lock(state_.mutex());
  const bool is_member = hello.reader >= 0 && hello.reader < geometry_.num_readers;
  const int32_t rank = is_member ? kFirstReader + hello.reader : kNoRank;
  const auto refuse = [&](StatusCode code, const std::string& why) {
    refusal_ = std::string("reader ") + std::to_string(hello.reader) + " (" + peer + "): " + why;
    return Fault{code, rank, -1, refusal_};
  };
  if (IsCompleteLocked()) {
    return refuse(StatusCode::kUnavailable, std::string("all ") +
                                                std::to_string(geometry_.num_readers) +
                                                " readers have joined; a late one needs new links");
  }
  const std::string difference = FirstDifference(tcp::MakeHello(geometry_, -1), hello);
  if (!difference.empty()) {
    // A member of this group with another plan: the group cannot become complete.
    const Fault mismatch = refuse(StatusCode::kMismatch, difference);
    state_.SetFaultLocked(mismatch);
    return mismatch;
  }
  if (!is_member) {
    return refuse(StatusCode::kMismatch, std::string("its number is not below num_readers=") +
                                             std::to_string(geometry_.num_readers));
  }
  const Reader& reader = *readers_[static_cast<size_t>(hello.reader)];
  if (reader.has_joined) {
    return refuse(StatusCode::kMismatch, "this number has joined from " + reader.peer);
  }
  return {StatusCode::kOk, rank, -1, ""};
}

void TcpSendLink::Admit(const Hello& hello, tcp::UniqueFd fd, const std::string& peer) {
  tcp::TuneConnection(fd.get(), options_.silence_s);
  const std::lock_guard<std::mutex> lock(state_.mutex());
  Reader* reader = readers_[static_cast<size_t>(hello.reader)].get();
  reader->channel = std::make_unique<Channel>(std::move(fd), peer);
  reader->peer = peer;
  reader->has_joined = true;
  ++num_joined_;
  if (!IsCompleteLocked()) return;
  const Hello welcome = tcp::MakeHello(geometry_, -1);
  for (const auto& member : readers_) {
    if (member->channel) member->channel->QueueControl(FrameType::kWelcome, 0, &welcome);
  }
  state_.NotifyCaller();
}

void TcpSendLink::Run() {
  bool is_busy = false;
  while (Turn(&is_busy)) {
  }
  std::vector<Channel*> channels;
  for (const auto& reader : readers_) {
    if (reader->channel) channels.push_back(reader->channel.get());
  }
  tcp::BidFarewell(channels, state_.fault());
  for (const auto& reader : readers_) reader->channel.reset();
  door_.Close();
}

// One round: say what is new, wait, hear what is new. False when the link is over.
bool TcpSendLink::Turn(bool* is_busy) {
  int64_t posted;
  {
    const std::lock_guard<std::mutex> lock(state_.mutex());
    if (state_.IsOverLocked()) return false;
    posted = posted_;
    for (; !epochs_.empty(); epochs_.pop_front()) {
      for (const auto& reader : readers_) {
        if (reader->channel) reader->channel->QueueControl(FrameType::kBegin, epochs_.front());
      }
    }
  }
  polled_.clear();
  polled_.push_back({state_.wakeup().fd(), POLLIN, 0});
  bool wants_turns = door_.wants_turns();
  *is_busy = false;
  for (const auto& reader : readers_) {
    if (!reader->channel) continue;
    wants_turns = true;
    KeepAlive(reader->channel.get());
    *is_busy |= Pump(reader.get(), posted);
    if (!reader->channel) continue;
    const int16_t events = reader->channel->is_blocked() ? POLLIN | POLLOUT : POLLIN;
    polled_.push_back({reader->channel->fd(), events, 0});
  }
  const size_t first_guest = polled_.size();
  door_.AddTo(&polled_);
  const int wait_ms = *is_busy ? 0 : wants_turns ? static_cast<int>(tcp::kHeartbeatS * 1e3) : -1;
  poll(polled_.data(), polled_.size(), wait_ms);
  if (polled_[0].revents != 0) state_.wakeup().Clear();
  const auto now = Deadline::Clock::now();
  const bool has_paused = pause_.HasEnded(now, options_.silence_s);
  size_t next = 1;
  for (const auto& reader : readers_) {
    if (!reader->channel) continue;
    if (has_paused) reader->channel->ForgetSilence();
    const bool is_silent = SilenceOf(*reader->channel, now, options_.silence_s) > 0;
    if (polled_[next++].revents != 0 || is_silent) ReadFrom(reader.get());
    // After the read: it may be this process that was stopped, and the peer has spoken since.
    if (!reader->channel || !is_silent) continue;
    const double silence_s = SilenceOf(*reader->channel, now, options_.silence_s);
    if (silence_s > 0) Lose(*reader, tcp::SilenceMessage(silence_s));
  }
  door_.Serve(polled_.data() + first_guest);
  return true;
}

// Writes one batch at most, so that readers take turns; true when more could be written at once.
bool TcpSendLink::Pump(Reader* reader, int64_t posted) {
  Channel* channel = reader->channel.get();
  if (channel->is_batch_done()) {
    channel->BeginBatch();
    Fill(reader, posted);
  }
  const Status status = channel->Write();
  if (!status.ok()) {
    ReadFrom(reader);  // what it said before the connection broke comes first
    if (reader->channel) Lose(*reader, status.message());
    return false;
  }
  if (channel->is_blocked()) return false;
  MarkWritten(reader);
  return channel->has_queued() ||
         reader->queued < std::min(posted, reader->released + geometry_.num_slots);
}

void TcpSendLink::Fill(Reader* reader, int64_t posted) {
  const int64_t limit = std::min(posted, reader->released + geometry_.num_slots);
  while (reader->queued < limit && reader->channel->has_room()) {
    const int64_t bytes = bytes_[static_cast<size_t>(reader->queued % geometry_.num_slots)];
    const int64_t chunk = std::min(bytes - reader->offset, tcp::kChunkBytes);
    FrameHeader header;
    header.type = FrameType::kData;
    header.length = static_cast<uint64_t>(chunk);
    header.value = static_cast<uint64_t>(reader->queued);
    header.is_last = reader->offset + chunk == bytes ? 1 : 0;
    reader->channel->AddData(header, slots_.at(reader->queued) + reader->offset);
    reader->offset = header.is_last ? 0 : reader->offset + chunk;
    reader->queued += header.is_last;
  }
}

void TcpSendLink::MarkWritten(Reader* reader) {
  if (reader->written == reader->queued) return;
  const std::lock_guard<std::mutex> lock(state_.mutex());
  reader->written = reader->queued;
  state_.NotifyCaller();
}

void TcpSendLink::ReadFrom(Reader* reader) {
  const Status status = reader->channel->Read(reader, kReadBytes);
  if (status.code() == StatusCode::kMismatch) {
    state_.SetFault(MakeFault(StatusCode::kMismatch, reader->rank(), "%s: %s",
                              reader->name().c_str(), status.message().c_str()));
  } else if (reader->has_left) {
    reader->channel.reset();
  } else if (!status.ok()) {
    Lose(*reader, status.message());
  } else if (reader->channel->has_ended()) {
    Lose(*reader, "the connection was closed without a word");
  }
}

void TcpSendLink::Lose(const Reader& reader, const std::string& why) {
  state_.SetFault(MakeFault(StatusCode::kPeerLost, reader.rank(), "%s is lost: %s",
                            reader.name().c_str(), why.c_str()));
}

Status TcpSendLink::Reader::OnControl(const FrameHeader& header, const uint8_t* payload) {
  if (header.type == FrameType::kHeartbeat) return OkStatus();
  if (header.type == FrameType::kAbort) {
    tcp::FaultRecord record;
    std::memcpy(&record, payload, sizeof(record));
    return link->state_.Fail(FromRecord(record));
  }
  const std::lock_guard<std::mutex> lock(link->state_.mutex());
  if (header.type == FrameType::kGoodbye) {
    if (!link->IsCompleteLocked() || released < link->posted_) {
      return link->state_.FailLocked(MakeFault(
          StatusCode::kPeerLost, rank(), "%s closed its link with %lld of %lld slots",
          name().c_str(), static_cast<long long>(released), static_cast<long long>(link->posted_)));
    }
    has_left = true;
    return OkStatus();
  }
  const auto count = static_cast<int64_t>(header.value);
  if (header.type != FrameType::kRelease || count < released || count > queued) {
    return Status(StatusCode::kMismatch, std::string("frame ") +
                                             std::to_string(static_cast<int>(header.type)) +
                                             std::string(" with value ") + std::to_string(count) +
                                             " does not belong here");
  }
  released = count;
  link->state_.NotifyCaller();
  return OkStatus();
}

Status TcpSendLink::Reader::OnDataBegin(const FrameHeader&, uint8_t**) {
  return Status(StatusCode::kMismatch, "a reader sends no data");
}

Status TcpSendLink::Reader::OnDataEnd(const FrameHeader&) { return OkStatus(); }

}  // namespace

Status CreateTcpSendLink(const std::string& host, int port, const LinkGeometry& geometry,
                         const TcpOptions& options, std::unique_ptr<SendLink>* link) {
  Status status = tcp::CheckGeometry(geometry, options);
  if (!status.ok()) return status;
  std::string name = host;
  if (name.size() > 2 && name.front() == '[' && name.back() == ']') {
    name = name.substr(1, name.size() - 2);
  }
  if (name.empty() || name == "0.0.0.0" || name == "::" || port < 0 || port > 65535) {
    return InvalidArgument(
        "tcp link: host=\"%.100s\", port=%d: needs the address at which readers reach this host "
        "(no wildcard), and a port from 0 (any) to 65535",
        host.c_str(), port);
  }
  tcp::UniqueFd listener;
  int bound_port = 0;
  status = tcp::Listen(name, port, &listener, &bound_port);
  if (!status.ok()) return status;
  auto made = std::make_unique<TcpSendLink>(tcp::JoinAddress(name, bound_port), std::move(listener),
                                            geometry, options);
  status = made->Start();
  if (status.ok()) *link = std::move(made);
  return status;
}

}  // namespace tandem
