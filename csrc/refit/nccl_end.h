// What both ends of an NCCL link have: a communicator, two streams (the executor's, and one for the
// wire) that wait for each other by events, the slots, and the first fault. A thread watches over a
// refit that is under way: when its deadline passes or NCCL reports an error it aborts the
// communicator, so that a call of the device's driver that waits for the stream comes back too.
#pragma once

#include <array>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "csrc/common/status.h"
#include "csrc/refit/deadline.h"
#include "csrc/refit/device_executor.h"
#include "csrc/refit/device_ops.h"
#include "csrc/refit/link.h"
#include "csrc/refit/nccl_api.h"
#include "csrc/refit/nccl_comm.h"
#include "csrc/refit/nccl_link.h"

namespace tandem {

// What all ranks must agree on, in numbers that a signed maximum compares rightly.
struct NcclField {
  const char* name;
  int64_t value;
};

class NcclEnd : private Watch {
 public:
  // rank: in the communicator; own_rank: in faults.
  NcclEnd(const NcclOptions& options, const LinkGeometry& geometry, int rank, int32_t own_rank);
  ~NcclEnd() override;
  NcclEnd(const NcclEnd&) = delete;
  NcclEnd& operator=(const NcclEnd&) = delete;

  // Opens the libraries, makes streams, events and memory.
  Status Init();
  Status Join(const Deadline& deadline);
  Status Begin(uint64_t epoch, const Deadline& deadline);

  // Broadcasts the slot's first bytes, from rank 0 to the others: after what the executor has been
  // given so far, or, where `after_read`, after it has read the slot's last contents.
  Status Broadcast(int64_t slot, int64_t bytes, bool after_read, const Deadline& deadline);
  // The executor goes on with this slot only when its last broadcast is done.
  Status WaitForWire(int64_t slot);
  // What the executor has been given so far was the last that reads this slot.
  Status MarkRead(int64_t slot);
  // Returns when all ranks have come here with all that they had enqueued before.
  Status Meet(const Deadline& deadline);

  // Status of the first fault, if there is one. For the device of the calling thread as well.
  Status Enter();
  // Keeps the first fault, aborts, and returns that fault's status.
  Status Fail(const Status& status);
  // When it returns, nothing on the device reads or writes the caller's tensors any more.
  void Abort(const Fault& fault);
  Fault fault() const;

  DeviceExecutor* executor() const { return executor_.get(); }
  uint8_t* slot(int64_t index) const { return slots_ + index * slot_stride_; }
  const LinkGeometry& geometry() const { return geometry_; }

 private:
  struct Slot {
    Event on_wire = nullptr;  // its last broadcast is done
    Event read = nullptr;     // its last contents have been read
  };

  using Fields = std::array<NcclField, 7>;
  using Extremes = std::array<int64_t, 14>;  // of each field the largest, then minus the smallest

  Status Check() override;
  Status MakeSlots();
  Status SayHello(const Deadline& deadline);
  Status CompareGeometry(const Deadline& deadline);
  Status Compare(const Fields& fields, const Extremes& extremes) const;
  Status ReduceOnWire(void* data, int64_t count, nccl::DataType type, nccl::RedOp op,
                      const Deadline& deadline);
  Status HoldBack(const Deadline& deadline);
  void SetDeadline(const Deadline& deadline);
  void Relax();  // nothing is under way
  void Drain();
  void WatchOver();
  void StopWatching();

  const NcclOptions options_;
  const LinkGeometry geometry_;
  const int rank_;
  const int32_t own_rank_;
  const int64_t slot_stride_;

  const nccl::Api* api_ = nullptr;
  const DeviceOps* ops_ = nullptr;
  std::unique_ptr<NcclComm> comm_;
  std::unique_ptr<DeviceExecutor> executor_;
  Stream wire_ = nullptr;
  Event work_done_ = nullptr;
  Event wire_done_ = nullptr;
  std::mutex draining_;
  Event drained_ = nullptr;
  std::vector<Event> earlier_;  // the last broadcasts, in turns; see HoldBack
  size_t next_earlier_ = 0;
  std::vector<Slot> slot_events_;
  uint8_t* slots_ = nullptr;
  bool has_nccl_memory_ = false;
  void* scratch_ = nullptr;
  uint64_t epoch_ = 0;
  bool has_joined_ = false;

  mutable std::mutex mutex_;  // of what follows
  std::condition_variable changed_;
  Fault fault_{StatusCode::kOk, kNoRank, -1, ""};
  Deadline deadline_ = Deadline::In(0);
  bool is_under_way_ = false;
  bool is_ending_ = false;
  std::thread watcher_;
};

}  // namespace tandem
