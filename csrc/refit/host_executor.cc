// The executor of a host: the calling thread, at once. It has no state but the memory that it was
// asked for, so that sessions of several threads share it.
#include <cstring>
#include <memory>
#include <mutex>
#include <new>
#include <vector>

#include "csrc/refit/executor.h"

namespace tandem {
namespace {

class HostExecutorImpl final : public Executor {
 public:
  bool is_immediate() const override { return true; }

  Status Copy(const CopyItem* items, int64_t num_items) override {
    for (int64_t i = 0; i < num_items; ++i) {
      const CopyItem& item = items[i];
      const int64_t tiles = (item.numel + kTileElements - 1) / kTileElements;
      const int64_t tile_prefix[2] = {0, tiles};
      Status status = cpu::BucketCopy(&item, tile_prefix, 1, tiles, {SerialFor()});
      if (!status.ok()) return status;
    }
    return OkStatus();
  }

  Status RawCopy(void* target, const void* source, int64_t bytes) override {
    if (bytes > 0) std::memcpy(target, source, static_cast<size_t>(bytes));
    return OkStatus();
  }

  Status Digest(const DigestItem* items, int64_t num_items, uint64_t* digests) override {
    return cpu::Digest(items, num_items, digests, {SerialFor()});
  }

  Status FromHost(void* target, const void* source, int64_t bytes) override {
    return RawCopy(target, source, bytes);
  }

  Status ToHost(void* target, const void* source, int64_t bytes) override {
    return RawCopy(target, source, bytes);
  }

  Status Allocate(int64_t bytes, void** memory) override {
    std::unique_ptr<uint8_t[]> block(new (std::nothrow) uint8_t[static_cast<size_t>(bytes)]);
    if (block == nullptr) {
      return Status(StatusCode::kUnavailable,
                    "no memory for " + std::to_string(bytes) + " bytes of a transfer");
    }
    *memory = block.get();
    const std::lock_guard<std::mutex> lock(mutex_);
    blocks_.push_back(std::move(block));
    return OkStatus();
  }

  Status Wait(const Deadline&) override { return OkStatus(); }

 private:
  std::mutex mutex_;
  std::vector<std::unique_ptr<uint8_t[]>> blocks_;
};

}  // namespace

Executor* HostExecutor() {
  static HostExecutorImpl executor;
  return &executor;
}

}  // namespace tandem
