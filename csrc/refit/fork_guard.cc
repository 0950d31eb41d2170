#include "csrc/refit/fork_guard.h"

#include <fcntl.h>
#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <vector>

namespace tandem {
namespace {

struct Guard {
  std::mutex mutex;
  std::vector<int> files;
  std::atomic<uint32_t> forks{0};
};

// Never destroyed: a fork may happen while the process ends.
Guard& TheGuard() {
  static Guard* const guard = new Guard;
  return *guard;
}

// Held over the fork, so that the child finds the list whole.
void BeforeFork() { TheGuard().mutex.lock(); }
void InParent() { TheGuard().mutex.unlock(); }
void InChild() {
  Guard& guard = TheGuard();
  for (const int file : guard.files) close(file);
  guard.files.clear();
  guard.forks.fetch_add(1, std::memory_order_relaxed);
  guard.mutex.unlock();
}

void WatchForks() {
  static const int registered = pthread_atfork(BeforeFork, InParent, InChild);
  static_cast<void>(registered);
}

}  // namespace

int OpenUnforked(const std::string& path, int flags, mode_t mode) {
  WatchForks();
  Guard& guard = TheGuard();
  const std::lock_guard<std::mutex> lock(guard.mutex);
  const int file = open(path.c_str(), flags | O_CLOEXEC, mode);
  if (file >= 0) guard.files.push_back(file);
  return file;
}

void KeepUnforked(int file) {
  WatchForks();
  const std::lock_guard<std::mutex> lock(TheGuard().mutex);
  TheGuard().files.push_back(file);
}

void CloseUnforked(int file) {
  Guard& guard = TheGuard();
  const std::lock_guard<std::mutex> lock(guard.mutex);
  guard.files.erase(std::remove(guard.files.begin(), guard.files.end(), file), guard.files.end());
  close(file);
}

uint32_t NumForks() {
  WatchForks();
  return TheGuard().forks.load(std::memory_order_relaxed);
}

}  // namespace tandem
