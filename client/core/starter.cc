#include "client/core/starter.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <climits>
#include <fstream>
#include <iterator>
#include <string_view>
#include <thread>
#include <utility>

namespace gradsync {
namespace {

constexpr std::chrono::milliseconds kLockPause{5};
constexpr std::chrono::seconds kReapWait{1};
constexpr int kReadyFd = 3;  // in the daemon: the first after the standard ones
constexpr size_t kLogTailBytes = 600;

std::string JoinPath(const std::string& directory, const std::string& name) {
  return directory + "/" + name;
}

std::string DirectoryOf(const std::string& path) {
  const size_t slash = path.rfind('/');
  return slash == std::string::npos ? "." : path.substr(0, slash);
}

bool IsExecutable(const std::string& path) {
  struct stat info {};
  return stat(path.c_str(), &info) == 0 && S_ISREG(info.st_mode) && access(path.c_str(), X_OK) == 0;
}

// The file that this code lies in: libgradsync.so, or a program that it is linked into.
std::string OwnFile() {
  Dl_info info{};
  if (dladdr(reinterpret_cast<const void*>(&OwnFile), &info) == 0 || info.dli_fname == nullptr) {
    return {};
  }
  std::array<char, PATH_MAX> resolved{};
  return realpath(info.dli_fname, resolved.data()) != nullptr ? resolved.data() : std::string();
}

// A daemon that is too busy to accept is there all the same: it is waited for.
Result<FoundDaemon> Connect(const std::string& path, Deadline deadline) {
  auto socket = ConnectTo(path);
  while (!socket && socket.error().code() == Code::kDeadlineExceeded &&
         std::chrono::steady_clock::now() < deadline) {
    std::this_thread::sleep_for(kLockPause);
    socket = ConnectTo(path);
  }
  if (!socket) return Unexpected(socket.error());
  return FoundDaemon{*std::move(socket), path, std::nullopt};
}

Result<FoundDaemon> ConnectToFixed(const Discovery& discovery, Deadline deadline) {
  auto found = Connect(discovery.fixed_socket, deadline);
  if (found || found.error().code() != Code::kDaemonLost) return found;
  return Unexpected(Code::kDaemonLost,
                    found.error().message() + "; " + discovery.fixed_by +
                        " names this socket, so no private daemon is started: start gradsyncd "
                        "there, or name none");
}

Status NoAccessToSystemDaemon(const Status& status) {
  return {Code::kPermissionDenied,
          status.message() +
              "; the node's daemon runs, but this user may not use it: ask to be made a member of "
              "the socket's group, or set GRADSYNC_SOCKET to a daemon of your own"};
}

// One process at a time looks for, and starts, the private daemon.
Result<SocketLock> LockStarting(const std::string& socket, Deadline deadline) {
  for (;;) {
    auto lock = SocketLock::TryTake(socket, SocketLock::Right::kStarting);
    if (!lock) return Unexpected(lock.error());
    if (lock->has_value()) return **std::move(lock);
    if (std::chrono::steady_clock::now() >= deadline) {
      return Unexpected(Code::kDeadlineExceeded,
                        "another process has held the lock '" + socket +
                            ".lock' too long while it starts gradsyncd; end that process");
    }
    std::this_thread::sleep_for(kLockPause);
  }
}

std::string LogTail(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  if (text.size() > kLogTailBytes) text.erase(0, text.size() - kLogTailBytes);
  while (!text.empty() && text.back() == '\n') text.pop_back();
  return text;
}

// What posix_spawn needs for a daemon that has nothing of the trainer's but its user: a session of
// its own, no descriptors but the ready pipe, default signals, `log` as standard output and error.
class SpawnPlan {
 public:
  SpawnPlan(int ready_fd, const std::string& log) {
    posix_spawn_file_actions_init(&actions_);
    posix_spawn_file_actions_addopen(&actions_, 0, "/dev/null", O_RDONLY, 0);
    posix_spawn_file_actions_addopen(&actions_, 1, log.c_str(), O_WRONLY | O_CREAT | O_APPEND,
                                     0600);
    posix_spawn_file_actions_adddup2(&actions_, 1, 2);
    posix_spawn_file_actions_adddup2(&actions_, ready_fd, kReadyFd);
    posix_spawn_file_actions_addclosefrom_np(&actions_, kReadyFd + 1);
    posix_spawnattr_init(&attributes_);
    sigset_t signals;
    sigemptyset(&signals);
    posix_spawnattr_setsigmask(&attributes_, &signals);
    sigfillset(&signals);
    posix_spawnattr_setsigdefault(&attributes_, &signals);
    posix_spawnattr_setflags(
        &attributes_,
        static_cast<int16_t>(POSIX_SPAWN_SETSID | POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF));
  }
  SpawnPlan(const SpawnPlan&) = delete;
  SpawnPlan& operator=(const SpawnPlan&) = delete;
  ~SpawnPlan() {
    posix_spawn_file_actions_destroy(&actions_);
    posix_spawnattr_destroy(&attributes_);
  }

  // Returns errno.
  int Spawn(pid_t* pid, const std::vector<std::string>& arguments,
            const std::vector<std::string>& environment) {
    return posix_spawn(pid, arguments.front().c_str(), &actions_, &attributes_,
                       Pointers(arguments).data(), Pointers(environment).data());
  }

 private:
  static std::vector<char*> Pointers(const std::vector<std::string>& texts) {
    std::vector<char*> pointers;
    pointers.reserve(texts.size() + 1);
    for (const std::string& text : texts) pointers.push_back(const_cast<char*>(text.c_str()));
    pointers.push_back(nullptr);
    return pointers;
  }

  posix_spawn_file_actions_t actions_{};
  posix_spawnattr_t attributes_{};
};

// Waits for the daemon's byte. False: every copy of the pipe's other end was closed first, so the
// daemon has failed; or the deadline came.
bool WaitUntilReady(int fd, Deadline deadline) {
  for (;;) {
    const auto left =
        std::chrono::ceil<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now());
    pollfd entry{fd, POLLIN, 0};
    const int ready =
        poll(&entry, 1, static_cast<int>(std::clamp<int64_t>(left.count(), 0, INT_MAX)));
    if (ready < 0 && errno == EINTR) continue;
    if (ready <= 0) return false;
    char byte = 0;
    const ssize_t count = read(fd, &byte, 1);
    if (count < 0 && errno == EINTR) continue;
    return count == 1;
  }
}

// With --detach the daemon goes on in a grandchild, so that the trainer keeps no child that it does
// not know of; what we spawned ends at once, and only that is waited for. The trainer may have
// ended it first, by a wait for any child or by ignoring SIGCHLD: no matter.
void ReapIntermediate(pid_t pid) {
  const Deadline deadline = std::chrono::steady_clock::now() + kReapWait;
  for (;;) {
    const pid_t reaped = waitpid(pid, nullptr, WNOHANG);
    if (reaped == pid || (reaped < 0 && errno != EINTR)) return;
    // Not a gradsyncd, or one that is stuck: it is not left behind.
    if (std::chrono::steady_clock::now() >= deadline) kill(pid, SIGKILL);
    std::this_thread::sleep_for(kLockPause);
  }
}

Status StartDaemon(const Discovery& discovery, Deadline deadline) {
  const auto binary = FindDaemonBinary(discovery);
  if (!binary) return binary.error();
  const std::string log = JoinPath(discovery.private_directory, "gradsyncd.log");
  std::array<int, 2> ends{-1, -1};
  if (pipe2(ends.data(), O_CLOEXEC) != 0) {
    return ErrnoStatus(Code::kInternal, errno, "cannot start gradsyncd");
  }
  const UniqueFd ready(ends[0]);
  UniqueFd daemon_end(ends[1]);
  // Above the standard ones, which a trainer may have closed and the spawn plan fills first.
  daemon_end = UniqueFd(fcntl(daemon_end.get(), F_DUPFD_CLOEXEC, kReadyFd));
  const std::vector<std::string> arguments = {*binary,
                                              "--detach",
                                              "--socket=" + discovery.private_socket(),
                                              "--idle_exit=" + discovery.idle_exit,
                                              "--ready_fd=" + std::to_string(kReadyFd),
                                              "--log_file=" + log};
  pid_t pid = -1;
  const int error = SpawnPlan(daemon_end.get(), log).Spawn(&pid, arguments, discovery.environment);
  if (error != 0) return ErrnoStatus(Code::kDaemonLost, error, "cannot run '" + *binary + "'");
  daemon_end.Reset();
  const bool is_ready = WaitUntilReady(ready.get(), deadline);
  ReapIntermediate(pid);
  if (is_ready) return OkStatus();
  return {Code::kDaemonLost,
          "'" + *binary + "' did not start; the end of its log, '" + log + "':\n" + LogTail(log)};
}

Result<FoundDaemon> FindPrivate(const Discovery& discovery, Deadline deadline) {
  GRADSYNC_RETURN_IF_ERROR(EnsurePrivateDirectory(discovery.private_directory, geteuid()));
  const std::string path = discovery.private_socket();
  auto found = Connect(path, deadline);
  if (found || found.error().code() != Code::kDaemonLost) return found;
  auto lock = LockStarting(path, deadline);
  if (!lock) return Unexpected(lock.error());
  // Whoever held the lock before us may have started it.
  found = Connect(path, deadline);
  if (found || found.error().code() != Code::kDaemonLost) return found;
  GRADSYNC_RETURN_IF_ERROR(StartDaemon(discovery, deadline));
  found = Connect(path, deadline);
  if (found) found->starting = *std::move(lock);
  return found;
}

}  // namespace

std::string Discovery::private_socket() const {
  // Clients of another version start a daemon of theirs beside this one.
  return JoinPath(private_directory, "gradsyncd-v" + std::to_string(kProtocolVersion) + ".sock");
}

Discovery DiscoveryFrom(const std::string& socket, const Environment& environment) {
  Discovery discovery;
  if (!socket.empty()) {
    discovery.fixed_socket = socket;
    discovery.fixed_by = "the session's option 'socket'";
  } else if (environment.socket) {
    discovery.fixed_socket = *environment.socket;
    discovery.fixed_by = "GRADSYNC_SOCKET";
  }
  const bool has_runtime_dir = environment.runtime_dir && environment.runtime_dir->front() == '/';
  discovery.private_directory = has_runtime_dir ? JoinPath(*environment.runtime_dir, "gradsync")
                                                : "/tmp/gradsync-" + std::to_string(geteuid());
  discovery.daemon_binary = environment.daemon.value_or("");
  discovery.path = environment.path.value_or("/usr/local/bin:/usr/bin:/bin");
  discovery.environment = environment.for_daemon;
  if (environment.idle_exit) discovery.idle_exit = *environment.idle_exit;
  return discovery;
}

Result<FoundDaemon> FindDaemon(const Discovery& discovery, Deadline deadline) {
  if (discovery.is_fixed()) return ConnectToFixed(discovery, deadline);
  auto found = Connect(discovery.system_socket, deadline);
  if (found) return found;
  if (found.error().code() == Code::kPermissionDenied) {
    return Unexpected(NoAccessToSystemDaemon(found.error()));
  }
  return FindPrivate(discovery, deadline);
}

Status EnsurePrivateDirectory(const std::string& path, uid_t uid) {
  if (mkdir(path.c_str(), 0700) != 0 && errno != EEXIST) {
    return ErrnoStatus(Code::kPermissionDenied, errno,
                       "cannot make the directory '" + path + "' for a private gradsyncd");
  }
  struct stat info {};
  if (lstat(path.c_str(), &info) != 0) {
    return ErrnoStatus(Code::kPermissionDenied, errno, "cannot look at '" + path + "'");
  }
  std::string fault;
  if (!S_ISDIR(info.st_mode)) {
    fault = "is not a directory";
  } else if (info.st_uid != uid) {
    fault = "belongs to user " + std::to_string(info.st_uid) + ", not " + std::to_string(uid);
  } else if ((info.st_mode & 0077) != 0) {
    fault = "is open to other users";
  }
  if (fault.empty()) return OkStatus();
  return {Code::kPermissionDenied,
          "'" + path + "' " + fault +
              ", so a private gradsyncd cannot be trusted there; remove it, or set XDG_RUNTIME_DIR "
              "to a directory of your own, or GRADSYNC_SOCKET to the daemon to use"};
}

Result<std::string> FindDaemonBinary(const Discovery& discovery) {
  if (!discovery.daemon_binary.empty()) {
    if (IsExecutable(discovery.daemon_binary)) return discovery.daemon_binary;
    return Unexpected(Code::kDaemonLost, "GRADSYNC_DAEMON='" + discovery.daemon_binary +
                                             "' is not an executable file");
  }
  // Beside the library, or in the bin/ of any directory above it: /usr/lib/<arch>/libgradsync.so
  // and /usr/bin, <venv>/lib/python3/site-packages/gradsync/libgradsync.so and <venv>/bin.
  std::string directory = DirectoryOf(OwnFile());
  if (IsExecutable(JoinPath(directory, "gradsyncd"))) return JoinPath(directory, "gradsyncd");
  for (; directory.size() > 1; directory = DirectoryOf(directory)) {
    const std::string candidate = JoinPath(directory, "bin/gradsyncd");
    if (IsExecutable(candidate)) return candidate;
  }
  std::string_view path = discovery.path;
  while (!path.empty()) {
    const std::string entry(path.substr(0, path.find(':')));
    if (entry.starts_with('/') && IsExecutable(JoinPath(entry, "gradsyncd"))) {
      return JoinPath(entry, "gradsyncd");
    }
    path.remove_prefix(std::min(path.size(), entry.size() + 1));
  }
  return Unexpected(
      Code::kDaemonLost,
      "no gradsyncd runs on this node, and none can be started: it is neither beside '" +
          OwnFile() + "' nor in PATH; install it, or set GRADSYNC_DAEMON to it");
}

}  // namespace gradsync
