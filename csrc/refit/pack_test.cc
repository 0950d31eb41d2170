// Bucket copy and float8 quantisation against plain loops in double precision, over dtypes, sizes,
// alignments and special values. The backend is the one that the build target links.
#include "csrc/refit/pack.h"

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "csrc/refit/fp8.h"
#include "csrc/refit/refit_backend.h"
#include "csrc/refit/rounding.h"

namespace tandem {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kQuietNaN = std::numeric_limits<float>::quiet_NaN();
constexpr unsigned char kGuard = 0xA5;

// Runs ranges out of order and one item at a time, as a pool with many threads might.
ParallelFor ScatteredFor() {
  return {[](void*, int64_t count, int64_t, RangeBody body, void* context) {
            for (int64_t i = count - 1; i >= 0; --i) body(context, i, i + 1);
          },
          nullptr};
}

// The value at an index, decoded without the code under test.
double Decode(const unsigned char* bytes, int64_t i, DType dtype) {
  if (dtype == DType::kFloat32) {
    float value;
    std::memcpy(&value, bytes + i * 4, 4);
    return value;
  }
  uint16_t bits;
  std::memcpy(&bits, bytes + i * 2, 2);
  if (dtype == DType::kBFloat16) return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
  const int exponent = bits >> 10 & 31;
  const int mantissa = bits & 1023;
  const double sign = bits & 0x8000 ? -1.0 : 1.0;
  if (exponent == 31) return mantissa ? std::nan("") : sign * kInf;
  return sign *
         (exponent == 0 ? std::ldexp(mantissa, -24) : std::ldexp(1024 + mantissa, exponent - 25));
}

double Rounded(double value, DType dtype) {
  if (dtype == DType::kFloat32) return static_cast<float>(value);
  return RoundTo(value, dtype == DType::kBFloat16 ? kBFloat16Format : kFloat16Format);
}

// Random bits are values of every magnitude, subnormals, infinities and NaNs among them.
std::vector<unsigned char> RandomBytes(int64_t count, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<unsigned char> bytes(static_cast<size_t>(count));
  for (unsigned char& byte : bytes) byte = static_cast<unsigned char>(random());
  return bytes;
}

// One tensor of a bucket: its place in the two buffers.
struct Piece {
  int64_t source_offset;
  int64_t target_offset;
  int64_t numel;
  DType from;
  DType to;
};

// Pieces in two byte buffers, with guards between the targets.
class Bucket {
 public:
  void Add(int64_t numel, DType from, DType to, int64_t source_shift, int64_t target_shift) {
    source_end_ = (source_end_ + 15) / 16 * 16 + source_shift;
    target_end_ = (target_end_ + 15) / 16 * 16 + 16 + target_shift;
    pieces_.push_back({source_end_, target_end_, numel, from, to});
    source_end_ += numel * SizeOf(from);
    target_end_ += numel * SizeOf(to);
    prefix_.push_back(prefix_.back() + (numel + kTileElements - 1) / kTileElements);
  }

  Status Run(const ParallelFor& parallel) {
    source_ = RandomBytes(source_end_ + 16, 11);
    target_.assign(static_cast<size_t>(target_end_ + 16), kGuard);
    std::vector<CopyItem> items;
    for (const Piece& piece : pieces_) {
      items.push_back({Aligned(source_) + piece.source_offset,
                       Aligned(target_) + piece.target_offset, piece.numel, piece.from, piece.to});
    }
    return RefitKernelsUnderTest().bucket_copy(items.data(), prefix_.data(),
                                               static_cast<int64_t>(items.size()), prefix_.back(),
                                               {parallel, nullptr});
  }

  void ExpectCopied() {
    std::vector<bool> is_written(target_.size());
    for (const Piece& piece : pieces_) {
      const unsigned char* source = Aligned(source_) + piece.source_offset;
      const unsigned char* target = Aligned(target_) + piece.target_offset;
      for (int64_t i = 0; i < piece.numel; ++i) {
        const double want = Rounded(Decode(source, i, piece.from), piece.to);
        const double got = Decode(target, i, piece.to);
        ASSERT_TRUE(std::isnan(want) ? std::isnan(got) : want == got && SameSign(want, got))
            << i << " of " << piece.numel << ": want " << want << ", got " << got;
      }
      const auto begin = is_written.begin() + (target - target_.data());
      std::fill(begin, begin + piece.numel * SizeOf(piece.to), true);
      if (piece.from == piece.to && piece.numel > 0) {
        ASSERT_EQ(std::memcmp(source, target, static_cast<size_t>(piece.numel * SizeOf(piece.to))),
                  0);
      }
    }
    for (size_t i = 0; i < target_.size(); ++i) {
      ASSERT_TRUE(is_written[i] || target_[i] == kGuard) << "byte " << i << " was written";
    }
  }

  const std::vector<unsigned char>& target() const { return target_; }

 private:
  static bool SameSign(double a, double b) { return std::signbit(a) == std::signbit(b); }
  static unsigned char* Aligned(std::vector<unsigned char>& bytes) {
    return bytes.data() + (16 - reinterpret_cast<uintptr_t>(bytes.data()) % 16) % 16;
  }

  int64_t source_end_ = 0;
  int64_t target_end_ = 0;
  std::vector<Piece> pieces_;
  std::vector<int64_t> prefix_ = {0};
  std::vector<unsigned char> source_;
  std::vector<unsigned char> target_;
};

std::string NameOf(DType dtype) {
  if (dtype == DType::kFloat32) return "f32";
  return dtype == DType::kBFloat16 ? "bf16" : "f16";
}

class BucketCopyTest : public testing::TestWithParam<std::tuple<DType, DType>> {
 protected:
  DType from() const { return std::get<0>(GetParam()); }
  DType to() const { return std::get<1>(GetParam()); }
};

constexpr DType kDTypes[] = {DType::kFloat32, DType::kBFloat16, DType::kFloat16};
INSTANTIATE_TEST_SUITE_P(DTypes, BucketCopyTest,
                         testing::Combine(testing::ValuesIn(kDTypes), testing::ValuesIn(kDTypes)),
                         [](const auto& info) {
                           return NameOf(std::get<0>(info.param)) + "_to_" +
                                  NameOf(std::get<1>(info.param));
                         });

TEST_P(BucketCopyTest, CopiesSizesAroundVectorsAndTiles) {
  Bucket bucket;
  for (const int64_t numel : {0, 1, 7, 8, 9, 31, 0, 0, 8191, 8192, 8193, 3 * 8192 + 5, 0}) {
    bucket.Add(numel, from(), to(), 0, 0);
  }
  ASSERT_TRUE(bucket.Run(SerialFor()).ok());
  bucket.ExpectCopied();
}

TEST_P(BucketCopyTest, CopiesFromAndToEveryByteOffset) {
  Bucket bucket;
  for (int64_t source_shift = 0; source_shift < 16; ++source_shift) {
    for (const int64_t target_shift : {0, 1, 2, 4, 6, 8, 15}) {
      bucket.Add(301, from(), to(), source_shift, target_shift);
    }
  }
  ASSERT_TRUE(bucket.Run(SerialFor()).ok());
  bucket.ExpectCopied();
}

TEST_P(BucketCopyTest, DoesNotDependOnTheSplit) {
  Bucket serial, scattered;
  for (Bucket* bucket : {&serial, &scattered}) {
    for (const int64_t numel : {20000, 3, 0, 8192, 12345}) bucket->Add(numel, from(), to(), 2, 6);
  }
  ASSERT_TRUE(serial.Run(SerialFor()).ok());
  ASSERT_TRUE(scattered.Run(ScatteredFor()).ok());
  scattered.ExpectCopied();
  EXPECT_EQ(serial.target(), scattered.target());
}

TEST(BucketCopyManyTest, CopiesTenThousandTinyItemsOfAllDtypes) {
  Bucket bucket;
  for (int64_t i = 0; i < 10000; ++i) {
    bucket.Add(i % 5, kDTypes[i % 3], kDTypes[i / 3 % 3], i % 2 * 4, i % 4 * 2);
  }
  ASSERT_TRUE(bucket.Run(SerialFor()).ok());
  bucket.ExpectCopied();
}

TEST(BucketCopyManyTest, AnEmptyBucketIsNoError) {
  const int64_t prefix[] = {0};
  EXPECT_TRUE(
      RefitKernelsUnderTest().bucket_copy(nullptr, prefix, 0, 0, {SerialFor(), nullptr}).ok());
}

// Runs the last two tiles only, so that the rest of a huge item is never touched.
ParallelFor LastTilesFor() {
  return {[](void*, int64_t count, int64_t, RangeBody body, void* context) {
            body(context, count - 2, count);
          },
          nullptr};
}

TEST(BucketCopyHugeTest, ReachesElementsBeyondTwoToThe31) {
  const int64_t tiles = (int64_t{1} << 31) / kTileElements + 3;
  const int64_t numel = tiles * kTileElements - 5;
  const auto map = [](int64_t bytes) {
    return static_cast<unsigned char*>(mmap(nullptr, static_cast<size_t>(bytes),
                                            PROT_READ | PROT_WRITE,
                                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  };
  unsigned char* source = map(numel * 4);
  unsigned char* target = map(numel * 2);
  ASSERT_NE(source, MAP_FAILED);
  ASSERT_NE(target, MAP_FAILED);
  for (int64_t i = numel - 12000; i < numel; ++i) {
    const auto value = static_cast<float>(i % 251);
    std::memcpy(source + i * 4, &value, 4);
  }
  const CopyItem item = {source, target, numel, DType::kFloat32, DType::kBFloat16};
  // The CUDA backend takes the table as it is: one that starts at the tile before the last. The
  // CPU's checks want the true one.
  const int64_t prefix[] = {kRefitIsEmulated ? 2 - tiles : 0, kRefitIsEmulated ? 2 : tiles};
  const Status status = RefitKernelsUnderTest().bucket_copy(
      &item, prefix, 1, kRefitIsEmulated ? 2 : tiles, {LastTilesFor(), nullptr});
  ASSERT_TRUE(status.ok()) << status.message();
  for (int64_t i = numel - 12000; i < numel; ++i) {
    ASSERT_EQ(Decode(target, i, DType::kBFloat16), i % 251) << i;
  }
  munmap(source, static_cast<size_t>(numel * 4));
  munmap(target, static_cast<size_t>(numel * 2));
}

TEST(BucketCopyErrorTest, RefusesTablesThatDoNotFit) {
  if (kRefitIsEmulated) GTEST_SKIP() << "the table is in device memory, which nobody reads here";
  float source[4] = {};
  float target[4] = {};
  const CopyItem items[] = {{source, target, 4, DType::kFloat32, DType::kFloat32}};
  const auto refused = [&](const CopyItem* table, std::vector<int64_t> prefix, int64_t num_items,
                           int64_t num_tiles) {
    return !RefitKernelsUnderTest()
                .bucket_copy(table, prefix.data(), num_items, num_tiles, {SerialFor(), nullptr})
                .ok();
  };
  const CopyItem null_source[] = {{nullptr, target, 4, DType::kFloat32, DType::kFloat32}};
  EXPECT_FALSE(refused(items, {0, 1}, 1, 1));
  EXPECT_TRUE(refused(items, {0, 2}, 1, 2));
  EXPECT_TRUE(refused(items, {1, 2}, 1, 2));
  EXPECT_TRUE(refused(items, {0, 1}, 1, 2));
  EXPECT_TRUE(refused(items, {0, 1}, -1, 1));
  EXPECT_TRUE(refused(null_source, {0, 1}, 1, 1));
}

// ---- float8 ----

// A matrix in one of the dtypes; what lies between its rows is NaN and must not be read.
struct Matrix {
  Matrix(int64_t rows, int64_t cols, int64_t stride, DType dtype, int64_t shift)
      : rows(rows), cols(cols), stride(stride), dtype(dtype), shift(shift) {
    bytes.resize(static_cast<size_t>((rows * stride + shift + 16) * SizeOf(dtype)));
    for (int64_t i = 0; i < rows * stride; ++i) Write(i, kQuietNaN);
  }

  void Write(int64_t i, float value) {
    const int64_t at = (shift + i) * SizeOf(dtype);
    if (dtype == DType::kFloat32) std::memcpy(&bytes[static_cast<size_t>(at)], &value, 4);
    if (dtype != DType::kFloat32) {
      const bool is_brain = dtype == DType::kBFloat16;
      const auto high = static_cast<uint16_t>(std::bit_cast<uint32_t>(value) >> 16);
      const auto half = std::bit_cast<uint16_t>(static_cast<_Float16>(value));
      std::memcpy(&bytes[static_cast<size_t>(at)], is_brain ? &high : &half, 2);
    }
  }
  void Set(int64_t i, int64_t j, float value) { Write(i * stride + j, value); }
  double Get(int64_t i, int64_t j) const {
    return Decode(bytes.data() + shift * SizeOf(dtype), i * stride + j, dtype);
  }
  ConstMatrixView View() const {
    return {bytes.data() + shift * SizeOf(dtype), rows, cols, stride, dtype};
  }

  int64_t rows, cols, stride;
  DType dtype;
  int64_t shift;
  std::vector<unsigned char> bytes;
};

struct Quantized {
  std::vector<uint8_t> codes;
  std::vector<float> scales;
};

int64_t Blocks(int64_t count) { return (count + kFp8Block - 1) / kFp8Block; }

Quantized Quantize(const Matrix& matrix) {
  Quantized out;
  const int64_t numel = matrix.rows * matrix.cols;
  out.codes.assign(static_cast<size_t>(numel + 8), kGuard);
  out.scales.assign(static_cast<size_t>(Blocks(matrix.rows) * Blocks(matrix.cols) + 1), -1.0f);
  const Status status = RefitKernelsUnderTest().quantize_fp8(
      {matrix.View(), out.codes.data(), out.scales.data()}, {SerialFor(), nullptr});
  EXPECT_TRUE(status.ok()) << status.message();
  for (size_t i = static_cast<size_t>(numel); i < out.codes.size(); ++i) {
    EXPECT_EQ(out.codes[i], kGuard) << "byte after the matrix";
  }
  EXPECT_EQ(out.scales.back(), -1.0f) << "scale after the last";
  return out;
}

// The largest finite magnitude of a block; an infinity counts as the largest float.
double BlockAmax(const Matrix& matrix, int64_t block_row, int64_t block_col) {
  double amax = 0.0;
  for (int64_t i = block_row * 128; i < std::min(matrix.rows, block_row * 128 + 128); ++i) {
    for (int64_t j = block_col * 128; j < std::min(matrix.cols, block_col * 128 + 128); ++j) {
      const double value = std::fabs(matrix.Get(i, j));
      if (value > amax) amax = value;
    }
  }
  return std::min<double>(amax, std::numeric_limits<float>::max());
}

std::vector<double> BlockAmaxes(const Matrix& matrix) {
  std::vector<double> amaxes;
  for (int64_t row = 0; row < Blocks(matrix.rows); ++row) {
    for (int64_t col = 0; col < Blocks(matrix.cols); ++col) {
      amaxes.push_back(BlockAmax(matrix, row, col));
    }
  }
  return amaxes;
}

void ExpectQuantized(const Matrix& matrix, const Quantized& got) {
  const std::vector<double> amaxes = BlockAmaxes(matrix);
  for (int64_t i = 0; i < matrix.rows; ++i) {
    for (int64_t j = 0; j < matrix.cols; ++j) {
      const auto block = static_cast<size_t>(i / 128 * Blocks(matrix.cols) + j / 128);
      const float amax = std::max(static_cast<float>(amaxes[block]), 1e-12f);
      const float scale = got.scales[block];
      ASSERT_EQ(scale, amax / 448.0f);
      const auto value = static_cast<float>(matrix.Get(i, j));
      const float scaled = value * (448.0f / amax);
      const double code = DecodeE4M3(got.codes[static_cast<size_t>(i * matrix.cols + j)]);
      const double rounded = RoundTo(scaled, kE4M3Format);
      const double want = std::isinf(rounded) ? std::copysign(448.0, rounded) : rounded;
      ASSERT_TRUE(std::isnan(want) ? std::isnan(code) : code == want)
          << i << ", " << j << ": " << value << " became " << code << ", want " << want;
      // And, whatever the scale: what comes back is within half a step of the source.
      if (std::isfinite(value)) {
        const double step = std::max(std::fabs(value) / 16.0, scale * 0x1p-10);
        ASSERT_LE(std::fabs(code * scale - value), step * (1 + 1e-6));
      }
    }
  }
}

class QuantizeTest : public testing::TestWithParam<DType> {};
INSTANTIATE_TEST_SUITE_P(DTypes, QuantizeTest, testing::ValuesIn(kDTypes),
                         [](const auto& info) { return NameOf(info.param); });

TEST_P(QuantizeTest, AgreesWithDoublePrecisionOverShapesStridesAndAlignments) {
  struct Shape {
    int64_t rows, cols, stride, shift;
  };
  std::mt19937 random(5);
  std::normal_distribution<float> normal;
  for (const Shape& shape :
       {Shape{128, 128, 128, 0}, Shape{1, 1, 1, 0}, Shape{129, 257, 257, 0}, Shape{3, 130, 136, 0},
        Shape{200, 64, 64, 1}, Shape{5, 136, 137, 3}, Shape{130, 12, 16, 0}}) {
    Matrix matrix(shape.rows, shape.cols, shape.stride, GetParam(), shape.shift);
    for (int64_t i = 0; i < shape.rows; ++i) {
      for (int64_t j = 0; j < shape.cols; ++j) {
        matrix.Set(i, j, normal(random) * std::ldexp(1.0f, static_cast<int>(random() % 12) - 9));
      }
    }
    SCOPED_TRACE(std::to_string(shape.rows) + " x " + std::to_string(shape.cols));
    ExpectQuantized(matrix, Quantize(matrix));
  }
}

TEST_P(QuantizeTest, AZeroBlockGivesZerosAndAFiniteScale) {
  Matrix matrix(128, 256, 256, GetParam(), 0);
  for (int64_t i = 0; i < 128; ++i) {
    for (int64_t j = 0; j < 256; ++j) matrix.Set(i, j, j < 128 ? 0.0f : 3.0f);
  }
  const Quantized got = Quantize(matrix);
  EXPECT_GT(got.scales[0], 0.0f);
  EXPECT_TRUE(std::isfinite(got.scales[0]));
  for (int64_t i = 0; i < 128; ++i) ASSERT_EQ(got.codes[static_cast<size_t>(i * 256)], 0);
  ExpectQuantized(matrix, got);
}

TEST_P(QuantizeTest, ANaNStaysOneAndLeavesItsBlockAlone) {
  Matrix matrix(4, 130, 130, GetParam(), 0);
  for (int64_t i = 0; i < 4; ++i) {
    for (int64_t j = 0; j < 130; ++j) matrix.Set(i, j, static_cast<float>(i + 1));
  }
  matrix.Set(2, 7, kQuietNaN);
  const Quantized got = Quantize(matrix);
  EXPECT_EQ(got.codes[2 * 130 + 7], 0x7F);
  EXPECT_EQ(got.scales[0], 4.0f / 448.0f);
  ExpectQuantized(matrix, got);
}

TEST_P(QuantizeTest, AnInfinitySaturates) {
  Matrix matrix(2, 3, 3, GetParam(), 0);
  for (int64_t i = 0; i < 6; ++i) matrix.Set(i / 3, i % 3, 1.0f);
  matrix.Set(0, 1, kInf);
  matrix.Set(1, 1, -kInf);
  const Quantized got = Quantize(matrix);
  EXPECT_TRUE(std::isfinite(got.scales[0]));
  EXPECT_EQ(DecodeE4M3(got.codes[1]), 448.0);
  EXPECT_EQ(DecodeE4M3(got.codes[4]), -448.0);
}

TEST(QuantizeEmptyTest, MatricesWithoutElementsAreNoError) {
  for (const auto& [rows, cols] : {std::pair<int64_t, int64_t>{0, 5}, {5, 0}}) {
    EXPECT_TRUE(RefitKernelsUnderTest()
                    .quantize_fp8({{nullptr, rows, cols, cols, DType::kFloat32}, nullptr, nullptr},
                                  {SerialFor(), nullptr})
                    .ok());
  }
}

}  // namespace
}  // namespace tandem
