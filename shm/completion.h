// The answers of the daemon for one group: written by CompletionWriter (the daemon), awaited
// through CompletionReader (the trainer).
#ifndef GRADSYNC_SHM_COMPLETION_H_
#define GRADSYNC_SHM_COMPLETION_H_

#include <chrono>
#include <cstdint>
#include <functional>
#include <string_view>

#include "shm/frame_socket.h"
#include "shm/session_layout.h"
#include "shm/status.h"

namespace gradsync {

// The daemon's side. One thread. Borrows the mapped words.
class CompletionWriter {
 public:
  explicit CompletionWriter(GroupWords* words) : words_(words) {}

  // Makes the words those of a new group.
  void Reset();

  // Operations below `completed` are complete; wakes their waiters.
  void Complete(uint64_t completed);

  // Nothing more completes, and `status` says why (its text is cut to kErrorTextBytes, at a
  // character). Wakes every waiter. The first failure is kept.
  void Fail(const Status& status);

 private:
  void Announce();

  GroupWords* words_;
  uint32_t epoch_ = 0;
  bool failed_ = false;
};

// The trainer's side. Any thread. Borrows the mapped words.
class CompletionReader {
 public:
  explicit CompletionReader(GroupWords* words) : words_(words) {}

  // Operations below this are complete.
  uint64_t Completed() const;
  bool IsComplete(uint64_t sequence) const { return Completed() > sequence; }

  // Whether the group has failed, and why. OK while it works.
  Status Failure() const;

  // Waits until operation `sequence` is complete (OK) or the group has failed (why). Every
  // kLivenessInterval it asks `check_alive`, and returns what that says if not OK: a daemon that
  // was killed wakes nobody. kDeadlineExceeded after `deadline`. Spins for up to `spin` first.
  Status Wait(uint64_t sequence, Deadline deadline, std::chrono::nanoseconds spin,
              const std::function<Status()>& check_alive) const;

  static constexpr std::chrono::milliseconds kLivenessInterval{100};

 private:
  GroupWords* words_;
};

}  // namespace gradsync

#endif  // GRADSYNC_SHM_COMPLETION_H_
