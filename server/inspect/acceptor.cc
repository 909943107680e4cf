#include "server/inspect/acceptor.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdint>
#include <utility>

#include "shm/frame_socket.h"
#include "spdlog/spdlog.h"

namespace gradsync {
namespace {

constexpr mode_t kMode = S_IRUSR | S_IWUSR;

// How long to let the process recover when it has no descriptor or memory left for a connection.
constexpr int kRetryMs = 100;

bool IsWelcome(const UniqueFd& connection) {
  const auto uid = PeerUid(connection.get());
  if (!uid) {
    spdlog::warn("event=inspect_refused reason=\"{}\"", uid.error().message());
    return false;
  }
  if (MayInspect(*uid, geteuid())) return true;
  spdlog::warn("event=inspect_refused peer_uid={} reason=\"neither this daemon's user nor root\"",
               *uid);
  return false;
}

}  // namespace

Result<std::unique_ptr<Acceptor>> Acceptor::Start(const std::string& path,
                                                  ConnectionHandler handler) {
  auto listener = ListenAt(path, kMode, SOCK_STREAM);
  if (!listener) return Unexpected(listener.error());
  UniqueFd stop(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!stop.valid()) {
    return Unexpected(ErrnoStatus(Code::kInternal, errno, "cannot create an eventfd"));
  }
  return std::unique_ptr<Acceptor>(
      new Acceptor(path, std::move(*listener), std::move(stop), std::move(handler)));
}

Acceptor::Acceptor(std::string path, UniqueFd listener, UniqueFd stop, ConnectionHandler handler)
    : path_(std::move(path)),
      listener_(std::move(listener)),
      stop_(std::move(stop)),
      handler_(std::move(handler)) {
  struct stat info {};
  if (lstat(path_.c_str(), &info) == 0) {
    device_ = info.st_dev;
    inode_ = info.st_ino;
  }
  thread_ = std::thread([this] { Run(); });
}

Acceptor::~Acceptor() {
  eventfd_write(stop_.get(), 1);
  thread_.join();
  if (OwnsFile()) unlink(path_.c_str());
}

void Acceptor::Run() {
  for (;;) {
    std::array<pollfd, 2> entries = {{{listener_.get(), POLLIN, 0}, {stop_.get(), POLLIN, 0}}};
    if (poll(entries.data(), entries.size(), -1) < 0 && errno != EINTR) return;
    if (entries[1].revents != 0) return;
    if (entries[0].revents != 0 && !AcceptOne() && WaitForStop(kRetryMs)) return;
  }
}

// False if the process cannot take a connection at the moment.
bool Acceptor::AcceptOne() {
  UniqueFd connection(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  if (connection.valid()) {
    if (IsWelcome(connection)) handler_(std::move(connection));
    return true;
  }
  const int error = errno;
  if (error == EAGAIN || error == EINTR || error == ECONNABORTED) return true;
  spdlog::warn("event=inspect_accept_failed reason=\"{}\"",
               ErrnoStatus(Code::kInternal, error, "accept").message());
  return false;
}

bool Acceptor::WaitForStop(int milliseconds) const {
  pollfd entry{stop_.get(), POLLIN, 0};
  return poll(&entry, 1, milliseconds) > 0;
}

bool Acceptor::OwnsFile() const {
  struct stat info {};
  return inode_ != 0 && lstat(path_.c_str(), &info) == 0 && info.st_dev == device_ &&
         info.st_ino == inode_;
}

}  // namespace gradsync
