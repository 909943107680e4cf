// Who may start, end and serve a daemon at a socket: two locks in the file "<socket>.lock".
//
//   kStarting  is held while somebody looks for a daemon and starts one if there is none (a
//              trainer, client/core/starter.h), and while an idle daemon ends: so under it there is
//              either a daemon that stays or none.
//   kServing   is held by the daemon that listens at the socket for as long as it does, and by
//              nobody else: so two of them never take each other's socket file for a stale one.
//
// The file has mode 0600 and is never removed (whoever locks a removed file excludes nobody). The
// locks are open file description locks (fcntl(2), F_OFD_SETLK) on one byte each: they end with
// the process that holds them, however it ends, unless it has forked meanwhile.
#ifndef GRADSYNC_SHM_SOCKET_LOCK_H_
#define GRADSYNC_SHM_SOCKET_LOCK_H_

#include <optional>
#include <string>
#include <utility>

#include "shm/status.h"
#include "shm/unique_fd.h"

namespace gradsync {

class SocketLock {
 public:
  enum class Right { kStarting = 0, kServing = 1 };  // the byte that is locked

  // Does not wait: nullopt while somebody else holds it. kPermissionDenied if the file cannot be
  // opened: it is another user's, or its directory is missing.
  static Result<std::optional<SocketLock>> TryTake(const std::string& socket, Right right);

  SocketLock(SocketLock&&) noexcept = default;
  SocketLock& operator=(SocketLock&& other) noexcept {
    Release();
    fd_ = std::move(other.fd_);
    return *this;
  }
  ~SocketLock() { Release(); }

 private:
  explicit SocketLock(UniqueFd locked) : fd_(std::move(locked)) {}

  void Release();

  UniqueFd fd_;
};

}  // namespace gradsync

#endif  // GRADSYNC_SHM_SOCKET_LOCK_H_
