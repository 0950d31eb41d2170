// One communicator, from its unique id to its end. All calls of NCCL about it are here: it is made
// without blocking, every call is followed until it is no longer in progress, and it can be aborted
// by any thread at any time. What travels is the caller's business.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "csrc/common/status.h"
#include "csrc/common/stream.h"
#include "csrc/refit/deadline.h"
#include "csrc/refit/nccl_api.h"

namespace tandem {

class NcclComm {
 public:
  explicit NcclComm(const nccl::Api* api) : api_(*api) {}
  ~NcclComm() { Abort(); }
  NcclComm(const NcclComm&) = delete;
  NcclComm& operator=(const NcclComm&) = delete;

  // On the calling thread's current device.
  Status Init(const std::string& unique_id, int num_ranks, int rank, const Deadline& deadline);
  // On a stream, in place. They wait only until the call is on the stream.
  Status Broadcast(void* data, int64_t bytes, Stream stream, const Deadline& deadline);
  Status AllReduce(void* data, int64_t count, nccl::DataType type, nccl::RedOp op, Stream stream,
                   const Deadline& deadline);
  // Tells NCCL of memory that travels often; does nothing where the library cannot. Until Close or
  // Abort.
  Status Register(void* memory, int64_t bytes);
  // An error that came about since: of a peer, of the network, of the device.
  Status Check();
  // The end in peace: waits until everything that was started is done. Else use Abort.
  Status Close(const Deadline& deadline);
  void Abort();

 private:
  Status Follow(nccl::Result result, const char* call, const Deadline& deadline);
  Status ToStatus(nccl::Result result, const char* call) const;

  const nccl::Api& api_;
  std::mutex mutex_;  // of comm_ and every call with it; never held while waiting
  nccl::Comm comm_ = nullptr;
  std::vector<void*> registered_;
  std::atomic<bool> is_aborted_ = false;
};

// See nccl_link.h.
Status MakeUniqueIdWith(const nccl::Api& api, std::string* unique_id);

}  // namespace tandem
