#include "server/local/listener.h"

#include <fcntl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

#include "server/local/trainer_session.h"
#include "shm/frame_socket.h"

namespace gradsync {
namespace {

UniqueFd OpenSpare() { return UniqueFd(open("/dev/null", O_RDONLY | O_CLOEXEC)); }

UniqueFd AcceptFrom(int listener) {
  for (;;) {
    UniqueFd socket(accept4(listener, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (socket.valid() || (errno != EINTR && errno != ECONNABORTED)) return socket;
  }
}

}  // namespace

Result<Listener> Listener::Open(const std::string& path, mode_t mode) {
  Result<UniqueFd> fd = ListenAt(path, mode);
  if (!fd) return Unexpected(fd.error());
  struct stat info {};
  if (stat(path.c_str(), &info) != 0) {
    return Unexpected(ErrnoStatus(Code::kInternal, errno, "cannot find the socket '" + path + "'"));
  }
  return Listener(path, *std::move(fd), OpenSpare(), info.st_dev, info.st_ino);
}

Listener::Listener(std::string path, UniqueFd fd, UniqueFd spare, dev_t device, ino_t inode)
    : path_(std::move(path)),
      fd_(std::move(fd)),
      spare_(std::move(spare)),
      device_(device),
      inode_(inode) {}

std::optional<UniqueFd> Listener::Accept() {
  UniqueFd socket = AcceptFrom(fd_.get());
  if (socket.valid()) return socket;
  if (errno == EMFILE || errno == ENFILE) RefuseOne();
  return std::nullopt;
}

void Listener::RefuseOne() {
  spare_.Reset();
  UniqueFd socket = AcceptFrom(fd_.get());
  if (socket.valid()) {
    CloseWithError(std::move(socket),
                   {Code::kOutOfMemory,
                    "gradsyncd has no file descriptors left; raise its limit (ulimit -n, "
                    "LimitNOFILE=)"});
  }
  spare_ = OpenSpare();
}

void Listener::Close() {
  if (!is_open()) return;
  struct stat info {};
  if (stat(path_.c_str(), &info) == 0 && info.st_dev == device_ && info.st_ino == inode_) {
    unlink(path_.c_str());
  }
  fd_.Reset();
}

}  // namespace gradsync
