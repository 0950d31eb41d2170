// The pipeline over links inside one process: random manifests bit for bit, casts, executors that
// finish later, and every way in which two ends can disagree.
#include "csrc/refit/session.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <random>
#include <utility>

#include "csrc/common/scalar_types.h"
#include "csrc/refit/bucket_mover.h"
#include "csrc/testing/deferred_executor.h"
#include "csrc/testing/loopback_link.h"
#include "csrc/testing/refit_problem.h"

namespace tandem {
namespace {

constexpr WireType kAllTypes[] = {
    WireType::kFloat64,    WireType::kFloat32,    WireType::kBFloat16, WireType::kFloat16,
    WireType::kFloat8E4M3, WireType::kFloat8E5M2, WireType::kInt64,    WireType::kInt32,
    WireType::kInt16,      WireType::kInt8,       WireType::kUInt8,    WireType::kBool,
};
constexpr WireType kFloats[] = {WireType::kFloat32, WireType::kBFloat16, WireType::kFloat16};

std::vector<uint64_t> DigestsOf(const Plan& plan, const TensorStore& store) {
  std::vector<uint64_t> digests;
  for (size_t i = 0; i < plan.tensors.size(); ++i) {
    const DigestItem item = {store[i].data(), static_cast<int64_t>(store[i].size()), 0};
    digests.push_back(0);
    EXPECT_TRUE(HostExecutor()->Digest(&item, 1, &digests.back()).ok());
  }
  return digests;
}

std::vector<uint64_t> SumOf(const std::vector<EndResult>& ends) {
  std::vector<uint64_t> sum(ends[0].digests.size());
  for (const EndResult& end : ends) {
    for (size_t i = 0; i < sum.size(); ++i) sum[i] += end.digests[i];
  }
  return sum;
}

std::vector<TensorEntry> RandomManifest(std::mt19937_64* random, int64_t scale) {
  std::vector<TensorEntry> tensors;
  const int64_t count = 1 + static_cast<int64_t>((*random)() % 12);
  for (int64_t i = 0; i < count; ++i) {
    std::vector<int64_t> shape;  // 0-dim where nothing is added
    const uint64_t rank = (*random)() % 4;
    for (uint64_t d = 0; d < rank; ++d) {
      const int64_t largest = d == 0 ? scale : 5;
      shape.push_back(static_cast<int64_t>((*random)() % static_cast<uint64_t>(largest)));
    }
    tensors.push_back({TensorName(i), kAllTypes[(*random)() % std::size(kAllTypes)], shape});
  }
  return tensors;
}

void ExpectArrived(const Plan& plan, RefitGroup* group, size_t num_readers, uint64_t seed,
                   uint64_t epoch) {
  std::mt19937_64 random(seed);
  TensorStore source(plan);
  source.Fill(&random);
  std::vector<TensorStore> targets(num_readers, TensorStore(plan));
  const RefitCall call = {epoch, 10 * epoch};
  const RefitGroup::Results results = group->Run(plan, &source, &targets, call, call);
  for (const EndResult& end : results.senders) ASSERT_TRUE(end.status.ok()) << end.status.message();
  const std::vector<uint64_t> expected = DigestsOf(plan, source);
  EXPECT_EQ(SumOf(results.senders), expected);
  for (size_t r = 0; r < num_readers; ++r) {
    ASSERT_TRUE(results.receivers[r].status.ok()) << results.receivers[r].status.message();
    EXPECT_EQ(results.receivers[r].digests, expected);
    for (size_t i = 0; i < plan.tensors.size(); ++i) {
      EXPECT_EQ(targets[r][i], source[i]) << "tensor " << i << " of reader " << r;
    }
  }
}

TEST(SessionTest, RandomManifestsArriveBitForBit) {
  for (uint64_t seed = 0; seed < 120; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937_64 random(seed);
    const int64_t bucket_bytes = 1024 * (1 + static_cast<int64_t>(random() % 40));
    const auto num_roots = static_cast<int32_t>(1 + random() % 3);
    const Plan plan =
        MakePlan(RandomManifest(&random, 1 + random() % 4000), bucket_bytes, num_roots);
    GroupOptions options;
    options.num_readers = static_cast<int32_t>(1 + random() % 3);
    options.num_slots = static_cast<int32_t>(2 + random() % 3);
    RefitGroup group = MakeGroup(plan, options);
    for (uint64_t epoch = 1; epoch <= 2; ++epoch) {
      ExpectArrived(plan, &group, static_cast<size_t>(options.num_readers), seed + epoch, epoch);
    }
  }
}

TEST(SessionTest, RandomManifestsArriveThroughExecutorsThatFinishLater) {
  for (uint64_t seed = 0; seed < 60; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937_64 random(seed);
    const auto num_roots = static_cast<int32_t>(1 + random() % 2);
    const Plan plan = MakePlan(RandomManifest(&random, 1 + random() % 4000),
                               1024 * (1 + static_cast<int64_t>(random() % 40)), num_roots);
    std::vector<DeferredExecutor> executors(static_cast<size_t>(2 * num_roots));
    RefitGroup group = MakeGroup(plan, {}, &executors);
    for (uint64_t epoch = 1; epoch <= 2; ++epoch) {
      ExpectArrived(plan, &group, 1, seed + epoch, epoch);
    }
  }
}

TEST(SessionTest, ABucketIsOneCopyOnADeviceHoweverManyTensorsItHolds) {
  std::vector<TensorEntry> tensors;
  for (int i = 0; i < 20; ++i) {
    tensors.push_back({TensorName(i), kFloats[i % 3], {i, 3}});
  }
  tensors.push_back({"mask", WireType::kInt8, {64}});
  const Plan plan = MakePlan(std::move(tensors), 1 << 20);
  ASSERT_EQ(plan.buckets.size(), 1u);
  std::vector<DeferredExecutor> executors(2);
  RefitGroup group = MakeGroup(plan, {}, &executors);
  ExpectArrived(plan, &group, 1, 7, 1);
  EXPECT_EQ(executors[0].num_copies(), 1);
  EXPECT_EQ(executors[1].num_copies(), 1);
}

// ---- Shapes that are easily forgotten ----

struct ShapeCase {
  const char* name;
  std::vector<TensorEntry> tensors;
};

class SessionShapeTest : public testing::TestWithParam<ShapeCase> {};

TEST_P(SessionShapeTest, ArrivesBitForBit) {
  constexpr int64_t kBucket = 4096;
  const Plan plan = MakePlan(GetParam().tensors, kBucket);
  GroupOptions options;
  options.num_readers = 2;
  RefitGroup group = MakeGroup(plan, options);
  ExpectArrived(plan, &group, 2, 3, 1);
}

INSTANTIATE_TEST_SUITE_P(
    All, SessionShapeTest,
    testing::Values(
        ShapeCase{"OnlyEmpty", {{"a", WireType::kFloat32, {0}}, {"b", WireType::kInt8, {3, 0}}}},
        ShapeCase{"EmptyBetween",
                  {{"a", WireType::kInt8, {5000}},
                   {"b", WireType::kBFloat16, {0, 7}},
                   {"c", WireType::kInt8, {5000}}}},
        ShapeCase{"NoDimension", {{"a", WireType::kFloat64, {}}, {"b", WireType::kBool, {}}}},
        ShapeCase{"ExactFit", {{"a", WireType::kFloat32, {1024}}, {"b", WireType::kInt64, {512}}}},
        ShapeCase{"OneByteMore", {{"a", WireType::kUInt8, {4097}}, {"b", WireType::kUInt8, {1}}}},
        ShapeCase{"ThreeBuckets", {{"a", WireType::kFloat16, {3 * 2048}}}},
        ShapeCase{"MixedTypes",
                  {{"a", WireType::kInt8, {13}},
                   {"b", WireType::kBFloat16, {301}},
                   {"c", WireType::kFloat32, {77, 3}},
                   {"d", WireType::kInt8, {1}}}}),
    [](const testing::TestParamInfo<ShapeCase>& info) { return info.param.name; });

// More pieces than a header has room to name.
TEST(SessionTest, ManySmallTensorsArriveBitForBit) {
  std::vector<TensorEntry> tensors;
  for (int i = 0; i < 500; ++i) {
    tensors.push_back({TensorName(i), WireType::kBFloat16, {i % 7}});
  }
  const Plan plan = MakePlan(std::move(tensors), 1 << 20);
  ASSERT_GT(plan.buckets[0].num_pieces, kMaxNamedPieces);
  RefitGroup group = MakeGroup(plan, {});
  ExpectArrived(plan, &group, 1, 5, 1);
}

// ---- Casts ----

float ValueAt(const std::vector<uint8_t>& bytes, WireType type, size_t i) {
  if (type == WireType::kFloat32) {
    float value;
    std::memcpy(&value, bytes.data() + 4 * i, 4);
    return value;
  }
  uint16_t bits;
  std::memcpy(&bits, bytes.data() + 2 * i, 2);
  return type == WireType::kBFloat16 ? ToFloat(BFloat16{bits}) : ToFloat(Float16{bits});
}

void SetValue(std::vector<uint8_t>* bytes, WireType type, size_t i, float value) {
  if (type == WireType::kFloat32) {
    std::memcpy(bytes->data() + 4 * i, &value, 4);
  } else if (type == WireType::kBFloat16) {
    BFloat16 narrow;
    StoreFloat(value, &narrow);
    std::memcpy(bytes->data() + 2 * i, &narrow, 2);
  } else {
    Float16 narrow;
    StoreFloat(value, &narrow);
    std::memcpy(bytes->data() + 2 * i, &narrow, 2);
  }
}

// What is left of a value after it went through a type.
float Through(WireType type, float value) {
  std::vector<uint8_t> bytes(4);
  SetValue(&bytes, type, 0, value);
  return ValueAt(bytes, type, 0);
}

TEST(SessionTest, CastsOnBothSidesRoundOncePerStep) {
  constexpr size_t kCount = 40000;  // several chunks and several buckets
  std::mt19937_64 random(11);
  std::normal_distribution<float> normal(0, 10);
  std::vector<float> values(kCount);
  for (float& value : values) value = normal(random);
  for (const WireType from : kFloats) {
    for (const WireType wire : kFloats) {
      for (const WireType to : kFloats) {
        const Plan plan = MakePlan({{"w", wire, {kCount}}, {"i", WireType::kInt16, {9}}}, 50 << 10);
        TensorStore source(plan, {from, WireType::kInt16});
        for (size_t i = 0; i < kCount; ++i) SetValue(&source[0], from, i, values[i]);
        std::vector<TensorStore> targets(1, TensorStore(plan, {to, WireType::kInt16}));
        RefitGroup group = MakeGroup(plan, {});
        const RefitGroup::Results results = group.Run(plan, &source, &targets, {}, {});
        ASSERT_TRUE(results.receivers[0].status.ok()) << results.receivers[0].status.message();
        EXPECT_EQ(results.receivers[0].digests, results.senders[0].digests);
        for (size_t i = 0; i < kCount; ++i) {
          const float expected = Through(to, Through(wire, Through(from, values[i])));
          ASSERT_EQ(ValueAt(targets[0][0], to, i), expected) << i;
        }
      }
    }
  }
}

TEST(SessionTest, OtherDtypesAreNotCast) {
  const Plan plan = MakePlan({{"counts", WireType::kInt32, {8}}}, 4096);
  TensorStore source(plan);
  std::vector<TensorStore> targets(1, TensorStore(plan, {WireType::kFloat32}));
  RefitGroup group = MakeGroup(plan, {});
  const RefitGroup::Results results = group.Run(plan, &source, &targets, {}, {});
  EXPECT_EQ(results.receivers[0].status.code(), StatusCode::kMismatch);
  EXPECT_NE(results.receivers[0].status.message().find("'counts' travels as int32"),
            std::string::npos);
  EXPECT_EQ(results.senders[0].status.code(), StatusCode::kMismatch);  // told by the reader
}

// ---- The order of calls ----

TEST(SessionTest, AnOldEpochIsRefused) {
  const Plan plan = ThreeBuckets();
  RefitGroup group = MakeGroup(plan, {});
  ExpectArrived(plan, &group, 1, 1, 3);
  const Status status = group.senders[0]->Begin(3, 4, Deadline::In(1));
  EXPECT_EQ(status.code(), StatusCode::kMismatch);
  EXPECT_NE(status.message().find("larger than the last, 3"), std::string::npos);
}

TEST(SessionTest, ASecondFinishIsRefusedAndTheNextRefitWorks) {
  const Plan plan = ThreeBuckets();
  RefitGroup group = MakeGroup(plan, {});
  ExpectArrived(plan, &group, 1, 1, 1);
  std::vector<uint64_t> digests(plan.tensors.size());
  EXPECT_EQ(group.senders[0]->Finish(digests.data()).code(), StatusCode::kMismatch);
  EXPECT_EQ(group.receivers[0]->Finish(digests.data()).code(), StatusCode::kMismatch);
  ExpectArrived(plan, &group, 1, 2, 2);
}

TEST(SessionTest, WhatComesTooEarlyOrTooLateIsRefused) {
  const Plan plan = ThreeBuckets();
  TensorStore store(plan);
  const auto first = [&](RefitGroup* group) {
    return group->senders[0]->Begin(1, 1, Deadline::In(5));
  };
  RefitGroup skipped = MakeGroup(plan, {});
  ASSERT_TRUE(first(&skipped).ok());
  Status status = skipped.senders[0]->Send(1, store.Of(plan, 1).data());
  EXPECT_EQ(status.code(), StatusCode::kMismatch);
  EXPECT_NE(status.message().find("the next of this root is 0"), std::string::npos);

  RefitGroup unfinished = MakeGroup(plan, {});
  ASSERT_TRUE(first(&unfinished).ok());
  std::vector<uint64_t> digests(plan.tensors.size());
  status = unfinished.senders[0]->Finish(digests.data());
  EXPECT_EQ(status.code(), StatusCode::kMismatch);
  EXPECT_NE(status.message().find("finish after 0 of 3 buckets"), std::string::npos);

  RefitGroup twice = MakeGroup(plan, {});
  ASSERT_TRUE(first(&twice).ok());
  status = twice.senders[0]->Begin(2, 2, Deadline::In(1));
  EXPECT_NE(status.message().find("that of epoch 1 is not finished"), std::string::npos);

  RefitGroup idle = MakeGroup(plan, {});
  EXPECT_EQ(idle.senders[0]->Send(0, store.Of(plan, 0).data()).code(), StatusCode::kMismatch);
  EXPECT_EQ(idle.receivers[0]->Receive(0, store.Of(plan, 0).data()).code(), StatusCode::kMismatch);
}

TEST(SessionTest, TimesAreOfThisRefitAndWithinItsTotal) {
  const Plan plan = MakePlan({{"w", WireType::kFloat32, {1 << 18}}}, 64 << 10);
  RefitGroup group = MakeGroup(plan, {});
  ExpectArrived(plan, &group, 1, 1, 1);
  for (const SessionTimes& times : {group.senders[0]->times(), group.receivers[0]->times()}) {
    EXPECT_GT(times.copy, 0);
    EXPECT_GT(times.digest, 0);
    EXPECT_LE(times.copy + times.digest + times.wire, times.total);
  }
}

}  // namespace
}  // namespace tandem
