// Accepts the connections of a local stream socket that its owner and root alone may use.
#ifndef GRADSYNC_SERVER_INSPECT_ACCEPTOR_H_
#define GRADSYNC_SERVER_INSPECT_ACCEPTOR_H_

#include <sys/types.h>

#include <functional>
#include <memory>
#include <string>
#include <thread>

#include "shm/status.h"
#include "shm/unique_fd.h"

namespace gradsync {

// Whether a process of user `peer` may look into a daemon of user `self`.
inline bool MayInspect(uid_t peer, uid_t self) { return peer == self || peer == 0; }

// gRPC could listen by itself, but it can neither set the file's mode before the first connection
// nor ask the kernel who connects.
class Acceptor {
 public:
  using ConnectionHandler = std::function<void(UniqueFd)>;

  // Listens at `path` with mode 0600 and calls `handler`, on a thread of its own, with each
  // connection (non-blocking, close-on-exec) of this process's user or of root. Others are hung up
  // on. Errors are those of ListenAt.
  static Result<std::unique_ptr<Acceptor>> Start(const std::string& path,
                                                 ConnectionHandler handler);

  // Stops listening and removes the socket file, if it still is this one's. The handler is not
  // called any more when this returns.
  ~Acceptor();

  Acceptor(const Acceptor&) = delete;
  Acceptor& operator=(const Acceptor&) = delete;

 private:
  Acceptor(std::string path, UniqueFd listener, UniqueFd stop, ConnectionHandler handler);
  void Run();
  bool AcceptOne();
  bool WaitForStop(int milliseconds) const;
  bool OwnsFile() const;

  const std::string path_;
  const UniqueFd listener_;
  const UniqueFd stop_;  // an eventfd: readable from the moment that the thread has to end
  const ConnectionHandler handler_;
  dev_t device_ = 0;  // of the socket file
  ino_t inode_ = 0;
  std::thread thread_;
};

}  // namespace gradsync

#endif  // GRADSYNC_SERVER_INSPECT_ACCEPTOR_H_
