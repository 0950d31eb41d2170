// What the tests of NCCL links share: the strict NCCL on host memory (csrc/testing/nccl, at
// TANDEM_TEST_NCCL) and links over it.
#pragma once

#include <gtest/gtest.h>

#include <cstdlib>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "csrc/refit/nccl_link.h"
#include "csrc/refit/session.h"
#include "csrc/testing/refit_problem.h"

namespace tandem {

inline constexpr double kTimeout = 20;

inline std::string Library() {
  const char* path = std::getenv("TANDEM_TEST_NCCL");
  EXPECT_NE(path, nullptr) << "TANDEM_TEST_NCCL is not set";
  return path == nullptr ? "" : path;
}

// For the time of a test, of this process and its children.
class Setting {
 public:
  explicit Setting(const char* name, const char* value = "1") : name_(name) {
    setenv(name, value, 1);
  }
  ~Setting() { unsetenv(name_); }

 private:
  const char* name_;
};

inline std::string NewId() {
  std::string id;
  const Status status = MakeNcclUniqueId(Library(), &id);
  EXPECT_TRUE(status.ok()) << status.message();
  return id;
}

// Many small tensors, mixed types, empty ones, one that fills many buckets.
inline Plan MakePlan(int32_t num_roots = 1) {
  std::vector<TensorEntry> tensors;
  for (int i = 0; i < 40; ++i) {
    const WireType types[] = {WireType::kFloat32, WireType::kBFloat16, WireType::kInt8};
    tensors.push_back({"small." + std::to_string(i), types[i % 3], {i % 7, 3, 37}});
  }
  tensors.push_back({"scalar", WireType::kFloat32, {}});
  tensors.push_back({"large", WireType::kBFloat16, {300, 1000}});
  Plan plan;
  const Status status = BuildPlan(std::move(tensors), 16384, num_roots, &plan);
  EXPECT_TRUE(status.ok()) << status.message();
  return plan;
}

inline NcclOptions Options(const std::string& id, NcclDialect dialect = NcclDialect::kBroadcast,
                           int device = 0) {
  return {Library(), Library(), id, dialect, device};
}

inline LinkGeometry Geometry(const Plan& plan, int32_t num_readers, int32_t root = 0) {
  return {plan.digest, kHeaderBytes + plan.bucket_bytes, 3, num_readers, root};
}

inline std::unique_ptr<SendLink> MakeSender(const NcclOptions& options,
                                            const LinkGeometry& geometry) {
  std::unique_ptr<SendLink> link;
  const Status status = CreateNcclSendLink(options, geometry, &link);
  EXPECT_TRUE(status.ok()) << status.message();
  return link;
}

inline std::unique_ptr<ReceiveLink> MakeReader(const NcclOptions& options,
                                               const LinkGeometry& geometry, int32_t reader) {
  std::unique_ptr<ReceiveLink> link;
  const Status status = CreateNcclReceiveLink(options, geometry, reader, &link);
  EXPECT_TRUE(status.ok()) << status.message();
  return link;
}

// The contents that everybody knows of an epoch.
inline void FillFor(uint64_t epoch, TensorStore* store) {
  std::mt19937_64 random(epoch);
  store->Fill(&random);
}

}  // namespace tandem
