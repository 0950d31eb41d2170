#include "csrc/refit/device_executor.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <string>
#include <thread>

namespace tandem {
namespace {

constexpr int64_t kBlockBytes = int64_t{64} << 10;
constexpr int64_t kNumBlocks = 32;
constexpr int64_t kPageBytes = int64_t{256} << 10;
// An item and its entry of the prefix, which has one more.
constexpr int64_t kCopyItems = kBlockBytes / (sizeof(CopyItem) + sizeof(int64_t)) - 1;
constexpr int64_t kDigestItems = kBlockBytes / sizeof(DigestItem);

}  // namespace

Status WaitForEvent(const DeviceOps& ops, Event event, Watch* watch, const Deadline& deadline,
                    const char* what) {
  // A device cannot wake a thread at an event and at a deadline, so it is asked: at once for what
  // is nearly done, then ever more seldom, as each question costs the device's driver.
  auto pause = std::chrono::microseconds(10);
  constexpr auto kLongestPause = std::chrono::microseconds(500);
  for (;;) {
    bool is_done = false;
    if (Status status = ops.is_done(event, &is_done); !status.ok()) return status;
    // Also of one that is done: work that an error cut short counts as done, too.
    if (Status status = watch->Check(); !status.ok() || is_done) return status;
    if (deadline.HasPassed()) {
      return Status(StatusCode::kDeadlineExceeded, std::string(what) + " took longer than allowed");
    }
    std::this_thread::sleep_for(pause);
    pause = std::min(pause * 2, kLongestPause);
  }
}

Status DeviceExecutor::Make(const DeviceOps* ops, Watch* watch,
                            std::unique_ptr<DeviceExecutor>* executor) {
  std::unique_ptr<DeviceExecutor> made(new DeviceExecutor(ops, watch));
  if (Status status = made->Init(); !status.ok()) return status;
  *executor = std::move(made);
  return OkStatus();
}

Status DeviceExecutor::Init() {
  if (Status status = ops_.create_stream(/*is_ordered_with_default=*/true, &stream_); !status.ok())
    return status;
  if (Status status = ops_.create_event(&done_); !status.ok()) return status;
  const int64_t bytes = kBlockBytes * kNumBlocks;
  if (Status status = ops_.allocate_pinned(bytes, &pinned_); !status.ok()) return status;
  if (Status status = ops_.allocate(bytes, &twins_); !status.ok()) return status;
  for (int64_t i = 0; i < kNumBlocks; ++i) {
    Event event = nullptr;
    if (Status status = ops_.create_event(&event); !status.ok()) return status;
    blocks_.push_back({static_cast<unsigned char*>(pinned_) + i * kBlockBytes,
                       static_cast<unsigned char*>(twins_) + i * kBlockBytes, event});
  }
  return OkStatus();
}

DeviceExecutor::~DeviceExecutor() {
  if (stream_ != nullptr) ops_.destroy_stream(stream_);
  for (const Block& block : blocks_) ops_.destroy_event(block.free);
  if (done_ != nullptr) ops_.destroy_event(done_);
  for (void* memory : allocated_) ops_.release(memory);
  for (unsigned char* page : pages_) ops_.release_pinned(page);
  ops_.release(twins_);
  ops_.release_pinned(pinned_);
}

Status DeviceExecutor::TakeBlock(Block** block) {
  *block = &blocks_[next_block_];
  next_block_ = (next_block_ + 1) % blocks_.size();
  return WaitForEvent(ops_, (*block)->free, watch_, deadline_, "work that was enqueued earlier");
}

Status DeviceExecutor::Copy(const CopyItem* items, int64_t num_items) {
  for (int64_t begin = 0; begin < num_items; begin += kCopyItems) {
    const int64_t count = std::min(kCopyItems, num_items - begin);
    if (Status status = CopySome(items + begin, count); !status.ok()) return status;
  }
  return OkStatus();
}

Status DeviceExecutor::CopySome(const CopyItem* items, int64_t num_items) {
  Block* block = nullptr;
  if (Status status = TakeBlock(&block); !status.ok()) return status;
  auto* prefix = reinterpret_cast<int64_t*>(block->host);
  int64_t tiles = 0;
  for (int64_t i = 0; i < num_items; ++i) {
    prefix[i] = tiles;
    tiles += (items[i].numel + kTileElements - 1) / kTileElements;
  }
  prefix[num_items] = tiles;
  const int64_t prefix_bytes = (num_items + 1) * static_cast<int64_t>(sizeof(int64_t));
  const int64_t item_bytes = num_items * static_cast<int64_t>(sizeof(CopyItem));
  std::memcpy(block->host + prefix_bytes, items, static_cast<size_t>(item_bytes));
  Status status = ops_.copy(block->device, block->host, prefix_bytes + item_bytes, stream_);
  if (!status.ok()) return status;
  status = ops_.bucket_copy(reinterpret_cast<const CopyItem*>(block->device + prefix_bytes),
                            reinterpret_cast<const int64_t*>(block->device), num_items, tiles,
                            {{}, stream_});
  return status.ok() ? ops_.record(block->free, stream_) : status;
}

Status DeviceExecutor::RawCopy(void* target, const void* source, int64_t bytes) {
  return bytes == 0 ? OkStatus() : ops_.copy(target, source, bytes, stream_);
}

Status DeviceExecutor::Digest(const DigestItem* items, int64_t num_items, uint64_t* digests) {
  for (int64_t begin = 0; begin < num_items; begin += kDigestItems) {
    const int64_t count = std::min(kDigestItems, num_items - begin);
    if (Status status = DigestSome(items + begin, count, digests + begin); !status.ok())
      return status;
  }
  return OkStatus();
}

Status DeviceExecutor::DigestSome(const DigestItem* items, int64_t num_items, uint64_t* digests) {
  Block* block = nullptr;
  if (Status status = TakeBlock(&block); !status.ok()) return status;
  const int64_t bytes = num_items * static_cast<int64_t>(sizeof(DigestItem));
  std::memcpy(block->host, items, static_cast<size_t>(bytes));
  Status status = ops_.copy(block->device, block->host, bytes, stream_);
  if (!status.ok()) return status;
  status = ops_.digest(reinterpret_cast<const DigestItem*>(block->device), num_items, digests,
                       {{}, stream_});
  return status.ok() ? ops_.record(block->free, stream_) : status;
}

Status DeviceExecutor::FromHost(void* target, const void* source, int64_t bytes) {
  for (int64_t begin = 0; begin < bytes; begin += kBlockBytes) {
    const int64_t size = std::min(kBlockBytes, bytes - begin);
    Block* block = nullptr;
    if (Status status = TakeBlock(&block); !status.ok()) return status;
    std::memcpy(block->host, static_cast<const unsigned char*>(source) + begin,
                static_cast<size_t>(size));
    Status status =
        ops_.copy(static_cast<unsigned char*>(target) + begin, block->host, size, stream_);
    if (status.ok()) status = ops_.record(block->free, stream_);
    if (!status.ok()) return status;
  }
  return OkStatus();
}

Status DeviceExecutor::TakeReadback(int64_t bytes, unsigned char** pinned, int64_t* taken) {
  const auto page = static_cast<size_t>(read_back_ / kPageBytes);
  const int64_t offset = read_back_ % kPageBytes;
  if (page == pages_.size()) {  // in the first refit; later ones find the pages
    void* memory = nullptr;
    if (Status status = ops_.allocate_pinned(kPageBytes, &memory); !status.ok()) return status;
    pages_.push_back(static_cast<unsigned char*>(memory));
  }
  *pinned = pages_[page] + offset;
  *taken = std::min(bytes, kPageBytes - offset);
  read_back_ += *taken;
  return OkStatus();
}

Status DeviceExecutor::ToHost(void* target, const void* source, int64_t bytes) {
  for (int64_t begin = 0; begin < bytes;) {
    unsigned char* pinned = nullptr;
    int64_t taken = 0;
    if (Status status = TakeReadback(bytes - begin, &pinned, &taken); !status.ok()) return status;
    Status status =
        ops_.copy(pinned, static_cast<const unsigned char*>(source) + begin, taken, stream_);
    if (!status.ok()) return status;
    readbacks_.push_back({static_cast<unsigned char*>(target) + begin, pinned, taken});
    begin += taken;
  }
  return OkStatus();
}

Status DeviceExecutor::Allocate(int64_t bytes, void** memory) {
  if (Status status = ops_.allocate(bytes, memory); !status.ok()) return status;
  allocated_.push_back(*memory);
  return OkStatus();
}

Status DeviceExecutor::Wait(const Deadline& deadline) {
  Status status = ops_.record(done_, stream_);
  if (status.ok()) {
    status = WaitForEvent(ops_, done_, watch_, deadline, "the work of a refit on the device");
  }
  // A failed wait leaves nothing behind that would be written to its targets later.
  for (const Readback& readback : readbacks_) {
    if (!status.ok()) break;
    std::memcpy(readback.target, readback.pinned, static_cast<size_t>(readback.bytes));
  }
  readbacks_.clear();
  read_back_ = 0;
  return status;
}

}  // namespace tandem
