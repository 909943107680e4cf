// The real gradsyncd program: how it starts, and how it ends.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <csignal>
#include <cstring>
#include <fstream>
#include <memory>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "shm/socket_lock.h"
#include "tests/integration/daemon_fixture.h"
#include "tests/integration/raw_client.h"

namespace gradsync::testing {
namespace {

using ::testing::HasSubstr;

class DaemonTest : public ::testing::Test {
 protected:
  std::string socket() const { return directory_.File("s"); }
  std::vector<std::string> Arguments(std::vector<std::string> more = {}) const {
    more.push_back("--socket=" + socket());
    return more;
  }
  bool SocketExists() const { return access(socket().c_str(), F_OK) == 0; }

  TemporaryDirectory directory_;
};

bool IsEnd(const Status& status) { return status.code() == Code::kShuttingDown; }

TEST_F(DaemonTest, VersionAndHelpArePrinted) {
  DaemonProcess version({"--version"});
  EXPECT_EQ(version.WaitForEnd(), 0);
  EXPECT_THAT(version.Output(), HasSubstr("(protocol " + std::to_string(kProtocolVersion) + ")"));
  DaemonProcess help({"--help"});
  EXPECT_EQ(help.WaitForEnd(), 0);
  EXPECT_THAT(help.Output(), HasSubstr("--idle-exit"));
}

TEST_F(DaemonTest, AWrongFlagEndsItWithStatus2AndTheFlagsName) {
  for (const char* flag : {"--no-such-flag", "--threads=many", "--socket-mode=0999",
                           "--log-level=loud", "--threads=-1", "stray"}) {
    DaemonProcess daemon(Arguments({flag}));
    EXPECT_EQ(daemon.WaitForEnd(), 2) << flag;
    EXPECT_FALSE(daemon.WaitUntilReady());
    EXPECT_FALSE(daemon.Output().empty());
  }
}

TEST_F(DaemonTest, ReadyIsSaidWhenTrainersCanConnect) {
  DaemonProcess daemon(Arguments());
  ASSERT_TRUE(daemon.WaitUntilReady()) << daemon.Output();
  EXPECT_TRUE(RawClient::Join(socket(), "job", 0, 1).has_value());
  struct stat info {};
  ASSERT_EQ(stat(socket().c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0600);
}

TEST_F(DaemonTest, ItsRanksComputeRightSums) {
  DaemonProcess daemon(Arguments());
  ASSERT_TRUE(daemon.WaitUntilReady());
  auto job = RawJob::Start(socket(), "job", 2, 8 << 20);
  ASSERT_TRUE(job.has_value()) << job.error().ToString();
  for (const uint64_t count : {1, 1000, 2 << 20}) {
    static uint64_t sequence = 0;
    const Status status = job->AllReduceAndCheck(sequence++, count);
    EXPECT_TRUE(status.ok()) << status.ToString();
  }
}

TEST_F(DaemonTest, SigtermFinishesTellsTheClientsAndEndsWithStatus0) {
  for (const int signal : {SIGTERM, SIGINT}) {
    DaemonProcess daemon(Arguments());
    ASSERT_TRUE(daemon.WaitUntilReady());
    auto job = RawJob::Start(socket(), "job", 2, 4096);
    ASSERT_TRUE(job.has_value());
    ASSERT_TRUE(job->AllReduceAndCheck(0, 10).ok());
    ASSERT_TRUE(job->ranks[0].Push(MakeBarrier(job->groups[0], 1)));
    daemon.Signal(signal);
    EXPECT_EQ(daemon.WaitForEnd(), 0) << daemon.Output();
    EXPECT_FALSE(SocketExists());
    EXPECT_TRUE(IsEnd(job->ranks[0].Wait(job->groups[0], 1)));
    EXPECT_TRUE(IsEnd(job->ranks[1].ReceiveLastError()));
  }
}

// A forked child (a data loader's worker, say) that holds the dead trainer's socket hides nothing.
TEST_F(DaemonTest, ATrainerThatDiesIsNoticedThoughItsChildHoldsItsSocket) {
  DaemonProcess daemon(Arguments());
  ASSERT_TRUE(daemon.WaitUntilReady());
  auto survivor = RawClient::Join(socket(), "job", 0, 2);
  ASSERT_TRUE(survivor.has_value());
  if (!PeerPidFd(survivor->socket()).valid()) GTEST_SKIP() << "the kernel has no SO_PEERPIDFD";
  std::array<int, 2> worker_life{-1, -1};
  ASSERT_EQ(pipe2(worker_life.data(), O_CLOEXEC), 0);
  const UniqueFd worker_end(worker_life[0]);
  UniqueFd our_end(worker_life[1]);

  const pid_t trainer = fork();
  if (trainer == 0) {
    our_end.Reset();
    auto client = RawClient::Join(socket(), "job", 1, 2);
    if (!client || !client->MakeGroup(MakeCreateGroup("world", {0, 1}))) _exit(1);
    if (fork() == 0) {
      char byte = 0;
      [[maybe_unused]] const ssize_t end = read(worker_end.get(), &byte, 1);
      _exit(0);
    }
    raise(SIGKILL);
  }
  const auto group = survivor->MakeGroup(MakeCreateGroup("world", {0, 1}));
  ASSERT_TRUE(group.has_value()) << group.error().ToString();
  int status = 0;
  ASSERT_EQ(waitpid(trainer, &status, 0), trainer);
  ASSERT_TRUE(WIFSIGNALED(status));
  ASSERT_TRUE(survivor->Push(MakeBarrier(*group, 0)));
  const Status lost = survivor->Wait(*group, 0);
  EXPECT_EQ(lost.code(), Code::kRankLost) << lost.ToString();
  EXPECT_THAT(lost.message(), HasSubstr("rank 1"));
}

TEST_F(DaemonTest, HangupIsIgnored) {
  DaemonProcess daemon(Arguments());
  ASSERT_TRUE(daemon.WaitUntilReady());
  daemon.Signal(SIGHUP);
  EXPECT_TRUE(RawClient::Join(socket(), "job", 0, 1).has_value());
}

TEST_F(DaemonTest, AKilledDaemonIsNoticedAndItsSocketFileReplaced) {
  auto first = std::make_unique<DaemonProcess>(Arguments());
  ASSERT_TRUE(first->WaitUntilReady());
  auto job = RawJob::Start(socket(), "job", 2, 4096);
  ASSERT_TRUE(job.has_value());
  ASSERT_TRUE(job->ranks[0].Push(MakeBarrier(job->groups[0], 0)));
  first->Signal(SIGKILL);
  EXPECT_EQ(first->WaitForEnd(), -SIGKILL);
  EXPECT_EQ(job->ranks[0].Wait(job->groups[0], 0).code(), Code::kDaemonLost);
  ASSERT_TRUE(SocketExists());

  DaemonProcess second(Arguments());
  ASSERT_TRUE(second.WaitUntilReady()) << second.Output();
  EXPECT_TRUE(RawClient::Join(socket(), "job", 0, 1).has_value());
}

TEST_F(DaemonTest, ASecondDaemonOnTheSocketIsRefused) {
  DaemonProcess first(Arguments());
  ASSERT_TRUE(first.WaitUntilReady());
  DaemonProcess second(Arguments());
  EXPECT_FALSE(second.WaitUntilReady());
  EXPECT_EQ(second.WaitForEnd(), 1);
  EXPECT_THAT(second.Output(), HasSubstr("another gradsyncd serves at"));
  EXPECT_TRUE(RawClient::Join(socket(), "job", 0, 1).has_value());
}

// Each of them finds a socket file that nobody listens behind: none may take another's new one for
// it.
TEST_F(DaemonTest, OfManyThatStartOnAStaleSocketOneServes) {
  for (int round = 0; round < 5; ++round) {
    {
      DaemonProcess killed(Arguments());
      ASSERT_TRUE(killed.WaitUntilReady());
      killed.Signal(SIGKILL);
      killed.WaitForEnd();
    }
    ASSERT_TRUE(SocketExists());
    std::vector<std::unique_ptr<DaemonProcess>> daemons;
    for (int i = 0; i < 4; ++i) daemons.push_back(std::make_unique<DaemonProcess>(Arguments()));
    int serving = 0;
    for (const auto& daemon : daemons) serving += daemon->WaitUntilReady() ? 1 : 0;
    EXPECT_EQ(serving, 1);
    EXPECT_TRUE(RawClient::Join(socket(), "job", 0, 1).has_value());
  }
}

TEST_F(DaemonTest, AFileThatIsNoSocketIsLeftAlone) {
  std::ofstream(socket()) << "precious";
  DaemonProcess daemon(Arguments());
  EXPECT_EQ(daemon.WaitForEnd(), 1);
  EXPECT_THAT(daemon.Output(), HasSubstr("is not a socket"));
  std::ifstream file(socket());
  std::string text;
  file >> text;
  EXPECT_EQ(text, "precious");
}

TEST_F(DaemonTest, ASocketPathThatCannotBeUsedIsAnErrorThatNamesIt) {
  for (const std::string& path : {std::string("/nonexistent/s"), std::string("/proc/s"),
                                  directory_.File(std::string(200, 'x'))}) {
    DaemonProcess daemon({"--socket=" + path});
    EXPECT_EQ(daemon.WaitForEnd(), 1) << path;
    EXPECT_THAT(daemon.Output(), HasSubstr(path));
  }
}

TEST_F(DaemonTest, AnotherUserIsNotLetInUnlessTheModeSaysSo) {
  if (getuid() != 0) GTEST_SKIP() << "needs root to become another user";
  ASSERT_EQ(chmod(directory_.path().c_str(), 0755), 0);
  const auto connect_as_nobody = [this] {
    Code code = Code::kInternal;
    std::thread([this, &code] {
      // The system call, for this thread only: the C library's function changes every thread.
      if (syscall(SYS_setresuid, 65534, 65534, 65534) != 0) return;
      const auto client = RawClient::Join(socket(), "job", 0, 1);
      code = client ? Code::kOk : client.error().code();
    }).join();
    return code;
  };
  {
    DaemonProcess closed(Arguments());
    ASSERT_TRUE(closed.WaitUntilReady());
    EXPECT_EQ(connect_as_nobody(), Code::kPermissionDenied);
  }
  DaemonProcess open(Arguments({"--socket-mode=0666"}));
  ASSERT_TRUE(open.WaitUntilReady());
  EXPECT_EQ(connect_as_nobody(), Code::kOk);
  EXPECT_THAT(open.Output(), HasSubstr("uid=65534"));
}

TEST_F(DaemonTest, AnIdleDaemonEndsByItself) {
  DaemonProcess daemon(Arguments({"--idle-exit=50ms"}));
  ASSERT_TRUE(daemon.WaitUntilReady());
  EXPECT_EQ(daemon.WaitForEnd(), 0);
  EXPECT_FALSE(SocketExists());
  EXPECT_THAT(daemon.Output(), HasSubstr("event=idle_end"));
}

// A starter that holds the lock always finds a daemon that stays, or none, and never one that goes.
TEST_F(DaemonTest, UnderTheStartLockADaemonDoesNotEnd) {
  for (int round = 0; round < 20; ++round) {
    DaemonProcess daemon(Arguments({"--idle-exit=1ms"}));
    auto lock = *SocketLock::TryTake(socket(), SocketLock::Right::kStarting);
    while (!lock) lock = *SocketLock::TryTake(socket(), SocketLock::Right::kStarting);
    const auto client = RawClient::Connect(socket());
    if (!client) {
      // Ended already, or not there yet: either way it is for the starter to start one.
      EXPECT_EQ(client.error().code(), Code::kDaemonLost);
      continue;
    }
    auto joined = RawClient::Join(socket(), "job", 0, 1);
    EXPECT_TRUE(joined.has_value()) << joined.error().ToString();
  }
}

TEST_F(DaemonTest, ADetachedDaemonOutlivesItsStarter) {
  DaemonProcess starter(Arguments({"--detach", "--idle-exit=50ms"}));
  ASSERT_TRUE(starter.WaitUntilReady()) << starter.Output();
  EXPECT_EQ(starter.WaitForEnd(), 0);
  {
    auto client = RawClient::Join(socket(), "job", 0, 1);
    EXPECT_TRUE(client.has_value()) << client.error().ToString();
  }
  while (SocketExists()) std::this_thread::yield();
}

TEST_F(DaemonTest, FlagsComeFromAFlagFileToo) {
  const std::string flags = directory_.File("flags");
  std::ofstream(flags) << "--max-session-bytes=8192\n--socket=" << socket() << "\n";
  DaemonProcess daemon({"--flagfile=" + flags});
  ASSERT_TRUE(daemon.WaitUntilReady()) << daemon.Output();
  auto client = RawClient::Join(socket(), "job", 0, 1);
  ASSERT_TRUE(client.has_value());
  EXPECT_EQ(client->Allocate(8193).error().code(), Code::kOutOfMemory);
}

TEST_F(DaemonTest, SystemdIsNotified) {
  const std::string path = directory_.File("notify");
  const UniqueFd notify(::socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::strncpy(address.sun_path, path.c_str(), sizeof(address.sun_path) - 1);
  ASSERT_EQ(bind(notify.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
  setenv("NOTIFY_SOCKET", path.c_str(), 1);
  DaemonProcess daemon(Arguments());
  unsetenv("NOTIFY_SOCKET");
  std::array<char, 64> state{};
  ASSERT_GT(recv(notify.get(), state.data(), state.size() - 1, 0), 0);
  EXPECT_STREQ(state.data(), "READY=1");
}

// Kilobytes of "Private_Clean" and "Private_Dirty" of a process.
uint64_t PrivateKilobytes(pid_t pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/smaps_rollup");
  uint64_t total = 0;
  for (std::string line; std::getline(file, line);) {
    std::istringstream words(line);
    std::string name;
    uint64_t kilobytes = 0;
    words >> name >> kilobytes;
    if (name == "Private_Clean:" || name == "Private_Dirty:") total += kilobytes;
  }
  return total;
}

TEST_F(DaemonTest, AnIdleDaemonHasLittlePrivateMemory) {
  DaemonProcess daemon(Arguments());
  ASSERT_TRUE(daemon.WaitUntilReady());
  const uint64_t kilobytes = PrivateKilobytes(daemon.pid());
  EXPECT_GT(kilobytes, 0);
  // Sanitizers bring memory of their own.
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
  EXPECT_LE(kilobytes, 64 * 1024);
#endif
  RecordProperty("private_kilobytes", static_cast<int>(kilobytes));
}

}  // namespace
}  // namespace gradsync::testing
