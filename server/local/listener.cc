#include "server/local/listener.h"

#include <fcntl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <thread>
#include <utility>

#include "server/local/trainer_session.h"
#include "shm/frame_socket.h"

namespace gradsync {
namespace {

constexpr std::chrono::seconds kLongestEnd{1};
constexpr std::chrono::milliseconds kEndPause{5};

UniqueFd OpenSpare() { return UniqueFd(open("/dev/null", O_RDONLY | O_CLOEXEC)); }

UniqueFd AcceptFrom(int listener) {
  for (;;) {
    UniqueFd socket(accept4(listener, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (socket.valid() || (errno != EINTR && errno != ECONNABORTED)) return socket;
  }
}

Status CannotAccept(int error) {
  return ErrnoStatus(Code::kOutOfMemory, error, "cannot accept a connection");
}

Result<SocketLock> LockServing(const std::string& path) {
  const Deadline deadline = std::chrono::steady_clock::now() + kLongestEnd;
  for (;;) {
    auto lock = SocketLock::TryTake(path, SocketLock::Right::kServing);
    if (!lock) return Unexpected(lock.error());
    if (lock->has_value()) return **std::move(lock);
    if (std::chrono::steady_clock::now() >= deadline) {
      return Unexpected(Code::kAlreadyExists, "another gradsyncd serves at '" + path + "'");
    }
    std::this_thread::sleep_for(kEndPause);
  }
}

}  // namespace

Result<Listener> Listener::Open(const std::string& path, mode_t mode) {
  Result<SocketLock> lock = LockServing(path);
  if (!lock) return Unexpected(lock.error());
  Result<UniqueFd> fd = ListenAt(path, mode);
  if (!fd) return Unexpected(fd.error());
  struct stat info {};
  if (stat(path.c_str(), &info) != 0) {
    return Unexpected(ErrnoStatus(Code::kInternal, errno, "cannot find the socket '" + path + "'"));
  }
  return Listener(*std::move(lock), path, *std::move(fd), OpenSpare(), info.st_dev, info.st_ino);
}

Listener::Listener(SocketLock lock, std::string path, UniqueFd fd, UniqueFd spare, dev_t device,
                   ino_t inode)
    : lock_(std::move(lock)),
      path_(std::move(path)),
      fd_(std::move(fd)),
      spare_(std::move(spare)),
      device_(device),
      inode_(inode) {}

Result<UniqueFd> Listener::Accept() {
  UniqueFd socket = AcceptFrom(fd_.get());
  if (socket.valid()) return socket;
  if (errno == EMFILE || errno == ENFILE) {
    GRADSYNC_RETURN_IF_ERROR(RefuseOne());
  } else if (errno != EAGAIN) {
    return Unexpected(CannotAccept(errno));
  }
  return Unexpected(Code::kDeadlineExceeded, "nobody connects");
}

Status Listener::RefuseOne() {
  spare_.Reset();
  UniqueFd socket = AcceptFrom(fd_.get());
  Status status = OkStatus();
  if (!socket.valid()) {
    if (errno != EAGAIN) status = CannotAccept(errno);
  } else {
    CloseWithError(std::move(socket),
                   {Code::kOutOfMemory,
                    "gradsyncd has no file descriptors left; raise its limit (ulimit -n, "
                    "LimitNOFILE=)"});
  }
  spare_ = OpenSpare();
  return status;
}

void Listener::Close() {
  if (!is_open()) return;
  struct stat info {};
  if (stat(path_.c_str(), &info) == 0 && info.st_dev == device_ && info.st_ino == inode_) {
    unlink(path_.c_str());
  }
  fd_.Reset();
  lock_.reset();
}

}  // namespace gradsync
