#include "shm/frame_socket.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <climits>
#include <cstring>

#ifndef SO_PEERPIDFD
#define SO_PEERPIDFD 77  // Linux 6.5; older headers lack it
#endif

namespace gradsync {
namespace {

constexpr int kBacklog = 128;

Result<sockaddr_un> AddressOf(const std::string& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.empty() || path.size() >= sizeof(address.sun_path)) {
    return Unexpected(Code::kInvalidArgument, "socket path '" + path + "' must have 1 to " +
                                                  std::to_string(sizeof(address.sun_path) - 1) +
                                                  " characters");
  }
  std::memcpy(address.sun_path, path.c_str(), path.size() + 1);
  return address;
}

Result<UniqueFd> NewSocket(int type) {
  UniqueFd fd(socket(AF_UNIX, type | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd.valid()) {
    return Unexpected(ErrnoStatus(Code::kInternal, errno, "cannot create a Unix socket"));
  }
  return fd;
}

int RemainingMs(Deadline deadline) {
  const auto left =
      std::chrono::ceil<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now());
  return static_cast<int>(std::clamp<int64_t>(left.count(), 0, INT_MAX));
}

// Waits until `events` hold on `socket`. False at the deadline.
bool PollFor(int socket, int16_t events, Deadline deadline) {
  for (;;) {
    pollfd entry{socket, events, 0};
    const int ready = poll(&entry, 1, RemainingMs(deadline));
    if (ready > 0) return true;
    if (ready == 0) return false;
    if (errno != EINTR) return false;
  }
}

void AttachFds(msghdr* message, std::span<const int> fds) {
  cmsghdr* header = CMSG_FIRSTHDR(message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(fds.size_bytes());
  std::memcpy(CMSG_DATA(header), fds.data(), fds.size_bytes());
}

std::vector<UniqueFd> TakeFds(msghdr* message) {
  std::vector<UniqueFd> fds;
  for (cmsghdr* header = CMSG_FIRSTHDR(message); header != nullptr;
       header = CMSG_NXTHDR(message, header)) {
    if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS) continue;
    const size_t count = (header->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (size_t i = 0; i < count; ++i) {
      int fd = -1;
      std::memcpy(&fd, CMSG_DATA(header) + i * sizeof(int), sizeof(int));
      fds.emplace_back(fd);
    }
  }
  return fds;
}

constexpr size_t kControlBytes = CMSG_SPACE(kMaxFrameFds * sizeof(int));

}  // namespace

Result<UniqueFd> ListenAt(const std::string& path, mode_t mode, int type) {
  auto address = AddressOf(path);
  if (!address) return Unexpected(address.error());
  struct stat info {};
  if (lstat(path.c_str(), &info) == 0) {
    if (!S_ISSOCK(info.st_mode)) {
      return Unexpected(
          Code::kAlreadyExists,
          "'" + path + "' exists and is not a socket; remove it or choose another path");
    }
    auto live = ConnectTo(path, type);
    if (live || live.error().code() != Code::kDaemonLost) {
      return Unexpected(Code::kAlreadyExists, "another process already listens at '" + path + "'");
    }
    unlink(path.c_str());
  }
  auto fd = NewSocket(type);
  if (!fd) return fd;
  // The mode is set before anybody can connect: a socket that does not listen yet refuses.
  if (bind(fd->get(), reinterpret_cast<const sockaddr*>(&*address), sizeof(*address)) != 0 ||
      chmod(path.c_str(), mode) != 0 || listen(fd->get(), kBacklog) != 0) {
    const int error = errno;
    return Unexpected(ErrnoStatus(error == EACCES ? Code::kPermissionDenied : Code::kInternal,
                                  error, "cannot listen at '" + path + "'"));
  }
  return fd;
}

Result<UniqueFd> ConnectTo(const std::string& path, int type) {
  auto address = AddressOf(path);
  if (!address) return Unexpected(address.error());
  auto fd = NewSocket(type);
  if (!fd) return fd;
  int result = 0;
  do {
    result = connect(fd->get(), reinterpret_cast<const sockaddr*>(&*address), sizeof(*address));
  } while (result != 0 && errno == EINTR);
  if (result == 0) return fd;
  const int error = errno;
  Code code = Code::kDaemonLost;
  if (error == EACCES || error == EPERM) code = Code::kPermissionDenied;
  if (error == EPROTOTYPE) code = Code::kProtocol;
  if (error == EAGAIN) code = Code::kDeadlineExceeded;
  return Unexpected(ErrnoStatus(code, error, "cannot connect to gradsyncd at '" + path + "'"));
}

Status SendFrame(int socket, std::span<const std::byte> bytes, std::span<const int> fds,
                 Deadline deadline) {
  if (bytes.empty() || bytes.size() > kMaxFrameBytes || fds.size() > kMaxFrameFds) {
    return {Code::kInternal, "a frame of " + std::to_string(bytes.size()) + " bytes and " +
                                 std::to_string(fds.size()) + " descriptors is over the limits"};
  }
  iovec vector{const_cast<std::byte*>(bytes.data()), bytes.size()};
  alignas(cmsghdr) std::array<std::byte, kControlBytes> control{};
  msghdr message{};
  message.msg_iov = &vector;
  message.msg_iovlen = 1;
  if (!fds.empty()) {
    message.msg_control = control.data();
    message.msg_controllen = CMSG_SPACE(fds.size_bytes());
    AttachFds(&message, fds);
  }
  for (;;) {
    if (sendmsg(socket, &message, MSG_NOSIGNAL | MSG_DONTWAIT) >= 0) return OkStatus();
    if (errno == EINTR) continue;
    if (errno != EAGAIN) return ErrnoStatus(Code::kDaemonLost, errno, "the peer hung up");
    if (!PollFor(socket, POLLOUT, deadline)) {
      return {Code::kDeadlineExceeded, "the peer does not read its socket"};
    }
  }
}

Result<Frame> ReceiveFrame(int socket, Deadline deadline) {
  Frame frame;
  frame.bytes.resize(kMaxFrameBytes);
  for (;;) {
    iovec vector{frame.bytes.data(), frame.bytes.size()};
    alignas(cmsghdr) std::array<std::byte, kControlBytes> control{};
    msghdr message{};
    message.msg_iov = &vector;
    message.msg_iovlen = 1;
    message.msg_control = control.data();
    message.msg_controllen = control.size();
    const ssize_t received = recvmsg(socket, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    // Also with an empty packet, which is no frame: what has been received must be closed.
    if (received >= 0) frame.fds = TakeFds(&message);
    if (received > 0) {
      frame.bytes.resize(static_cast<size_t>(received));
      if ((message.msg_flags & (MSG_TRUNC | MSG_CTRUNC)) != 0) {
        return Unexpected(Code::kProtocol, "a frame is longer than " +
                                               std::to_string(kMaxFrameBytes) +
                                               " bytes or carries too many descriptors");
      }
      return frame;
    }
    if (received == 0) return Unexpected(Code::kDaemonLost, "the peer hung up");
    if (errno == EINTR) continue;
    if (errno != EAGAIN) {
      return Unexpected(ErrnoStatus(Code::kDaemonLost, errno, "the peer hung up"));
    }
    if (!PollFor(socket, POLLIN, deadline)) {
      return Unexpected(Code::kDeadlineExceeded, "no answer in time");
    }
  }
}

bool HasHungUp(int socket) {
  pollfd entry{socket, POLLRDHUP, 0};
  return poll(&entry, 1, 0) > 0 && (entry.revents & (POLLRDHUP | POLLHUP | POLLERR)) != 0;
}

Result<uid_t> PeerUid(int socket) {
  ucred credentials{};
  socklen_t size = sizeof(credentials);
  if (getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &credentials, &size) != 0) {
    return Unexpected(ErrnoStatus(Code::kPermissionDenied, errno, "cannot tell who connected"));
  }
  return credentials.uid;
}

UniqueFd PeerPidFd(int socket) {
  int fd = -1;
  socklen_t size = sizeof(fd);
  if (getsockopt(socket, SOL_SOCKET, SO_PEERPIDFD, &fd, &size) != 0) return UniqueFd();
  return UniqueFd(fd);
}

}  // namespace gradsync
