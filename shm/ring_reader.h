// The daemon's side of the submission ring.
#ifndef GRADSYNC_SHM_RING_READER_H_
#define GRADSYNC_SHM_RING_READER_H_

#include <atomic>
#include <cstdint>

#include "shm/session_layout.h"

namespace gradsync {

// One thread. Borrows the mapped ring. The trainer may write anything anywhere at any time: entries
// are copied once and the copy is what the caller validates.
class RingReader {
 public:
  enum class Pop : uint8_t { kEmpty, kEntry, kCorrupt };

  explicit RingReader(RingLayout* ring) : ring_(ring) {}

  // kCorrupt: the trainer's head is impossible (behind the tail, or more than a ring ahead).
  Pop TryPop(Submission* out) {
    const uint64_t head = ring_->head.load(std::memory_order_acquire);
    if (head == tail_) return Pop::kEmpty;
    if (head - tail_ > kRingEntries) return Pop::kCorrupt;
    *out = ring_->entries[tail_ % kRingEntries];
    // Keeps the compiler from reading the shared entry again where `*out` is used.
    std::atomic_signal_fence(std::memory_order_seq_cst);
    ++tail_;
    ring_->tail.store(tail_, std::memory_order_release);
    return Pop::kEntry;
  }

  // Announces that the daemon is about to sleep. False: an entry came in meanwhile, do not sleep.
  bool PrepareToSleep() {
    ring_->daemon_asleep.store(1, std::memory_order_seq_cst);
    return ring_->head.load(std::memory_order_seq_cst) == tail_;
  }

  void WakeUp() { ring_->daemon_asleep.store(0, std::memory_order_relaxed); }

 private:
  RingLayout* ring_;
  uint64_t tail_ = 0;  // our own copy: the one in shared memory is for the trainer to read
};

}  // namespace gradsync

#endif  // GRADSYNC_SHM_RING_READER_H_
