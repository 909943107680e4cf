#include "tests/fault/rank_process.h"

#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <utility>

#include "shm/frame_socket.h"
#include "tests/integration/daemon_fixture.h"
#include "tests/integration/raw_client.h"

namespace gradsync::testing {
namespace {

[[noreturn]] void Die(const char* what) {
  std::perror(what);
  std::abort();
}

// Of the process at the other end of a connection.
pid_t PeerPid(int socket) {
  ucred credentials{};
  socklen_t size = sizeof(credentials);
  if (getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &credentials, &size) != 0) Die("SO_PEERCRED");
  return credentials.pid;
}

}  // namespace

void Channel::Say(const std::string& text) const {
  const std::string line = text.empty() ? " " : text;
  static_cast<void>(SendFrame(socket_.get(), std::as_bytes(std::span(line)), {}, SoonEnough()));
}

std::string Channel::Hear() const {
  const auto frame = ReceiveFrame(socket_.get(), SoonEnough());
  if (!frame) return {};
  return {reinterpret_cast<const char*>(frame->bytes.data()), frame->bytes.size()};
}

RankProcess::RankProcess(const std::function<void(const Channel&)>& body) {
  std::array<int, 2> ends{-1, -1};
  if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends.data()) != 0) Die("socketpair");
  UniqueFd ours(ends[0]);
  UniqueFd theirs(ends[1]);
  std::fflush(nullptr);
  pid_ = fork();
  if (pid_ < 0) Die("fork");
  if (pid_ == 0) {
    ours.Reset();
    body(Channel(std::move(theirs)));
    std::fflush(nullptr);
    _exit(EXIT_SUCCESS);
  }
  channel_.emplace(std::move(ours));
}

RankProcess::RankProcess(RankProcess&& other) noexcept
    : pid_(std::exchange(other.pid_, -1)), channel_(std::move(other.channel_)) {}

RankProcess::~RankProcess() {
  if (pid_ < 0) return;
  Kill();
  WaitForEnd();
}

void RankProcess::Kill() const { kill(pid_, SIGKILL); }

int RankProcess::WaitForEnd() {
  int status = 0;
  while (waitpid(pid_, &status, 0) < 0) {
    if (errno != EINTR) Die("waitpid");
  }
  pid_ = -1;
  return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

Result<std::shared_ptr<Session>> OpenSession(const Discovery& discovery, uint32_t rank,
                                             uint32_t world_size, const std::string& job) {
  SessionRequest request;
  request.job = job;
  request.rank = rank;
  request.world_size = world_size;
  request.timeout_ms = static_cast<uint32_t>(std::chrono::milliseconds(kPatience).count());
  return Session::Open(request, {}, discovery);
}

Discovery At(const std::string& socket) {
  Discovery discovery;
  discovery.fixed_socket = socket;
  discovery.fixed_by = "the test";
  return discovery;
}

Discovery PrivateIn(const std::string& directory, const std::string& idle_exit) {
  Discovery discovery;
  discovery.system_socket = directory + "/system.sock";
  discovery.private_directory = directory + "/private";
  discovery.daemon_binary = DaemonBinary();
  discovery.environment = {"PATH=/usr/bin:/bin"};
  discovery.idle_exit = idle_exit;
  return discovery;
}

void KillPrivateDaemon(const Discovery& discovery) {
  const auto socket = ConnectTo(discovery.private_socket());
  if (!socket) return;
  kill(PeerPid(socket->get()), SIGKILL);
  // Gone when the connection is: only then may its files be removed.
  static_cast<void>(ReceiveFrame(socket->get(), SoonEnough()));
}

int PrivateStarts(const Discovery& discovery) {
  std::ifstream log(discovery.private_directory + "/gradsyncd.log");
  int starts = 0;
  for (std::string line; std::getline(log, line);) {
    if (line.find("event=serving") != std::string::npos) ++starts;
  }
  return starts;
}

}  // namespace gradsync::testing
