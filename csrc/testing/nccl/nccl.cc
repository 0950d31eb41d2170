// The functions of NCCL that csrc/refit/nccl_api.h knows, and a few that belong to them, on host
// memory: libtandem_test_nccl.so. For tests; never shipped.
//
//   TANDEM_TEST_NCCL_SILENT=1                a peer that dies or aborts is not noticed
//   TANDEM_TEST_NCCL_ONE_RANK_PER_DEVICE=1   two ranks on one device are refused, as by NCCL
//   TANDEM_TEST_DEVICE_JITTER_US=n           streams dawdle up to n microseconds before each work
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "csrc/refit/nccl_api.h"
#include "csrc/testing/nccl/communicator.h"

using namespace tandem;           // NOLINT: the file is a library's surface
using namespace tandem::testing;  // NOLINT

namespace {

constexpr int kVersion = 22907;

// Handles are numbers, never used twice: one of a communicator that is gone is found.
struct Live {
  std::mutex mutex;
  uintptr_t next = 1;
  std::map<nccl::Comm, std::shared_ptr<Communicator>> comms;
};
Live& All() {
  static auto* all = new Live;
  return *all;
}

std::shared_ptr<Communicator> Find(nccl::Comm comm, const char* call) {
  Live& all = All();
  const std::lock_guard<std::mutex> lock(all.mutex);
  const auto found = all.comms.find(comm);
  if (found != all.comms.end()) return found->second;
  const uintptr_t number = reinterpret_cast<uintptr_t>(comm);
  Refuse(nccl::kInvalidArgument,
         std::string(call) + (number > 0 && number < all.next
                                  ? ": the communicator is used after it was aborted or destroyed"
                                  : ": there is no such communicator"));
  return nullptr;
}

std::shared_ptr<Communicator> Take(nccl::Comm comm, const char* call) {
  std::shared_ptr<Communicator> found = Find(comm, call);
  Live& all = All();
  const std::lock_guard<std::mutex> lock(all.mutex);
  all.comms.erase(comm);
  return found;
}

struct Group {
  int depth = 0;
  std::vector<std::function<nccl::Result()>> calls;
};
Group& CurrentGroup() {
  thread_local Group group;
  return group;
}

nccl::Result Collective(const Call& call, const void* source, void* target, nccl::Comm comm,
                        Stream stream) {
  const std::shared_ptr<Communicator> found = Find(comm, "a collective");
  if (found == nullptr) return nccl::kInvalidArgument;
  if (stream == nullptr) return Refuse(nccl::kInvalidArgument, "the stream is null");
  if (CurrentGroup().depth == 0) return found->Launch(call, source, target, stream, false);
  CurrentGroup().calls.push_back([=] { return found->Launch(call, source, target, stream, true); });
  return nccl::kSuccess;
}

}  // namespace

#define TANDEM_EXPORT __attribute__((visibility("default")))

extern "C" {

TANDEM_EXPORT nccl::Result ncclGetVersion(int* version) {
  *version = kVersion;
  return nccl::kSuccess;
}

TANDEM_EXPORT nccl::Result ncclGetUniqueId(nccl::UniqueId* id) {
  std::string error;
  const nccl::Result result = MakeUniqueId(id, &error);
  return result == nccl::kSuccess ? result : Refuse(result, error);
}

TANDEM_EXPORT nccl::Result ncclCommInitRankConfig(nccl::Comm* comm, int num_ranks,
                                                  nccl::UniqueId id, int rank,
                                                  nccl::Config* config) {
  *comm = nullptr;
  if (num_ranks < 1 || num_ranks > kMaxRanks || rank < 0 || rank >= num_ranks) {
    return Refuse(nccl::kInvalidArgument, "rank " + std::to_string(rank) + " of " +
                                              std::to_string(num_ranks) + " (at most " +
                                              std::to_string(kMaxRanks) + ")");
  }
  bool is_blocking = true;
  if (config != nullptr) {
    if (config->magic != nccl::kConfigMagic || config->size < 40) {
      return Refuse(nccl::kInvalidArgument, "the configuration was not initialised");
    }
    is_blocking = config->blocking != 0;
  }
  auto made = std::make_shared<Communicator>(
      Communicator::Place{id, num_ranks, rank, CurrentDevice(), is_blocking});
  {
    Live& all = All();
    const std::lock_guard<std::mutex> lock(all.mutex);
    *comm = reinterpret_cast<nccl::Comm>(all.next++);
    all.comms[*comm] = made;
  }
  return made->Init();
}

TANDEM_EXPORT nccl::Result ncclCommInitRank(nccl::Comm* comm, int num_ranks, nccl::UniqueId id,
                                            int rank) {
  return ncclCommInitRankConfig(comm, num_ranks, id, rank, nullptr);
}

TANDEM_EXPORT nccl::Result ncclCommFinalize(nccl::Comm comm) {
  const auto found = Find(comm, "ncclCommFinalize");
  return found == nullptr ? nccl::kInvalidArgument : found->Finalize();
}

TANDEM_EXPORT nccl::Result ncclCommDestroy(nccl::Comm comm) {
  const auto found = Find(comm, "ncclCommDestroy");
  if (found == nullptr) return nccl::kInvalidArgument;
  const nccl::Result result = found->Destroy();
  if (result == nccl::kSuccess) Take(comm, "ncclCommDestroy");
  return result;
}

TANDEM_EXPORT nccl::Result ncclCommAbort(nccl::Comm comm) {
  const auto found = Take(comm, "ncclCommAbort");
  if (found == nullptr) return nccl::kInvalidArgument;
  found->Abort();
  return nccl::kSuccess;
}

TANDEM_EXPORT nccl::Result ncclCommGetAsyncError(nccl::Comm comm, nccl::Result* error) {
  const auto found = Find(comm, "ncclCommGetAsyncError");
  if (found == nullptr) return nccl::kInvalidArgument;
  *error = found->AsyncError();
  return nccl::kSuccess;
}

TANDEM_EXPORT nccl::Result ncclCommCount(nccl::Comm comm, int* count) {
  const auto found = Find(comm, "ncclCommCount");
  if (found == nullptr) return nccl::kInvalidArgument;
  *count = found->place().num_ranks;
  return nccl::kSuccess;
}

TANDEM_EXPORT nccl::Result ncclCommUserRank(nccl::Comm comm, int* rank) {
  const auto found = Find(comm, "ncclCommUserRank");
  if (found == nullptr) return nccl::kInvalidArgument;
  *rank = found->place().rank;
  return nccl::kSuccess;
}

TANDEM_EXPORT const char* ncclGetErrorString(nccl::Result result) {
  constexpr const char* kTexts[] = {"no error",
                                    "unhandled cuda error",
                                    "unhandled system error",
                                    "internal error",
                                    "invalid argument",
                                    "invalid usage",
                                    "remote process exited or there was a network error",
                                    "NCCL operation in progress"};
  return result >= 0 && result <= nccl::kInProgress ? kTexts[result] : "unknown result code";
}

TANDEM_EXPORT const char* ncclGetLastError(nccl::Comm comm) {
  if (comm != nullptr) {
    Live& all = All();
    const std::lock_guard<std::mutex> lock(all.mutex);
    const auto found = all.comms.find(comm);
    const std::string text = found == all.comms.end() ? "" : found->second->last_error();
    if (!text.empty()) LastError() = text;
  }
  return LastError().c_str();
}

TANDEM_EXPORT nccl::Result ncclBroadcast(const void* source, void* target, size_t count,
                                         nccl::DataType type, int root, nccl::Comm comm,
                                         Stream stream) {
  return Collective({Call::kBroadcast, type, root, -1, count}, source, target, comm, stream);
}

TANDEM_EXPORT nccl::Result ncclAllReduce(const void* source, void* target, size_t count,
                                         nccl::DataType type, nccl::RedOp op, nccl::Comm comm,
                                         Stream stream) {
  return Collective({Call::kAllReduce, type, -1, op, count}, source, target, comm, stream);
}

TANDEM_EXPORT nccl::Result ncclMemAlloc(void** memory, size_t bytes) {
  const Status status = AllocateDeviceMemory(static_cast<int64_t>(bytes), memory);
  return status.ok() ? nccl::kSuccess : Refuse(nccl::kUnhandledCudaError, status.message());
}

TANDEM_EXPORT nccl::Result ncclMemFree(void* memory) {
  if (memory == nullptr || ReleaseDeviceMemory(memory)) return nccl::kSuccess;
  return Refuse(nccl::kInvalidArgument, "ncclMemFree: no device memory");
}

TANDEM_EXPORT nccl::Result ncclCommRegister(nccl::Comm comm, void* memory, size_t bytes,
                                            void** handle) {
  const auto found = Find(comm, "ncclCommRegister");
  return found == nullptr ? nccl::kInvalidArgument : found->Register(memory, bytes, handle);
}

TANDEM_EXPORT nccl::Result ncclCommDeregister(nccl::Comm comm, void* handle) {
  const auto found = Find(comm, "ncclCommDeregister");
  return found == nullptr ? nccl::kInvalidArgument : found->Deregister(handle);
}

TANDEM_EXPORT nccl::Result ncclGroupStart() {
  ++CurrentGroup().depth;
  return nccl::kSuccess;
}

TANDEM_EXPORT nccl::Result ncclGroupEnd() {
  Group& group = CurrentGroup();
  if (group.depth == 0) return Refuse(nccl::kInvalidUsage, "ncclGroupEnd without ncclGroupStart");
  if (--group.depth > 0) return nccl::kSuccess;
  nccl::Result first = nccl::kSuccess;
  for (const auto& call : std::exchange(group.calls, {})) {
    const nccl::Result result = call();
    if (first == nccl::kSuccess || first == nccl::kInProgress) first = result;
  }
  return first;
}

}  // extern "C"
