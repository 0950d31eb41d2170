// What the refit needs of a device, as a table of functions: streams, events, memory and the two
// kernels. libtandem_cuda.so has one for CUDA; csrc/testing/nccl has one for host memory, whose
// streams are threads, so that all that is written against the table runs without a device. Found
// at run time: nothing here links a device runtime.
//
// Semantics are CUDA's: work on a stream runs in the order in which it was enqueued, a call returns
// before it is done, an event that was never recorded counts as done.
#pragma once

#include <cstdint>
#include <string>

#include "csrc/common/status.h"
#include "csrc/common/stream.h"
#include "csrc/refit/digest.h"
#include "csrc/refit/pack.h"

namespace tandem {

using Event = void*;

struct DeviceOps {
  int64_t size_bytes = 0;      // sizeof(DeviceOps) of the library's build: both sides must agree
  const char* name = nullptr;  // "cuda", for messages

  // For the calling thread: what follows is about this device.
  Status (*use_device)(int device) = nullptr;

  // A stream that is ordered with the default stream, on which callers make and read their tensors,
  // waits for all that was enqueued there before, and what is enqueued there later waits for it.
  Status (*create_stream)(bool is_ordered_with_default, Stream* stream) = nullptr;
  void (*destroy_stream)(Stream stream) = nullptr;  // waits for its work
  Status (*create_event)(Event* event) = nullptr;
  void (*destroy_event)(Event event) = nullptr;
  Status (*record)(Event event, Stream stream) = nullptr;
  Status (*stream_wait)(Stream stream, Event event) = nullptr;  // the stream waits, not the host
  // Also returns errors of work that was enqueued earlier.
  Status (*is_done)(Event event, bool* done) = nullptr;

  // Aligned to at least 256 bytes. Memory of the device, and of the host where the device reads it.
  Status (*allocate)(int64_t bytes, void** memory) = nullptr;
  void (*release)(void* memory) = nullptr;
  Status (*allocate_pinned)(int64_t bytes, void** memory) = nullptr;
  void (*release_pinned)(void* memory) = nullptr;

  // Between any two memories. Host memory that is not pinned may make the call wait.
  Status (*copy)(void* target, const void* source, int64_t bytes, Stream stream) = nullptr;
  decltype(&cuda::BucketCopy) bucket_copy = nullptr;
  decltype(&cuda::Digest) digest = nullptr;
};

// Opens a library that exports TandemDeviceOps; it stays open as long as the process.
// kUnavailable names the path and the reason.
Status LoadDeviceOps(const std::string& path, const DeviceOps** ops);

}  // namespace tandem

extern "C" const tandem::DeviceOps* TandemDeviceOps();
