// An executor that does nothing until it is waited for: what it was asked for has not happened yet
// when a call returns, as on a device, but always and not only sometimes. Of host memory, for
// tests; one thread.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "csrc/refit/executor.h"

namespace tandem {

class DeferredExecutor final : public Executor {
 public:
  bool is_immediate() const override { return false; }
  Status Copy(const CopyItem* items, int64_t num_items) override {
    ++num_copies_;
    return Defer([items = std::vector<CopyItem>(items, items + num_items)] {
      return HostExecutor()->Copy(items.data(), static_cast<int64_t>(items.size()));
    });
  }
  Status RawCopy(void* target, const void* source, int64_t bytes) override {
    return Defer([=] { return HostExecutor()->RawCopy(target, source, bytes); });
  }
  Status Digest(const DigestItem* items, int64_t num_items, uint64_t* digests) override {
    return Defer([items = std::vector<DigestItem>(items, items + num_items), digests] {
      return HostExecutor()->Digest(items.data(), static_cast<int64_t>(items.size()), digests);
    });
  }
  Status FromHost(void* target, const void* source, int64_t bytes) override {
    return RawCopy(target, source, bytes);
  }
  Status ToHost(void* target, const void* source, int64_t bytes) override {
    return RawCopy(target, source, bytes);
  }
  Status Allocate(int64_t bytes, void** memory) override {
    blocks_.push_back(std::make_unique<uint8_t[]>(static_cast<size_t>(bytes)));
    *memory = blocks_.back().get();
    return OkStatus();
  }
  Status Wait(const Deadline&) override {
    Status status = OkStatus();
    for (const auto& work : waiting_) {
      if (status.ok()) status = work();
    }
    waiting_.clear();
    return status;
  }

  // Calls of Copy, each of which would be a launch.
  int64_t num_copies() const { return num_copies_; }

 private:
  Status Defer(std::function<Status()> work) {
    waiting_.push_back(std::move(work));
    return OkStatus();
  }

  std::vector<std::function<Status()>> waiting_;
  std::vector<std::unique_ptr<uint8_t[]>> blocks_;
  int64_t num_copies_ = 0;
};

}  // namespace tandem
