#include "csrc/testing/simt_emulator.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <set>
#include <string>

#include "csrc/testing/block_runner.h"

constinit thread_local uint3 threadIdx = {0, 0, 0};
constinit thread_local uint3 blockIdx = {0, 0, 0};
constinit thread_local dim3 blockDim;
constinit thread_local dim3 gridDim;

namespace simt::emulator {
namespace {

uint64_t NumberFromEnvironment(const char* name) {
  const char* text = std::getenv(name);
  return text == nullptr ? 0 : std::strtoull(text, nullptr, 10);
}

Schedule ScheduleFromEnvironment() {
  return {NumberFromEnvironment("SIMT_SEED"), NumberFromEnvironment("SIMT_STRICT") != 0};
}

uint64_t Volume(const dim3& d) { return uint64_t{d.x} * d.y * d.z; }

std::string Text(const dim3& d) {
  char text[64];
  std::snprintf(text, sizeof(text), "(%u, %u, %u)", d.x, d.y, d.z);
  return text;
}

// Adds the kernel's name, without template arguments, to the file that SIMT_COVERAGE names.
void RecordKernel(const char* kernel) {
  const char* path = std::getenv("SIMT_COVERAGE");
  static thread_local std::set<std::string> recorded;
  if (path == nullptr || !recorded.insert(kernel).second) return;
  std::string name = kernel;
  name.erase(0, name.find_first_not_of('('));
  name.erase(std::min(name.find_first_of("<)"), name.size()));
  if (std::FILE* file = std::fopen(path, "a")) {
    std::fprintf(file, "%s\n", name.c_str());
    std::fclose(file);
  }
}

tandem::Status Error(const LaunchConfig& config, const std::string& what) {
  return tandem::Status(tandem::StatusCode::kDeviceError,
                        std::string("kernel ") + config.kernel + ": " + what);
}

// The limits that are the same on all supported devices.
tandem::Status CheckLaunch(const LaunchConfig& config) {
  const dim3& grid = config.grid;
  const dim3& block = config.block;
  if (Volume(grid) == 0 || grid.x > 0x7FFFFFFFu || grid.y > 0xFFFFu || grid.z > 0xFFFFu) {
    return Error(config, "grid " + Text(grid) + ", want 1 ... (2^31 - 1, 65535, 65535)");
  }
  if (Volume(block) == 0 || Volume(block) > kMaxThreads || block.z > 64) {
    return Error(config, "block " + Text(block) + ", want 1 ... 1024 threads, at most 64 in z");
  }
  if (config.shared_bytes < 0 || config.shared_bytes > SharedMemory::kMaxBytes) {
    return Error(config, "dynamic shared memory of " + std::to_string(config.shared_bytes) +
                             " bytes, want 0 ... " + std::to_string(SharedMemory::kMaxBytes));
  }
  return tandem::OkStatus();
}

// Visits 0 ... count - 1 once each, in an order of the seed's: x -> a x + b modulo count.
class BlockOrder {
 public:
  BlockOrder(uint64_t count, uint64_t seed) : count_(count) {
    if (seed == 0) return;
    Random random(seed);
    offset_ = random.Next() % count;
    do {
      step_ = random.Next() % count;
    } while (std::gcd(step_, count) != 1);
  }

  uint64_t At(uint64_t i) const {
    return static_cast<uint64_t>((static_cast<unsigned __int128>(i) * step_ + offset_) % count_);
  }

 private:
  uint64_t count_;
  uint64_t offset_ = 0;
  uint64_t step_ = 1;
};

}  // namespace

tandem::Status RunGrid(const LaunchConfig& config, void (*body)(void*), void* context) {
  if (tandem::Status status = CheckLaunch(config); !status.ok()) return status;
  RecordKernel(config.kernel);
  static thread_local BlockRunner runner;
  const Schedule schedule = ScheduleFromEnvironment();
  gridDim = config.grid;
  blockDim = config.block;
  const uint64_t count = Volume(config.grid);
  const BlockOrder order(count, schedule.seed);
  for (uint64_t i = 0; i < count; ++i) {
    const uint64_t number = order.At(i);
    blockIdx = {static_cast<unsigned>(number % gridDim.x),
                static_cast<unsigned>(number / gridDim.x % gridDim.y),
                static_cast<unsigned>(number / gridDim.x / gridDim.y)};
    const std::string failure = runner.Run(config, schedule, number, body, context);
    if (!failure.empty()) {
      return Error(config, "block " + Text(blockIdx) + ", seed " + std::to_string(schedule.seed) +
                               ": " + failure);
    }
  }
  return tandem::OkStatus();
}

}  // namespace simt::emulator
