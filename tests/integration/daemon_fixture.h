// Daemons for tests: one in this process, and the real program.
#ifndef GRADSYNC_TESTS_INTEGRATION_DAEMON_FIXTURE_H_
#define GRADSYNC_TESTS_INTEGRATION_DAEMON_FIXTURE_H_

#include <sys/types.h>

#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "server/engine/engine.h"
#include "server/local/options.h"
#include "server/local/server.h"
#include "shm/status.h"
#include "shm/unique_fd.h"

namespace gradsync::testing {

// A directory of its own (0700), removed with all that is in it.
class TemporaryDirectory {
 public:
  TemporaryDirectory();
  ~TemporaryDirectory();
  TemporaryDirectory(const TemporaryDirectory&) = delete;
  TemporaryDirectory& operator=(const TemporaryDirectory&) = delete;

  const std::string& path() const { return path_; }
  std::string File(const std::string& name) const { return path_ + "/" + name; }

 private:
  std::string path_;
};

// A Server on a thread of this process, in a directory of its own. Stopped by the destructor.
// Aborts the test program if it cannot start.
class InProcessDaemon {
 public:
  // With a CpuEngine of `threads` threads. options.socket is filled in.
  explicit InProcessDaemon(ServerOptions options = {}, int threads = 2);
  InProcessDaemon(ServerOptions options, std::unique_ptr<Engine> engine);
  ~InProcessDaemon();

  std::string socket() const { return directory_.File("gradsyncd.sock"); }
  Server& server() { return *server_; }

  // Stops it, and waits for it: what Run() returned.
  Status Stop();
  // Waits for it to end by itself.
  Status Join();

 private:
  void Start(ServerOptions options, std::unique_ptr<Engine> engine);

  TemporaryDirectory directory_;
  std::unique_ptr<Server> server_;
  Status result_;
  std::thread thread_;
};

// The gradsyncd program of this build; or that of GRADSYNC_TEST_DAEMON, for tests that run on
// another machine than they were built on.
std::string DaemonBinary();

// The gradsyncd program as a child process. Killed by the destructor.
class DaemonProcess {
 public:
  // Starts it with these arguments (and --log-level=info to a file), without waiting for it.
  explicit DaemonProcess(std::vector<std::string> arguments);
  ~DaemonProcess();
  DaemonProcess(const DaemonProcess&) = delete;
  DaemonProcess& operator=(const DaemonProcess&) = delete;

  // Whether it accepts trainers (--ready-fd). False if it ended instead.
  bool WaitUntilReady();

  pid_t pid() const { return pid_; }
  void Signal(int signal) const;
  // Its exit status, or minus the signal that killed it; aborts the test if it does not end.
  int WaitForEnd();
  std::string Output() const;  // what it wrote to stdout and stderr so far

 private:
  TemporaryDirectory directory_;
  UniqueFd ready_;
  UniqueFd pidfd_;
  pid_t pid_ = -1;
  std::optional<int> exit_code_;
};

}  // namespace gradsync::testing

#endif  // GRADSYNC_TESTS_INTEGRATION_DAEMON_FIXTURE_H_
