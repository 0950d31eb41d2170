// Ends of TCP links in processes of their own, for tests: a child makes links and uses them as it
// is told, line by line, and answers "ok" or the fault.
//
//   Peer sender(kSenderRole);  const Outcome opened = sender.Do("open 127.0.0.1 0 ...", soon);
//   sender.Tell("send 1000 30"); ...; sender.Kill(SIGKILL);
//
// Sender:  open HOST PORT SETTING -> ok ADDRESS | join S | begin EPOCH S | send COUNT S | flush S
// Reader:  open SETTING READER ADDRESS... (one per root) | join S | begin EPOCH S | take COUNT S
// Both:    abort WORD | close | run SHELL COMMAND | fork -> ok PID (a child that does nothing)
// `take` prints "going" when the first slots of each root are there.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "csrc/refit/link.h"
#include "csrc/testing/child_process.h"

namespace tandem {

// What SETTING stands for: six words.
struct LinkSetting {
  LinkGeometry geometry;
  double silence_s = 20;

  std::string words() const;
};

struct Outcome {
  bool is_ok = false;
  StatusCode code = StatusCode::kOk;
  int32_t rank = kNoRank;
  std::string text;    // after "ok", or the fault's message, or the line that was neither
  double seconds = 0;  // since the peer was told, or since Restart
};

class Peer {
 public:
  // network: this test's own, a new namespace without any interface but lo, or that of a process.
  static constexpr pid_t kOurNetwork = 0;
  static constexpr pid_t kOwnNetwork = -1;
  explicit Peer(const std::string& role, pid_t network = kOurNetwork);

  void Tell(const std::string& command);
  Outcome Answer(const Deadline& deadline);
  Outcome Do(const std::string& command, const Deadline& deadline);
  void RestartClock() { told_at_ = Deadline::Clock::now(); }
  bool AwaitGoing(const Deadline& deadline);
  std::string ReadLine(const Deadline& deadline) { return child_.ReadLine(deadline); }
  void Kill(int signal) const { child_.Kill(signal); }
  pid_t pid() const { return child_.pid(); }

 private:
  ChildProcess child_;
  Deadline::Clock::time_point told_at_;
};

inline constexpr char kSenderRole[] = "sender";
inline constexpr char kReaderRole[] = "reader";
std::map<std::string, ChildProcess::Role> TcpRoles();

}  // namespace tandem
