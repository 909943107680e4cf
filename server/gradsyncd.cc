// gradsyncd: the daemon's main. Flags, log, signals, notifications; all else is in Server.
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <functional>
#include <iostream>
#include <memory>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "server/engine/cpu/cpu_engine.h"
#include "server/engine/cuda_module.h"
#ifdef GRADSYNC_WITH_INSPECT
#include "server/inspect/inspect_server.h"
#include "server/inspect/socket_path.h"
#include "spdlog/spdlog.h"
#endif
#include "server/local/flags.h"
#include "server/local/log.h"
#include "server/local/server.h"
#include "shm/protocol.h"
#include "shm/status.h"
#include "shm/unique_fd.h"

ABSL_FLAG(std::string, socket, gradsync::kSystemSocket,
          "Where trainers connect. A stale socket file is replaced; with another daemon behind it, "
          "or any other file there, gradsyncd ends with an error.");
ABSL_FLAG(std::string, socket_mode, "0600",
          "The socket file's mode, octal: who may connect. 0666 serves every user of the machine "
          "(jobs of different users never meet), 0600 the daemon's own user only.");
#ifdef GRADSYNC_WITH_INSPECT
ABSL_FLAG(std::string, inspect_socket, "auto",
          "Where gradsyncctl asks, over gRPC; for the daemon's own user and root. auto: the "
          "trainers' socket with .inspect added, or nowhere if that fails. Empty: nowhere.");
#endif
ABSL_FLAG(int, threads, 0, "Threads that reduce large buffers. 0: by the cores it may use.");
ABSL_FLAG(gradsync::Seconds, idle_exit, {absl::ZeroDuration()},
          "Ends by itself after this time without a session. 0: never.");
ABSL_FLAG(gradsync::Seconds, drain_timeout, {absl::Seconds(30)},
          "How long SIGTERM or SIGINT wait for running operations; a second signal does not.");
ABSL_FLAG(uint32_t, max_sessions, 1024, "Sessions (ranks) at a time.");
ABSL_FLAG(uint32_t, max_user_sessions, 0, "Sessions of one user. 0: as --max-sessions.");
ABSL_FLAG(uint64_t, max_session_bytes, 0,
          "Bytes of segments of one session. 0: as --max-user-bytes.");
ABSL_FLAG(uint64_t, max_user_bytes, 0,
          "Bytes of segments of all sessions of one user. 0: as --max-total-bytes.");
ABSL_FLAG(uint64_t, max_total_bytes, 0,
          "Bytes of segments of all sessions together. 0: the machine's memory.");
ABSL_FLAG(uint64_t, max_session_device_bytes, 0,
          "Bytes of segments on GPUs of one session. 0: what the GPUs have.");
ABSL_FLAG(std::string, import_gpu_memory, "own-user",
          "Whose GPU memory may be reduced where the trainer has allocated it: never, own-user or "
          "always. A trainer that frees such memory too early can harm every job of that GPU.");
ABSL_FLAG(std::string, cuda_module, "",
          "The GPU engine. Empty: gradsync_cuda.so beside this program or in ../lib/gradsync. "
          "Loaded, like the driver and NCCL, when the first trainer uses a GPU.");
ABSL_FLAG(std::string, nccl, "libnccl.so.2", "NCCL's library, for jobs over several GPUs.");
ABSL_FLAG(std::string, log_level, "info", "trace, debug, info, warning, error, critical or off.");
ABSL_FLAG(std::string, log_file, "",
          "Appends the log to this file; empty: stderr. SIGHUP is ignored: rotate with "
          "copytruncate.");
ABSL_FLAG(int, ready_fd, -1,
          "When trainers can connect, writes a newline to this inherited descriptor and closes it. "
          "On a start-up error it is closed without.");
ABSL_FLAG(bool, detach, false,
          "Goes on in a background process with a session of its own; the one that was started "
          "ends at once.");
ABSL_FLAG(bool, version, false, "Prints the version and ends.");
ABSL_FLAG(bool, help, false, "Prints this text and ends.");

namespace gradsync {
namespace {

constexpr int kExitFailure = 1;
constexpr int kExitUsage = 2;

// What concerns one start only is not taken from the environment.
constexpr std::array kFlags = {
    FlagName{"socket"},
    FlagName{"socket_mode"},
#ifdef GRADSYNC_WITH_INSPECT
    FlagName{"inspect_socket"},
#endif
    FlagName{"threads"},
    FlagName{"idle_exit"},
    FlagName{"drain_timeout"},
    FlagName{"max_sessions"},
    FlagName{"max_user_sessions"},
    FlagName{"max_session_bytes"},
    FlagName{"max_user_bytes"},
    FlagName{"max_total_bytes"},
    FlagName{"max_session_device_bytes"},
    FlagName{"import_gpu_memory"},
    FlagName{"cuda_module"},
    FlagName{"nccl"},
    FlagName{"log_level"},
    FlagName{"log_file"},
    FlagName{"ready_fd", false},
    FlagName{"detach", false},
    FlagName{"version", false},
    FlagName{"help", false},
};

Result<mode_t> ParseMode(const std::string& text) {
  uint32_t mode = 0;
  for (const char digit : text) {
    if (digit < '0' || digit > '7' || mode > 0777) {
      mode = ~0u;
      break;
    }
    mode = mode * 8 + static_cast<uint32_t>(digit - '0');
  }
  if (!text.empty() && mode <= 0777) return mode;
  return Unexpected(Code::kInvalidArgument,
                    absl::StrCat("--socket-mode: '", text, "' is not an octal mode up to 0777"));
}

Result<ServerOptions::ImportMemory> ParseImportMemory(const std::string& text) {
  if (text == "never") return ServerOptions::ImportMemory::kNever;
  if (text == "own-user") return ServerOptions::ImportMemory::kOwnUser;
  if (text == "always") return ServerOptions::ImportMemory::kAlways;
  return Unexpected(
      Code::kInvalidArgument,
      absl::StrCat("--import-gpu-memory: '", text, "' is none of never, own-user and always"));
}

Result<ServerOptions> OptionsFromFlags() {
  Result<mode_t> mode = ParseMode(absl::GetFlag(FLAGS_socket_mode));
  if (!mode) return Unexpected(mode.error());
  if (absl::GetFlag(FLAGS_threads) < 0) {
    return Unexpected(Code::kInvalidArgument, "--threads: must not be negative");
  }
  if (absl::GetFlag(FLAGS_max_sessions) == 0) {
    return Unexpected(Code::kInvalidArgument, "--max-sessions: must be at least 1");
  }
  if (const int fd = absl::GetFlag(FLAGS_ready_fd); fd != -1 && fcntl(fd, F_GETFD) < 0) {
    return Unexpected(Code::kInvalidArgument,
                      absl::StrCat("--ready-fd: ", fd, " is not an open descriptor"));
  }
  ServerOptions options;
  // Absolute, so that the file is still found to be removed after a change of directory.
  std::error_code error;
  options.socket = std::filesystem::absolute(absl::GetFlag(FLAGS_socket), error).string();
  options.socket_mode = *mode;
  options.max_sessions = absl::GetFlag(FLAGS_max_sessions);
  options.max_user_sessions = absl::GetFlag(FLAGS_max_user_sessions);
  options.max_session_bytes = absl::GetFlag(FLAGS_max_session_bytes);
  options.max_user_bytes = absl::GetFlag(FLAGS_max_user_bytes);
  options.max_total_bytes = absl::GetFlag(FLAGS_max_total_bytes);
  options.max_session_device_bytes = absl::GetFlag(FLAGS_max_session_device_bytes);
  Result<ServerOptions::ImportMemory> import =
      ParseImportMemory(absl::GetFlag(FLAGS_import_gpu_memory));
  if (!import) return Unexpected(import.error());
  options.import_memory = *import;
  options.idle_exit = absl::ToChronoNanoseconds(absl::GetFlag(FLAGS_idle_exit).value);
  options.drain_timeout = absl::ToChronoNanoseconds(absl::GetFlag(FLAGS_drain_timeout).value);
  return options;
}

// A session takes up to four descriptors; the soft limit is often 1024.
void RaiseDescriptorLimit() {
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
  limit.rlim_cur = limit.rlim_max;
  setrlimit(RLIMIT_NOFILE, &limit);
}

// SIGTERM and SIGINT drain the daemon, the next of them ends the process. Blocks both in every
// thread that is made after it, so it must come before all of them.
class SignalThread {
 public:
  SignalThread() {
    sigemptyset(&signals_);
    sigaddset(&signals_, SIGTERM);
    sigaddset(&signals_, SIGINT);
    pthread_sigmask(SIG_BLOCK, &signals_, nullptr);
  }

  void Start(std::function<void()> drain) {
    thread_ = std::thread([this, drain = std::move(drain)] {
      for (int received = 0;; ++received) {
        int signal = 0;
        sigwait(&signals_, &signal);
        if (ended_.load()) return;
        if (received > 0) _exit(kExitFailure);
        drain();
      }
    });
  }

  // Before the server goes.
  void End() {
    ended_.store(true);
    pthread_kill(thread_.native_handle(), SIGTERM);
    thread_.join();
  }

 private:
  sigset_t signals_{};
  std::thread thread_;
  std::atomic<bool> ended_{false};
};

// A daemon that one rank started serves all of them: it must not be confined to the cores that the
// rank was pinned to. The kernel leaves it those of its cpuset, which is the container's limit.
void UseAllCores() {
  cpu_set_t all;
  std::memset(&all, 0xff, sizeof(all));
  sched_setaffinity(0, sizeof(all), &all);
}

// The parent of what goes on must not run what the child will (destructors, exit handlers).
Status Detach() {
  const pid_t child = fork();
  if (child < 0) return ErrnoStatus(Code::kInternal, errno, "cannot detach");
  if (child > 0) _exit(EXIT_SUCCESS);
  setsid();
  // Nor must it keep the folder busy that it was started in.
  if (chdir("/") != 0) return ErrnoStatus(Code::kInternal, errno, "cannot detach");
  UseAllCores();
  return OkStatus();
}

// sd_notify(3): systemd's Type=notify units wait for READY=1.
void NotifySystemd(const char* state) {
  const char* path = std::getenv("NOTIFY_SOCKET");
  if (path == nullptr || (path[0] != '/' && path[0] != '@')) return;
  sockaddr_un address{};
  const size_t length = std::strlen(path);
  if (length >= sizeof(address.sun_path)) return;
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path, path, length);
  if (path[0] == '@') address.sun_path[0] = '\0';  // a name outside the file system
  const UniqueFd fd(socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  const auto size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + length);
  sendto(fd.get(), state, std::strlen(state), MSG_NOSIGNAL,
         reinterpret_cast<const sockaddr*>(&address), size);
}

void AnnounceReady(UniqueFd ready_fd) {
  if (ready_fd.valid()) {
    [[maybe_unused]] const ssize_t written = write(ready_fd.get(), "\n", 1);
  }
  NotifySystemd("READY=1");
}

int Fail(const Status& status, int exit_code) {
  std::cerr << "gradsyncd: " << status.message() << "\n";
  return exit_code;
}

#ifdef GRADSYNC_WITH_INSPECT
// Answers operators, unless they are not wanted.
class Inspection {
 public:
  // An error only if the flag names a socket: trainers do not need what operators do not get.
  Status Start(const std::string& trainer_socket, Server* server,
               const std::shared_ptr<spdlog::logger>& logger) {
    const std::string flag = absl::GetFlag(FLAGS_inspect_socket);
    if (flag.empty()) return OkStatus();
    spdlog::set_default_logger(logger);
    const bool by_default = flag == "auto";
    auto started = InspectServer::Start(by_default ? DefaultInspectSocket(trainer_socket) : flag,
                                        SnapshotsOf(server));
    if (started) {
      server_ = *std::move(started);
      return OkStatus();
    }
    if (!by_default) return started.error();
    LogEvent(*logger, spdlog::level::warn, "inspect_off", "reason", started.error().message());
    return OkStatus();
  }

  void Drain() {
    if (server_ != nullptr) server_->Drain();
  }

  void Stop() { server_.reset(); }

 private:
  static SnapshotSource SnapshotsOf(Server* server) {
    return [server](Time deadline) -> Result<std::vector<JobSnapshot>> {
      std::vector<JobSnapshot> jobs;
      GRADSYNC_RETURN_IF_ERROR(server->Call(
          [&jobs](const JobTable& table, Time now) { jobs = table.Snapshot(now); }, deadline));
      return jobs;
    };
  }

  std::unique_ptr<InspectServer> server_;
};
#else
class Inspection {
 public:
  Status Start(const std::string&, Server*, const std::shared_ptr<spdlog::logger>&) {
    return OkStatus();
  }
  void Drain() {}
  void Stop() {}
};
#endif

Status Serve(ServerOptions options, UniqueFd* ready_fd) {
  SignalThread signals;
  CpuEngineOptions engine_options;
  engine_options.threads = absl::GetFlag(FLAGS_threads);
  Result<std::unique_ptr<CpuEngine>> engine = CpuEngine::Create(engine_options);
  if (!engine) return engine.error();
  const std::shared_ptr<spdlog::logger> logger = options.logger;
  const std::string socket = options.socket;
  const CudaOptions cuda{absl::GetFlag(FLAGS_cuda_module), absl::GetFlag(FLAGS_nccl)};
  Result<std::unique_ptr<Server>> server = Server::Create(std::move(options), *std::move(engine),
                                                          [cuda] { return LoadCudaEngine(cuda); });
  if (!server) return server.error();
  Inspection inspection;
  GRADSYNC_RETURN_IF_ERROR(inspection.Start(socket, server->get(), logger));
  signals.Start([&inspection, &server] {
    inspection.Drain();
    (*server)->Stop();
  });
  AnnounceReady(std::move(*ready_fd));
  const Status status = (*server)->Run();
  NotifySystemd("STOPPING=1");
  LogEvent(*logger, status.ok() ? spdlog::level::info : spdlog::level::err, "end", "result",
           CodeName(status.code()), "reason", status.message());
  signals.End();
  inspection.Stop();
  // Operations that are stuck would hold up the engine's destructor.
  if (!status.ok()) _exit(kExitFailure);
  return status;
}

int Main(int argc, char** argv) {
  const std::vector<std::string> environment = [] {
    std::vector<std::string> entries;
    for (char** entry = environ; *entry != nullptr; ++entry) entries.emplace_back(*entry);
    return entries;
  }();
  const std::vector<std::string> arguments(argv + 1, argv + argc);
  if (Status status = SetFlags(kFlags, environment, arguments); !status.ok()) {
    return Fail(status, kExitUsage);
  }
  if (absl::GetFlag(FLAGS_help)) {
    std::cout << "gradsyncd averages the gradients of the trainers on this machine.\n\n"
              << "Flags (precedence: command line, flag file, environment):\n"
              << DescribeFlags(kFlags);
    return EXIT_SUCCESS;
  }
  if (absl::GetFlag(FLAGS_version)) {
    std::cout << "gradsyncd " << GRADSYNC_VERSION << " (protocol " << kProtocolVersion << ")\n";
    return EXIT_SUCCESS;
  }
  Result<ServerOptions> options = OptionsFromFlags();
  if (!options) return Fail(options.error(), kExitUsage);
  auto logger = MakeLogger(absl::GetFlag(FLAGS_log_level), absl::GetFlag(FLAGS_log_file));
  if (!logger) return Fail(logger.error(), kExitUsage);
  options->logger = *logger;
  // A log whose reader has gone must not end the daemon, nor the end of the terminal it came from.
  std::signal(SIGPIPE, SIG_IGN);
  std::signal(SIGHUP, SIG_IGN);
  RaiseDescriptorLimit();
  if (absl::GetFlag(FLAGS_detach)) {
    if (Status status = Detach(); !status.ok()) return Fail(status, kExitFailure);
  }
  // Closed after an error has been printed: whoever sees it closed may look for the reason.
  UniqueFd ready_fd(absl::GetFlag(FLAGS_ready_fd));
  if (ready_fd.valid()) fcntl(ready_fd.get(), F_SETFD, FD_CLOEXEC);
  const Status status = Serve(*std::move(options), &ready_fd);
  return status.ok() ? EXIT_SUCCESS : Fail(status, kExitFailure);
}

}  // namespace
}  // namespace gradsync

int main(int argc, char** argv) { return gradsync::Main(argc, argv); }
