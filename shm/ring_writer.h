// The trainer's side of the submission ring.
#ifndef GRADSYNC_SHM_RING_WRITER_H_
#define GRADSYNC_SHM_RING_WRITER_H_

#include <atomic>
#include <cstdint>

#include "shm/session_layout.h"

namespace gradsync {

// Not thread-safe: the caller serialises the threads of a trainer. Borrows the mapped ring.
class RingWriter {
 public:
  explicit RingWriter(RingLayout* ring)
      : ring_(ring), head_(ring->head.load(std::memory_order_relaxed)) {}

  // False when the ring is full (the daemon has not drained it yet).
  bool TryPush(const Submission& submission) {
    if (head_ - ring_->tail.load(std::memory_order_acquire) >= kRingEntries) return false;
    ring_->entries[head_ % kRingEntries] = submission;
    ++head_;
    // Sequentially consistent, as are the load below and both accesses in
    // RingReader::PrepareToSleep: of "head is new" here and "asleep is 1" there, at least one side
    // sees the other's.
    ring_->head.store(head_, std::memory_order_seq_cst);
    return true;
  }

  // After a push: whether the daemon sleeps, so that the caller must ring the eventfd. At most one
  // caller is told so per sleep.
  bool MustWakeDaemon() {
    return ring_->daemon_asleep.load(std::memory_order_seq_cst) != 0 &&
           ring_->daemon_asleep.exchange(0, std::memory_order_seq_cst) != 0;
  }

 private:
  RingLayout* ring_;
  uint64_t head_;  // our own copy: what lies in shared memory is for the daemon to read
};

}  // namespace gradsync

#endif  // GRADSYNC_SHM_RING_WRITER_H_
