// csrc/refit/nccl_api.h against the real header, type by type, and its functions against the real
// library. Nothing here needs a GPU.
#include "csrc/refit/nccl_api.h"

#include <gtest/gtest.h>
#include <nccl.h>

#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <string>
#include <type_traits>

namespace tandem {
namespace {

// Whether a value of one type is passed exactly as one of the other.
template <typename Ours, typename Theirs>
constexpr bool IsPassedAlike() {
  if constexpr (std::is_same_v<Ours, Theirs>) {
    return true;
  } else if constexpr (std::is_pointer_v<Ours> && std::is_pointer_v<Theirs>) {
    return true;  // what they point to is compared below
  } else if constexpr (std::is_enum_v<Ours> && std::is_enum_v<Theirs>) {
    return sizeof(Ours) == sizeof(Theirs);
  } else if constexpr (std::is_class_v<Ours> && std::is_class_v<Theirs>) {
    return sizeof(Ours) == sizeof(Theirs) && alignof(Ours) == alignof(Theirs) &&
           std::is_trivially_copyable_v<Ours> && std::is_trivially_copyable_v<Theirs>;
  } else {
    return false;
  }
}

template <typename Ours, typename Theirs>
struct IsCalledAlike : std::false_type {};
template <typename R, typename... A, typename S, typename... B>
struct IsCalledAlike<R (*)(A...), S (*)(B...)> {
  static constexpr bool value = [] {
    if constexpr (sizeof...(A) != sizeof...(B)) {
      return false;
    } else {
      return IsPassedAlike<R, S>() && (IsPassedAlike<A, B>() && ...);
    }
  }();
};

#define TANDEM_SAME_FUNCTION(member, function) \
  static_assert(IsCalledAlike<decltype(nccl::Api::member), decltype(&(function))>::value, #function)

TANDEM_SAME_FUNCTION(get_version, ncclGetVersion);
TANDEM_SAME_FUNCTION(get_unique_id, ncclGetUniqueId);
TANDEM_SAME_FUNCTION(comm_init_rank_config, ncclCommInitRankConfig);
TANDEM_SAME_FUNCTION(comm_finalize, ncclCommFinalize);
TANDEM_SAME_FUNCTION(comm_destroy, ncclCommDestroy);
TANDEM_SAME_FUNCTION(comm_abort, ncclCommAbort);
TANDEM_SAME_FUNCTION(comm_get_async_error, ncclCommGetAsyncError);
TANDEM_SAME_FUNCTION(get_error_string, ncclGetErrorString);
TANDEM_SAME_FUNCTION(get_last_error, ncclGetLastError);
TANDEM_SAME_FUNCTION(broadcast, ncclBroadcast);
TANDEM_SAME_FUNCTION(all_reduce, ncclAllReduce);
TANDEM_SAME_FUNCTION(mem_alloc, ncclMemAlloc);
TANDEM_SAME_FUNCTION(mem_free, ncclMemFree);
TANDEM_SAME_FUNCTION(comm_register, ncclCommRegister);
TANDEM_SAME_FUNCTION(comm_deregister, ncclCommDeregister);

// A comparison that finds nothing would prove nothing.
static_assert(!IsCalledAlike<decltype(nccl::Api::broadcast), decltype(&ncclAllReduce)>::value);
static_assert(
    !IsCalledAlike<decltype(nccl::Api::comm_abort), decltype(&ncclGetErrorString)>::value);

static_assert(sizeof(nccl::Comm) == sizeof(ncclComm_t));
static_assert(nccl::kUniqueIdBytes == NCCL_UNIQUE_ID_BYTES);

#define TANDEM_SAME_VALUE(ours, theirs) \
  static_assert(static_cast<int>(nccl::ours) == static_cast<int>(theirs), #theirs)
TANDEM_SAME_VALUE(kSuccess, ncclSuccess);
TANDEM_SAME_VALUE(kUnhandledCudaError, ncclUnhandledCudaError);
TANDEM_SAME_VALUE(kSystemError, ncclSystemError);
TANDEM_SAME_VALUE(kInternalError, ncclInternalError);
TANDEM_SAME_VALUE(kInvalidArgument, ncclInvalidArgument);
TANDEM_SAME_VALUE(kInvalidUsage, ncclInvalidUsage);
TANDEM_SAME_VALUE(kRemoteError, ncclRemoteError);
TANDEM_SAME_VALUE(kInProgress, ncclInProgress);
TANDEM_SAME_VALUE(kInt8, ncclInt8);
TANDEM_SAME_VALUE(kUint8, ncclUint8);
TANDEM_SAME_VALUE(kInt32, ncclInt32);
TANDEM_SAME_VALUE(kUint32, ncclUint32);
TANDEM_SAME_VALUE(kInt64, ncclInt64);
TANDEM_SAME_VALUE(kUint64, ncclUint64);
TANDEM_SAME_VALUE(kFloat16, ncclFloat16);
TANDEM_SAME_VALUE(kFloat32, ncclFloat32);
TANDEM_SAME_VALUE(kFloat64, ncclFloat64);
TANDEM_SAME_VALUE(kBFloat16, ncclBfloat16);
TANDEM_SAME_VALUE(kSum, ncclSum);
TANDEM_SAME_VALUE(kProd, ncclProd);
TANDEM_SAME_VALUE(kMax, ncclMax);
TANDEM_SAME_VALUE(kMin, ncclMin);
TANDEM_SAME_VALUE(kUndefined, NCCL_CONFIG_UNDEF_INT);

#define TANDEM_SAME_FIELD(ours, theirs) \
  static_assert(offsetof(nccl::Config, ours) == offsetof(ncclConfig_t, theirs), #theirs)
TANDEM_SAME_FIELD(size, size);
TANDEM_SAME_FIELD(magic, magic);
TANDEM_SAME_FIELD(version, version);
TANDEM_SAME_FIELD(blocking, blocking);
TANDEM_SAME_FIELD(cga_cluster_size, cgaClusterSize);
TANDEM_SAME_FIELD(min_ctas, minCTAs);
TANDEM_SAME_FIELD(max_ctas, maxCTAs);
TANDEM_SAME_FIELD(net_name, netName);
TANDEM_SAME_FIELD(split_share, splitShare);
TANDEM_SAME_FIELD(traffic_class, trafficClass);
static_assert(nccl::kConfigMagic == NCCL_API_MAGIC);
static_assert(sizeof(nccl::Config) <= sizeof(ncclConfig_t));
static_assert(nccl::kConfigVersion <= NCCL_VERSION_CODE);

TEST(NcclApi, AnUntouchedConfigurationIsTheirsUpToItsSize) {
  ncclConfig_t theirs = NCCL_CONFIG_INITIALIZER;
  nccl::Config ours;
  theirs.size = ours.size;
  theirs.version = ours.version;
  EXPECT_EQ(std::memcmp(&ours, &theirs, sizeof(ours)), 0);
}

TEST(NcclApi, TheLibraryIsTheHeaders) {
  int version = 0;
  ASSERT_EQ(ncclGetVersion(&version), ncclSuccess);
  EXPECT_EQ(version, NCCL_VERSION_CODE);
}

TEST(NcclApi, TheRealLibraryFillsTheTable) {
  const nccl::Api* api = nullptr;
  const Status status = nccl::LoadApi(std::getenv("TANDEM_NCCL_LIBRARY"), &api);
  ASSERT_TRUE(status.ok()) << status.message();
  EXPECT_NE(api->mem_alloc, nullptr);
  EXPECT_NE(api->comm_register, nullptr);
  EXPECT_NE(api->comm_deregister, nullptr);
  EXPECT_EQ(api->get_error_string(nccl::kRemoteError),
            std::string(ncclGetErrorString(ncclRemoteError)));
  int version = 0;
  EXPECT_EQ(api->get_version(&version), nccl::kSuccess);
  EXPECT_EQ(version, NCCL_VERSION_CODE);
}

}  // namespace
}  // namespace tandem
