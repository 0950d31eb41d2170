// The pipeline: tensors -> buckets -> a link -> buckets -> tensors, with digests on both sides. One
// SendSession per root; one ReceiveSession per reader, over the links of all roots. It follows a
// plan and decides nothing; when, which version and what happens after a failure is the caller's
// business.
//
// A slot is a SlotHeader, then (at kHeaderBytes) the bucket's payload as the plan lays it out. The
// header says which bucket of which refit this is, and carries the digest of the bucket's pieces; a
// receiver compares all of it, so that a repeated epoch, a wrong order or a truncated bucket is
// found at the bucket where it happens. Each end also has one digest per tensor when a refit is
// finished.
//
//   sender.Begin(epoch, version, deadline)            receiver.Begin(epoch, version, deadline)
//   for each bucket of its root: Send(b, tensors)     for each bucket: Receive(b, tensors)
//   sender.Finish(digests)                            receiver.Finish(digests)
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "csrc/common/status.h"
#include "csrc/refit/deadline.h"
#include "csrc/refit/link.h"
#include "csrc/refit/plan.h"

namespace tandem {

inline constexpr int64_t kHeaderBytes = 1024;

// Little-endian, at the start of a slot.
struct SlotHeader {
  uint64_t magic = 0;
  uint64_t epoch = 0;
  uint64_t version = 0;
  int64_t bucket = 0;
  int64_t bytes = 0;    // of the payload
  uint64_t digest = 0;  // of the row of the pieces' digests; 0 with digests off
  uint32_t has_digest = 0;
  uint32_t root = 0;
};

// A whole dense tensor in the memory of the link's executor. type may differ from the plan's among
// float32, bfloat16 and float16: then the copy casts.
struct TensorMemory {
  void* data = nullptr;
  WireType type = WireType::kFloat32;
};

// Seconds of a refit, by what this end did.
struct SessionTimes {
  double copy = 0;  // pack or unpack
  double digest = 0;
  double wire = 0;   // waiting for a slot, posting, flushing | waiting for a slot that is filled
  double total = 0;  // Begin to Finish
};

struct SessionOptions {
  bool digests = true;  // off only to measure what they cost
};

class SendSession {
 public:
  // `plan` outlives the session.
  SendSession(const Plan& plan, int32_t root, std::unique_ptr<SendLink> link,
              SessionOptions options);
  ~SendSession();
  std::string address() const;
  Status Join(const Deadline& deadline);
  Status Begin(uint64_t epoch, uint64_t version, const Deadline& deadline);
  // tensors: one per piece of the bucket. Buckets of the root in plan order, else kMismatch.
  Status Send(int64_t bucket, const TensorMemory* tensors);
  // digests: [plan.tensors.size()], those of other roots' tensors are 0.
  Status Finish(uint64_t* digests);
  void Abort(const Fault& fault);
  Fault fault() const;
  SessionTimes times() const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

class ReceiveSession {
 public:
  // links: one per root, in order.
  ReceiveSession(const Plan& plan, int32_t reader, std::vector<std::unique_ptr<ReceiveLink>> links,
                 SessionOptions options);
  ~ReceiveSession();
  Status Join(const Deadline& deadline);
  Status Begin(uint64_t epoch, uint64_t version, const Deadline& deadline);
  // Unpacks bucket number `bucket` into whole tensors, one per piece (a piece goes to its offset).
  Status Receive(int64_t bucket, const TensorMemory* tensors);
  // digests: [plan.tensors.size()] of the bytes that arrived.
  Status Finish(uint64_t* digests);
  void Abort(const Fault& fault);
  Fault fault() const;
  SessionTimes times() const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace tandem
