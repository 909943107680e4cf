#include "tests/integration/daemon_fixture.h"

#include <fcntl.h>
#include <poll.h>
#include <spawn.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <utility>

#include "server/engine/cpu/cpu_engine.h"
#include "tests/integration/raw_client.h"

namespace gradsync::testing {
namespace {

[[noreturn]] void Die(const std::string& what) {
  std::fprintf(stderr, "test fixture: %s\n", what.c_str());
  std::abort();
}

std::unique_ptr<Engine> MakeEngine(int threads) {
  CpuEngineOptions options;
  options.threads = threads;
  Result<std::unique_ptr<CpuEngine>> engine = CpuEngine::Create(options);
  if (!engine) Die(engine.error().ToString());
  return *std::move(engine);
}

bool PollReadable(int fd) {
  pollfd entry{fd, POLLIN, 0};
  const auto patience = std::chrono::duration_cast<std::chrono::milliseconds>(kPatience);
  int ready = 0;
  do {
    ready = poll(&entry, 1, static_cast<int>(patience.count()));
  } while (ready < 0 && errno == EINTR);
  return ready > 0;
}

}  // namespace

TemporaryDirectory::TemporaryDirectory() {
  // Short: a socket's path has at most 107 characters.
  std::string pattern = "/tmp/gradsync-test-XXXXXX";
  if (mkdtemp(pattern.data()) == nullptr) Die("cannot make a temporary directory");
  path_ = pattern;
}

TemporaryDirectory::~TemporaryDirectory() {
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

InProcessDaemon::InProcessDaemon(ServerOptions options, int threads) {
  Start(std::move(options), MakeEngine(threads));
}

InProcessDaemon::InProcessDaemon(ServerOptions options, std::unique_ptr<Engine> engine) {
  Start(std::move(options), std::move(engine));
}

void InProcessDaemon::Start(ServerOptions options, std::unique_ptr<Engine> engine) {
  options.socket = socket();
  Result<std::unique_ptr<Server>> server = Server::Create(std::move(options), std::move(engine));
  if (!server) Die(server.error().ToString());
  server_ = *std::move(server);
  thread_ = std::thread([this] { result_ = server_->Run(); });
}

InProcessDaemon::~InProcessDaemon() {
  if (thread_.joinable()) static_cast<void>(Stop());
}

Status InProcessDaemon::Stop() {
  server_->Stop();
  return Join();
}

Status InProcessDaemon::Join() {
  thread_.join();
  return result_;
}

std::string DaemonBinary() {
  const char* const moved = std::getenv("GRADSYNC_TEST_DAEMON");
  return moved != nullptr ? moved : GRADSYNC_DAEMON_BINARY;
}

DaemonProcess::DaemonProcess(std::vector<std::string> arguments) {
  const std::string binary = DaemonBinary();
  std::array<int, 2> ends{-1, -1};
  if (pipe2(ends.data(), O_CLOEXEC) != 0) Die("cannot make a pipe");
  ready_ = UniqueFd(ends[0]);
  const UniqueFd daemon_end(ends[1]);
  constexpr int kReadyFd = 3;
  arguments.insert(arguments.begin(), binary);
  arguments.push_back("--ready-fd=" + std::to_string(kReadyFd));
  std::vector<char*> argv;
  for (std::string& argument : arguments) argv.push_back(argument.data());
  argv.push_back(nullptr);

  const std::string output = directory_.File("output");
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_addopen(&actions, 1, output.c_str(), O_WRONLY | O_CREAT | O_APPEND,
                                   0600);
  posix_spawn_file_actions_adddup2(&actions, 1, 2);
  posix_spawn_file_actions_adddup2(&actions, daemon_end.get(), kReadyFd);
  const int error = posix_spawn(&pid_, binary.c_str(), &actions, nullptr, argv.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  if (error != 0) Die("cannot start " + binary);
  pidfd_ = UniqueFd(static_cast<int>(syscall(SYS_pidfd_open, pid_, 0)));
}

DaemonProcess::~DaemonProcess() {
  if (exit_code_) return;
  Signal(SIGKILL);
  WaitForEnd();
}

bool DaemonProcess::WaitUntilReady() {
  char byte = 0;
  return PollReadable(ready_.get()) && read(ready_.get(), &byte, 1) == 1 && byte == '\n';
}

void DaemonProcess::Signal(int signal) const { kill(pid_, signal); }

int DaemonProcess::WaitForEnd() {
  if (exit_code_) return *exit_code_;
  if (!PollReadable(pidfd_.get())) Die("gradsyncd does not end:\n" + Output());
  int status = 0;
  waitpid(pid_, &status, 0);
  exit_code_ = WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
  return *exit_code_;
}

std::string DaemonProcess::Output() const {
  std::ifstream file(directory_.File("output"));
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

}  // namespace gradsync::testing
