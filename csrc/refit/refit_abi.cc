#include "csrc/refit/refit_abi.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "csrc/refit/deadline.h"
#include "csrc/refit/digest.h"
#include "csrc/refit/executor.h"
#include "csrc/refit/nccl_link.h"
#include "csrc/refit/plan.h"
#include "csrc/refit/session.h"
#include "csrc/refit/shm_link.h"
#include "csrc/refit/tcp_link.h"

#define TANDEM_EXPORT extern "C" __attribute__((visibility("default")))

namespace {

using tandem::Deadline;
using tandem::Fault;
using tandem::InvalidArgument;
using tandem::LinkGeometry;
using tandem::Plan;
using tandem::ReceiveLink;
using tandem::ReceiveSession;
using tandem::SendLink;
using tandem::SendSession;
using tandem::SessionTimes;
using tandem::Status;
using tandem::StatusCode;
using tandem::TensorMemory;

constexpr int32_t kAbiVersion = 1;
constexpr int64_t kUniqueIdBytes = 128;
// A day is as good as for ever, and no clock overflows.
constexpr double kLongestSeconds = 86400;

enum Transport : int32_t { kShm = 0, kTcp = 1, kNccl = 2 };

// Plans are shared: a session needs its own as long as it lives.
using PlanHandle = std::shared_ptr<const Plan>;

template <typename Session>
struct End {
  PlanHandle plan;
  std::unique_ptr<Session> session;
  std::vector<TensorMemory> memory;  // of one bucket
  int32_t root = 0;                  // senders
};
using Sender = End<SendSession>;
using Receiver = End<ReceiveSession>;

const Plan& PlanOf(const void* plan) { return **static_cast<const PlanHandle*>(plan); }

Deadline In(double seconds) {
  return Deadline::In(std::isfinite(seconds) ? std::clamp(seconds, 0.0, kLongestSeconds)
                                             : (seconds > 0 ? kLongestSeconds : 0.0));
}

// Text of any length into a field, at most up to the start of a character.
template <size_t N>
void Write(const std::string& text, char (&field)[N]) {
  size_t size = std::min(text.size(), N - 1);
  if (size < text.size()) {
    while (size > 0 && (static_cast<unsigned char>(text[size]) & 0xC0) == 0x80) --size;
  }
  std::memcpy(field, text.data(), size);
  field[size] = '\0';
}

int32_t Report(const Fault& fault, TandemRefitError* error) {
  if (fault.code == StatusCode::kOk) return 0;
  error->code = static_cast<int32_t>(fault.code);
  error->rank = fault.rank;
  error->bucket = fault.bucket;
  Write(fault.message, error->message);
  return error->code;
}

int32_t Report(const Status& status, TandemRefitError* error) {
  return Report(Fault{status.code(), tandem::kNoRank, -1, status.message()}, error);
}

// A failed call tells its session's first fault, unless it failed without one.
template <typename Session>
int32_t Report(const Status& status, const Session& session, TandemRefitError* error) {
  if (status.ok()) return 0;
  const Fault fault = session.fault();
  return fault.code == StatusCode::kOk ? Report(status, error) : Report(fault, error);
}

Fault ToFault(const TandemRefitError& error) {
  return {static_cast<StatusCode>(error.code), error.rank, error.bucket, error.message};
}

LinkGeometry GeometryOf(const Plan& plan, const TandemRefitLink& link, int32_t root) {
  return {plan.digest, tandem::kHeaderBytes + plan.bucket_bytes, link.num_slots, link.num_readers,
          root};
}

std::string TextOf(const char* text) { return text == nullptr ? "" : text; }

Status CheckLink(const Plan& plan, const TandemRefitLink& link, bool is_sender) {
  if (link.num_slots < 2)
    return InvalidArgument("num_slots: want at least 2, got %d", link.num_slots);
  if (link.num_readers < 1) {
    return InvalidArgument("num_readers: want at least 1, got %d", link.num_readers);
  }
  if (is_sender && (link.root < 0 || link.root >= plan.num_roots)) {
    return InvalidArgument("root: want one of the plan's %d, got %d", plan.num_roots, link.root);
  }
  if (!is_sender && (link.reader < 0 || link.reader >= link.num_readers)) {
    return InvalidArgument("reader: want one of %d, got %d", link.num_readers, link.reader);
  }
  if (link.transport != kShm && link.transport != kTcp && link.transport != kNccl) {
    return InvalidArgument("transport: want 0 (shm), 1 (tcp) or 2 (nccl), got %d", link.transport);
  }
  if (link.transport == kNccl && link.unique_ids == nullptr) {
    return InvalidArgument("unique_ids: nccl needs one of 128 bytes per root");
  }
  return tandem::OkStatus();
}

tandem::NcclOptions NcclOptionsOf(const TandemRefitLink& link, int32_t root) {
  return {TextOf(link.nccl_library), TextOf(link.device_library),
          std::string(link.unique_ids + root * kUniqueIdBytes, kUniqueIdBytes),
          static_cast<tandem::NcclDialect>(link.nccl_dialect), link.device};
}

Status OpenSendLink(const Plan& plan, const TandemRefitLink& link,
                    std::unique_ptr<SendLink>* result) {
  const LinkGeometry geometry = GeometryOf(plan, link, link.root);
  switch (link.transport) {
    case kShm:
      return tandem::CreateShmSendLink(link.addresses[0], geometry, result);
    case kTcp:
      return tandem::CreateTcpSendLink(link.addresses[0], link.port, geometry, {link.silence_s},
                                       result);
    default:
      return tandem::CreateNcclSendLink(NcclOptionsOf(link, link.root), geometry, result);
  }
}

Status OpenReceiveLink(const Plan& plan, const TandemRefitLink& link, int32_t root,
                       std::unique_ptr<ReceiveLink>* result) {
  const LinkGeometry geometry = GeometryOf(plan, link, root);
  switch (link.transport) {
    case kShm:
      return tandem::AttachShmReceiveLink(link.addresses[root], geometry, link.reader, result);
    case kTcp:
      return tandem::ConnectTcpReceiveLink(link.addresses[root], geometry, link.reader,
                                           {link.silence_s}, result);
    default:
      return tandem::CreateNcclReceiveLink(NcclOptionsOf(link, root), geometry, link.reader,
                                           result);
  }
}

// `step(bucket, tensors)` for `count` buckets from number `first` on, of those that `mine` takes.
template <typename Mine, typename Step>
Status ForBuckets(const Plan& plan, int64_t first, int64_t count, Mine mine, void* const* data,
                  const int32_t* types, std::vector<TensorMemory>* memory, Step step) {
  const auto end = static_cast<int64_t>(plan.buckets.size());
  for (int64_t bucket = first; count > 0; ++bucket) {
    if (bucket < 0 || bucket >= end) {
      return InvalidArgument("first, count: bucket %lld is not one of the plan's %lld",
                             static_cast<long long>(bucket), static_cast<long long>(end));
    }
    const tandem::Bucket& entry = plan.buckets[static_cast<size_t>(bucket)];
    if (!mine(entry)) continue;
    memory->clear();
    for (int64_t i = 0; i < entry.num_pieces; ++i) {
      memory->push_back({data[i], static_cast<tandem::WireType>(types[i])});
    }
    Status status = step(bucket, memory->data());
    if (!status.ok()) return status;
    data += entry.num_pieces;
    types += entry.num_pieces;
    --count;
  }
  return tandem::OkStatus();
}

template <typename Session>
void ReserveMemory(End<Session>* end) {
  int64_t largest = 0;
  for (const tandem::Bucket& bucket : end->plan->buckets) {
    largest = std::max(largest, bucket.num_pieces);
  }
  end->memory.reserve(static_cast<size_t>(largest));
}

template <typename Session>
int32_t Finish(End<Session>* end, uint64_t* digests, TandemRefitTimes* times,
               TandemRefitError* error) {
  const Status status = end->session->Finish(digests);
  const SessionTimes seconds = end->session->times();
  *times = {seconds.copy, seconds.digest, seconds.wire, seconds.total};
  return Report(status, *end->session, error);
}

int64_t CopyOut(const std::string& text, char* bytes, int64_t capacity) {
  const auto size = static_cast<int64_t>(text.size());
  if (bytes != nullptr)
    std::memcpy(bytes, text.data(), static_cast<size_t>(std::min(size, capacity)));
  return size;
}

}  // namespace

TANDEM_EXPORT int32_t tandem_refit_abi_version() { return kAbiVersion; }

TANDEM_EXPORT int32_t tandem_plan_build(const char* const* names, const int32_t* types,
                                        const int32_t* ranks, const int64_t* extents, int64_t n,
                                        int64_t bucket_bytes, int32_t num_roots, void** plan,
                                        TandemRefitError* error) {
  std::vector<tandem::TensorEntry> tensors;
  tensors.reserve(static_cast<size_t>(n));
  for (int64_t i = 0; i < n; ++i) {
    tensors.push_back({names[i], static_cast<tandem::WireType>(types[i]),
                       std::vector<int64_t>(extents, extents + ranks[i])});
    extents += ranks[i];
  }
  auto built = std::make_shared<Plan>();
  const Status status = tandem::BuildPlan(std::move(tensors), bucket_bytes, num_roots, built.get());
  if (status.ok()) *plan = new PlanHandle(std::move(built));
  return Report(status, error);
}

TANDEM_EXPORT int32_t tandem_plan_parse(const char* bytes, int64_t size, void** plan,
                                        TandemRefitError* error) {
  auto parsed = std::make_shared<Plan>();
  const Status status =
      tandem::ParsePlan(std::string(bytes, static_cast<size_t>(size)), parsed.get());
  if (status.ok()) *plan = new PlanHandle(std::move(parsed));
  return Report(status, error);
}

TANDEM_EXPORT void tandem_plan_free(void* plan) { delete static_cast<PlanHandle*>(plan); }

TANDEM_EXPORT int64_t tandem_plan_serialize(const void* plan, char* bytes, int64_t capacity) {
  return CopyOut(tandem::SerializePlan(PlanOf(plan)), bytes, capacity);
}

TANDEM_EXPORT uint64_t tandem_plan_digest(const void* plan) { return PlanOf(plan).digest; }

TANDEM_EXPORT void tandem_plan_counts(const void* plan, int64_t counts[6]) {
  const Plan& p = PlanOf(plan);
  counts[0] = static_cast<int64_t>(p.tensors.size());
  counts[1] = static_cast<int64_t>(p.buckets.size());
  counts[2] = static_cast<int64_t>(p.pieces.size());
  counts[3] = p.bucket_bytes;
  counts[4] = p.total_bytes();
  counts[5] = p.num_roots;
}

TANDEM_EXPORT void tandem_plan_pieces(const void* plan, int64_t* pieces) {
  const Plan& p = PlanOf(plan);
  for (size_t b = 0; b < p.buckets.size(); ++b) {
    const tandem::Bucket& bucket = p.buckets[b];
    for (int64_t i = bucket.first_piece; i < bucket.first_piece + bucket.num_pieces; ++i) {
      const tandem::Piece& piece = p.pieces[static_cast<size_t>(i)];
      const int64_t row[6] = {static_cast<int64_t>(b), piece.tensor, piece.tensor_offset,
                              piece.bucket_offset,     piece.bytes,  bucket.root};
      pieces = std::copy(std::begin(row), std::end(row), pieces);
    }
  }
}

TANDEM_EXPORT const char* tandem_plan_tensor(const void* plan, int64_t index, int32_t* type,
                                             int32_t* num_extents, const int64_t** extents) {
  const tandem::TensorEntry& entry = PlanOf(plan).tensors[static_cast<size_t>(index)];
  *type = static_cast<int32_t>(entry.type);
  *num_extents = static_cast<int32_t>(entry.shape.size());
  *extents = entry.shape.data();
  return entry.name.c_str();
}

TANDEM_EXPORT int32_t tandem_sender_open(const void* plan, const TandemRefitLink* link,
                                         void** sender, TandemRefitError* error) {
  auto end = std::make_unique<Sender>();
  end->plan = *static_cast<const PlanHandle*>(plan);
  std::unique_ptr<SendLink> wire;
  Status status = CheckLink(*end->plan, *link, true);
  if (status.ok()) status = OpenSendLink(*end->plan, *link, &wire);
  if (!status.ok()) return Report(status, error);
  ReserveMemory(end.get());
  end->session = std::make_unique<SendSession>(*end->plan, link->root, std::move(wire),
                                               tandem::SessionOptions{link->has_digests != 0});
  end->root = link->root;
  *sender = end.release();
  return 0;
}

TANDEM_EXPORT int64_t tandem_sender_address(const void* sender, char* bytes, int64_t capacity) {
  return CopyOut(static_cast<const Sender*>(sender)->session->address(), bytes, capacity);
}

TANDEM_EXPORT int32_t tandem_sender_join(void* sender, double timeout_s, TandemRefitError* error) {
  SendSession& session = *static_cast<Sender*>(sender)->session;
  return Report(session.Join(In(timeout_s)), session, error);
}

TANDEM_EXPORT int32_t tandem_sender_begin(void* sender, uint64_t epoch, uint64_t version,
                                          double timeout_s, TandemRefitError* error) {
  SendSession& session = *static_cast<Sender*>(sender)->session;
  return Report(session.Begin(epoch, version, In(timeout_s)), session, error);
}

TANDEM_EXPORT int32_t tandem_sender_send(void* sender, int64_t first, int64_t count,
                                         void* const* data, const int32_t* types,
                                         TandemRefitError* error) {
  Sender& end = *static_cast<Sender*>(sender);
  const auto mine = [&](const tandem::Bucket& bucket) { return bucket.root == end.root; };
  const auto step = [&](int64_t bucket, const TensorMemory* tensors) {
    return end.session->Send(bucket, tensors);
  };
  return Report(ForBuckets(*end.plan, first, count, mine, data, types, &end.memory, step),
                *end.session, error);
}

TANDEM_EXPORT int32_t tandem_sender_finish(void* sender, uint64_t* digests, TandemRefitTimes* times,
                                           TandemRefitError* error) {
  return Finish(static_cast<Sender*>(sender), digests, times, error);
}

TANDEM_EXPORT void tandem_sender_abort(void* sender, const TandemRefitError* fault) {
  static_cast<Sender*>(sender)->session->Abort(ToFault(*fault));
}

TANDEM_EXPORT void tandem_sender_free(void* sender) { delete static_cast<Sender*>(sender); }

TANDEM_EXPORT int32_t tandem_receiver_open(const void* plan, const TandemRefitLink* link,
                                           void** receiver, TandemRefitError* error) {
  auto end = std::make_unique<Receiver>();
  end->plan = *static_cast<const PlanHandle*>(plan);
  std::vector<std::unique_ptr<ReceiveLink>> wires;
  Status status = CheckLink(*end->plan, *link, false);
  for (int32_t root = 0; status.ok() && root < end->plan->num_roots; ++root) {
    wires.emplace_back();
    status = OpenReceiveLink(*end->plan, *link, root, &wires.back());
  }
  if (!status.ok()) return Report(status, error);
  ReserveMemory(end.get());
  end->session = std::make_unique<ReceiveSession>(*end->plan, link->reader, std::move(wires),
                                                  tandem::SessionOptions{link->has_digests != 0});
  *receiver = end.release();
  return 0;
}

TANDEM_EXPORT int32_t tandem_receiver_join(void* receiver, double timeout_s,
                                           TandemRefitError* error) {
  ReceiveSession& session = *static_cast<Receiver*>(receiver)->session;
  return Report(session.Join(In(timeout_s)), session, error);
}

TANDEM_EXPORT int32_t tandem_receiver_begin(void* receiver, uint64_t epoch, uint64_t version,
                                            double timeout_s, TandemRefitError* error) {
  ReceiveSession& session = *static_cast<Receiver*>(receiver)->session;
  return Report(session.Begin(epoch, version, In(timeout_s)), session, error);
}

TANDEM_EXPORT int32_t tandem_receiver_receive(void* receiver, int64_t first, int64_t count,
                                              void* const* data, const int32_t* types,
                                              TandemRefitError* error) {
  Receiver& end = *static_cast<Receiver*>(receiver);
  const auto mine = [](const tandem::Bucket&) { return true; };
  const auto step = [&](int64_t bucket, const TensorMemory* tensors) {
    return end.session->Receive(bucket, tensors);
  };
  return Report(ForBuckets(*end.plan, first, count, mine, data, types, &end.memory, step),
                *end.session, error);
}

TANDEM_EXPORT int32_t tandem_receiver_finish(void* receiver, uint64_t* digests,
                                             TandemRefitTimes* times, TandemRefitError* error) {
  return Finish(static_cast<Receiver*>(receiver), digests, times, error);
}

TANDEM_EXPORT void tandem_receiver_abort(void* receiver, const TandemRefitError* fault) {
  static_cast<Receiver*>(receiver)->session->Abort(ToFault(*fault));
}

TANDEM_EXPORT void tandem_receiver_free(void* receiver) { delete static_cast<Receiver*>(receiver); }

TANDEM_EXPORT void tandem_digest(const void* const* data, const int64_t* bytes, int64_t n,
                                 uint64_t* digests) {
  for (int64_t i = 0; i < n; ++i) {
    const tandem::DigestItem item = {data[i], bytes[i], 0};
    // Fails only for arguments that the caller has checked: memory that is there.
    if (!tandem::HostExecutor()->Digest(&item, 1, digests + i).ok()) digests[i] = 0;
  }
}

TANDEM_EXPORT int32_t tandem_nccl_unique_id(const char* library, char* unique_id,
                                            TandemRefitError* error) {
  std::string id;
  const Status status = tandem::MakeNcclUniqueId(library, &id);
  if (status.ok()) id.copy(unique_id, kUniqueIdBytes);
  return Report(status, error);
}
