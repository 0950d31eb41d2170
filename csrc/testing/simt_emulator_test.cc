// The emulator on kernels with known results, for each schedule that the environment asks for, and
// on broken ones, which it must name.
#include "csrc/testing/simt_emulator.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <numeric>
#include <string>
#include <vector>

#include "csrc/testing/emulator_kernels.h"

namespace tandem::testing {
namespace {

// A variable of the environment for the time of a scope.
class ScopedVariable {
 public:
  ScopedVariable(const char* name, const char* value) : name_(name) {
    if (const char* old = std::getenv(name)) old_ = old;
    had_ = std::getenv(name) != nullptr;
    setenv(name, value, 1);
  }
  ~ScopedVariable() { had_ ? setenv(name_, old_.c_str(), 1) : unsetenv(name_); }

 private:
  const char* name_;
  std::string old_;
  bool had_ = false;
};

constexpr int kUntouched = -1;
constexpr uint32_t kAll = 0xFFFFFFFFu;

TEST(SimtEmulator, EveryThreadOfAThreeDimensionalGridRunsOnceWithItsOwnIndices) {
  const Shape shape = {{3, 4, 2}, {5, 3, 4}};
  std::vector<int64_t> threads(3 * 4 * 2 * 60, kUntouched);
  std::vector<int64_t> blocks(threads.size(), kUntouched);
  ASSERT_TRUE(WriteIndices(shape, threads.data(), blocks.data()).ok());
  for (size_t i = 0; i < threads.size(); ++i) {
    EXPECT_EQ(threads[i], static_cast<int64_t>(i % 60));
    EXPECT_EQ(blocks[i], static_cast<int64_t>(i / 60));
  }
}

// What CUDA's documentation says each of the eight shuffles of the kernel gives, or -1 where that
// is undefined because the source does not take part.
int ExpectedLane(int which, int lane, int width) {
  const int begin = lane / width * width;
  const int end = begin + width;
  switch (which) {
    case 0:
      return begin + 3 % width;
    case 1:
      return begin + (lane + 1) % width;
    case 2:
    case 3: {
      const int source = lane ^ (which == 2 ? 1 : width / 2);
      return source < end ? source : lane;
    }
    case 4:
    case 5: {
      const int source = lane + (which == 4 ? 1 : 5);
      return source < end ? source : lane;
    }
    default: {
      const int source = lane - (which == 6 ? 1 : 5);
      return source >= begin ? source : lane;
    }
  }
}

void ExpectShuffles(int threads, uint32_t mask, int width) {
  SCOPED_TRACE(::testing::Message() << threads << " threads, mask " << mask << ", width " << width);
  std::vector<int> out(8 * static_cast<size_t>(threads), kUntouched);
  const Status status = Shuffles(threads, mask, width, out.data());
  ASSERT_TRUE(status.ok()) << status.message();
  for (int which = 0; which < 8; ++which) {
    for (int i = 0; i < threads; ++i) {
      const int lane = i % 32;
      if ((mask >> lane & 1) == 0) {
        EXPECT_EQ(out[which * threads + i], kUntouched);
        continue;
      }
      const int source = i - lane + ExpectedLane(which, lane, width);
      const bool takes_part = source < threads && (mask >> (source % 32) & 1) != 0;
      EXPECT_EQ(out[which * threads + i], takes_part ? 100 + source : -1)
          << "shuffle " << which << " of thread " << i;
    }
  }
}

TEST(SimtEmulator, ShufflesReadTheLaneThatCudaReads) {
  for (int width : {32, 16, 8, 4, 2}) ExpectShuffles(64, kAll, width);
  ExpectShuffles(1024, kAll, 32);
}

TEST(SimtEmulator, ShufflesOfPartOfAWarpReadItsLanesOnly) {
  ExpectShuffles(40, kAll, 32);  // the second warp has eight lanes
  ExpectShuffles(1, kAll, 32);
  ScopedVariable lenient("SIMT_STRICT", "0");
  ExpectShuffles(64, 0x0000FFFFu, 16);
  ExpectShuffles(64, 0x5555AAAAu, 32);
  ExpectShuffles(32, 0x80000001u, 32);
}

TEST(SimtEmulator, VotesCountTheLanesOfTheMask) {
  constexpr int kThreads = 40;
  constexpr uint32_t kThirds = 0x49249249u;
  std::vector<uint32_t> out(4 * kThreads);
  ASSERT_TRUE(Votes(kThreads, kAll, out.data()).ok());
  for (int i = 0; i < kThreads; ++i) {
    const uint32_t lanes = i < 32 ? kAll : 0xFFu;
    EXPECT_EQ(out[i], kThirds & lanes);
    EXPECT_EQ(out[kThreads + i], i < 32 ? 1u : 0u);
    EXPECT_EQ(out[2 * kThreads + i], i < 32 ? 0u : 1u);
    EXPECT_EQ(out[3 * kThreads + i] & ~lanes, 0u);
    EXPECT_NE(out[3 * kThreads + i] >> (i % 32) & 1, 0u);
  }
}

TEST(SimtEmulator, HalvesOfAWarpVoteByThemselves) {
  std::vector<uint32_t> out(32);
  ASSERT_TRUE(Halves(out.data()).ok());
  for (int lane = 0; lane < 32; ++lane) EXPECT_EQ(out[lane], lane < 16 ? 0xAAAAu : 0xAAAA0000u);
}

TEST(SimtEmulator, EightBytesGoThroughAShuffle) {
  std::vector<double> out(32);
  ASSERT_TRUE(Doubles(out.data()).ok());
  for (int lane = 0; lane < 32; ++lane) EXPECT_EQ(out[lane], 1.0 / (32.0 - lane));
}

TEST(SimtEmulator, AtomicsAddUpInEveryOrder) {
  constexpr int kThreads = 1023;
  std::vector<int32_t> signed_out(3);
  std::vector<uint32_t> out(7);
  ASSERT_TRUE(Atomics(kThreads, signed_out.data(), out.data()).ok());
  EXPECT_EQ(signed_out, (std::vector<int32_t>{-kThreads, kThreads - 8, 8 - kThreads}));
  std::vector<uint32_t> expected = {0, 0, 0, 0, 0x80000000u, kAll, 2 * kThreads};
  for (uint32_t i = 0; i < kThreads; ++i) expected[i % 4] += i;
  EXPECT_EQ(out, expected);
}

std::vector<float> SumsOf(int threads) {
  std::vector<float> x(1000);
  std::iota(x.begin(), x.end(), 1.0f);
  std::vector<float> out(3);
  const Status status = NestedBarriers(3, threads, 4, x.data(), 1000, out.data());
  EXPECT_TRUE(status.ok()) << status.message();
  return out;
}

TEST(SimtEmulator, BarriersInNestedLoopsKeepTheBlockInStep) {
  for (int threads : {1, 2, 64, 256, 1024}) {
    EXPECT_EQ(SumsOf(threads), (std::vector<float>{2002000, 4004000, 6006000})) << threads;
  }
}

TEST(SimtEmulator, ACorrectKernelGivesTheSameUnderEverySeed) {
  const std::vector<float> expected = SumsOf(128);
  for (int seed = 1; seed < 40; ++seed) {
    ScopedVariable order("SIMT_SEED", std::to_string(seed).c_str());
    EXPECT_EQ(SumsOf(128), expected) << "seed " << seed;
  }
}

TEST(SimtEmulator, SyncwarpOrdersTheSharedMemoryOfAWarp) {
  std::vector<int> out(1024);
  const Status status = WarpPrefix(32, out.data());
  ASSERT_TRUE(status.ok()) << status.message();
  for (int i = 0; i < 1024; ++i) {
    const int first = i / 32 * 32;
    EXPECT_EQ(out[i], (first + i) * (i - first + 1) / 2);
  }
}

TEST(SimtEmulator, SyncwarpsOfPartsOrderWhatTheirLanesHaveInCommon) {
  std::vector<int> out(32);
  const Status status = HalvesThenWarp(out.data());
  ASSERT_TRUE(status.ok()) << status.message();
  EXPECT_EQ(out, std::vector<int>(32, 7));
}

TEST(SimtEmulator, SyncwarpsOfPartsOrderWritesAfterReads) {
  std::vector<int> out(16);
  const Status status = HalfAfterReads(out.data());
  ASSERT_TRUE(status.ok()) << status.message();
  EXPECT_EQ(out, std::vector<int>(16, 7));
}

TEST(SimtEmulator, InstancesOfATemplateHaveTheirOwnSharedArrays) {
  std::vector<float> floats(32);
  std::vector<double> doubles(32);
  const Status status = TwoTypes(floats.data(), doubles.data());
  ASSERT_TRUE(status.ok()) << status.message();
  for (int i = 0; i < 32; ++i) {
    EXPECT_EQ(floats[i], static_cast<float>(31 - i) / 3);
    EXPECT_EQ(doubles[i], static_cast<double>(31 - i) / 3);
  }
}

TEST(SimtEmulator, SeedsAreDifferentSchedules) {
  // The block that runs last tells: its threads write over those of all others.
  std::vector<int64_t> last_blocks;
  for (const char* seed : {"0", "1", "2", "3", "4", "5"}) {
    ScopedVariable order("SIMT_SEED", seed);
    int64_t last = kUntouched;
    auto body = [](void* context) { *static_cast<int64_t*>(context) = blockIdx.x; };
    ASSERT_TRUE(simt::emulator::RunGrid({"Last", dim3(64), dim3(1), 0}, body, &last).ok());
    last_blocks.push_back(last);
  }
  EXPECT_EQ(last_blocks[0], 63);
  EXPECT_NE(last_blocks, std::vector<int64_t>(6, 63));
}

TEST(SimtEmulator, SharedMemoryStartsAsNotANumberOrHuge) {
  for (const char* seed : {"0", "1", "2"}) {
    ScopedVariable order("SIMT_SEED", seed);
    float value = 0.0f;
    auto body = [](void* context) {
      std::memcpy(context, simt::emulator::DynamicShared(), sizeof(float));
    };
    ASSERT_TRUE(simt::emulator::RunGrid({"Poison", dim3(1), dim3(1), 4}, body, &value).ok());
    EXPECT_FALSE(std::abs(value) < 1e37f) << value;
  }
}

struct Report {
  Fault fault;
  std::vector<const char*> words;
};

void ExpectReport(const Report& report) {
  std::vector<float> out(64);
  const Status status = Break(report.fault, out.data());
  EXPECT_EQ(status.code(), StatusCode::kDeviceError) << static_cast<int>(report.fault);
  for (const char* word : report.words) {
    EXPECT_NE(status.message().find(word), std::string::npos)
        << "no \"" << word << "\" in: " << status.message();
  }
}

class Reports : public ::testing::TestWithParam<const char*> {
 protected:
  Reports() : strict_("SIMT_STRICT", "1"), seed_("SIMT_SEED", GetParam()) {}

  ScopedVariable strict_;
  ScopedVariable seed_;
};

INSTANTIATE_TEST_SUITE_P(Seeds, Reports, ::testing::Values("0", "3", "7", "11"));

TEST_P(Reports, TheCorrectKernelHasNone) {
  std::vector<float> out(64);
  const Status status = Break(Fault::kNone, out.data());
  EXPECT_TRUE(status.ok()) << status.message();
  EXPECT_EQ(out, std::vector<float>(64, 1.0f));
}

TEST_P(Reports, ABarrierThatAThreadNeverReaches) {
  ExpectReport({Fault::kBarrierNotReached,
                {"deadlock", "63 threads from (0, 0, 0): __syncthreads at",
                 "1 thread from (37, 0, 0): __ballot_sync(0xffffffff) at", "faulty_kernels.cu:"}});
}

TEST_P(Reports, ThreadsAtDifferentBarriers) {
  ExpectReport({Fault::kTwoBarriers,
                {"divergence", "37 threads from (0, 0, 0): __syncthreads at",
                 "27 threads from (37, 0, 0): __syncthreads at"}});
}

TEST_P(Reports, MasksThatDoNotFit) {
  ExpectReport({Fault::kLaneOutsideItsMask, {"mask: lane 31 is not in the mask that it names"}});
  ExpectReport({Fault::kDifferentMasks, {"mask", "different masks"}});
}

TEST_P(Reports, LanesAtDifferentIntrinsics) {
  ExpectReport({Fault::kTwoShuffles, {"divergence", "16 threads from", "__shfl_xor_sync"}});
}

TEST_P(Reports, ALaneThatNeverArrives) {
  ExpectReport({Fault::kLaneNeverArrives,
                {"deadlock", "31 threads from (32, 0, 0): __syncwarp(0xffffffff) at",
                 "33 threads from (0, 0, 0): __syncthreads"}});
}

TEST_P(Reports, EarlyExitsInStrictModeOnly) {
  ExpectReport({Fault::kExitBeforeBarrier, {"early exit", "1 thread from (37, 0, 0): returned"}});
  ExpectReport({Fault::kExitedLaneInMask, {"early exit: lane 5"}});
  ScopedVariable lenient("SIMT_STRICT", "0");
  std::vector<float> out(64);
  EXPECT_TRUE(Break(Fault::kExitBeforeBarrier, out.data()).ok());
  EXPECT_TRUE(Break(Fault::kExitedLaneInMask, out.data()).ok());
}

TEST_P(Reports, TooMuchSharedMemory) {
  ExpectReport({Fault::kTooMuchStatic, {"shared memory: no room for second [16388 bytes]"}});
}

#ifndef __SANITIZE_ADDRESS__  // whose own reports come first, and end the process

TEST_P(Reports, UninitialisedSharedMemory) {
  ExpectReport(
      {Fault::kUninitialisedStatic, {"uninitialised: thread (26, 0, 0) reads byte 148 of values"}});
  ExpectReport({Fault::kUninitialisedDynamic,
                {"uninitialised: thread (26, 0, 0) reads byte 148 of dynamic shared memory"}});
}

TEST_P(Reports, RacesWhateverTheOrder) {
  ExpectReport({Fault::kRaceBetweenWarps, {"race", "of values, which thread"}});
  ExpectReport({Fault::kRaceInWarp, {"race", "of values, which thread"}});
  // The one half may read before the other has written at all.
  ExpectReport({Fault::kRaceBetweenHalves, {"of values, which"}});
  ExpectReport({Fault::kRaceWithAtomics, {"race", "of values, which"}});
  ExpectReport({Fault::kRaceOfAnAtomic, {"race", "of values, which"}});
  ExpectReport({Fault::kWriteAfterRead, {"race", "of values, which thread"}});
}

TEST_P(Reports, WritesOutsideOfAnArray) {
  ExpectReport({Fault::kOverrunStatic, {"outside of values"}});
  ExpectReport({Fault::kUnderrunDynamic, {"outside of dynamic shared memory"}});
}

#else

TEST_P(Reports, WritesOutsideOfAnArrayEndTheProcess) {
  std::vector<float> out(64);
  EXPECT_DEATH(static_cast<void>(Break(Fault::kOverrunStatic, out.data())), "use-after-poison");
  EXPECT_DEATH(static_cast<void>(Break(Fault::kUnderrunDynamic, out.data())), "use-after-poison");
}

#endif

TEST(SimtEmulator, LaunchesBeyondADevicesLimitsAreRefused) {
  std::vector<int64_t> out(4096);
  const std::vector<Shape> bad = {
      {{1, 1, 1}, {1025, 1, 1}},
      {{1, 1, 1}, {1, 1, 65}},
      {{0, 1, 1}, {1, 1, 1}},
      {{1, 65536, 1}, {1, 1, 1}},
      {{1, 1, 1}, {1, 0, 1}},
      {{1, 1, 1}, {1, 1, 1}, -1},
      {{1, 1, 1}, {1, 1, 1}, (227 << 10) + 1},
  };
  for (const Shape& shape : bad) {
    const Status status = WriteIndices(shape, out.data(), out.data());
    EXPECT_EQ(status.code(), StatusCode::kDeviceError);
    EXPECT_NE(status.message().find("IndicesKernel"), std::string::npos) << status.message();
  }
  EXPECT_TRUE(WriteIndices({{1, 1, 1}, {32, 32, 1}, 227 << 10}, out.data(), out.data()).ok());
}

}  // namespace
}  // namespace tandem::testing
