// The shared memory of one emulated block: arrays by the place of their declaration, poisoned when
// the block first sees them, with guards between them.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace simt::emulator {

class SharedMemory {
 public:
  // What a block may have on every supported device: static arrays, and all together.
  static constexpr int64_t kMaxStaticBytes = int64_t{48} << 10;
  static constexpr int64_t kMaxBytes = int64_t{227} << 10;
  static constexpr int kMaxArrays = 64;
  static constexpr int64_t kGuardBytes = 128;
  static constexpr int64_t kMemoryBytes =
      kMaxStaticBytes + kMaxBytes + 3 * kMaxArrays * kGuardBytes;

  SharedMemory();
  ~SharedMemory();

  // Forgets the arrays of the block before.
  void StartBlock(int64_t dynamic_bytes, uint8_t poison);

  // The array that was declared at `site`, or null when static memory is used up.
  void* Static(const void* site, const char* name, int64_t bytes, int64_t alignment);
  void* Dynamic() const { return dynamic_; }

  // Of an address in an array of this block; -1 of any other.
  int64_t OffsetOf(const void* address) const {
    const int64_t offset = static_cast<const unsigned char*>(address) - memory_.get();
    return offset >= 0 && offset < used_ ? offset : -1;
  }
  std::string Describe(int64_t offset) const;

  // Names an array outside whose bounds something was written, or nothing.
  std::string FindOverrun() const;

 private:
  struct Array {
    const void* site;
    const char* name;
    unsigned char* data;
    int64_t bytes;
  };

  unsigned char* Place(const void* site, const char* name, int64_t bytes, int64_t alignment);

  std::unique_ptr<unsigned char[]> memory_;
  int64_t used_ = 0;
  int64_t static_bytes_ = 0;
  uint8_t poison_ = 0;
  std::vector<Array> arrays_;
  unsigned char* dynamic_ = nullptr;
};

}  // namespace simt::emulator
