#include "server/local/idle.h"

#include <fcntl.h>
#include <sys/file.h>

#include <cerrno>
#include <utility>

namespace gradsync {

std::string StartLockPath(const std::string& socket) { return socket + ".lock"; }

Result<UniqueFd> OpenStartLock(const std::string& socket) {
  const std::string path = StartLockPath(socket);
  UniqueFd fd(open(path.c_str(), O_CREAT | O_RDWR | O_CLOEXEC | O_NOFOLLOW, 0600));
  if (fd.valid()) return fd;
  return Unexpected(
      ErrnoStatus(Code::kPermissionDenied, errno, "cannot open the lock file '" + path + "'"));
}

Result<std::optional<UniqueFd>> TryStartLock(const std::string& socket) {
  Result<UniqueFd> fd = OpenStartLock(socket);
  if (!fd) return Unexpected(fd.error());
  if (flock(fd->get(), LOCK_EX | LOCK_NB) == 0) return std::optional<UniqueFd>(*std::move(fd));
  if (errno == EWOULDBLOCK) return std::optional<UniqueFd>();
  return Unexpected(
      ErrnoStatus(Code::kInternal, errno, "cannot lock '" + StartLockPath(socket) + "'"));
}

}  // namespace gradsync
