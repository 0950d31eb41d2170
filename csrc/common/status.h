// Result of every fallible csrc function. The core has no exceptions; a binding turns a Status into
// its language's error.
//
//   Status status = LogitsStats(rows, stats, workspace, execution);
//   if (!status.ok()) return status;
#pragma once

#include <cstdarg>
#include <cstdio>
#include <string>
#include <utility>

namespace tandem {

enum class StatusCode {
  kOk = 0,
  kInvalidArgument,  // the caller broke the contract; the message names the argument and the value
  kDeviceError,      // a device runtime call failed
  // Of the refit transport:
  kDeadlineExceeded,  // a wait ended; the message names what was waited for
  kPeerLost,          // a process or a connection is gone
  kAborted,           // a peer gave up and said why
  kMismatch,          // two ends disagree: plan, epoch, version, order, size
  kDataLoss,          // bytes arrived that were not sent
  kUnavailable,       // the machine refuses: no memory, no address, no library
};

class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(StatusCode code, std::string message) : code_(code), message_(std::move(message)) {}

  bool ok() const { return code_ == StatusCode::kOk; }
  StatusCode code() const { return code_; }
  const std::string& message() const { return message_; }

 private:
  StatusCode code_ = StatusCode::kOk;
  std::string message_;
};

inline Status OkStatus() { return Status(); }

// printf-style, so that messages can carry the values that were seen.
[[gnu::format(printf, 1, 2)]] inline Status InvalidArgument(const char* format, ...) {
  char buffer[256];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(buffer, sizeof(buffer), format, arguments);
  va_end(arguments);
  return Status(StatusCode::kInvalidArgument, buffer);
}

}  // namespace tandem
