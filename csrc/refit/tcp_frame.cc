#include "csrc/refit/tcp_frame.h"

#include <algorithm>
#include <cinttypes>
#include <cstdio>
#include <cstring>

namespace tandem::tcp {
namespace {

std::string Differs(const char* field, int64_t sender, int64_t reader) {
  char text[160];
  std::snprintf(text, sizeof(text), "%s: the sender has %" PRId64 ", the reader %" PRId64, field,
                sender, reader);
  return text;
}

// At most kMaxMessage bytes, and no character of UTF-8 cut in two.
size_t CutAt(const std::string& message) {
  if (message.size() <= kMaxMessage) return message.size();
  size_t size = kMaxMessage;
  while (size > 0 && (static_cast<uint8_t>(message[size]) & 0xC0) == 0x80) --size;
  return size;
}

}  // namespace

uint64_t PayloadOf(FrameType type) {
  switch (type) {
    case FrameType::kHello:
    case FrameType::kWelcome:
      return sizeof(Hello);
    case FrameType::kRefuse:
    case FrameType::kAbort:
      return sizeof(FaultRecord);
    default:
      return 0;
  }
}

Hello MakeHello(const LinkGeometry& geometry, int32_t reader) {
  Hello hello;
  hello.reader = reader;
  hello.plan_digest = geometry.plan_digest;
  hello.slot_bytes = geometry.slot_bytes;
  hello.num_slots = geometry.num_slots;
  hello.num_readers = geometry.num_readers;
  hello.root = geometry.root;
  return hello;
}

std::string FirstDifference(const Hello& sender, const Hello& reader) {
  if (sender.version != reader.version) {
    return Differs("protocol version", sender.version, reader.version);
  }
  if (sender.plan_digest != reader.plan_digest) {
    char text[160];
    std::snprintf(text, sizeof(text),
                  "plan_digest: the sender has %016" PRIx64 ", the reader %016" PRIx64,
                  sender.plan_digest, reader.plan_digest);
    return text;
  }
  if (sender.slot_bytes != reader.slot_bytes) {
    return Differs("slot_bytes", sender.slot_bytes, reader.slot_bytes);
  }
  if (sender.num_slots != reader.num_slots) {
    return Differs("num_slots", sender.num_slots, reader.num_slots);
  }
  if (sender.num_readers != reader.num_readers) {
    return Differs("num_readers", sender.num_readers, reader.num_readers);
  }
  return sender.root == reader.root ? "" : Differs("root", sender.root, reader.root);
}

FaultRecord ToRecord(const Fault& fault) {
  FaultRecord record;
  record.code = static_cast<int32_t>(fault.code);
  record.rank = fault.rank;
  record.bucket = fault.bucket;
  record.message_bytes = static_cast<uint32_t>(CutAt(fault.message));
  std::memcpy(record.message, fault.message.data(), record.message_bytes);
  return record;
}

Fault FromRecord(const FaultRecord& record) {
  Fault fault;
  const bool is_code = record.code > static_cast<int32_t>(StatusCode::kOk) &&
                       record.code <= static_cast<int32_t>(StatusCode::kUnavailable);
  fault.code = is_code ? static_cast<StatusCode>(record.code) : StatusCode::kAborted;
  fault.rank = record.rank;
  fault.bucket = record.bucket;
  fault.message.assign(record.message,
                       std::min<uint32_t>(record.message_bytes, sizeof(record.message)));
  return fault;
}

}  // namespace tandem::tcp
