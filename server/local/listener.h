// The socket that trainers connect to.
#ifndef GRADSYNC_SERVER_LOCAL_LISTENER_H_
#define GRADSYNC_SERVER_LOCAL_LISTENER_H_

#include <sys/types.h>

#include <optional>
#include <string>

#include "shm/socket_lock.h"
#include "shm/status.h"
#include "shm/unique_fd.h"

namespace gradsync {

class Listener {
 public:
  // As ListenAt (shm/frame_socket.h), and as the only daemon that does (SocketLock). One that is
  // just ending is waited for, for a second.
  static Result<Listener> Open(const std::string& path, mode_t mode);

  Listener(Listener&&) = default;
  Listener& operator=(Listener&&) = delete;
  ~Listener() { Close(); }

  int fd() const { return fd_.get(); }
  bool is_open() const { return fd_.valid(); }

  // The next connection. Does not block: kDeadlineExceeded when there is none. When the process has
  // run out of descriptors, that too, and the connection is closed with a word why, rather than
  // left to poll readable for ever. kOutOfMemory when not even that can be done: it stays readable.
  Result<UniqueFd> Accept();

  // Removes the socket file (unless another daemon has put its own there), then refuses whoever has
  // not been accepted.
  void Close();

 private:
  Listener(SocketLock lock, std::string path, UniqueFd fd, UniqueFd spare, dev_t device,
           ino_t inode);

  Status RefuseOne();

  std::optional<SocketLock> lock_;
  std::string path_;
  UniqueFd fd_;
  UniqueFd spare_;  // given up for a moment to accept, and refuse, one more
  dev_t device_;
  ino_t inode_;
};

}  // namespace gradsync

#endif  // GRADSYNC_SERVER_LOCAL_LISTENER_H_
