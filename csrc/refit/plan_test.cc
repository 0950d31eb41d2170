// Plans: small ones by hand, random ones against the rules of plan.h, and shipped bytes that were
// damaged.
#include "csrc/refit/plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <random>
#include <string>
#include <tuple>
#include <vector>

namespace tandem {
namespace {

constexpr int64_t kA = kPieceAlignment;

TensorEntry Bytes(const std::string& name, int64_t count) {
  return {name, WireType::kUInt8, {count}};
}

Plan PlanOf(std::vector<TensorEntry> tensors, int64_t bucket_bytes, int32_t num_roots = 1) {
  Plan plan;
  const Status status = BuildPlan(std::move(tensors), bucket_bytes, num_roots, &plan);
  EXPECT_TRUE(status.ok()) << status.message();
  return plan;
}

using Row = std::tuple<int64_t, int64_t, int64_t, int64_t>;

// Per bucket its pieces: tensor, tensor_offset, bucket_offset, bytes.
std::vector<std::vector<Row>> RowsOf(const Plan& plan) {
  std::vector<std::vector<Row>> rows;
  for (const Bucket& bucket : plan.buckets) {
    rows.emplace_back();
    for (int64_t p = bucket.first_piece; p < bucket.first_piece + bucket.num_pieces; ++p) {
      const Piece& piece = plan.pieces[static_cast<size_t>(p)];
      rows.back().emplace_back(piece.tensor, piece.tensor_offset, piece.bucket_offset, piece.bytes);
    }
  }
  return rows;
}

std::string RefusalOf(std::vector<TensorEntry> tensors, int64_t bucket_bytes = kA,
                      int32_t num_roots = 1) {
  Plan plan;
  const Status status = BuildPlan(std::move(tensors), bucket_bytes, num_roots, &plan);
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_TRUE(plan.tensors.empty());
  return status.message();
}

TEST(Plan, FillsBucketsGreedilyAndSplitsWhatIsLargerThanABucket) {
  const Plan plan = PlanOf({Bytes("a", 100), Bytes("b", 2000), Bytes("c", 10), Bytes("d", 9000),
                            Bytes("e", 1), Bytes("f", 4096), Bytes("g", 1)},
                           4 * kA + 7);
  const std::vector<std::vector<Row>> want = {
      {{0, 0, 0, 100}, {1, 0, 1024, 2000}, {2, 0, 3072, 10}},
      {{3, 0, 0, 4096}},
      {{3, 4096, 0, 4096}},
      {{3, 8192, 0, 808}, {4, 0, 1024, 1}},
      {{5, 0, 0, 4096}},
      {{6, 0, 0, 1}}};
  EXPECT_EQ(RowsOf(plan), want);
  EXPECT_EQ(plan.bucket_bytes, 4096);
  EXPECT_EQ(plan.total_bytes(), 100 + 2000 + 10 + 9000 + 1 + 4096 + 1);
  EXPECT_EQ(plan.buckets[0].bytes, 3082);
}

TEST(Plan, GivesEmptyTensorsAndScalarsAPlace) {
  const Plan plan = PlanOf({{"empty", WireType::kFloat32, {0, 5}},
                            {"scalar", WireType::kFloat64, {}},
                            Bytes("full", kA),
                            {"last", WireType::kBool, {3, 0}}},
                           kA);
  const std::vector<std::vector<Row>> want = {{{0, 0, 0, 0}, {1, 0, 0, 8}},
                                              {{2, 0, 0, kA}, {3, 0, kA, 0}}};
  EXPECT_EQ(RowsOf(plan), want);
}

TEST(Plan, OfEmptyTensorsHasOneBucketOfNoBytes) {
  const Plan plan = PlanOf({Bytes("a", 0), {"b", WireType::kInt64, {1LL << 40, 0, 1LL << 40}}}, kA);
  EXPECT_EQ(RowsOf(plan), (std::vector<std::vector<Row>>{{{0, 0, 0, 0}, {1, 0, 0, 0}}}));
  EXPECT_EQ(plan.bucket_bytes, 0);
  Plan parsed;
  EXPECT_TRUE(ParsePlan(SerializePlan(plan), &parsed).ok());
}

TEST(Plan, GivesRootsTurns) {
  const Plan plan = PlanOf(
      {Bytes("a", kA), Bytes("b", kA), Bytes("c", kA), Bytes("d", kA), Bytes("e", 3 * kA)}, kA, 2);
  std::vector<std::pair<int32_t, int64_t>> order;
  for (const Bucket& bucket : plan.buckets) {
    order.emplace_back(bucket.root, plan.pieces[static_cast<size_t>(bucket.first_piece)].tensor);
  }
  const std::vector<std::pair<int32_t, int64_t>> want = {{0, 0}, {1, 1}, {0, 2}, {1, 3},
                                                         {0, 4}, {0, 4}, {0, 4}};
  EXPECT_EQ(order, want);
}

TEST(Plan, MayHaveMoreRootsThanTensors) {
  const Plan plan = PlanOf({Bytes("a", 1), Bytes("b", 1)}, kA, 5);
  EXPECT_EQ(plan.buckets.size(), 2u);
  EXPECT_EQ(plan.num_roots, 5);
}

TEST(Plan, RefusesWhatIsNoManifestAndNamesTheTensor) {
  constexpr int64_t kHuge = 1LL << 62;
  EXPECT_NE(RefusalOf({}).find("at least one"), std::string::npos);
  EXPECT_NE(RefusalOf({Bytes("", 1)}).find("tensor 0"), std::string::npos);
  EXPECT_NE(RefusalOf({Bytes("a", 1), Bytes("b", 1), Bytes("a", 2)}).find("tensor 2, 'a'"),
            std::string::npos);
  EXPECT_NE(RefusalOf({{"neg", WireType::kInt8, {3, -1}}}).find("[3, -1]"), std::string::npos);
  EXPECT_NE(RefusalOf({{"big", WireType::kFloat32, {kHuge, 2}}}).find("'big'"), std::string::npos);
  EXPECT_NE(RefusalOf({Bytes("x", kHuge - kA), Bytes("y", kHuge - kA)}).find("'y'"),
            std::string::npos);
  EXPECT_NE(RefusalOf({{"odd", static_cast<WireType>(12), {1}}}).find("12"), std::string::npos);
  EXPECT_NE(RefusalOf({Bytes("a", 1)}, kA - 1).find("1023"), std::string::npos);
  EXPECT_NE(RefusalOf({Bytes("a", 1)}, kA, 0).find("num_roots"), std::string::npos);
}

TEST(Plan, KnowsTorchsNamesAndSizes) {
  EXPECT_STREQ(NameOf(WireType::kFloat8E4M3), "float8_e4m3fn");
  EXPECT_STREQ(NameOf(WireType::kBool), "bool");
  EXPECT_STREQ(NameOf(static_cast<WireType>(-1)), "unknown dtype");
  EXPECT_EQ(SizeOf(WireType::kFloat64), 8);
  EXPECT_EQ(SizeOf(WireType::kBFloat16), 2);
  EXPECT_EQ(SizeOf(WireType::kUInt8), 1);
  EXPECT_EQ(SizeOf(static_cast<WireType>(12)), 0);
}

std::vector<TensorEntry> RandomManifest(std::mt19937* random) {
  const auto below = [random](uint64_t bound) { return static_cast<int64_t>((*random)() % bound); };
  std::vector<TensorEntry> tensors;
  const int64_t count = 1 + below(40);
  for (int64_t i = 0; i < count; ++i) {
    TensorEntry tensor = {std::to_string(i), static_cast<WireType>(below(12)), {}};
    for (int64_t axis = below(4); axis > 0; --axis) tensor.shape.push_back(below(i % 3 ? 30 : 9));
    if (i % 11 == 3) tensor.shape = {below(40000)};
    tensors.push_back(std::move(tensor));
  }
  return tensors;
}

// The rules of plan.h, one by one.
void ExpectRules(const Plan& plan, int64_t capacity) {
  std::vector<int64_t> done(plan.tensors.size(), 0);
  std::vector<int64_t> pieces(plan.tensors.size(), 0);
  std::vector<int64_t> last_tensor(static_cast<size_t>(plan.num_roots), -1);
  int64_t next_piece = 0;
  for (const Bucket& bucket : plan.buckets) {
    ASSERT_EQ(bucket.first_piece, next_piece);
    ASSERT_GT(bucket.num_pieces, 0);
    next_piece += bucket.num_pieces;
    int64_t end = 0;
    for (int64_t p = bucket.first_piece; p < next_piece; ++p) {
      const Piece& piece = plan.pieces[static_cast<size_t>(p)];
      const auto tensor = static_cast<size_t>(piece.tensor);
      int64_t& last = last_tensor[static_cast<size_t>(bucket.root)];
      ASSERT_EQ(piece.tensor % plan.num_roots, bucket.root);
      ASSERT_GE(piece.tensor, last);
      last = piece.tensor;
      ASSERT_EQ(piece.tensor_offset, done[tensor]);
      ASSERT_EQ(piece.tensor_offset % kA, 0);
      ASSERT_EQ(piece.bucket_offset, (end + kA - 1) / kA * kA);
      end = piece.bucket_offset + piece.bytes;
      done[tensor] += piece.bytes;
      ++pieces[tensor];
      const bool may_be_split = plan.tensors[tensor].bytes() > capacity;
      ASSERT_TRUE(pieces[tensor] == 1 || may_be_split);
    }
    ASSERT_EQ(bucket.bytes, end);
    ASSERT_LE(end, capacity);
  }
  ASSERT_EQ(next_piece, static_cast<int64_t>(plan.pieces.size()));
  for (size_t i = 0; i < done.size(); ++i) {
    ASSERT_EQ(done[i], plan.tensors[i].bytes()) << "tensor " << i;
    ASSERT_GE(pieces[i], 1);
  }
}

TEST(Plan, KeepsItsRulesForRandomManifests) {
  std::mt19937 random(7);
  for (int round = 0; round < 400; ++round) {
    const std::vector<TensorEntry> tensors = RandomManifest(&random);
    const int64_t capacity = kA * static_cast<int64_t>(1 + random() % 20);
    const auto roots = static_cast<int32_t>(1 + random() % 4);
    const Plan plan = PlanOf(tensors, capacity + static_cast<int64_t>(random() % kA), roots);
    ASSERT_NO_FATAL_FAILURE(ExpectRules(plan, capacity)) << "round " << round;
    Plan parsed;
    const Status status = ParsePlan(SerializePlan(plan), &parsed);
    ASSERT_TRUE(status.ok()) << status.message();
    ASSERT_EQ(parsed.digest, plan.digest);
    ASSERT_EQ(RowsOf(parsed), RowsOf(plan));
    ASSERT_EQ(FirstDifference(parsed.tensors, tensors), "");
    ASSERT_EQ(parsed.bucket_bytes, plan.bucket_bytes);
    ASSERT_EQ(SerializePlan(parsed), SerializePlan(plan));
  }
}

TEST(Plan, HasAnotherDigestForEveryDifference) {
  const std::vector<TensorEntry> tensors = {Bytes("a", 3000), {"b", WireType::kFloat32, {2, 3}}};
  const uint64_t digest = PlanOf(tensors, 2 * kA).digest;
  EXPECT_EQ(PlanOf(tensors, 2 * kA).digest, digest);
  EXPECT_NE(PlanOf(tensors, 3 * kA).digest, digest);
  EXPECT_NE(PlanOf(tensors, 2 * kA, 2).digest, digest);
  EXPECT_NE(PlanOf({tensors[1], tensors[0]}, 2 * kA).digest, digest);
  EXPECT_NE(PlanOf({tensors[0], {"b", WireType::kFloat32, {3, 2}}}, 2 * kA).digest, digest);
  EXPECT_NE(PlanOf({tensors[0], {"b", WireType::kInt32, {2, 3}}}, 2 * kA).digest, digest);
  EXPECT_NE(PlanOf({tensors[0], {"c", WireType::kFloat32, {2, 3}}}, 2 * kA).digest, digest);
}

std::string Shipped() {
  return SerializePlan(PlanOf({Bytes("embed", 5000),
                               {"norm", WireType::kBFloat16, {64}},
                               {"head", WireType::kFloat32, {0, 8}}},
                              2 * kA, 2));
}

TEST(ParsePlan, TakesNoneOfItsPrefixesAndNothingMore) {
  const std::string bytes = Shipped();
  Plan plan;
  ASSERT_TRUE(ParsePlan(bytes, &plan).ok());
  for (size_t size = 0; size < bytes.size(); ++size) {
    EXPECT_EQ(ParsePlan(bytes.substr(0, size), &plan).code(), StatusCode::kMismatch) << size;
  }
  EXPECT_EQ(ParsePlan(bytes + '\0', &plan).code(), StatusCode::kMismatch);
}

TEST(ParsePlan, OfDamagedBytesFailsOrShowsInTheDigest) {
  const std::string bytes = Shipped();
  Plan plan;
  ASSERT_TRUE(ParsePlan(bytes, &plan).ok());
  const uint64_t digest = plan.digest;
  for (size_t i = 0; i < bytes.size() * 8; ++i) {
    std::string damaged = bytes;
    damaged[i / 8] = static_cast<char>(damaged[i / 8] ^ 1 << i % 8);
    const Status status = ParsePlan(damaged, &plan);
    if (status.ok()) {
      EXPECT_NE(plan.digest, digest) << "bit " << i;
    } else {
      EXPECT_EQ(status.code(), StatusCode::kMismatch) << "bit " << i << ": " << status.message();
    }
  }
}

TEST(ParsePlan, MakesNoMemoryForCountsThatCannotBe) {
  std::string bytes = Shipped();
  const int64_t count = std::numeric_limits<int64_t>::max();
  for (size_t at : {size_t{24}, size_t{32}, size_t{40}}) {
    std::string damaged = bytes;
    damaged.replace(at, sizeof(count), reinterpret_cast<const char*>(&count), sizeof(count));
    Plan plan;
    EXPECT_NE(ParsePlan(damaged, &plan).message().find("shorter"), std::string::npos);
  }
}

TEST(FirstDifference, NamesTheTensorAndBothSides) {
  const std::vector<TensorEntry> tensors = {Bytes("a", 4), {"b", WireType::kFloat32, {2, 3}}};
  EXPECT_EQ(FirstDifference(tensors, tensors), "");
  EXPECT_EQ(FirstDifference(tensors, {tensors[1], tensors[0]}),
            "tensor 0: want 'a' uint8 [4], got 'b' float32 [2, 3]");
  EXPECT_EQ(FirstDifference(tensors, {tensors[0], {"b", WireType::kBFloat16, {3, 2}}}),
            "tensor 1: want 'b' float32 [2, 3], got 'b' bfloat16 [3, 2]");
  EXPECT_EQ(FirstDifference(tensors, {tensors[0]}),
            "want 2 tensors, got 1: 'b' float32 [2, 3] is missing");
  EXPECT_EQ(FirstDifference({tensors[0]}, tensors),
            "want 1 tensors, got 2: 'b' float32 [2, 3] is too many");
}

}  // namespace
}  // namespace tandem
