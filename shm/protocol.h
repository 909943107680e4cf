// The control protocol between a trainer and its daemon: frames over a SOCK_SEQPACKET Unix socket.
//
// A session is one connection of one rank of one job. The trainer asks, the daemon answers each
// request once, in order, with the request's reply type or with ErrorReply; the daemon sends
// nothing unasked but a last ErrorReply (request_id 0) before it closes a session.
//
// Every message is a plain struct: a FrameHeader first, then fixed fields; strings are
// NUL-terminated within fixed arrays. The header's first three fields stay where they are in every
// version, so that versions can tell each other apart. Fields are native-endian: both ends are on
// one machine.
//
//   trainer                          daemon
//   Hello                         -> Welcome          + control segment, doorbell eventfd
//   AllocateSegment               -> SegmentAllocated + the segment
//   FreeSegment                   -> Done
//   CreateGroup                   -> GroupCreated     when every rank of the group has asked
//   DestroyGroup                  -> Done
//   AbortGroup                    -> Done
//   DescribeBucket                -> Done
//   SendMessage (+ its memory)    -> Done             when the daemon has taken it
//   ReceiveMessage                -> MessageReceived  + its memory; when there is one
//   CancelMessage                 -> Done             after the ErrorReply to what it cancels
//   StandAside                    -> Rejoined         when every rank of the group stands aside
//   AllocateDeviceSegment         -> SegmentAllocated + the memory, of a GPU
//   ImportDeviceSegment (+ it)    -> SegmentAllocated
//   UseDevice                     -> Done
//   Goodbye                       -> Done             then both close
#ifndef GRADSYNC_SHM_PROTOCOL_H_
#define GRADSYNC_SHM_PROTOCOL_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>

#include "shm/device.h"
#include "shm/session_layout.h"

namespace gradsync {

// Raised whenever a message, the control segment or their meaning changes.
inline constexpr uint16_t kProtocolVersion = 4;
inline constexpr uint32_t kFrameMagic = 0x63736467;  // "gdsc"

// Where the daemon and a client that was told nothing meet.
inline constexpr char kSystemSocket[] = "/run/gradsync/gradsyncd.sock";

inline constexpr uint32_t kMaxLocalRanks = 256;
inline constexpr uint32_t kMaxTimeoutMs = 7u * 24 * 3600 * 1000;

enum class FrameType : uint16_t {
  kHello = 1,
  kWelcome = 2,
  kAllocateSegment = 3,
  kSegmentAllocated = 4,
  kFreeSegment = 5,
  kCreateGroup = 6,
  kGroupCreated = 7,
  kDestroyGroup = 8,
  kDescribeBucket = 9,
  kGoodbye = 10,
  kDone = 11,
  kError = 12,
  kAbortGroup = 13,
  kSendMessage = 14,
  kReceiveMessage = 15,
  kMessageReceived = 16,
  kCancelMessage = 17,
  kStandAside = 18,
  kRejoined = 19,
  kAllocateDeviceSegment = 20,
  kImportDeviceSegment = 21,
  kUseDevice = 22,
};

struct FrameHeader {
  uint32_t magic;    // kFrameMagic
  uint16_t version;  // kProtocolVersion
  uint16_t type;     // FrameType
  uint32_t size;     // of the whole message, bytes
  uint32_t request_id;
};
static_assert(sizeof(FrameHeader) == 16);

// A string in a message. Set() cuts at N-1 bytes; Get() stops at the array's end whatever it holds.
template <size_t N>
struct Text {
  std::array<char, N> bytes;

  void Set(std::string_view text) {
    bytes.fill('\0');
    std::memcpy(bytes.data(), text.data(), text.size() < N ? text.size() : N - 1);
  }
  std::string Get() const { return {bytes.data(), strnlen(bytes.data(), N)}; }
};

struct Hello {
  static constexpr FrameType kType = FrameType::kHello;
  FrameHeader header;
  Text<128> job;  // not empty; ranks that name the same job meet
  uint32_t generation;
  uint32_t world_size;
  uint32_t rank;
  uint32_t local_rank;
  uint32_t local_world_size;
  uint32_t pid;      // as the trainer sees itself; for people to read, nothing is keyed on it
  Text<64> program;  // for people to read
};

struct Welcome {
  static constexpr FrameType kType = FrameType::kWelcome;
  FrameHeader header;
  uint64_t session;
  uint64_t control_bytes;  // of the control segment (SessionLayout)
  uint32_t spin_us;        // how long a waiting trainer may spin; 0 where cores are scarce
  uint32_t reserved;
  Text<32> daemon_version;
};

struct AllocateSegment {
  static constexpr FrameType kType = FrameType::kAllocateSegment;
  FrameHeader header;
  uint64_t bytes;
  Text<32> label;
};

struct SegmentAllocated {
  static constexpr FrameType kType = FrameType::kSegmentAllocated;
  FrameHeader header;
  uint64_t bytes;  // at least what was asked, a whole number of pages
  uint32_t segment;
  uint32_t reserved;
};

// As AllocateSegment, in memory of a GPU; the descriptor is for cuMemImportFromShareableHandle.
struct AllocateDeviceSegment {
  static constexpr FrameType kType = FrameType::kAllocateDeviceSegment;
  FrameHeader header;
  uint64_t bytes;
  DeviceUuid device;
  Text<32> label;
};

// Makes a segment of GPU memory that the trainer has allocated, and keeps until it has freed the
// segment: exported, as a descriptor that comes along, or by its legacy handle.
struct ImportDeviceSegment {
  static constexpr FrameType kType = FrameType::kImportDeviceSegment;
  FrameHeader header;
  uint64_t bytes;  // of the whole allocation
  DeviceUuid device;
  uint8_t hand_over;  // HandOver, one of the trainer's memory
  uint8_t reserved[7];
  LegacyHandle handle;  // kLegacyHandle only
};

// This rank's operations of the group on GPUs are on this one, and go through this flag page
// (shm/device.h). Once for a group, before the first of them.
struct UseDevice {
  static constexpr FrameType kType = FrameType::kUseDevice;
  FrameHeader header;
  DeviceUuid device;
  uint32_t group;
  uint32_t flags_segment;  // in the machine's memory, of one page: kFlagPageBytes
};

struct FreeSegment {
  static constexpr FrameType kType = FrameType::kFreeSegment;
  FrameHeader header;
  uint32_t segment;
  uint32_t reserved;
};

struct CreateGroup {
  static constexpr FrameType kType = FrameType::kCreateGroup;
  FrameHeader header;
  Text<128> tag;  // ranks that name the same tag meet; a tag is used again only after DestroyGroup
  uint32_t timeout_ms;
  uint32_t rank_count;
  std::array<uint32_t, kMaxLocalRanks> ranks;  // of the job, in the group's order; without repeats
};

struct GroupCreated {
  static constexpr FrameType kType = FrameType::kGroupCreated;
  FrameHeader header;
  uint32_t group;  // index into SessionLayout::groups
  uint32_t reserved;
};

struct DestroyGroup {
  static constexpr FrameType kType = FrameType::kDestroyGroup;
  FrameHeader header;
  uint32_t group;
  uint32_t reserved;
};

// The rank will not keep its side of what the group waits for: the group fails on every rank, with
// this text and code.
struct AbortGroup {
  static constexpr FrameType kType = FrameType::kAbortGroup;
  FrameHeader header;
  uint32_t group;
  int32_t code;  // Code, not kOk
  Text<1024> text;
};

// What a bucket holds, for inspection and for error texts. Sent for each bucket of a plan, in index
// order; index 0 replaces an earlier plan.
struct DescribeBucket {
  static constexpr FrameType kType = FrameType::kDescribeBucket;
  FrameHeader header;
  uint32_t group;
  uint32_t bucket;
  uint32_t bucket_count;
  uint32_t parameter_count;
  uint64_t count;  // elements
  uint8_t dtype;   // DType
  uint8_t reserved[7];
  Text<256> parameters;  // "encoder.5.weight ... encoder.3.bias"
};

// In the place of a sender: whoever it is.
inline constexpr uint32_t kAnyMember = 0xffffffff;

// A longer message travels as a sealed memfd of exactly its size, which goes from one trainer to
// the other: the daemon maps nothing.
inline constexpr uint32_t kInlineMessageBytes = 1024;

// From one member of a group to another, outside the group's order of operations. Messages of one
// sender to one receiver under one tag are received in the order in which they were sent.
struct SendMessage {
  static constexpr FrameType kType = FrameType::kSendMessage;
  FrameHeader header;
  uint64_t tag;
  uint64_t bytes;
  uint32_t group;
  uint32_t to;          // index in the group
  uint32_t timeout_ms;  // for the daemon to take it
  uint32_t reserved;
  std::array<std::byte, kInlineMessageBytes> data;
};

struct ReceiveMessage {
  static constexpr FrameType kType = FrameType::kReceiveMessage;
  FrameHeader header;
  uint64_t tag;
  uint32_t group;
  uint32_t from;  // index in the group, or kAnyMember
  uint32_t timeout_ms;
  uint32_t reserved;
};

struct MessageReceived {
  static constexpr FrameType kType = FrameType::kMessageReceived;
  FrameHeader header;
  uint64_t bytes;
  uint32_t from;  // index in the group
  uint32_t reserved;
  std::array<std::byte, kInlineMessageBytes> data;
};

// Ends a SendMessage or ReceiveMessage of this session that has no reply yet, with an ErrorReply.
// Does nothing to one that has.
struct CancelMessage {
  static constexpr FrameType kType = FrameType::kCancelMessage;
  FrameHeader header;
  uint32_t group;
  uint32_t request;  // its request_id
};

// From now on the rank submits nothing to the group, and the group's sums, averages and shares are
// made without it, until every member has said the same.
struct StandAside {
  static constexpr FrameType kType = FrameType::kStandAside;
  FrameHeader header;
  uint64_t next_sequence;  // the first operation that it takes no part in
  uint32_t group;
  uint32_t timeout_ms;  // for the others to submit anything
  uint8_t policy;       // AsidePolicy; the same on every rank
  uint8_t reserved[7];
};

struct Rejoined {
  static constexpr FrameType kType = FrameType::kRejoined;
  FrameHeader header;
  uint64_t next_sequence;  // of the group, for every member
  uint32_t last;           // the member that took part longest; of several the last
  uint32_t reserved;
};

struct Goodbye {
  static constexpr FrameType kType = FrameType::kGoodbye;
  FrameHeader header;
};

struct Done {
  static constexpr FrameType kType = FrameType::kDone;
  FrameHeader header;
};

struct ErrorReply {
  static constexpr FrameType kType = FrameType::kError;
  FrameHeader header;
  int32_t code;  // Code
  uint32_t reserved;
  Text<2048> text;
};

// A zeroed message with its header filled in.
template <typename Message>
Message MakeMessage(uint32_t request_id = 0) {
  static_assert(std::is_trivially_copyable_v<Message> && std::is_standard_layout_v<Message>);
  Message message;
  std::memset(static_cast<void*>(&message), 0, sizeof(message));
  message.header = {kFrameMagic, kProtocolVersion, static_cast<uint16_t>(Message::kType),
                    sizeof(Message), request_id};
  return message;
}

template <typename Message>
std::span<const std::byte> AsBytes(const Message& message) {
  return std::as_bytes(std::span<const Message, 1>(&message, 1));
}

// The header of a received frame, if it is one of ours in any version.
inline std::optional<FrameHeader> ReadHeader(std::span<const std::byte> frame) {
  FrameHeader header{};
  if (frame.size() < sizeof(header)) return std::nullopt;
  std::memcpy(&header, frame.data(), sizeof(header));
  if (header.magic != kFrameMagic) return std::nullopt;
  return header;
}

// The message in a received frame, if it is exactly that message in this version.
template <typename Message>
std::optional<Message> ReadMessage(std::span<const std::byte> frame) {
  const std::optional<FrameHeader> header = ReadHeader(frame);
  if (!header || header->version != kProtocolVersion || frame.size() != sizeof(Message) ||
      header->size != sizeof(Message) || header->type != static_cast<uint16_t>(Message::kType)) {
    return std::nullopt;
  }
  Message message;
  std::memcpy(static_cast<void*>(&message), frame.data(), sizeof(message));
  return message;
}

}  // namespace gradsync

#endif  // GRADSYNC_SHM_PROTOCOL_H_
