// A reader's end of the TCP link. The I/O thread owns the connection: it reads slots into memory
// and says what was given back; the caller's thread takes slots in order.
#include <poll.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

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

// One look at the clock and at what the caller gave back per so many bytes.
constexpr int64_t kReadBytes = 1 << 20;

class TcpReceiveLink final : public ReceiveLink, private tcp::FrameSink {
 public:
  TcpReceiveLink(std::string host, int port, const LinkGeometry& geometry, int32_t reader,
                 const TcpOptions& options);
  ~TcpReceiveLink() override;
  Status Prepare();

  Executor* executor() override { return HostExecutor(); }
  Status Join(const Deadline& deadline) override;
  Status Begin(uint64_t epoch, const Deadline& deadline) override;
  Status Receive(const Deadline& deadline, const uint8_t** slot, int64_t* bytes) override;
  Status Release() override;
  void Abort(const Fault& fault) override { state_.SetFault(fault); }
  Fault fault() const override { return state_.fault(); }

 private:
  Status OnControl(const FrameHeader& header, const uint8_t* payload) override;
  Status OnDataBegin(const FrameHeader& header, uint8_t** target) override;
  Status OnDataEnd(const FrameHeader& header) override;

  Status Dial(const Deadline& deadline);
  Status ReadyLocked();
  Status Misuse(const char* what);
  Fault Late(const char* what) const;
  std::string sender() const;
  Status Welcome(const uint8_t* payload);

  void Run();
  bool Turn();
  void WriteAll();
  void ReadAll();
  void Lose(const std::string& why);

  const std::string host_;
  const int port_;
  const LinkGeometry geometry_;
  const int32_t reader_;
  const TcpOptions options_;
  tcp::SlotMemory slots_;
  tcp::EndState state_;
  std::unique_ptr<Channel> channel_;  // of the I/O thread, once it runs
  tcp::OwnPause pause_;               // I/O thread
  int64_t told_ = 0;                  // slots given back that the sender knows of; I/O thread
  int64_t offset_ = 0;                // what has arrived of slot number arrived_; I/O thread

  // Under the mutex.
  bool is_welcome_ = false;
  bool has_left_ = false;        // the sender; written by the I/O thread alone
  std::deque<uint64_t> epochs_;  // announced by the sender, and not yet begun here
  uint64_t epoch_ = 0;
  int64_t arrived_ = 0;  // written by the I/O thread alone
  int64_t taken_ = 0;
  int64_t released_ = 0;
  std::vector<int64_t> bytes_;  // of each slot

  std::thread thread_;
};

TcpReceiveLink::TcpReceiveLink(std::string host, int port, const LinkGeometry& geometry,
                               int32_t reader, const TcpOptions& options)
    : host_(std::move(host)),
      port_(port),
      geometry_(geometry),
      reader_(reader),
      options_(options),
      bytes_(static_cast<size_t>(geometry.num_slots), 0) {}

Status TcpReceiveLink::Prepare() {
  const Status status = slots_.Allocate(geometry_);
  return status.ok() ? state_.wakeup().Open() : status;
}

TcpReceiveLink::~TcpReceiveLink() { state_.StopAndJoin(&thread_); }

std::string TcpReceiveLink::sender() const {
  return "the sender, root " + std::to_string(geometry_.root) + " (" +
         tcp::JoinAddress(host_, port_) + ")";
}

// ---- The caller's thread ----

Status TcpReceiveLink::Dial(const Deadline& deadline) {
  std::vector<tcp::SocketAddress> addresses;
  Status status =
      tcp::Resolve(host_, port_, deadline, [this] { return state_.IsOver(); }, &addresses);
  if (!status.ok()) return status;
  tcp::UniqueFd fd;
  const std::string name = tcp::JoinAddress(host_, port_);
  status = tcp::Connect(addresses, name, state_.wakeup().fd(), deadline, &fd);
  if (!status.ok()) return status;
  tcp::TuneConnection(fd.get(), options_.silence_s);
  channel_ = std::make_unique<Channel>(std::move(fd), name);
  const Hello hello = tcp::MakeHello(geometry_, reader_);
  channel_->QueueControl(FrameType::kHello, 0, &hello);
  return OkStatus();
}

Status TcpReceiveLink::Join(const Deadline& deadline) {
  if (state_.IsOver()) return state_.Fail({});
  if (thread_.joinable()) return Misuse("Join is called twice");
  Status status = Dial(deadline);
  if (status.ok()) status = StartThread("a reader's connection", [this] { Run(); }, &thread_);
  if (!status.ok()) {
    return state_.Fail(
        {status.code(), geometry_.root, -1,
         std::string("reader ") + std::to_string(reader_) + ": " + status.message()});
  }
  std::unique_lock<std::mutex> lock(state_.mutex());
  return state_.WaitLocked(
      lock, deadline, [this] { return is_welcome_; },
      [this] { return Late("to welcome all readers: others have not joined"); });
}

Status TcpReceiveLink::Misuse(const char* what) {
  return state_.Fail(MakeFault(StatusCode::kInvalidArgument, kFirstReader + reader_, "%s", what));
}

Fault TcpReceiveLink::Late(const char* what) const {
  return MakeFault(StatusCode::kDeadlineExceeded, geometry_.root,
                   "reader %d waited for %s %s until the deadline; %lld slots have arrived",
                   reader_, sender().c_str(), what, static_cast<long long>(arrived_));
}

Status TcpReceiveLink::ReadyLocked() {
  if (state_.IsOverLocked()) return state_.StatusLocked();
  if (is_welcome_) return OkStatus();
  return state_.FailLocked(MakeFault(StatusCode::kInvalidArgument, kFirstReader + reader_,
                                     "the link is used before Join has succeeded"));
}

Status TcpReceiveLink::Begin(uint64_t epoch, const Deadline& deadline) {
  std::unique_lock<std::mutex> lock(state_.mutex());
  Status status = ReadyLocked();
  if (!status.ok()) return status;
  const auto mismatch = [&](const std::string& than) {
    return state_.FailLocked(MakeFault(StatusCode::kMismatch, kFirstReader + reader_,
                                       "reader %d begins epoch %llu, %s", reader_,
                                       static_cast<unsigned long long>(epoch), than.c_str()));
  };
  if (epoch <= epoch_)
    return mismatch(std::string("not larger than its last, ") + std::to_string(epoch_));
  status = state_.WaitLocked(
      lock, deadline, [this] { return !epochs_.empty() || has_left_; },
      [this] { return Late("to begin a refit"); });
  if (!status.ok()) return status;
  if (epochs_.empty()) {
    return state_.FailLocked(MakeFault(StatusCode::kPeerLost, geometry_.root,
                                       "%s has closed its link", sender().c_str()));
  }
  const uint64_t announced = epochs_.front();
  epochs_.pop_front();
  if (announced != epoch) return mismatch(std::string("the sender ") + std::to_string(announced));
  epoch_ = epoch;
  return OkStatus();
}

Status TcpReceiveLink::Receive(const Deadline& deadline, const uint8_t** slot, int64_t* bytes) {
  std::unique_lock<std::mutex> lock(state_.mutex());
  Status status = ReadyLocked();
  if (!status.ok()) return status;
  status = state_.WaitLocked(
      lock, deadline, [this] { return arrived_ > taken_ || has_left_; },
      [this] { return Late("for the next slot"); });
  if (!status.ok()) return status;
  if (arrived_ == taken_) {
    return state_.FailLocked(MakeFault(StatusCode::kPeerLost, geometry_.root,
                                       "%s closed its link after %lld slots", sender().c_str(),
                                       static_cast<long long>(arrived_)));
  }
  *slot = slots_.at(taken_);
  *bytes = bytes_[static_cast<size_t>(taken_ % geometry_.num_slots)];
  ++taken_;
  return OkStatus();
}

Status TcpReceiveLink::Release() {
  std::unique_lock<std::mutex> lock(state_.mutex());
  if (state_.IsOverLocked()) return state_.StatusLocked();
  if (released_ == taken_) {
    lock.unlock();
    return Misuse("Release without a slot that was received");
  }
  ++released_;
  state_.wakeup().Notify();
  return OkStatus();
}

// ---- The I/O thread ----

void TcpReceiveLink::Run() {
  while (Turn()) {
  }
  {
    const std::lock_guard<std::mutex> lock(state_.mutex());
    if (told_ < released_) {
      channel_->QueueControl(FrameType::kRelease, static_cast<uint64_t>(released_));
    }
  }
  tcp::BidFarewell({channel_.get()}, state_.fault());
  channel_.reset();
}

bool TcpReceiveLink::Turn() {
  {
    const std::lock_guard<std::mutex> lock(state_.mutex());
    // A sender that left in peace wants to hear nothing; what has arrived can still be taken.
    if (state_.IsOverLocked() || has_left_) return false;
    if (told_ < released_) {
      channel_->QueueControl(FrameType::kRelease, static_cast<uint64_t>(released_));
      told_ = released_;
    }
  }
  KeepAlive(channel_.get());
  WriteAll();
  const int16_t events = channel_->is_blocked() ? POLLIN | POLLOUT : POLLIN;
  pollfd polled[2] = {{state_.wakeup().fd(), POLLIN, 0}, {channel_->fd(), events, 0}};
  poll(polled, 2, static_cast<int>(tcp::kHeartbeatS * 1e3));
  if (polled[0].revents != 0) state_.wakeup().Clear();
  const auto now = Deadline::Clock::now();
  if (pause_.HasEnded(now, options_.silence_s)) channel_->ForgetSilence();
  const bool is_silent = SilenceOf(*channel_, now, options_.silence_s) > 0;
  if (polled[1].revents != 0 || is_silent) ReadAll();
  // After the read: it may be this process that was stopped, and the sender has spoken since.
  const double silence_s = is_silent ? SilenceOf(*channel_, now, options_.silence_s) : 0;
  if (silence_s > 0) Lose(tcp::SilenceMessage(silence_s));
  return true;
}

void TcpReceiveLink::WriteAll() {
  Status status = channel_->Write();
  while (status.ok() && channel_->is_batch_done() && channel_->has_queued()) {
    channel_->BeginBatch();
    status = channel_->Write();
  }
  if (status.ok()) return;
  ReadAll();  // what the sender said before the connection broke comes first
  Lose(status.message());
}

void TcpReceiveLink::ReadAll() {
  const Status status = channel_->Read(this, kReadBytes);
  if (status.code() == StatusCode::kMismatch) {
    state_.SetFault(MakeFault(StatusCode::kMismatch, geometry_.root, "reader %d, from %s: %s",
                              reader_, sender().c_str(), status.message().c_str()));
  } else if (!status.ok()) {
    Lose(status.message());
  } else if (channel_->has_ended() && !has_left_) {
    Lose("the connection was closed without a word");
  }
}

void TcpReceiveLink::Lose(const std::string& why) {
  state_.SetFault(MakeFault(StatusCode::kPeerLost, geometry_.root, "reader %d: %s is lost: %s",
                            reader_, sender().c_str(), why.c_str()));
}

Status TcpReceiveLink::Welcome(const uint8_t* payload) {
  Hello hello;
  std::memcpy(&hello, payload, sizeof(hello));
  const std::string difference = FirstDifference(hello, tcp::MakeHello(geometry_, reader_));
  if (!difference.empty()) return Status(StatusCode::kMismatch, difference);
  const std::lock_guard<std::mutex> lock(state_.mutex());
  is_welcome_ = true;
  state_.NotifyCaller();
  return OkStatus();
}

Status TcpReceiveLink::OnControl(const FrameHeader& header, const uint8_t* payload) {
  switch (header.type) {
    case FrameType::kHeartbeat:
      return OkStatus();
    case FrameType::kWelcome:
      return Welcome(payload);
    case FrameType::kRefuse:
    case FrameType::kAbort: {
      tcp::FaultRecord record;
      std::memcpy(&record, payload, sizeof(record));
      return state_.Fail(FromRecord(record));
    }
    case FrameType::kBegin: {
      const std::lock_guard<std::mutex> lock(state_.mutex());
      epochs_.push_back(header.value);
      state_.NotifyCaller();
      return OkStatus();
    }
    case FrameType::kGoodbye: {
      const std::lock_guard<std::mutex> lock(state_.mutex());
      has_left_ = true;
      state_.NotifyCaller();
      return OkStatus();
    }
    default:
      return Status(StatusCode::kMismatch, "a frame that a sender does not send");
  }
}

Status TcpReceiveLink::OnDataBegin(const FrameHeader& header, uint8_t** target) {
  const std::lock_guard<std::mutex> lock(state_.mutex());
  const bool is_next = header.value == static_cast<uint64_t>(arrived_);
  const bool has_room = arrived_ < released_ + geometry_.num_slots;
  const auto room = static_cast<uint64_t>(geometry_.slot_bytes - offset_);
  if (!is_next || !has_room || header.length > room) {
    return Status(StatusCode::kMismatch, std::string("slot ") + std::to_string(header.value) +
                                             " with " + std::to_string(header.length) +
                                             " bytes, but slot " + std::to_string(arrived_) +
                                             " is next, with room for " +
                                             std::to_string(has_room ? room : 0));
  }
  *target = slots_.at(arrived_) + offset_;
  return OkStatus();
}

Status TcpReceiveLink::OnDataEnd(const FrameHeader& header) {
  offset_ += static_cast<int64_t>(header.length);
  if (!header.is_last) return OkStatus();
  const std::lock_guard<std::mutex> lock(state_.mutex());
  bytes_[static_cast<size_t>(arrived_ % geometry_.num_slots)] = offset_;
  offset_ = 0;
  ++arrived_;
  state_.NotifyCaller();
  return OkStatus();
}

}  // namespace

Status ConnectTcpReceiveLink(const std::string& address, const LinkGeometry& geometry,
                             int32_t reader, const TcpOptions& options,
                             std::unique_ptr<ReceiveLink>* link) {
  Status status = tcp::CheckGeometry(geometry, options);
  if (!status.ok()) return status;
  if (reader < 0 || reader >= geometry.num_readers) {
    return InvalidArgument("tcp link: reader=%d is not below num_readers=%d", reader,
                           geometry.num_readers);
  }
  std::string host;
  int port = 0;
  status = tcp::SplitAddress(address, &host, &port);
  if (!status.ok()) return status;
  auto made = std::make_unique<TcpReceiveLink>(host, port, geometry, reader, options);
  status = made->Prepare();
  if (status.ok()) *link = std::move(made);
  return status;
}

}  // namespace tandem
