#include "csrc/testing/nccl/host_device.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <map>
#include <utility>

namespace tandem::testing {
namespace {

constexpr size_t kAlignment = 4096;
constexpr int kNumKinds = 4;
enum Kind { kDeviceBlock, kPinnedBlock, kStream, kEvent };

struct Counts {
  std::array<std::atomic<int64_t>, kNumKinds> made{};
  std::array<std::atomic<int64_t>, kNumKinds> alive{};
};
Counts counts;

void Count(Kind kind, int change) {
  if (change > 0) ++counts.made[kind];
  counts.alive[kind] += change;
}

// Microseconds that a stream may dawdle before each piece of work, so that an order which nothing
// enforces does not come about by luck. 0 without TANDEM_TEST_DEVICE_JITTER_US.
uint64_t JitterMicroseconds() {
  static const uint64_t jitter = [] {
    const char* text = std::getenv("TANDEM_TEST_DEVICE_JITTER_US");
    return text == nullptr ? uint64_t{0} : std::strtoull(text, nullptr, 10);
  }();
  return jitter;
}

void Dawdle() {
  if (JitterMicroseconds() == 0) return;
  static std::atomic<uint64_t> state{1};
  uint64_t x = state.fetch_add(0x9E3779B97F4A7C15ull);
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ (x >> 27)) % (JitterMicroseconds() + 1);
  std::this_thread::sleep_for(std::chrono::microseconds(x));
}

// Blocks of device memory by their start.
struct Blocks {
  std::mutex mutex;
  std::map<const unsigned char*, size_t> sizes;
};
Blocks& DeviceBlocks() {
  static auto* blocks = new Blocks;
  return *blocks;
}

// Numbers its records, so that an older one never counts for a newer.
struct EventState {
  std::mutex mutex;
  std::condition_variable changed;
  uint64_t recorded = 0;
  uint64_t done = 0;
  std::shared_ptr<HostStream::Error> error;

  void Finish(uint64_t number) {
    const std::lock_guard<std::mutex> lock(mutex);
    done = std::max(done, number);
    changed.notify_all();
  }
  void Wait(uint64_t number) {
    std::unique_lock<std::mutex> lock(mutex);
    changed.wait(lock, [&] { return done >= number; });
  }
};
using SharedEvent = std::shared_ptr<EventState>;

SharedEvent& EventOf(Event event) { return *static_cast<SharedEvent*>(event); }

Status UseDevice(int device);

Status CreateStream(bool, Stream* stream) {
  *stream = new HostStream;
  return OkStatus();
}
void DestroyStream(Stream stream) { delete StreamOf(stream); }

Status CreateEvent(Event* event) {
  *event = new SharedEvent(std::make_shared<EventState>());
  Count(kEvent, 1);
  return OkStatus();
}
void DestroyEvent(Event event) {
  delete static_cast<SharedEvent*>(event);
  Count(kEvent, -1);
}

Status Record(Event event, Stream stream) {
  SharedEvent state = EventOf(event);
  uint64_t number = 0;
  {
    const std::lock_guard<std::mutex> lock(state->mutex);
    number = ++state->recorded;
    state->error = StreamOf(stream)->error();
  }
  StreamOf(stream)->Enqueue([state, number] { state->Finish(number); });
  return OkStatus();
}

Status StreamWait(Stream stream, Event event) {
  SharedEvent state = EventOf(event);
  uint64_t number = 0;
  {
    const std::lock_guard<std::mutex> lock(state->mutex);
    number = state->recorded;
  }
  StreamOf(stream)->Enqueue([state, number] { state->Wait(number); });
  return OkStatus();
}

Status IsDone(Event event, bool* done) {
  const SharedEvent& state = EventOf(event);
  const std::lock_guard<std::mutex> lock(state->mutex);
  *done = state->done >= state->recorded;
  return state->error == nullptr ? OkStatus() : state->error->Get();
}

void* AlignedBlock(int64_t bytes) {
  const size_t size = (static_cast<size_t>(bytes) + kAlignment - 1) / kAlignment * kAlignment;
  return std::aligned_alloc(kAlignment, std::max(size, kAlignment));
}

void Release(void* memory) {
  if (memory != nullptr) ReleaseDeviceMemory(memory);
}

Status AllocatePinned(int64_t bytes, void** memory) {
  *memory = AlignedBlock(bytes);
  if (*memory == nullptr) {
    return Status(StatusCode::kUnavailable, "no " + std::to_string(bytes) + " bytes of memory");
  }
  Count(kPinnedBlock, 1);
  return OkStatus();
}
void ReleasePinned(void* memory) {
  if (memory == nullptr) return;
  std::free(memory);
  Count(kPinnedBlock, -1);
}

Status Copy(void* target, const void* source, int64_t bytes, Stream stream) {
  StreamOf(stream)->Enqueue([=] { std::memcpy(target, source, static_cast<size_t>(bytes)); });
  return OkStatus();
}

Status CopyBucket(const CopyItem* items, const int64_t* tile_prefix, int64_t num_items,
                  int64_t num_tiles, const Execution& execution) {
  HostStream* stream = StreamOf(execution.stream);
  stream->Enqueue([=, error = stream->error()] {
    error->Set(cpu::BucketCopy(items, tile_prefix, num_items, num_tiles, {SerialFor(), nullptr}));
  });
  return OkStatus();
}

Status DigestItems(const DigestItem* items, int64_t num_items, uint64_t* digests,
                   const Execution& execution) {
  HostStream* stream = StreamOf(execution.stream);
  stream->Enqueue([=, error = stream->error()] {
    error->Set(cpu::Digest(items, num_items, digests, {SerialFor(), nullptr}));
  });
  return OkStatus();
}

thread_local int current_device = 0;

Status UseDevice(int device) {
  if (device < 0) return InvalidArgument("device: want at least 0, got %d", device);
  current_device = device;
  return OkStatus();
}

}  // namespace

HostStream::HostStream() : thread_([this] { Run(); }) { Count(kStream, 1); }

HostStream::~HostStream() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    is_ending_ = true;
    changed_.notify_all();
  }
  thread_.join();
  Count(kStream, -1);
}

void HostStream::Enqueue(std::function<void()> work) {
  const std::lock_guard<std::mutex> lock(mutex_);
  work_.push_back(std::move(work));
  changed_.notify_all();
}

void HostStream::Run() {
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    changed_.wait(lock, [&] { return is_ending_ || !work_.empty(); });
    if (work_.empty()) return;
    const std::function<void()> work = std::move(work_.front());
    work_.pop_front();
    lock.unlock();
    Dawdle();
    work();
    lock.lock();
  }
}

void HostStream::Error::Set(const Status& status) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (status_.ok() && !status.ok()) status_ = status;
}

Status HostStream::Error::Get() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return status_;
}

HostStream* StreamOf(Stream stream) { return static_cast<HostStream*>(stream); }

bool IsDeviceMemory(const void* data, size_t bytes) {
  Blocks& blocks = DeviceBlocks();
  const std::lock_guard<std::mutex> lock(blocks.mutex);
  const auto* start = static_cast<const unsigned char*>(data);
  auto next = blocks.sizes.upper_bound(start);
  if (next == blocks.sizes.begin()) return false;
  const auto& [block, size] = *--next;
  return start + bytes <= block + size;
}

Status AllocateDeviceMemory(int64_t bytes, void** memory) {
  *memory = AlignedBlock(bytes);
  if (*memory == nullptr) {
    return Status(StatusCode::kUnavailable, "no " + std::to_string(bytes) + " bytes of memory");
  }
  Count(kDeviceBlock, 1);
  Blocks& blocks = DeviceBlocks();
  const std::lock_guard<std::mutex> lock(blocks.mutex);
  blocks.sizes[static_cast<unsigned char*>(*memory)] = static_cast<size_t>(bytes);
  return OkStatus();
}

bool ReleaseDeviceMemory(void* memory) {
  Blocks& blocks = DeviceBlocks();
  {
    const std::lock_guard<std::mutex> lock(blocks.mutex);
    if (blocks.sizes.erase(static_cast<unsigned char*>(memory)) == 0) return false;
  }
  std::free(memory);
  Count(kDeviceBlock, -1);
  return true;
}

int CurrentDevice() { return current_device; }

}  // namespace tandem::testing

extern "C" {

__attribute__((visibility("default"))) const tandem::DeviceOps* TandemDeviceOps() {
  using namespace tandem::testing;
  static const tandem::DeviceOps ops = {
      .size_bytes = sizeof(tandem::DeviceOps),
      .name = "host",
      .use_device = &UseDevice,
      .create_stream = &CreateStream,
      .destroy_stream = &DestroyStream,
      .create_event = &CreateEvent,
      .destroy_event = &DestroyEvent,
      .record = &Record,
      .stream_wait = &StreamWait,
      .is_done = &IsDone,
      .allocate = &AllocateDeviceMemory,
      .release = &Release,
      .allocate_pinned = &AllocatePinned,
      .release_pinned = &ReleasePinned,
      .copy = &Copy,
      .bucket_copy = &CopyBucket,
      .digest = &DigestItems,
  };
  return &ops;
}

__attribute__((visibility("default"))) void tandem_test_device_counts(int64_t values[8]) {
  using tandem::testing::counts;
  for (int i = 0; i < 4; ++i) {
    values[i] = counts.made[i];
    values[4 + i] = counts.alive[i];
  }
}

}  // extern "C"
