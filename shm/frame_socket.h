// Frames over a SOCK_SEQPACKET Unix socket, with file descriptors riding along (SCM_RIGHTS).
//
// One frame is one packet. Every descriptor is close-on-exec and every call here has a deadline or
// does not block.
#ifndef GRADSYNC_SHM_FRAME_SOCKET_H_
#define GRADSYNC_SHM_FRAME_SOCKET_H_

#include <sys/socket.h>
#include <sys/types.h>

#include <chrono>
#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include "shm/status.h"
#include "shm/unique_fd.h"

namespace gradsync {

using Deadline = std::chrono::steady_clock::time_point;

inline constexpr size_t kMaxFrameBytes = 16 * 1024;
inline constexpr size_t kMaxFrameFds = 4;

struct Frame {
  std::vector<std::byte> bytes;
  std::vector<UniqueFd> fds;
};

// Binds and listens at `path` with file mode `mode`. A socket file with nobody listening behind it
// (a daemon that was killed) is replaced; a live one is kAlreadyExists; any other file is an error.
// `type` is SOCK_STREAM for what speaks another protocol than frames.
Result<UniqueFd> ListenAt(const std::string& path, mode_t mode, int type = SOCK_SEQPACKET);

// Connects to `path`. kDaemonLost if nobody listens there (no file, or a stale one),
// kPermissionDenied if the file's mode forbids it, kProtocol if what listens there is not of
// `type`. Does not wait: kDeadlineExceeded if as many connections
// as may are waiting to be accepted, as by a daemon that is stopped or very busy.
Result<UniqueFd> ConnectTo(const std::string& path, int type = SOCK_SEQPACKET);

// Sends one frame whole. `fds` are borrowed. kDaemonLost when the peer has hung up,
// kDeadlineExceeded when it does not read until the deadline. A deadline in the past makes it a
// try.
Status SendFrame(int socket, std::span<const std::byte> bytes, std::span<const int> fds,
                 Deadline deadline);

// Receives one frame. Hang-up is kDaemonLost with text "the peer hung up"; a frame that was cut
// short (too long, or with too many descriptors) is kProtocol; nothing until the deadline is
// kDeadlineExceeded. A deadline in the past makes it a poll.
Result<Frame> ReceiveFrame(int socket, Deadline deadline);

// Whether the peer has closed its end. Reads nothing.
bool HasHungUp(int socket);

// Who is at the other end, by the kernel's word (SO_PEERCRED).
Result<uid_t> PeerUid(int socket);

// A descriptor that polls readable when the connected process ends (SO_PEERPIDFD, Linux 6.5), or an
// invalid one where the kernel has none. It tells of a trainer's death even when a forked child
// still holds the trainer's socket open.
UniqueFd PeerPidFd(int socket);

}  // namespace gradsync

#endif  // GRADSYNC_SHM_FRAME_SOCKET_H_
