// A device made of host memory: streams are threads that take their work in order, device memory is
// remembered so that a pointer which is none is found. The table is TandemDeviceOps().
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "csrc/refit/device_ops.h"

namespace tandem::testing {

// Work in order on a thread of its own. Destruction waits for all of it.
class HostStream {
 public:
  HostStream();
  ~HostStream();
  HostStream(const HostStream&) = delete;
  HostStream& operator=(const HostStream&) = delete;

  void Enqueue(std::function<void()> work);

  // The first error of enqueued work; an event tells of it.
  class Error {
   public:
    void Set(const Status& status);
    Status Get() const;

   private:
    mutable std::mutex mutex_;
    Status status_;
  };
  const std::shared_ptr<Error>& error() const { return error_; }

 private:
  void Run();

  std::shared_ptr<Error> error_ = std::make_shared<Error>();
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> work_;
  bool is_ending_ = false;
  std::thread thread_;
};

HostStream* StreamOf(Stream stream);

// Whether all of these bytes are in one block of device memory.
bool IsDeviceMemory(const void* data, size_t bytes);
Status AllocateDeviceMemory(int64_t bytes, void** memory);
// False: it was not device memory.
bool ReleaseDeviceMemory(void* memory);

// Of the calling thread, as use_device set it.
int CurrentDevice();

}  // namespace tandem::testing

// Since the start of the process: blocks of device memory, of pinned memory, streams and events
// made; then those that are alive, in the same order.
extern "C" void tandem_test_device_counts(int64_t counts[8]);
