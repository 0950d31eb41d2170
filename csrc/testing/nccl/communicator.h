// A communicator with the states that the real one has, kept strictly: what the real library
// answers with undefined behaviour or a hang is refused here with a message.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "csrc/refit/nccl_api.h"
#include "csrc/testing/nccl/collectives.h"
#include "csrc/testing/nccl/host_device.h"
#include "csrc/testing/nccl/segment.h"

namespace tandem::testing {

// The message of this thread's last refused call.
std::string& LastError();
nccl::Result Refuse(nccl::Result result, const std::string& message);

class Communicator : public std::enable_shared_from_this<Communicator> {
 public:
  struct Place {
    nccl::UniqueId id;
    int num_ranks;
    int rank;
    int device;
    bool is_blocking;
  };
  explicit Communicator(const Place& place);
  ~Communicator();

  // Blocking ones return when all ranks are there, others at once with kInProgress.
  nccl::Result Init();
  // One that is not blocking returns kInProgress, and the collective is on the stream only when
  // AsyncError says so: whoever enqueues something behind it too early is ahead of it. is_in_group:
  // it may follow another that is not launched yet.
  nccl::Result Launch(const Call& call, const void* source, void* target, Stream stream,
                      bool is_in_group);
  nccl::Result AsyncError();
  nccl::Result Finalize();
  nccl::Result Destroy();
  void Abort();
  nccl::Result Register(void* memory, size_t bytes, void** handle);
  nccl::Result Deregister(void* handle);
  std::string last_error() const;
  const Place& place() const { return place_; }

 private:
  enum class State { kJoining, kReady, kPending, kFinalizing, kFinalized };

  void Join();
  void Fail(nccl::Result result, const std::string& message);
  nccl::Result WaitUntilReady();
  void CheckDevices();
  void LaunchPending();
  void Execute(const Call& call, const void* source, void* target);
  std::string Who() const { return "rank " + std::to_string(place_.rank) + ": "; }

  const Place place_;
  const bool is_silent_;
  Segment segment_;
  std::unique_ptr<Collectives> collectives_;
  std::thread joining_;
  std::atomic<bool> is_aborted_ = false;

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  State state_ = State::kJoining;
  nccl::Result error_ = nccl::kSuccess;
  std::string message_;
  std::vector<std::function<void()>> pending_;
  int64_t outstanding_ = 0;
  std::map<void*, std::pair<unsigned char*, size_t>> registered_;
};

}  // namespace tandem::testing
