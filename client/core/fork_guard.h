// What becomes of the client's connections in a forked child.
//
// A trainer forks data-loader workers while sessions are open. The child gets copies of the
// sockets, which would keep the daemon from seeing the trainer's death, and copies of the handles,
// whose use would corrupt the parent's session. So in the child, before fork() returns there, every
// guarded descriptor is closed and every guard says so; whoever owns one asks in_child() first and
// then does nothing at all: no message, no lock (another thread of the parent may have held it at
// the fork).
#ifndef GRADSYNC_CLIENT_CORE_FORK_GUARD_H_
#define GRADSYNC_CLIENT_CORE_FORK_GUARD_H_

#include <atomic>

#include "shm/unique_fd.h"

namespace gradsync {

// Owns two descriptors on behalf of one connection. The process's guards are known to a fork
// handler (pthread_atfork), registered with the first of them: the one thing of the client that is
// process-wide, because fork is.
class ForkGuard {
 public:
  explicit ForkGuard(UniqueFd socket);
  ForkGuard(const ForkGuard&) = delete;
  ForkGuard& operator=(const ForkGuard&) = delete;
  ~ForkGuard();

  // Whether this is a child of the process that made the guard.
  bool in_child() const { return in_child_.load(std::memory_order_relaxed); }

  int socket() const { return socket_.get(); }
  int doorbell() const { return doorbell_.get(); }

  // Once, before other threads use the guard.
  void SetDoorbell(UniqueFd doorbell);

 private:
  friend struct ForkHandlers;
  void EnterChild();

  UniqueFd socket_;
  UniqueFd doorbell_;
  std::atomic<bool> in_child_{false};
  ForkGuard* next_ = nullptr;  // the list of all guards, under its lock
  ForkGuard* previous_ = nullptr;
};

}  // namespace gradsync

#endif  // GRADSYNC_CLIENT_CORE_FORK_GUARD_H_
