// The local daemon: accepts the trainers of this machine and serves them from shared memory.
//
// A Server is an ordinary object. A process may have several; it installs no signal handler, reads
// no environment and touches no global.
#ifndef GRADSYNC_SERVER_LOCAL_SERVER_H_
#define GRADSYNC_SERVER_LOCAL_SERVER_H_

#include <functional>
#include <memory>

#include "server/engine/device_engine.h"
#include "server/engine/engine.h"
#include "server/job/job_table.h"
#include "server/job/operation.h"
#include "server/local/options.h"
#include "shm/status.h"

namespace gradsync {

class Reactor;

class Server {
 public:
  // `devices` makes the engine for GPUs when the first trainer asks for one; without it there is
  // none. Listens: from here on trainers can connect, and are served once Run() runs. Errors are
  // those of ListenAt (shm/frame_socket.h).
  static Result<std::unique_ptr<Server>> Create(ServerOptions options,
                                                std::unique_ptr<Engine> engine,
                                                DeviceEngineFactory devices = nullptr);

  // Ends the sessions without a word if Run() has not ended them. No other call may be running.
  ~Server();

  Server(const Server&) = delete;
  Server& operator=(const Server&) = delete;

  // Serves until Stop(), or until idle for options.idle_exit. Once, on any one thread. OK after an
  // orderly end; kDeadlineExceeded when operations still ran at the end of options.drain_timeout
  // (the destructor then waits for the engine).
  Status Run();

  // Makes Run() finish: no further connections, operations that are running finish, then clients
  // are told (kShuttingDown) and Run() returns. Any thread, and signal handlers; may be repeated.
  void Stop();

  // Shows `function` the jobs, on the reactor's thread, and waits until it has returned. It must be
  // quick. For any thread but the reactor's. kDeadlineExceeded when the reactor does not get to it
  // (then the function does not run), kShuttingDown once Run() has ended.
  Status Call(std::function<void(const JobTable&, Time)> function, Time deadline);

 private:
  explicit Server(std::unique_ptr<Reactor> reactor);

  std::unique_ptr<Reactor> reactor_;
};

}  // namespace gradsync

#endif  // GRADSYNC_SERVER_LOCAL_SERVER_H_
