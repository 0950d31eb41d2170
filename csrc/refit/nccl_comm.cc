#include "csrc/refit/nccl_comm.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <thread>

namespace tandem {
namespace {

StatusCode CodeOf(nccl::Result result) {
  switch (result) {
    case nccl::kRemoteError:
      return StatusCode::kPeerLost;
    case nccl::kInvalidUsage:
    case nccl::kInvalidArgument:
      return StatusCode::kMismatch;
    case nccl::kSystemError:
      return StatusCode::kUnavailable;
    default:
      return StatusCode::kDeviceError;
  }
}

Status Aborted() { return Status(StatusCode::kAborted, "the communicator was aborted"); }

}  // namespace

Status NcclComm::ToStatus(nccl::Result result, const char* call) const {
  const char* detail = api_.get_last_error(comm_);
  std::string message = std::string(call) + ": " + api_.get_error_string(result);
  if (detail != nullptr && *detail != '\0') message += std::string(": ") + detail;
  return Status(CodeOf(result), message);
}

Status NcclComm::Init(const std::string& unique_id, int num_ranks, int rank,
                      const Deadline& deadline) {
  nccl::UniqueId id;
  if (unique_id.size() != sizeof(id.internal)) {
    return InvalidArgument("unique_id: want %zu bytes, got %zu", sizeof(id.internal),
                           unique_id.size());
  }
  std::memcpy(id.internal, unique_id.data(), sizeof(id.internal));
  nccl::Config config;
  config.blocking = 0;
  nccl::Result result = nccl::kSuccess;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (is_aborted_) return Aborted();
    result = api_.comm_init_rank_config(&comm_, num_ranks, id, rank, &config);
  }
  Status status = Follow(result, "ncclCommInitRankConfig", deadline);
  if (status.code() == StatusCode::kDeadlineExceeded) {
    status = Status(status.code(), "not all of the " + std::to_string(num_ranks) +
                                       " ranks of the communicator came in time (this is rank " +
                                       std::to_string(rank) + ")");
  }
  return status;
}

Status NcclComm::Follow(nccl::Result result, const char* call, const Deadline& deadline) {
  // The library cannot be waited for with a deadline, so it is asked.
  auto pause = std::chrono::microseconds(5);
  constexpr auto kLongestPause = std::chrono::microseconds(1000);
  while (result == nccl::kInProgress) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (is_aborted_) return Aborted();
      const nccl::Result asked = api_.comm_get_async_error(comm_, &result);
      if (asked != nccl::kSuccess) return ToStatus(asked, "ncclCommGetAsyncError");
    }
    if (result != nccl::kInProgress) break;
    if (deadline.HasPassed()) {
      return Status(StatusCode::kDeadlineExceeded, std::string(call) + " is still in progress");
    }
    std::this_thread::sleep_for(pause);
    pause = std::min(pause * 2, kLongestPause);
  }
  if (result == nccl::kSuccess) return OkStatus();
  const std::lock_guard<std::mutex> lock(mutex_);
  return is_aborted_ ? Aborted() : ToStatus(result, call);
}

Status NcclComm::Broadcast(void* data, int64_t bytes, Stream stream, const Deadline& deadline) {
  nccl::Result result = nccl::kSuccess;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (is_aborted_) return Aborted();
    result = api_.broadcast(data, data, static_cast<size_t>(bytes), nccl::kUint8, 0, comm_, stream);
  }
  return Follow(result, "ncclBroadcast", deadline);
}

Status NcclComm::AllReduce(void* data, int64_t count, nccl::DataType type, nccl::RedOp op,
                           Stream stream, const Deadline& deadline) {
  nccl::Result result = nccl::kSuccess;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (is_aborted_) return Aborted();
    result = api_.all_reduce(data, data, static_cast<size_t>(count), type, op, comm_, stream);
  }
  return Follow(result, "ncclAllReduce", deadline);
}

Status NcclComm::Register(void* memory, int64_t bytes) {
  if (api_.comm_register == nullptr || api_.comm_deregister == nullptr) return OkStatus();
  const std::lock_guard<std::mutex> lock(mutex_);
  if (is_aborted_) return Aborted();
  void* handle = nullptr;
  const nccl::Result result =
      api_.comm_register(comm_, memory, static_cast<size_t>(bytes), &handle);
  if (result != nccl::kSuccess) return ToStatus(result, "ncclCommRegister");
  if (handle != nullptr) registered_.push_back(handle);  // none: this memory cannot be registered
  return OkStatus();
}

Status NcclComm::Check() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (is_aborted_) return Aborted();
  if (comm_ == nullptr) return OkStatus();
  nccl::Result error = nccl::kSuccess;
  const nccl::Result asked = api_.comm_get_async_error(comm_, &error);
  if (asked != nccl::kSuccess) return ToStatus(asked, "ncclCommGetAsyncError");
  if (error == nccl::kSuccess || error == nccl::kInProgress) return OkStatus();
  return ToStatus(error, "an operation of NCCL");
}

Status NcclComm::Close(const Deadline& deadline) {
  nccl::Result result = nccl::kSuccess;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (is_aborted_) return Aborted();
    if (comm_ == nullptr) return OkStatus();
    for (void* handle : registered_) {
      result = api_.comm_deregister(comm_, handle);
      if (result != nccl::kSuccess) return ToStatus(result, "ncclCommDeregister");
    }
    registered_.clear();
    result = api_.comm_finalize(comm_);
  }
  if (Status status = Follow(result, "ncclCommFinalize", deadline); !status.ok()) return status;
  const std::lock_guard<std::mutex> lock(mutex_);
  if (is_aborted_) return Aborted();
  result = api_.comm_destroy(comm_);
  if (result != nccl::kSuccess && result != nccl::kInProgress) {
    return ToStatus(result, "ncclCommDestroy");
  }
  comm_ = nullptr;
  return OkStatus();
}

void NcclComm::Abort() {
  is_aborted_ = true;  // before the lock: whoever follows a call stops at its next question
  const std::lock_guard<std::mutex> lock(mutex_);
  if (comm_ != nullptr) api_.comm_abort(comm_);
  comm_ = nullptr;
  registered_.clear();
}

Status MakeUniqueIdWith(const nccl::Api& api, std::string* unique_id) {
  nccl::UniqueId id;
  const nccl::Result result = api.get_unique_id(&id);
  if (result != nccl::kSuccess) {
    return Status(StatusCode::kUnavailable, std::string("ncclGetUniqueId: ") +
                                                api.get_error_string(result) + ": " +
                                                api.get_last_error(nullptr));
  }
  unique_id->assign(id.internal, sizeof(id.internal));
  return OkStatus();
}

}  // namespace tandem
