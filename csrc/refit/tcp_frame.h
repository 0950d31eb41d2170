// What travels on a connection of the TCP link: frames, each a header of 24 bytes and a payload.
// Little-endian, as the machines are.
//
//   reader -> sender   hello, release*, heartbeat*, goodbye | abort
//   sender -> reader   welcome | refuse, (begin, data*)*, heartbeat*, goodbye | abort
//
// A slot travels as one or more data frames in a row, so that an abort or a heartbeat can pass
// between them. A data frame is sent only when the reader has a free slot: a reader takes all that
// arrives, and the connection is never blocked for an abort.
#pragma once

#include <bit>
#include <cstdint>
#include <string>

#include "csrc/refit/link.h"

namespace tandem::tcp {

static_assert(std::endian::native == std::endian::little, "frames are structs in memory");

inline constexpr uint32_t kFrameMagic = 0x4c54'4454;  // "TDTL"
inline constexpr uint32_t kProtocolVersion = 1;

enum class FrameType : uint16_t {
  kHello = 1,  // Hello
  kWelcome,    // Hello, of the sender: all readers are there
  kRefuse,     // FaultRecord
  kBegin,      // value: epoch
  kData,       // value: number of the slot since the link was made; is_last: it is complete
  kRelease,    // value: slots that the reader has given back since the link was made
  kHeartbeat,
  kAbort,    // FaultRecord
  kGoodbye,  // the end closes its link in peace
};

struct FrameHeader {
  uint32_t magic = kFrameMagic;
  FrameType type = FrameType::kHeartbeat;
  uint16_t is_last = 0;
  uint64_t length = 0;  // bytes of the payload
  uint64_t value = 0;
};
static_assert(sizeof(FrameHeader) == 24);

struct Hello {
  uint32_t version = kProtocolVersion;
  int32_t reader = -1;  // -1: the sender
  uint64_t plan_digest = 0;
  int64_t slot_bytes = 0;
  int32_t num_slots = 0;
  int32_t num_readers = 0;
  int32_t root = 0;
  int32_t reserved = 0;
};
static_assert(sizeof(Hello) == 40);

inline constexpr int kMaxMessage = 400;

struct FaultRecord {
  int32_t code = 0;
  int32_t rank = 0;
  int64_t bucket = 0;
  uint32_t message_bytes = 0;
  char message[kMaxMessage] = {};
  uint32_t reserved = 0;
};
static_assert(sizeof(FaultRecord) == 424);

// Of every frame but data.
inline constexpr uint64_t kMaxControlPayload = sizeof(FaultRecord);
// The payload that a frame of this type has; data frames have any.
uint64_t PayloadOf(FrameType type);

Hello MakeHello(const LinkGeometry& geometry, int32_t reader);
// In words, "" where there is none.
std::string FirstDifference(const Hello& sender, const Hello& reader);

FaultRecord ToRecord(const Fault& fault);
Fault FromRecord(const FaultRecord& record);

}  // namespace tandem::tcp
