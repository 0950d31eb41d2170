// libtandem_cuda.so from outside: its two symbols, its tables, a clean error without a driver, and,
// with a GPU, its product against a loop. TANDEM_CUDA_LIBRARY is its path.
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <memory>
#include <random>
#include <utility>
#include <vector>

#include "csrc/cuda/tables.h"
#include "csrc/refit/device_ops.h"
#include "csrc/testing/naive_gemm.h"

namespace tandem {
namespace {

bool HasDevice() {
  int count = 0;
  return cudaGetDeviceCount(&count) == cudaSuccess && count > 0;
}

const CudaTables* Tables() {
  const char* path = std::getenv("TANDEM_CUDA_LIBRARY");
  static void* library = path == nullptr ? nullptr : dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* error = path == nullptr ? "TANDEM_CUDA_LIBRARY is not set" : dlerror();
    ADD_FAILURE() << (error == nullptr ? path : error);
    return nullptr;
  }
  const auto tables_of =
      reinterpret_cast<decltype(&TandemCudaTables)>(dlsym(library, "TandemCudaTables"));
  return tables_of == nullptr ? nullptr : tables_of();
}

TEST(CudaLibrary, ExportsCompleteTables) {
  const CudaTables* tables = Tables();
  ASSERT_NE(tables, nullptr);
  EXPECT_EQ(tables->size_bytes, static_cast<int64_t>(sizeof(CudaTables)));
  EXPECT_NE(tables->loss.logits_stats, nullptr);
  EXPECT_NE(tables->loss.logits_threshold, nullptr);
  EXPECT_NE(tables->refit.quantize_fp8, nullptr);
  EXPECT_NE(tables->refit.digest, nullptr);
  EXPECT_NE(tables->make_gemm, nullptr);
}

TEST(CudaLibrary, HasATableForTheRefit) {
  const DeviceOps* ops = nullptr;
  const Status loaded = LoadDeviceOps(std::getenv("TANDEM_CUDA_LIBRARY"), &ops);
  ASSERT_TRUE(loaded.ok()) << loaded.message();
  EXPECT_STREQ(ops->name, "cuda");
  EXPECT_NE(ops->bucket_copy, nullptr);
  EXPECT_NE(ops->digest, nullptr);
  Stream stream = nullptr;
  const Status status = ops->create_stream(true, &stream);
  if (!HasDevice()) {
    EXPECT_EQ(status.code(), StatusCode::kDeviceError) << status.message();
    return;
  }
  ASSERT_TRUE(status.ok()) << status.message();
  ops->destroy_stream(stream);
}

TEST(CudaLibrary, SaysWhatIsMissingWithoutADriver) {
  if (HasDevice()) GTEST_SKIP() << "there is a device";
  const CudaTables* tables = Tables();
  ASSERT_NE(tables, nullptr);
  std::vector<char> scratch(static_cast<size_t>(tables->gemm_scratch_bytes));
  Gemm* gemm = nullptr;
  Status status = tables->make_gemm({scratch.data(), tables->gemm_scratch_bytes}, &gemm);
  EXPECT_EQ(status.code(), StatusCode::kDeviceError);
  EXPECT_FALSE(status.message().empty());
  EXPECT_EQ(gemm, nullptr);

  float value = 0;
  const int64_t target = 0;
  LogitRows rows;
  rows.logits = {&value, 1, 1, 1, DType::kFloat32};
  rows.targets = &target;
  status = tables->loss.logits_stats(rows, {&value, &value, &value, &value}, {}, {});
  EXPECT_EQ(status.code(), StatusCode::kDeviceError) << status.message();
}

TEST(CudaLibrary, RefusesTooLittleScratch) {
  const CudaTables* tables = Tables();
  ASSERT_NE(tables, nullptr);
  Gemm* gemm = nullptr;
  EXPECT_EQ(tables->make_gemm({}, &gemm).code(), StatusCode::kInvalidArgument);
}

// Device memory with a copy of host bytes.
class DeviceBytes {
 public:
  explicit DeviceBytes(const std::vector<char>& bytes) : size_(bytes.size()) {
    EXPECT_EQ(cudaMalloc(&data_, size_ + 1), cudaSuccess);
    EXPECT_EQ(cudaMemcpy(data_, bytes.data(), size_, cudaMemcpyHostToDevice), cudaSuccess);
  }
  ~DeviceBytes() { cudaFree(data_); }
  DeviceBytes(const DeviceBytes&) = delete;
  DeviceBytes& operator=(const DeviceBytes&) = delete;

  void* data() const { return data_; }
  std::vector<char> Read() const {
    std::vector<char> bytes(size_);
    EXPECT_EQ(cudaMemcpy(bytes.data(), data_, size_, cudaMemcpyDeviceToHost), cudaSuccess);
    return bytes;
  }

 private:
  void* data_ = nullptr;
  size_t size_;
};

struct ProductCase {
  int64_t rows, inner, cols;
  DType dtype, result;
  bool transpose_a, transpose_b;
  float beta;
};

std::vector<char> RandomMatrix(int64_t count, DType dtype, uint32_t seed) {
  std::vector<char> bytes(static_cast<size_t>(count * SizeOf(dtype)));
  std::mt19937 random(seed);
  std::normal_distribution<double> normal;
  for (int64_t i = 0; i < count; ++i) StoreDouble(normal(random), bytes.data(), i, dtype);
  return bytes;
}

void ExpectProduct(const ProductCase& c, Gemm* gemm) {
  const auto shape = [](int64_t rows, int64_t cols, bool transpose) {
    return transpose ? std::pair(cols, rows) : std::pair(rows, cols);
  };
  const auto [a_rows, a_cols] = shape(c.rows, c.inner, c.transpose_a);
  const auto [b_rows, b_cols] = shape(c.inner, c.cols, c.transpose_b);
  const std::vector<char> a = RandomMatrix(a_rows * a_cols, c.dtype, 1);
  const std::vector<char> b = RandomMatrix(b_rows * b_cols, c.dtype, 2);
  std::vector<char> want = RandomMatrix(c.rows * c.cols, c.result, 3);
  if (c.beta == 0.0f) std::fill(want.begin(), want.end(), static_cast<char>(0xFF));
  const DeviceBytes device_a(a), device_b(b), device_c(want);
  ASSERT_TRUE(NaiveGemm()
                  .Multiply({a.data(), a_rows, a_cols, a_cols, c.dtype}, c.transpose_a,
                            {b.data(), b_rows, b_cols, b_cols, c.dtype}, c.transpose_b, c.beta,
                            {want.data(), c.rows, c.cols, c.cols, c.result}, {})
                  .ok());
  const Status status =
      gemm->Multiply({device_a.data(), a_rows, a_cols, a_cols, c.dtype}, c.transpose_a,
                     {device_b.data(), b_rows, b_cols, b_cols, c.dtype}, c.transpose_b, c.beta,
                     {device_c.data(), c.rows, c.cols, c.cols, c.result}, {});
  ASSERT_TRUE(status.ok()) << status.message();
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  const std::vector<char> got = device_c.Read();
  const double scale = std::sqrt(static_cast<double>(c.inner) + 1);
  const double tolerance = (c.result == DType::kBFloat16 ? 2e-2 : 1e-5) * scale;
  for (int64_t i = 0; i < c.rows * c.cols; ++i) {
    ASSERT_NEAR(LoadDouble(got.data(), i, c.result), LoadDouble(want.data(), i, c.result),
                tolerance);
  }
}

TEST(CudaLibrary, ItsProductIsThatOfALoop) {
  if (!HasDevice()) GTEST_SKIP() << "there is no device";
  const CudaTables* tables = Tables();
  ASSERT_NE(tables, nullptr);
  const DeviceBytes scratch(std::vector<char>(static_cast<size_t>(tables->gemm_scratch_bytes)));
  Gemm* raw = nullptr;
  const Status status = tables->make_gemm({scratch.data(), tables->gemm_scratch_bytes}, &raw);
  ASSERT_TRUE(status.ok()) << status.message();
  const std::unique_ptr<Gemm> gemm(raw);
  for (DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    // logits, their gradient times the weight, and the weight's gradient.
    ExpectProduct({33, 64, 257, dtype, DType::kFloat32, false, true, 0.0f}, gemm.get());
    ExpectProduct({33, 64, 256, dtype, dtype, false, true, 0.0f}, gemm.get());
    ExpectProduct({33, 257, 64, dtype, dtype, false, false, 0.0f}, gemm.get());
    ExpectProduct({256, 33, 64, dtype, DType::kFloat32, true, false, 1.0f}, gemm.get());
    ExpectProduct({256, 0, 64, dtype, DType::kFloat32, true, false, 0.0f}, gemm.get());
  }
}

}  // namespace
}  // namespace tandem
