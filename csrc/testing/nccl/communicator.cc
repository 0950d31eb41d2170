#include "csrc/testing/nccl/communicator.h"

#include <cstdlib>
#include <utility>

namespace tandem::testing {
namespace {

bool IsSet(const char* name) { return std::getenv(name) != nullptr; }

}  // namespace

std::string& LastError() {
  thread_local std::string error;
  return error;
}

nccl::Result Refuse(nccl::Result result, const std::string& message) {
  LastError() = message;
  return result;
}

Communicator::Communicator(const Place& place)
    : place_(place), is_silent_(IsSet("TANDEM_TEST_NCCL_SILENT")) {}

Communicator::~Communicator() {
  if (joining_.joinable()) joining_.join();
  ForgetUniqueId(place_.id);
}

nccl::Result Communicator::Init() {
  joining_ = std::thread([this] { Join(); });
  return place_.is_blocking ? WaitUntilReady() : nccl::kInProgress;
}

nccl::Result Communicator::WaitUntilReady() {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [&] { return state_ != State::kJoining || error_ != nccl::kSuccess; });
  return error_ == nccl::kSuccess ? error_ : Refuse(error_, message_);
}

void Communicator::Join() {
  const std::string wrong = segment_.Enter(place_.id, place_.num_ranks, place_.rank);
  if (!wrong.empty()) return Fail(nccl::kInvalidUsage, wrong);
  SegmentData& data = segment_.data();
  data.ranks[place_.rank].device = place_.device;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    collectives_ =
        std::make_unique<Collectives>(&segment_, place_.num_ranks, place_.rank, is_silent_);
  }
  std::string lost;
  const bool all_there = segment_.WaitFor(
      [&] {
        for (int rank = 0; rank < place_.num_ranks; ++rank) {
          if (data.ranks[rank].presence == Presence::kAbsent) return false;
        }
        return true;
      },
      [&] {
        lost = collectives_->FindLostPeer();
        return is_aborted_ || !lost.empty();
      });
  if (is_aborted_) return;
  if (!all_there) return Fail(nccl::kRemoteError, lost + " before all ranks were there");
  CheckDevices();
  const std::lock_guard<std::mutex> lock(mutex_);
  if (state_ == State::kJoining) state_ = State::kReady;
  changed_.notify_all();
}

void Communicator::CheckDevices() {
  if (!IsSet("TANDEM_TEST_NCCL_ONE_RANK_PER_DEVICE")) return;
  for (int rank = 0; rank < place_.num_ranks; ++rank) {
    if (rank == place_.rank || segment_.data().ranks[rank].device != place_.device) continue;
    Fail(nccl::kInvalidUsage, "Duplicate GPU detected : rank " + std::to_string(place_.rank) +
                                  " and rank " + std::to_string(rank) + " both on device " +
                                  std::to_string(place_.device));
  }
}

void Communicator::Fail(nccl::Result result, const std::string& message) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (error_ == nccl::kSuccess) {
    error_ = result;
    message_ = Who() + message;
  }
  changed_.notify_all();
}

nccl::Result Communicator::Launch(const Call& call, const void* source, void* target, Stream stream,
                                  bool is_in_group) {
  const auto bytes = static_cast<size_t>(call.count) * static_cast<size_t>(SizeOfType(call.type));
  if (SizeOfType(call.type) == 0) {
    return Refuse(nccl::kInvalidArgument, Who() + "type " + std::to_string(call.type));
  }
  if (call.kind == Call::kBroadcast && (call.root < 0 || call.root >= place_.num_ranks)) {
    return Refuse(nccl::kInvalidArgument, Who() + "root " + std::to_string(call.root) + " of " +
                                              std::to_string(place_.num_ranks) + " ranks");
  }
  const bool reads = call.kind == Call::kAllReduce || call.root == place_.rank;
  if ((reads && !IsDeviceMemory(source, bytes)) || !IsDeviceMemory(target, bytes)) {
    return Refuse(nccl::kInvalidArgument, Who() + call.Describe() + ": no device memory");
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  if (error_ != nccl::kSuccess) return Refuse(error_, message_);
  if (state_ != State::kReady && !(is_in_group && !pending_.empty())) {
    const char* why = state_ == State::kJoining   ? "before all ranks are there"
                      : state_ == State::kPending ? "while the call before it is in progress"
                                                  : "after ncclCommFinalize";
    return Refuse(nccl::kInvalidUsage, Who() + call.Describe() + " " + why);
  }
  ++outstanding_;
  pending_.push_back([self = shared_from_this(), call, source, target, stream] {
    StreamOf(stream)->Enqueue([=] { self->Execute(call, source, target); });
  });
  if (place_.is_blocking) {
    LaunchPending();
    return nccl::kSuccess;
  }
  state_ = State::kPending;
  return nccl::kInProgress;
}

void Communicator::LaunchPending() {
  for (const auto& launch : std::exchange(pending_, {})) launch();
}

void Communicator::Execute(const Call& call, const void* source, void* target) {
  bool is_well = !is_aborted_;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    is_well = is_well && error_ == nccl::kSuccess;
  }
  if (is_well) {
    const Outcome outcome = collectives_->Run(call, source, target);
    if (outcome.result != nccl::kSuccess && outcome.result != nccl::kInProgress) {
      Fail(outcome.result, outcome.message);
    }
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  --outstanding_;
}

nccl::Result Communicator::AsyncError() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (error_ == nccl::kSuccess && collectives_ != nullptr && state_ == State::kReady) {
    const std::string lost = collectives_->FindLostPeer();
    if (!lost.empty()) {
      error_ = nccl::kRemoteError;
      message_ = Who() + lost;
    }
  }
  if (error_ != nccl::kSuccess) return error_;
  switch (state_) {
    case State::kJoining:
      return nccl::kInProgress;
    case State::kPending:
      // Once more in progress, so that nobody takes the first answer for the last.
      if (!pending_.empty()) {
        LaunchPending();
        return nccl::kInProgress;
      }
      state_ = State::kReady;
      return nccl::kSuccess;
    case State::kFinalizing:
      if (outstanding_ > 0) return nccl::kInProgress;
      state_ = State::kFinalized;
      return nccl::kSuccess;
    default:
      return nccl::kSuccess;
  }
}

nccl::Result Communicator::Finalize() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (error_ != nccl::kSuccess) return Refuse(error_, message_);
  if (state_ != State::kReady) {
    return Refuse(nccl::kInvalidUsage, Who() +
                                           "ncclCommFinalize of a communicator that is not "
                                           "ready, or for the second time");
  }
  state_ = State::kFinalizing;
  return place_.is_blocking ? nccl::kSuccess : nccl::kInProgress;
}

nccl::Result Communicator::Destroy() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!registered_.empty()) {
    return Refuse(nccl::kInvalidUsage, Who() + std::to_string(registered_.size()) +
                                           " buffers are still registered; deregister them first");
  }
  if (state_ != State::kFinalized) {
    return Refuse(nccl::kInvalidUsage, Who() + "ncclCommDestroy before ncclCommFinalize is done");
  }
  segment_.data().ranks[place_.rank].presence = Presence::kLeft;
  segment_.Announce();
  return nccl::kSuccess;
}

void Communicator::Abort() {
  is_aborted_ = true;
  if (joining_.joinable()) joining_.join();
  std::unique_lock<std::mutex> lock(mutex_);
  if (collectives_ != nullptr) {
    collectives_->Interrupt();
    segment_.data().ranks[place_.rank].presence = Presence::kAborted;
    segment_.Announce();
  }
  outstanding_ -= static_cast<int64_t>(std::exchange(pending_, {}).size());
}

nccl::Result Communicator::Register(void* memory, size_t bytes, void** handle) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (state_ != State::kReady || !IsDeviceMemory(memory, bytes)) {
    return Refuse(nccl::kInvalidUsage,
                  Who() + "ncclCommRegister: the communicator is not ready, or no device memory");
  }
  *handle = memory;
  registered_[memory] = {static_cast<unsigned char*>(memory), bytes};
  return nccl::kSuccess;
}

nccl::Result Communicator::Deregister(void* handle) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (registered_.erase(handle) == 0) {
    return Refuse(nccl::kInvalidArgument, Who() + "ncclCommDeregister: it is not registered");
  }
  return nccl::kSuccess;
}

std::string Communicator::last_error() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return message_;
}

}  // namespace tandem::testing
