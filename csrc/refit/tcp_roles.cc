#include "csrc/refit/tcp_roles.h"

#include <fcntl.h>
#include <sched.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <memory>
#include <sstream>
#include <utility>

#include "csrc/refit/tcp_link.h"

namespace tandem {
namespace {

// Slots of each root after which a transfer is under way: both ends have used every slot.
constexpr int64_t kGoing = 4;

uint64_t Word(int64_t slot, int32_t root) {
  return (static_cast<uint64_t>(slot) * 64 + static_cast<uint64_t>(root) + 1) * 0x9E3779B97F4A7C15u;
}

void FillSlot(uint8_t* slot, int64_t bytes, uint64_t word) {
  auto* words = reinterpret_cast<uint64_t*>(slot);
  for (int64_t i = 0; i < bytes / 8; ++i) words[i] = word + static_cast<uint64_t>(i);
}

bool IsAsFilled(const uint8_t* slot, int64_t bytes, uint64_t word) {
  const auto* words = reinterpret_cast<const uint64_t*>(slot);
  uint64_t difference = 0;
  for (int64_t i = 0; i < bytes / 8; ++i) {
    difference |= words[i] ^ (word + static_cast<uint64_t>(i));
  }
  return difference == 0;
}

LinkSetting ReadSetting(std::istream& words) {
  LinkSetting setting;
  LinkGeometry& geometry = setting.geometry;
  words >> geometry.plan_digest >> geometry.slot_bytes >> geometry.num_slots >>
      geometry.num_readers >> geometry.root >> setting.silence_s;
  return setting;
}

std::string FaultLine(const Status& status, const Fault& fault) {
  return "fault " + std::to_string(static_cast<int>(status.code())) + " " +
         std::to_string(fault.rank) + " " + status.message();
}

bool EnterNetwork(pid_t network) {
  if (network == Peer::kOurNetwork) return true;
  if (network == Peer::kOwnNetwork) return unshare(CLONE_NEWNET) == 0;
  const std::string path = "/proc/" + std::to_string(network) + "/ns/net";
  const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  const bool has_entered = file >= 0 && setns(file, CLONE_NEWNET) == 0;
  if (file >= 0) close(file);
  return has_entered;
}

class Role {
 public:
  virtual ~Role() = default;
  int Run(const std::vector<std::string>& arguments);

 protected:
  // Answers a command of one kind of end.
  virtual Status Do(const std::string& verb, std::istream& words, std::string* answer) = 0;
  virtual Fault fault() const = 0;
  virtual void Abort(const Fault& fault) = 0;
  virtual void Close() = 0;

 private:
  std::string Common(const std::string& verb, std::istream& words);
};

int Role::Run(const std::vector<std::string>& arguments) {
  if (!EnterNetwork(std::stoi(arguments.at(0)))) return 3;
  PrintLine("ready");
  std::string line;
  while (std::getline(std::cin, line)) {
    std::istringstream words(line);
    std::string verb;
    words >> verb;
    std::string answer = Common(verb, words);
    if (answer.empty()) {
      const Status status = Do(verb, words, &answer);
      answer = status.ok() ? "ok " + answer : FaultLine(status, fault());
    }
    PrintLine(answer);
  }
  return 0;
}

std::string Role::Common(const std::string& verb, std::istream& words) {
  std::string rest;
  if (verb == "run") {
    std::getline(words, rest);
    return std::system(rest.c_str()) == 0 ? "ok" : "failed:" + rest;
  }
  if (verb == "abort") {
    words >> rest;
    Abort({StatusCode::kAborted, kNoRank, -1, rest});
    return "ok";
  }
  if (verb == "close") {
    Close();
    return "ok";
  }
  if (verb == "fork") {
    const pid_t child = fork();
    if (child > 0) return "ok " + std::to_string(child);
    alarm(120);  // ends even if the test forgets it
    close(STDIN_FILENO);
    close(STDOUT_FILENO);
    while (true) pause();
  }
  return "";
}

class SenderEnd final : public Role {
  Status Do(const std::string& verb, std::istream& words, std::string* answer) override {
    if (verb == "open") return Open(words, answer);
    uint64_t epoch = 0;
    int64_t count = 0;
    double seconds = 0;
    if (verb == "begin") words >> epoch;
    if (verb == "send") words >> count;
    words >> seconds;
    const Deadline deadline = Deadline::In(seconds);
    if (verb == "join") return link_->Join(deadline);
    if (verb == "begin") return link_->Begin(epoch, deadline);
    if (verb == "flush") return link_->Flush(deadline);
    return verb == "send" ? Send(count, deadline) : InvalidArgument("no command");
  }
  Status Open(std::istream& words, std::string* answer) {
    std::string host;
    int port = 0;
    words >> host >> port;
    setting_ = ReadSetting(words);
    num_sent_ = 0;
    const Status status =
        CreateTcpSendLink(host, port, setting_.geometry, {setting_.silence_s}, &link_);
    if (status.ok()) *answer = link_->address();
    return status;
  }
  Status Send(int64_t count, const Deadline& deadline) {
    const LinkGeometry& geometry = setting_.geometry;
    for (int64_t i = 0; i < count; ++i) {
      uint8_t* slot = nullptr;
      Status status = link_->Acquire(deadline, &slot);
      if (!status.ok()) return status;
      FillSlot(slot, geometry.slot_bytes, Word(num_sent_++, geometry.root));
      status = link_->Post(geometry.slot_bytes, deadline);
      if (!status.ok()) return status;
    }
    return OkStatus();
  }
  Fault fault() const override { return link_ ? link_->fault() : Fault{}; }
  void Abort(const Fault& fault) override { link_->Abort(fault); }
  void Close() override { link_.reset(); }

  LinkSetting setting_;
  std::unique_ptr<SendLink> link_;
  int64_t num_sent_ = 0;
};

class ReaderEnd final : public Role {
  Status Do(const std::string& verb, std::istream& words, std::string*) override {
    if (verb == "open") return Open(words);
    uint64_t epoch = 0;
    int64_t count = 0;
    double seconds = 0;
    if (verb == "begin") words >> epoch;
    if (verb == "take") words >> count;
    words >> seconds;
    const Deadline deadline = Deadline::In(seconds);
    if (verb == "take") return Take(count, deadline);
    for (const auto& link : links_) {
      const Status status = verb == "join" ? link->Join(deadline) : link->Begin(epoch, deadline);
      if (!status.ok()) return status;
    }
    return OkStatus();
  }
  Status Open(std::istream& words) {
    setting_ = ReadSetting(words);
    int32_t reader = 0;
    words >> reader;
    Close();
    std::string address;
    LinkGeometry geometry = setting_.geometry;
    for (; words >> address; ++geometry.root) {
      links_.emplace_back();
      const Status status =
          ConnectTcpReceiveLink(address, geometry, reader, {setting_.silence_s}, &links_.back());
      if (!status.ok()) return status;
    }
    return OkStatus();
  }
  // The next `count` slots of each root, in turn.
  Status Take(int64_t count, const Deadline& deadline) {
    for (int64_t i = 0; i < count; ++i) {
      if (i == kGoing) PrintLine("going");
      for (size_t root = 0; root < links_.size(); ++root) {
        const Status status = TakeOne(root, deadline);
        if (!status.ok()) return status;
      }
      ++num_taken_;
    }
    return OkStatus();
  }
  Status TakeOne(size_t root, const Deadline& deadline) {
    const uint8_t* slot = nullptr;
    int64_t bytes = 0;
    const Status status = links_[root]->Receive(deadline, &slot, &bytes);
    if (!status.ok()) return status;
    const int32_t number = setting_.geometry.root + static_cast<int32_t>(root);
    if (bytes != setting_.geometry.slot_bytes ||
        !IsAsFilled(slot, bytes, Word(num_taken_, number))) {
      return Status(StatusCode::kDataLoss, "slot " + std::to_string(num_taken_) + " of root " +
                                               std::to_string(number) + " is not what was sent");
    }
    return links_[root]->Release();
  }
  Fault fault() const override {
    for (const auto& link : links_) {
      if (link && link->fault().code != StatusCode::kOk) return link->fault();
    }
    return {};
  }
  void Abort(const Fault& fault) override {
    for (const auto& link : links_) link->Abort(fault);
  }
  void Close() override {
    links_.clear();
    num_taken_ = 0;
  }

  LinkSetting setting_;
  std::vector<std::unique_ptr<ReceiveLink>> links_;
  int64_t num_taken_ = 0;
};

template <typename End>
int RunRole(const std::vector<std::string>& arguments) {
  std::unique_ptr<Role> role = std::make_unique<End>();
  return role->Run(arguments);
}

}  // namespace

std::string LinkSetting::words() const {
  std::ostringstream text;
  text << geometry.plan_digest << ' ' << geometry.slot_bytes << ' ' << geometry.num_slots << ' '
       << geometry.num_readers << ' ' << geometry.root << ' ' << silence_s;
  return text.str();
}

Peer::Peer(const std::string& role, pid_t network)
    : child_(role, {std::to_string(network)}), told_at_(Deadline::Clock::now()) {
  child_.ReadLine(Deadline::In(30));  // "ready", or the end, which the first answer tells
}

void Peer::Tell(const std::string& command) {
  RestartClock();
  child_.WriteLine(command);
}

Outcome Peer::Answer(const Deadline& deadline) {
  Outcome outcome;
  outcome.text = child_.ReadLine(deadline);
  while (outcome.text == "going") outcome.text = child_.ReadLine(deadline);
  outcome.seconds = std::chrono::duration<double>(Deadline::Clock::now() - told_at_).count();
  std::istringstream words(outcome.text);
  std::string kind;
  words >> kind;
  outcome.is_ok = kind == "ok";
  int code = 0;
  if (kind == "fault" && words >> code >> outcome.rank)
    outcome.code = static_cast<StatusCode>(code);
  if (outcome.is_ok || kind == "fault") std::getline(words >> std::ws, outcome.text);
  return outcome;
}

Outcome Peer::Do(const std::string& command, const Deadline& deadline) {
  Tell(command);
  return Answer(deadline);
}

bool Peer::AwaitGoing(const Deadline& deadline) { return child_.ReadLine(deadline) == "going"; }

std::map<std::string, ChildProcess::Role> TcpRoles() {
  return {{kSenderRole, RunRole<SenderEnd>}, {kReaderRole, RunRole<ReaderEnd>}};
}

}  // namespace tandem
