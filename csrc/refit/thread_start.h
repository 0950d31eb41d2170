// A thread, or a Status: where the machine has none left, std::thread throws, and an exception that
// leaves the C interface ends the process.
#pragma once

#include <string>
#include <system_error>
#include <thread>
#include <utility>

#include "csrc/common/status.h"

namespace tandem {

// kUnavailable says what the thread was for.
template <typename Function>
Status StartThread(const char* purpose, Function function, std::thread* thread) {
  try {
    *thread = std::thread(std::move(function));
  } catch (const std::system_error& error) {
    return Status(StatusCode::kUnavailable,
                  std::string("no thread for ") + purpose + ": " + error.what() +
                      "; this process needs more memory, or a higher limit of threads (ulimit -u, "
                      "the container's pids)");
  }
  return OkStatus();
}

}  // namespace tandem
