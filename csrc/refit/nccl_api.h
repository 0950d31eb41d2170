// The part of NCCL that the refit calls, as a table filled from a library that is opened at run
// time: neither NCCL nor CUDA is needed to build or to start. The types are written here once more;
// third_party/nccl compares every one of them with nccl.h and links against the real library.
#pragma once

#include <climits>
#include <cstddef>
#include <string>

#include "csrc/common/status.h"
#include "csrc/common/stream.h"

namespace tandem::nccl {

struct CommData;  // NCCL's; only its address is known
using Comm = CommData*;

inline constexpr int kUniqueIdBytes = 128;
struct UniqueId {
  char internal[kUniqueIdBytes];
};

enum Result : int {
  kSuccess = 0,
  kUnhandledCudaError = 1,
  kSystemError = 2,
  kInternalError = 3,
  kInvalidArgument = 4,
  kInvalidUsage = 5,
  kRemoteError = 6,
  kInProgress = 7,
};

enum DataType : int {
  kInt8 = 0,
  kUint8 = 1,
  kInt32 = 2,
  kUint32 = 3,
  kInt64 = 4,
  kUint64 = 5,
  kFloat16 = 6,
  kFloat32 = 7,
  kFloat64 = 8,
  kBFloat16 = 9,
};

enum RedOp : int { kSum = 0, kProd = 1, kMax = 2, kMin = 3 };

inline constexpr int kUndefined = INT_MIN;
inline constexpr unsigned kConfigMagic = 0xcafebeef;
inline constexpr unsigned kConfigVersion = 21801;

// The configuration as of 2.18, which every later library takes; traffic_class lies where 2.18 has
// padding and later ones look for it.
struct Config {
  size_t size = sizeof(Config);
  unsigned magic = kConfigMagic;
  unsigned version = kConfigVersion;
  int blocking = kUndefined;
  int cga_cluster_size = kUndefined;
  int min_ctas = kUndefined;
  int max_ctas = kUndefined;
  const char* net_name = nullptr;
  int split_share = kUndefined;
  int traffic_class = kUndefined;
};

struct Api {
  Result (*get_version)(int* version) = nullptr;
  Result (*get_unique_id)(UniqueId* id) = nullptr;
  Result (*comm_init_rank_config)(Comm* comm, int num_ranks, UniqueId id, int rank,
                                  Config* config) = nullptr;
  Result (*comm_finalize)(Comm comm) = nullptr;
  Result (*comm_destroy)(Comm comm) = nullptr;
  Result (*comm_abort)(Comm comm) = nullptr;
  Result (*comm_get_async_error)(Comm comm, Result* error) = nullptr;
  const char* (*get_error_string)(Result result) = nullptr;
  const char* (*get_last_error)(Comm comm) = nullptr;
  Result (*broadcast)(const void* source, void* target, size_t count, DataType type, int root,
                      Comm comm, Stream stream) = nullptr;
  Result (*all_reduce)(const void* source, void* target, size_t count, DataType type, RedOp op,
                       Comm comm, Stream stream) = nullptr;
  // Null in libraries before 2.19.
  Result (*mem_alloc)(void** memory, size_t bytes) = nullptr;
  Result (*mem_free)(void* memory) = nullptr;
  Result (*comm_register)(Comm comm, void* memory, size_t bytes, void** handle) = nullptr;
  Result (*comm_deregister)(Comm comm, void* handle) = nullptr;
};

// The oldest library with non-blocking communicators that can be finalized and all of Config.
inline constexpr int kOldestVersion = 21801;

// Opens the library for as long as the process lives. kUnavailable names the path, and the function
// that is missing or the version that is too old.
Status LoadApi(const std::string& path, const Api** api);

}  // namespace tandem::nccl
