// What both sides know of GPUs without knowing CUDA: which one it is, how memory of it crosses
// processes, and the flag page, through which a trainer's stream and the daemon's tell each other
// how far they are without either processor.
//
// A flag page belongs to one rank of one group. It is one page of a segment (shm/segment.h) that
// both sides pin for their GPUs (cuMemHostRegister), so that streams wait for its words and write
// them (cuStreamWaitValue64, cuStreamWriteValue64):
//
//   the trainer's stream                      the daemon's stream
//   ... writes the gradients ...              waits until ready[s % kFlagSlots] >= s + 1
//   ready[s % kFlagSlots] = s + 1             reduces
//   waits until done >= s + 1                 done = s + 1
//   ... reads the averages ...
//
// A wait may be enqueued long before the word is written. Who survives the other writes its words
// from the processor, all with kReleased, so that no stream waits for the dead.
#ifndef GRADSYNC_SHM_DEVICE_H_
#define GRADSYNC_SHM_DEVICE_H_

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "shm/session_layout.h"

namespace gradsync {

// A GPU's identity, the same in every process whatever CUDA_VISIBLE_DEVICES says
// (cuDeviceGetUuid).
using DeviceUuid = std::array<uint8_t, 16>;

// How memory of a GPU came to be used by both sides.
enum class HandOver : uint8_t {
  kHostMemory = 0,      // none: it is shared memory of the machine
  kDaemonMemory = 1,    // the daemon allocated it (cuMemCreate), the trainer mapped it
  kExportedMemory = 2,  // the trainer's (cuMemCreate), exported as a file descriptor
  kLegacyHandle = 3,    // the trainer's (cudaMalloc), by CUDA IPC handle
};
inline constexpr uint8_t kHandOverCount = 4;

// A CUipcMemHandle.
using LegacyHandle = std::array<std::byte, 64>;

// Operations of a group on GPUs that may be under way: beyond that the trainer waits before it
// submits more.
inline constexpr uint64_t kFlagSlots = 256;

// Ahead of every sequence number in the way that streams compare, which is cyclic: a word passes if
// int64_t(word - awaited) >= 0.
inline constexpr uint64_t kReleased = std::numeric_limits<int64_t>::max();

struct FlagPage {
  // Operations of the group below this are done, as far as they are on this rank's GPU. The
  // daemon's stream writes it, and either processor writes kReleased.
  alignas(kCacheLine) std::atomic<uint64_t> done;
  // Slot s % kFlagSlots: s + 1 once the trainer's stream has come to operation s. The trainer's
  // stream writes it, and the daemon's processor writes kReleased.
  alignas(kCacheLine) std::array<std::atomic<uint64_t>, kFlagSlots> ready;
  // Not 0 once the group cannot go on, before any word is let go because of it. Why will be in the
  // group's words (session_layout.h) soon. The daemon's processor writes it.
  alignas(kCacheLine) std::atomic<uint32_t> failing;
};
inline constexpr uint64_t kFlagPageBytes = 4096;
static_assert(sizeof(FlagPage) <= kFlagPageBytes && std::is_standard_layout_v<FlagPage>);
static_assert(sizeof(std::atomic<uint64_t>) == 8);

// So that no stream waits for what will not come. Any thread; a word that is released stays so.
inline void ReleaseReady(FlagPage* page) {
  for (std::atomic<uint64_t>& ready : page->ready)
    ready.store(kReleased, std::memory_order_release);
}
inline void ReleaseDone(FlagPage* page) { page->done.store(kReleased, std::memory_order_release); }

}  // namespace gradsync

#endif  // GRADSYNC_SHM_DEVICE_H_
