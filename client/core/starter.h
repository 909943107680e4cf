// Where the daemon is: finding it, and starting a private one where there is none.
#ifndef GRADSYNC_CLIENT_CORE_STARTER_H_
#define GRADSYNC_CLIENT_CORE_STARTER_H_

#include <sys/types.h>

#include <optional>
#include <string>
#include <vector>

#include "client/core/environment.h"
#include "shm/frame_socket.h"
#include "shm/protocol.h"
#include "shm/socket_lock.h"
#include "shm/status.h"
#include "shm/unique_fd.h"

namespace gradsync {

// What to look for, in this order: the fixed socket, and then nothing else; the system's daemon; a
// private daemon of this user, which is started if nobody listens.
struct Discovery {
  std::string fixed_socket;  // empty: none
  std::string fixed_by;      // who said so, for texts: "GRADSYNC_SOCKET"
  std::string system_socket = kSystemSocket;
  std::string private_directory;
  std::string daemon_binary;  // GRADSYNC_DAEMON; empty: next to this library, else in `path`
  std::string path;           // PATH
  std::vector<std::string> environment;  // of a private daemon, "NAME=value"
  std::string idle_exit = "60s";         // how long a private daemon outlives its last session

  bool is_fixed() const { return !fixed_socket.empty(); }
  std::string private_socket() const;
};

// `socket` is the caller's own choice; empty: none.
Discovery DiscoveryFrom(const std::string& socket, const Environment& environment);

struct FoundDaemon {
  UniqueFd socket;
  std::string path;
  // The right to start one, held until the daemon has welcomed us: it does not end before that.
  std::optional<SocketLock> starting;
};

// A connection to a daemon. However many processes ask at the same time, one private daemon is
// started. Errors say what to do: kDaemonLost (nobody listens, or the daemon did not start: with
// the end of its log), kPermissionDenied (socket, or a private directory that others could reach),
// kDeadlineExceeded.
Result<FoundDaemon> FindDaemon(const Discovery& discovery, Deadline deadline);

// Makes `path` a directory that is this user's own and nobody else's (0700). kPermissionDenied if
// it is somebody else's, a symbolic link, or open to others: a socket in it could be anybody's.
Status EnsurePrivateDirectory(const std::string& path, uid_t uid);

// The daemon's executable, or an error that says where was looked.
Result<std::string> FindDaemonBinary(const Discovery& discovery);

}  // namespace gradsync

#endif  // GRADSYNC_CLIENT_CORE_STARTER_H_
