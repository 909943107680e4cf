// The control segment of a session, as bytes: plain data only. Behaviour is in ring_writer.h and
// ring_reader.h (the submission ring) and completion.h (the answers).
//
// One per session, allocated and sealed by the daemon, mapped by the daemon and one trainer.
// Nothing in it is a pointer, a pid or a thread id. Each word has one writer, named beside it; the
// other side trusts nothing it reads here before it has copied and checked it.
#ifndef GRADSYNC_SHM_SESSION_LAYOUT_H_
#define GRADSYNC_SHM_SESSION_LAYOUT_H_

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace gradsync {

inline constexpr size_t kCacheLine = 64;
inline constexpr uint32_t kRingEntries = 1024;  // a power of two
inline constexpr uint32_t kMaxGroupsPerSession = 256;
inline constexpr size_t kErrorTextBytes = 996;
inline constexpr uint32_t kNoSegment = 0xffffffff;

// A range of one of the session's segments. `segment` is the number that the daemon gave it.
struct Region {
  uint32_t segment;
  uint32_t reserved;
  uint64_t offset;  // bytes from the segment's start
};

// What a trainer submits: one operation of one group. Operations of a group are numbered from 0 in
// the group's one order, the same on every rank; they may arrive out of order (buckets become ready
// so), and are started and completed strictly in order.
struct Submission {
  uint64_t sequence;
  uint64_t count;       // elements of a block; 0 for a barrier
  uint32_t group;       // the session's number for the group (GroupCreated::group)
  uint32_t timeout_ms;  // from the first rank's submission to the last's
  uint32_t root;        // index in the group; of a kind that has one, else 0
  uint32_t bucket;      // index in the registered plan; kBucketReduce only, else 0
  uint8_t kind;         // OpKind
  uint8_t dtype;        // DType
  uint8_t reduce_op;    // ReduceOp
  uint8_t on_device;    // 1: on the GPU of UseDevice, where both sides are; else 0
  uint8_t reserved[4];
  // One block, or one for each rank, on those who have a side (OpTraits). The output may equal the
  // input, but for kAllToAll.
  Region input;
  Region output;
  uint8_t padding[56];
};
static_assert(sizeof(Submission) == 128 && alignof(Submission) == 8);
static_assert(std::is_trivially_copyable_v<Submission> && std::is_standard_layout_v<Submission>);

// Single producer (the trainer), single consumer (the daemon).
struct RingLayout {
  // Entries ever written; the trainer stores it after it has written the entry.
  alignas(kCacheLine) std::atomic<uint64_t> head;
  // Entries ever consumed; the daemon stores it with release after it has copied the entry.
  alignas(kCacheLine) std::atomic<uint64_t> tail;
  // 1 while the daemon sleeps or is about to: then the trainer must ring the eventfd. The daemon
  // stores it, and a trainer that rings exchanges it to 0, both sequentially consistent.
  alignas(kCacheLine) std::atomic<uint32_t> daemon_asleep;
  alignas(kCacheLine) std::array<Submission, kRingEntries> entries;
};

enum class GroupState : uint32_t {
  kActive = 0,
  kFailed = 1,  // `code` and `text` say why; nothing more completes
};

// The daemon's answers for one group. All words but `waiters` are written by the daemon only.
struct GroupWords {
  // Operations completed: operation s is complete when this is > s. Stored with release.
  alignas(kCacheLine) std::atomic<uint64_t> completed;
  // Bumped after every change of `completed` or `state`: the futex word.
  std::atomic<uint32_t> epoch;
  // GroupState, stored with release after `code` and `text`.
  std::atomic<uint32_t> state;
  // Threads of the trainer that are about to sleep on `epoch`; the trainer's. With none, the daemon
  // saves the wake-up call.
  std::atomic<uint32_t> waiters;
  int32_t code;  // Code
  uint32_t text_bytes;
  std::array<char, kErrorTextBytes> text;
};
static_assert(sizeof(GroupWords) == 1024);

inline constexpr uint64_t kControlMagic = 0x31636e7973647267;  // "grdsync1"

struct SessionLayout {
  uint64_t magic;         // the daemon, once
  uint32_t version;       // kProtocolVersion; the daemon, once
  uint32_t ring_entries;  // kRingEntries; the daemon, once
  alignas(kCacheLine) RingLayout ring;
  alignas(kCacheLine) std::array<GroupWords, kMaxGroupsPerSession> groups;
};
static_assert(std::is_standard_layout_v<SessionLayout>);
static_assert(std::atomic<uint64_t>::is_always_lock_free && sizeof(std::atomic<uint64_t>) == 8);
static_assert(offsetof(SessionLayout, ring) == kCacheLine);
static_assert(offsetof(RingLayout, entries) == 3 * kCacheLine);
static_assert(sizeof(SessionLayout) == kCacheLine + 3 * kCacheLine + kRingEntries * 128 +
                                           kMaxGroupsPerSession * sizeof(GroupWords));

}  // namespace gradsync

#endif  // GRADSYNC_SHM_SESSION_LAYOUT_H_
