// The executor of a device's memory: work goes onto a stream, the host does not wait for it.
//
// Lists of items and small host data travel through pinned memory that was made at the start and is
// used in turns; only when the host is that far ahead does it wait, by looking at an event, with a
// deadline, and asking `watch` whether waiting still makes sense. What goes to the host is kept
// beside it until Wait.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "csrc/common/stream.h"
#include "csrc/refit/deadline.h"
#include "csrc/refit/device_ops.h"
#include "csrc/refit/executor.h"

namespace tandem {

// Asked between two looks at what is waited for: an error ends the wait.
class Watch {
 public:
  virtual ~Watch() = default;
  virtual Status Check() = 0;
};

// Waits for an event. kDeadlineExceeded names `what`.
Status WaitForEvent(const DeviceOps& ops, Event event, Watch* watch, const Deadline& deadline,
                    const char* what);

class DeviceExecutor : public Executor {
 public:
  // `ops` and `watch` outlive it.
  static Status Make(const DeviceOps* ops, Watch* watch, std::unique_ptr<DeviceExecutor>* executor);
  ~DeviceExecutor() override;
  DeviceExecutor(const DeviceExecutor&) = delete;
  DeviceExecutor& operator=(const DeviceExecutor&) = delete;

  Stream stream() const { return stream_; }
  // Of calls that have none of their own.
  void set_deadline(const Deadline& deadline) { deadline_ = deadline; }

  bool is_immediate() const override { return false; }
  Status Copy(const CopyItem* items, int64_t num_items) override;
  Status RawCopy(void* target, const void* source, int64_t bytes) override;
  Status Digest(const DigestItem* items, int64_t num_items, uint64_t* digests) override;
  Status FromHost(void* target, const void* source, int64_t bytes) override;
  Status ToHost(void* target, const void* source, int64_t bytes) override;
  Status Allocate(int64_t bytes, void** memory) override;
  Status Wait(const Deadline& deadline) override;

 private:
  // A piece of pinned memory, its twin on the device, and when both are free again.
  struct Block {
    unsigned char* host = nullptr;
    unsigned char* device = nullptr;
    Event free = nullptr;
  };
  struct Readback {
    void* target;
    const unsigned char* pinned;
    int64_t bytes;
  };

  DeviceExecutor(const DeviceOps* ops, Watch* watch) : ops_(*ops), watch_(watch) {}
  Status Init();
  Status TakeBlock(Block** block);
  Status CopySome(const CopyItem* items, int64_t num_items);
  Status DigestSome(const DigestItem* items, int64_t num_items, uint64_t* digests);
  // Pinned memory until the next Wait, up to `bytes` of it.
  Status TakeReadback(int64_t bytes, unsigned char** pinned, int64_t* taken);

  const DeviceOps& ops_;
  Watch* watch_;
  Deadline deadline_ = Deadline::In(0);
  Stream stream_ = nullptr;
  Event done_ = nullptr;
  void* pinned_ = nullptr;
  void* twins_ = nullptr;
  std::vector<Block> blocks_;
  size_t next_block_ = 0;
  std::vector<void*> allocated_;
  std::vector<unsigned char*> pages_;  // of readbacks
  int64_t read_back_ = 0;              // bytes of the pages in use
  std::vector<Readback> readbacks_;
};

}  // namespace tandem
