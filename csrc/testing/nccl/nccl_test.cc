// The strict NCCL refuses, with a message, what the real one answers with a hang or with undefined
// behaviour; and what is right goes through. Ranks are threads here. TANDEM_TEST_NCCL is the
// library's path.
#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>
#include <functional>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "csrc/refit/deadline.h"
#include "csrc/refit/device_ops.h"
#include "csrc/refit/nccl_api.h"

namespace tandem {
namespace {

const nccl::Api& Nccl() {
  static const nccl::Api* api = nullptr;
  if (api == nullptr) {
    const Status status = nccl::LoadApi(std::getenv("TANDEM_TEST_NCCL"), &api);
    EXPECT_TRUE(status.ok()) << status.message();
  }
  return *api;
}

const DeviceOps& Device() {
  static const DeviceOps* ops = nullptr;
  if (ops == nullptr) {
    const Status status = LoadDeviceOps(std::getenv("TANDEM_TEST_NCCL"), &ops);
    EXPECT_TRUE(status.ok()) << status.message();
  }
  return *ops;
}

nccl::UniqueId NewId() {
  nccl::UniqueId id;
  EXPECT_EQ(Nccl().get_unique_id(&id), nccl::kSuccess);
  return id;
}

// A rank: a communicator, a stream and device memory.
class Rank {
 public:
  Rank() {
    EXPECT_TRUE(Device().create_stream(false, &stream).ok());
    EXPECT_TRUE(Device().create_event(&event_).ok());
    void* data = nullptr;
    EXPECT_TRUE(Device().allocate(kBytes, &data).ok());
    memory = static_cast<unsigned char*>(data);
  }
  ~Rank() {
    if (comm != nullptr) Nccl().comm_abort(comm);
    Device().destroy_stream(stream);
    Device().destroy_event(event_);
    Device().release(memory);
  }
  Rank(const Rank&) = delete;
  Rank& operator=(const Rank&) = delete;

  nccl::Result Init(const nccl::UniqueId& id, int num_ranks, int rank) {
    nccl::Config config;
    config.blocking = 0;
    return Follow(Nccl().comm_init_rank_config(&comm, num_ranks, id, rank, &config));
  }

  nccl::Result Broadcast(size_t count, nccl::DataType type = nccl::kUint8, int root = 0) {
    return Finish(Nccl().broadcast(memory, memory, count, type, root, comm, stream));
  }
  nccl::Result AllReduce(size_t count, nccl::DataType type, nccl::RedOp op) {
    return Finish(Nccl().all_reduce(memory, memory, count, type, op, comm, stream));
  }

  // The state when nothing is in progress any more; kInProgress after 20 s.
  nccl::Result Follow(nccl::Result result) {
    const Deadline deadline = Deadline::In(20);
    while (result == nccl::kInProgress && !deadline.HasPassed()) {
      if (Nccl().comm_get_async_error(comm, &result) != nccl::kSuccess) return nccl::kInternalError;
      std::this_thread::yield();
    }
    return result;
  }

  // Of a collective: also when it is done on the stream.
  nccl::Result Finish(nccl::Result result) {
    result = Follow(result);
    if (result != nccl::kSuccess) return result;
    EXPECT_TRUE(Device().record(event_, stream).ok());
    const Deadline deadline = Deadline::In(20);
    bool is_done = false;
    while (!is_done && !deadline.HasPassed()) {
      EXPECT_TRUE(Device().is_done(event_, &is_done).ok());
      std::this_thread::yield();
    }
    EXPECT_TRUE(is_done);
    nccl::Result error = nccl::kSuccess;
    EXPECT_EQ(Nccl().comm_get_async_error(comm, &error), nccl::kSuccess);
    return error;
  }

  std::string error() const { return Nccl().get_last_error(comm); }

  static constexpr int64_t kBytes = 3 << 20;
  nccl::Comm comm = nullptr;
  Stream stream = nullptr;
  unsigned char* memory = nullptr;

 private:
  Event event_ = nullptr;
};

// Runs a function of every rank in a thread of its own.
void InThreads(int count, const std::function<void(int)>& run) {
  std::vector<std::thread> threads;
  for (int i = 0; i < count; ++i) threads.emplace_back([&, i] { run(i); });
  for (std::thread& thread : threads) thread.join();
}

// What went wrong at two ranks that each do something else, the first message with `part` in it.
std::string ErrorOf(const std::function<nccl::Result(Rank*, int)>& call, const std::string& part) {
  const nccl::UniqueId id = NewId();
  Rank ranks[2];
  std::string errors[2];
  nccl::Result results[2];
  InThreads(2, [&](int i) {
    EXPECT_EQ(ranks[i].Init(id, 2, i), nccl::kSuccess) << ranks[i].error();
    results[i] = call(&ranks[i], i);
    errors[i] = ranks[i].error();
  });
  EXPECT_NE(results[0], nccl::kSuccess);
  EXPECT_NE(results[1], nccl::kSuccess);
  for (const std::string& error : errors) {
    if (error.find(part) != std::string::npos) return part;
  }
  return errors[0] + " | " + errors[1];
}

TEST(StrictNccl, BroadcastsOfAnySizeAndRootArrive) {
  const nccl::UniqueId id = NewId();
  Rank ranks[3];
  InThreads(3, [&](int i) {
    ASSERT_EQ(ranks[i].Init(id, 3, i), nccl::kSuccess) << ranks[i].error();
    int round = 0;
    for (const size_t count : {size_t{0}, size_t{1}, size_t{262144}, size_t{262145},
                               static_cast<size_t>(Rank::kBytes)}) {
      const int root = round % 3;
      for (size_t k = 0; k < count; ++k) {
        ranks[i].memory[k] = static_cast<unsigned char>(k * 7 + 31 * i + round);
      }
      ASSERT_EQ(ranks[i].Broadcast(count, nccl::kUint8, root), nccl::kSuccess) << ranks[i].error();
      for (size_t k = 0; k < count; ++k) {
        ASSERT_EQ(ranks[i].memory[k], static_cast<unsigned char>(k * 7 + 31 * root + round));
      }
      ++round;
    }
  });
}

TEST(StrictNccl, ReductionsSumAndTakeTheLargest) {
  const nccl::UniqueId id = NewId();
  constexpr int kCount = 3000;  // several rounds of the shared memory
  Rank ranks[3];
  InThreads(3, [&](int i) {
    ASSERT_EQ(ranks[i].Init(id, 3, i), nccl::kSuccess);
    std::vector<float> floats(kCount);
    std::iota(floats.begin(), floats.end(), static_cast<float>(i));
    std::memcpy(ranks[i].memory, floats.data(), sizeof(float) * kCount);
    ASSERT_EQ(ranks[i].AllReduce(kCount, nccl::kFloat32, nccl::kSum), nccl::kSuccess);
    std::memcpy(floats.data(), ranks[i].memory, sizeof(float) * kCount);
    for (int k = 0; k < kCount; ++k) ASSERT_EQ(floats[k], 3.0f * k + 3);
    int64_t number = -5 + i;
    std::memcpy(ranks[i].memory, &number, sizeof(number));
    ASSERT_EQ(ranks[i].AllReduce(1, nccl::kInt64, nccl::kMax), nccl::kSuccess);
    std::memcpy(&number, ranks[i].memory, sizeof(number));
    EXPECT_EQ(number, -3);
  });
}

TEST(StrictNccl, CountsThatDifferAreNamed) {
  const std::string want =
      "rank 0 calls broadcast(100 x uint8, root 0), rank 1 calls broadcast(101 x "
      "uint8, root 0)";
  EXPECT_EQ(ErrorOf([](Rank* rank, int i) { return rank->Broadcast(100 + i); }, want), want);
}

TEST(StrictNccl, TypesThatDifferAreNamed) {
  const std::string want =
      "rank 0 calls broadcast(8 x int8, root 0), rank 1 calls broadcast(8 x "
      "bfloat16, root 0)";
  EXPECT_EQ(
      ErrorOf([](Rank* rank,
                 int i) { return rank->Broadcast(8, i == 0 ? nccl::kInt8 : nccl::kBFloat16); },
              want),
      want);
}

TEST(StrictNccl, RootsThatDifferAreNamed) {
  const std::string want =
      "rank 0 calls broadcast(8 x uint8, root 0), rank 1 calls broadcast(8 x "
      "uint8, root 1)";
  EXPECT_EQ(ErrorOf([](Rank* rank, int i) { return rank->Broadcast(8, nccl::kUint8, i); }, want),
            want);
}

TEST(StrictNccl, AnotherOrderIsNamed) {
  const std::string want =
      "collective 2: rank 0 calls broadcast(8 x uint8, root 0), rank 1 calls "
      "all-reduce(2 x float32, op 0)";
  EXPECT_EQ(ErrorOf(
                [](Rank* rank, int i) {
                  nccl::Result first = rank->Broadcast(64);
                  if (first != nccl::kSuccess) return first;
                  return i == 0 ? rank->Broadcast(8)
                                : rank->AllReduce(2, nccl::kFloat32, nccl::kSum);
                },
                want),
            want);
}

TEST(StrictNccl, ARankThatExistsAlreadyIsRefused) {
  const nccl::UniqueId id = NewId();
  Rank ranks[3];
  InThreads(2, [&](int i) { ASSERT_EQ(ranks[i].Init(id, 2, i), nccl::kSuccess); });
  EXPECT_EQ(ranks[2].Init(id, 2, 1), nccl::kInvalidUsage);
  EXPECT_NE(ranks[2].error().find("rank 1 exists already"), std::string::npos) << ranks[2].error();
}

TEST(StrictNccl, GroupSizesThatDifferAreRefused) {
  const nccl::UniqueId id = NewId();
  Rank ranks[3];
  InThreads(2, [&](int i) { ASSERT_EQ(ranks[i].Init(id, 2, i), nccl::kSuccess); });
  EXPECT_EQ(ranks[2].Init(id, 3, 2), nccl::kInvalidUsage);
  EXPECT_NE(ranks[2].error().find("says 3 ranks, another says 2"), std::string::npos);
}

TEST(StrictNccl, UseAfterAbortIsRefused) {
  const nccl::UniqueId id = NewId();
  Rank rank;
  ASSERT_EQ(rank.Init(id, 1, 0), nccl::kSuccess);
  const nccl::Comm gone = rank.comm;
  ASSERT_EQ(Nccl().comm_abort(gone), nccl::kSuccess);
  rank.comm = nullptr;
  EXPECT_EQ(Nccl().broadcast(rank.memory, rank.memory, 1, nccl::kUint8, 0, gone, rank.stream),
            nccl::kInvalidArgument);
  EXPECT_NE(rank.error().find("after it was aborted or destroyed"), std::string::npos);
  EXPECT_EQ(Nccl().comm_abort(gone), nccl::kInvalidArgument);
}

TEST(StrictNccl, ACallBeforeTheLastOneIsDoneIsRefused) {
  const nccl::UniqueId id = NewId();
  Rank rank;
  ASSERT_EQ(rank.Init(id, 1, 0), nccl::kSuccess);
  const auto broadcast = [&] {
    return Nccl().broadcast(rank.memory, rank.memory, 1, nccl::kUint8, 0, rank.comm, rank.stream);
  };
  EXPECT_EQ(broadcast(), nccl::kInProgress);
  EXPECT_EQ(broadcast(), nccl::kInvalidUsage);
  EXPECT_NE(std::string(Nccl().get_last_error(nullptr)).find("in progress"), std::string::npos);
}

TEST(StrictNccl, HostMemoryIsRefused) {
  const nccl::UniqueId id = NewId();
  Rank rank;
  ASSERT_EQ(rank.Init(id, 1, 0), nccl::kSuccess);
  std::vector<unsigned char> host(16);
  EXPECT_EQ(Nccl().broadcast(host.data(), host.data(), 16, nccl::kUint8, 0, rank.comm, rank.stream),
            nccl::kInvalidArgument);
  // One byte beyond the end of a block is no device memory either.
  EXPECT_EQ(rank.Broadcast(static_cast<size_t>(Rank::kBytes) + 1), nccl::kInvalidArgument);
}

TEST(StrictNccl, TheEndMustBeInOrder) {
  const nccl::UniqueId id = NewId();
  Rank rank;
  ASSERT_EQ(rank.Init(id, 1, 0), nccl::kSuccess);
  void* handle = nullptr;
  ASSERT_EQ(Nccl().comm_register(rank.comm, rank.memory, 4096, &handle), nccl::kSuccess);
  EXPECT_EQ(Nccl().comm_destroy(rank.comm), nccl::kInvalidUsage);  // still registered
  ASSERT_EQ(Nccl().comm_deregister(rank.comm, handle), nccl::kSuccess);
  EXPECT_EQ(Nccl().comm_deregister(rank.comm, handle), nccl::kInvalidArgument);
  EXPECT_EQ(Nccl().comm_destroy(rank.comm), nccl::kInvalidUsage);  // not finalized
  ASSERT_EQ(rank.Follow(Nccl().comm_finalize(rank.comm)), nccl::kSuccess);
  EXPECT_EQ(rank.Broadcast(1), nccl::kInvalidUsage);
  EXPECT_EQ(Nccl().comm_destroy(rank.comm), nccl::kSuccess);
  rank.comm = nullptr;
}

TEST(StrictNccl, AnotherRanksAbortEndsACollective) {
  const nccl::UniqueId id = NewId();
  Rank ranks[2];
  InThreads(2, [&](int i) { ASSERT_EQ(ranks[i].Init(id, 2, i), nccl::kSuccess); });
  InThreads(2, [&](int i) {
    if (i == 1) {
      EXPECT_EQ(Nccl().comm_abort(ranks[1].comm), nccl::kSuccess);
      ranks[1].comm = nullptr;
      return;
    }
    EXPECT_EQ(ranks[0].Broadcast(8), nccl::kRemoteError);
    EXPECT_NE(ranks[0].error().find("rank 1 aborted"), std::string::npos) << ranks[0].error();
  });
}

TEST(StrictNccl, AnythingButAnIdAndAConfigurationIsRefused) {
  nccl::UniqueId id = {};
  Rank rank;
  EXPECT_EQ(rank.Init(id, 1, 0), nccl::kInvalidUsage);
  EXPECT_NE(rank.error().find("unique id"), std::string::npos);
  nccl::Config config;
  config.magic = 0;
  nccl::Comm comm = nullptr;
  EXPECT_EQ(Nccl().comm_init_rank_config(&comm, 1, NewId(), 0, &config), nccl::kInvalidArgument);
  EXPECT_EQ(Nccl().comm_init_rank_config(&comm, 2, NewId(), 2, nullptr), nccl::kInvalidArgument);
}

TEST(HostDevice, StreamsKeepTheirOrderAndWaitForEachOther) {
  const DeviceOps& device = Device();
  Rank rank;
  Stream other = nullptr;
  Event event = nullptr, done = nullptr;
  ASSERT_TRUE(device.create_stream(true, &other).ok());
  ASSERT_TRUE(device.create_event(&event).ok());
  ASSERT_TRUE(device.create_event(&done).ok());
  bool is_done = false;
  ASSERT_TRUE(device.is_done(event, &is_done).ok());
  EXPECT_TRUE(is_done);  // never recorded
  // A chain of copies through both streams: right only if each waits for the one before.
  constexpr int kSteps = 50;
  rank.memory[0] = 42;
  for (int step = 0; step < kSteps; ++step) {
    const Stream here = step % 2 == 0 ? rank.stream : other;
    const Stream there = step % 2 == 0 ? other : rank.stream;
    ASSERT_TRUE(device.copy(rank.memory + step + 1, rank.memory + step, 1, here).ok());
    ASSERT_TRUE(device.record(event, here).ok());
    ASSERT_TRUE(device.stream_wait(there, event).ok());
  }
  ASSERT_TRUE(device.record(done, rank.stream).ok());
  const Deadline deadline = Deadline::In(20);
  for (is_done = false; !is_done && !deadline.HasPassed(); std::this_thread::yield()) {
    ASSERT_TRUE(device.is_done(done, &is_done).ok());
  }
  EXPECT_TRUE(is_done);
  EXPECT_EQ(rank.memory[kSteps], 42);
  device.destroy_stream(other);
  device.destroy_event(event);
  device.destroy_event(done);
}

}  // namespace
}  // namespace tandem
