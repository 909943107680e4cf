#include "shm/socket_lock.h"

#include <fcntl.h>

#include <cerrno>

namespace gradsync {
namespace {

// Locks, or with F_UNLCK unlocks, one byte. Returns errno.
int SetLock(int fd, short type, off_t byte, off_t bytes) {  // NOLINT(google-runtime-int): flock's
  struct flock lock {};
  lock.l_type = type;
  lock.l_whence = SEEK_SET;
  lock.l_start = byte;
  lock.l_len = bytes;
  return fcntl(fd, F_OFD_SETLK, &lock) == 0 ? 0 : errno;
}

}  // namespace

Result<std::optional<SocketLock>> SocketLock::TryTake(const std::string& socket, Right right) {
  const std::string path = socket + ".lock";
  UniqueFd fd(open(path.c_str(), O_CREAT | O_RDWR | O_CLOEXEC | O_NOFOLLOW, 0600));
  if (!fd.valid()) {
    return Unexpected(
        ErrnoStatus(Code::kPermissionDenied, errno, "cannot open the lock file '" + path + "'"));
  }
  const int error = SetLock(fd.get(), F_WRLCK, static_cast<off_t>(right), 1);
  if (error == 0) return std::optional(SocketLock(std::move(fd)));
  if (error == EAGAIN || error == EACCES) return std::optional<SocketLock>();
  return Unexpected(ErrnoStatus(Code::kInternal, error, "cannot lock '" + path + "'"));
}

void SocketLock::Release() {
  // For every copy of the descriptor: a process that another thread forked meanwhile has one.
  if (fd_.valid()) SetLock(fd_.get(), F_UNLCK, 0, 0);
  fd_.Reset();
}

}  // namespace gradsync
