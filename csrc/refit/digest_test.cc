// The digest against its definition, written out word by word; pieces, threads and alignments; and
// what faults do to it. The backend is the one that the build target links.
#include "csrc/refit/digest.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <random>
#include <set>
#include <vector>

#include "csrc/refit/refit_backend.h"

namespace tandem {
namespace {

constexpr int64_t kB = kDigestBlock;
// What an independent program gives for the bytes of OfCountedBytesIsThisNumber.
constexpr uint64_t kCountedDigest = 0x842BC238E4B7EE6E;

std::vector<unsigned char> RandomBytes(int64_t count, unsigned seed = 5) {
  std::mt19937 random(seed);
  std::vector<unsigned char> bytes(static_cast<size_t>(count));
  for (unsigned char& byte : bytes) byte = static_cast<unsigned char>(random());
  return bytes;
}

// The definition of digest.h, from bytes, without anything of the code under test.
uint64_t Splitmix(uint64_t* state) {
  uint64_t z = (*state += 0x9E3779B97F4A7C15);
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EB;
  return z ^ (z >> 31);
}

uint64_t Mixed(uint64_t z) {
  uint64_t state = z - 0x9E3779B97F4A7C15;
  return Splitmix(&state);
}

uint64_t Expected(const unsigned char* data, int64_t bytes) {
  uint64_t digest = 0;
  for (int64_t begin = 0; begin < bytes; begin += kB) {
    const int64_t count = std::min(kB, bytes - begin);
    uint64_t keys = 0;
    uint64_t h = 0;
    uint64_t s = 0;
    for (int64_t word = 0; word < kB / 8; ++word) {
      uint64_t w = 0;
      for (int64_t k = 7; k >= 0; --k) {
        const int64_t at = word * 8 + k;
        w = w << 8 | (at < count ? data[begin + at] : 0);
      }
      const uint64_t key = Splitmix(&keys);
      const uint64_t low = (w + key) % (1ULL << 32);
      const uint64_t high = ((w >> 32) + (key >> 32)) % (1ULL << 32);
      h += low * high;
      s += w;
    }
    digest += Mixed(h + Mixed(s + Mixed(static_cast<uint64_t>(begin / kB) + 1)) +
                    static_cast<uint64_t>(count));
  }
  return digest;
}

ParallelFor ScatteredFor() {
  return {[](void*, int64_t count, int64_t, RangeBody body, void* context) {
            for (int64_t i = count - 1; i >= 0; --i) body(context, i, i + 1);
          },
          nullptr};
}

std::vector<uint64_t> DigestsOf(const std::vector<DigestItem>& items,
                                const ParallelFor& parallel = SerialFor()) {
  std::vector<uint64_t> digests(items.size(), 0xDEAD);
  const Status status = RefitKernelsUnderTest().digest(
      items.data(), static_cast<int64_t>(items.size()), digests.data(), {parallel, nullptr});
  EXPECT_TRUE(status.ok()) << status.message();
  return digests;
}

uint64_t DigestOf(const std::vector<unsigned char>& bytes) {
  return DigestsOf({{bytes.data(), static_cast<int64_t>(bytes.size()), 0}})[0];
}

TEST(Digest, IsWhatTheDefinitionSays) {
  for (int64_t bytes : {int64_t{1}, int64_t{7}, int64_t{8}, int64_t{9}, int64_t{511}, kB - 1, kB,
                        kB + 1, 2 * kB, 4 * kB - 8, 4 * kB, 4 * kB + 1, 37 * kB + 333}) {
    const std::vector<unsigned char> data = RandomBytes(bytes);
    EXPECT_EQ(DigestOf(data), Expected(data.data(), bytes)) << bytes << " bytes";
  }
}

// Both ends of a wire and both backends must have this one number, whoever built them.
TEST(Digest, OfCountedBytesIsThisNumber) {
  std::vector<unsigned char> data(3000);
  for (size_t i = 0; i < data.size(); ++i) data[i] = static_cast<unsigned char>(i * 7 + i / 256);
  EXPECT_EQ(DigestOf(data), Expected(data.data(), 3000));
  EXPECT_EQ(DigestOf(data), kCountedDigest);
}

TEST(Digest, OfAnEmptyTensorIsZero) {
  EXPECT_EQ(DigestsOf({{nullptr, 0, 0}, {nullptr, 0, 9}}), (std::vector<uint64_t>{0, 0}));
  EXPECT_TRUE(DigestsOf({}).empty());
}

TEST(Digest, DoesNotDependOnTheAlignment) {
  const std::vector<unsigned char> data = RandomBytes(6 * kB + 100);
  for (int64_t shift = 0; shift < 18; ++shift) {
    for (int64_t bytes : {6 * kB, 3 * kB + 17}) {
      const DigestItem item = {data.data() + shift, bytes, 0};
      EXPECT_EQ(DigestsOf({item})[0], Expected(data.data() + shift, bytes)) << shift;
    }
  }
}

TEST(Digest, OfATensorIsTheSumOfItsPieces) {
  const std::vector<unsigned char> data = RandomBytes(23 * kB + 5);
  const auto bytes = static_cast<int64_t>(data.size());
  const uint64_t whole = DigestOf(data);
  for (int64_t cut : {1, 2, 5, 22, 23}) {
    const auto digests =
        DigestsOf({{data.data() + cut * kB, bytes - cut * kB, cut}, {data.data(), cut * kB, 0}});
    EXPECT_EQ(digests[0] + digests[1], whole) << "cut at block " << cut;
  }
  uint64_t sum = 0;
  for (int64_t b = 0; b < 24; ++b) {
    sum += DigestsOf({{data.data() + b * kB, std::min(kB, bytes - b * kB), b}})[0];
  }
  EXPECT_EQ(sum, whole);
}

TEST(Digest, OfManyItemsIsThatOfEachByAnySplit) {
  std::mt19937 random(1);
  const std::vector<unsigned char> data = RandomBytes(200000);
  std::vector<DigestItem> items;
  std::vector<uint64_t> expected;
  for (int i = 0; i < 60; ++i) {
    const int64_t bytes = i % 7 == 0 ? 0 : static_cast<int64_t>(random() % (i % 5 ? 3000 : 90000));
    const auto offset = static_cast<int64_t>(random() % (data.size() - static_cast<size_t>(bytes)));
    items.push_back({data.data() + offset, bytes, 0});
    expected.push_back(Expected(data.data() + offset, bytes));
  }
  EXPECT_EQ(DigestsOf(items), expected);
  EXPECT_EQ(DigestsOf(items, ScatteredFor()), expected);
}

TEST(Digest, SeesOneBitAnywhere) {
  std::vector<unsigned char> data = RandomBytes(2 * kB + 40);
  std::set<uint64_t> seen = {DigestOf(data)};
  size_t changed = 0;
  for (size_t i = 0; i < data.size(); i += 13, ++changed) {
    data[i] ^= static_cast<unsigned char>(1 << i % 8);
    seen.insert(DigestOf(data));
    data[i] ^= static_cast<unsigned char>(1 << i % 8);
  }
  EXPECT_EQ(seen.size(), changed + 1);
}

TEST(Digest, SeesWordsAndBlocksThatChangedPlaces) {
  const std::vector<unsigned char> data = RandomBytes(4 * kB);
  std::set<uint64_t> seen = {DigestOf(data)};
  for (int64_t size : {int64_t{4}, int64_t{8}, int64_t{64}, kB}) {
    std::vector<unsigned char> swapped = data;
    std::swap_ranges(swapped.begin(), swapped.begin() + size, swapped.begin() + 2 * size);
    seen.insert(DigestOf(swapped));
  }
  EXPECT_EQ(seen.size(), 5u);
}

TEST(Digest, SeesTheNumberOfZeros) {
  std::set<uint64_t> seen;
  for (int64_t bytes : {int64_t{0}, int64_t{1}, int64_t{8}, kB - 1, kB, kB + 1, 2 * kB}) {
    seen.insert(DigestOf(std::vector<unsigned char>(static_cast<size_t>(bytes))));
  }
  EXPECT_EQ(seen.size(), 7u);
}

// A word whose keyed half is zero hides the other half from the product, not from the sum.
TEST(Digest, SeesWhatAZeroFactorHides) {
  uint64_t state = 0;
  const uint64_t key = Splitmix(&state);
  std::vector<unsigned char> data(static_cast<size_t>(kB));
  std::set<uint64_t> seen;
  for (uint64_t high : {0u, 1u, 77u}) {
    const uint64_t low = (0 - key) % (1ULL << 32);
    const uint64_t word = high << 32 | low;
    std::memcpy(data.data(), &word, sizeof(word));
    seen.insert(DigestOf(data));
  }
  EXPECT_EQ(seen.size(), 3u);
}

TEST(Digest, RefusesWhatIsNoPiece) {
  if (kRefitIsEmulated) GTEST_SKIP() << "a device's items are in its memory";
  const unsigned char byte = 0;
  uint64_t digest = 0;
  for (const DigestItem& item :
       {DigestItem{nullptr, 1, 0}, DigestItem{&byte, -1, 0}, DigestItem{&byte, 1, -1}}) {
    EXPECT_EQ(RefitKernelsUnderTest().digest(&item, 1, &digest, {SerialFor(), nullptr}).code(),
              StatusCode::kInvalidArgument);
  }
}

}  // namespace
}  // namespace tandem
