// How a daemon that was started on demand ends by itself, and why no trainer ever falls between a
// daemon that goes and one that comes.
//
// Beside the socket lies a lock file, "<socket>.lock": O_CREAT | O_RDWR | O_CLOEXEC, mode 0600,
// taken with flock(LOCK_EX), never removed (whoever waits for the lock of a removed file waits for
// nothing).
//
//   A starter (client/core) takes the lock, tries to connect, starts a daemon if nobody listens,
//   waits until that daemon accepts (--ready-fd), connects, and gives the lock back when it has its
//   Welcome. The daemon, idle for --idle-exit, tries the lock without waiting. If somebody holds
//   it, a trainer is on its way: the daemon stays and tries again later. With the lock held it
//   looks once more for a connection, and stays if there is one; else it removes the socket file,
//   closes the listener, and then gives the lock back.
//
// So under the lock there is either a daemon that stays or none. A client that connected without
// the lock in the very last moment lies in the backlog of the listener that is closed: it reads
// end-of-file before any Welcome, and tries again.
#ifndef GRADSYNC_SERVER_LOCAL_IDLE_H_
#define GRADSYNC_SERVER_LOCAL_IDLE_H_

#include <optional>
#include <string>

#include "shm/status.h"
#include "shm/unique_fd.h"

namespace gradsync {

// "<socket>.lock".
std::string StartLockPath(const std::string& socket);

// Opens the lock file, making it if need be.
Result<UniqueFd> OpenStartLock(const std::string& socket);

// The lock, held until the descriptor is closed; nullopt while somebody else holds it.
Result<std::optional<UniqueFd>> TryStartLock(const std::string& socket);

}  // namespace gradsync

#endif  // GRADSYNC_SERVER_LOCAL_IDLE_H_
