#include "client/core/starter.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <string>

namespace gradsync {
namespace {

using ::testing::HasSubstr;

class StarterTest : public ::testing::Test {
 protected:
  StarterTest() {
    std::string name = ::testing::TempDir() + "starter_XXXXXX";
    root_ = mkdtemp(name.data());
    discovery_.system_socket = root_ + "/system.sock";
    discovery_.private_directory = root_ + "/private";
    discovery_.daemon_binary = root_ + "/gradsyncd";
  }
  ~StarterTest() override { std::filesystem::remove_all(root_); }

  void WriteDaemon(const std::string& script) const {
    std::ofstream(discovery_.daemon_binary) << "#!/bin/sh\n" << script;
    chmod(discovery_.daemon_binary.c_str(), 0755);
  }
  static Deadline Soon() { return std::chrono::steady_clock::now() + std::chrono::seconds(20); }

  std::string root_;
  Discovery discovery_;
};

TEST_F(StarterTest, MakesADirectoryForThisUserAlone) {
  ASSERT_TRUE(EnsurePrivateDirectory(discovery_.private_directory, geteuid()).ok());
  struct stat info {};
  ASSERT_EQ(lstat(discovery_.private_directory.c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0700);
  EXPECT_TRUE(EnsurePrivateDirectory(discovery_.private_directory, geteuid()).ok());
}

TEST_F(StarterTest, RefusesADirectoryOfSomebodyElse) {
  ASSERT_EQ(mkdir(discovery_.private_directory.c_str(), 0700), 0);
  const Status status = EnsurePrivateDirectory(discovery_.private_directory, geteuid() + 1);
  EXPECT_EQ(status.code(), Code::kPermissionDenied);
  EXPECT_THAT(status.message(), HasSubstr("belongs to user " + std::to_string(geteuid())));
}

TEST_F(StarterTest, RefusesADirectoryThatOthersCanReach) {
  ASSERT_EQ(mkdir(discovery_.private_directory.c_str(), 0700), 0);
  ASSERT_EQ(chmod(discovery_.private_directory.c_str(), 0710), 0);
  const Status status = EnsurePrivateDirectory(discovery_.private_directory, geteuid());
  EXPECT_EQ(status.code(), Code::kPermissionDenied);
  EXPECT_THAT(status.message(), HasSubstr("open to other users"));
}

TEST_F(StarterTest, RefusesALinkAndAFileInTheDirectorysPlace) {
  ASSERT_EQ(mkdir((root_ + "/elsewhere").c_str(), 0700), 0);
  std::filesystem::create_symlink(root_ + "/elsewhere", discovery_.private_directory);
  const Status link = EnsurePrivateDirectory(discovery_.private_directory, geteuid());
  EXPECT_EQ(link.code(), Code::kPermissionDenied);
  EXPECT_THAT(link.message(), HasSubstr("is not a directory"));
  std::ofstream(root_ + "/file") << "x";
  EXPECT_EQ(EnsurePrivateDirectory(root_ + "/file", geteuid()).code(), Code::kPermissionDenied);
}

TEST_F(StarterTest, AFixedSocketIsNeverReplacedByAPrivateDaemon) {
  discovery_.fixed_socket = root_ + "/fixed.sock";
  discovery_.fixed_by = "GRADSYNC_SOCKET";
  WriteDaemon("touch " + root_ + "/started\n");
  const auto found = FindDaemon(discovery_, Soon());
  ASSERT_FALSE(found);
  EXPECT_EQ(found.error().code(), Code::kDaemonLost);
  EXPECT_THAT(found.error().message(), HasSubstr(root_ + "/fixed.sock"));
  EXPECT_THAT(found.error().message(), HasSubstr("GRADSYNC_SOCKET names this socket"));
  EXPECT_FALSE(std::filesystem::exists(root_ + "/started"));
}

TEST_F(StarterTest, FindsTheSystemsDaemonFirst) {
  const auto system = ListenAt(discovery_.system_socket, 0600);
  ASSERT_TRUE(system);
  const auto found = FindDaemon(discovery_, Soon());
  ASSERT_TRUE(found) << found.error().ToString();
  EXPECT_EQ(found->path, discovery_.system_socket);
}

TEST_F(StarterTest, ADaemonThatFailsIsReportedWithTheEndOfItsLog) {
  WriteDaemon("echo 'no such flag' >&2; exit 1\n");
  const auto found = FindDaemon(discovery_, Soon());
  ASSERT_FALSE(found);
  EXPECT_EQ(found.error().code(), Code::kDaemonLost);
  EXPECT_THAT(found.error().message(), HasSubstr(discovery_.daemon_binary));
  EXPECT_THAT(found.error().message(), HasSubstr("no such flag"));
}

TEST_F(StarterTest, ADaemonGetsACleanProcess) {
  discovery_.environment = {"PATH=/usr/bin:/bin", "GRADSYNC_X=1"};
  setenv("LEAKED", "1", 1);
  // ready_fd, its only descriptor besides the standard ones, is closed by the exit: "it failed".
  WriteDaemon("echo \"$@\"; env; ls /proc/$$/fd | tr '\\n' ' '; exit 0\n");
  const auto found = FindDaemon(discovery_, Soon());
  ASSERT_FALSE(found);
  const std::string& log = found.error().message();
  EXPECT_THAT(log, HasSubstr("--detach"));
  EXPECT_THAT(log, HasSubstr("--socket=" + discovery_.private_socket()));
  EXPECT_THAT(log, HasSubstr("GRADSYNC_X=1"));
  EXPECT_THAT(log, ::testing::Not(HasSubstr("LEAKED")));
  EXPECT_THAT(log, HasSubstr("0 1 10 2 3"));  // 10: the shell's own, of the script
}

TEST_F(StarterTest, AStarterThatHangsHoldsUpOthersNoLongerThanTheirDeadline) {
  WriteDaemon("touch " + root_ + "/started\n");
  ASSERT_TRUE(EnsurePrivateDirectory(discovery_.private_directory, geteuid()).ok());
  const std::string socket = discovery_.private_socket();
  const auto lock = SocketLock::TryTake(socket, SocketLock::Right::kStarting);
  ASSERT_TRUE(lock && lock->has_value());
  const auto found =
      FindDaemon(discovery_, std::chrono::steady_clock::now() + std::chrono::milliseconds(20));
  ASSERT_FALSE(found);
  EXPECT_EQ(found.error().code(), Code::kDeadlineExceeded);
  EXPECT_THAT(found.error().message(), HasSubstr(socket + ".lock"));
  EXPECT_FALSE(std::filesystem::exists(root_ + "/started"));
}

TEST_F(StarterTest, ABinaryThatIsNotThereIsAnError) {
  const auto found = FindDaemonBinary(discovery_);
  ASSERT_FALSE(found);
  EXPECT_THAT(found.error().message(), HasSubstr("GRADSYNC_DAEMON='" + root_ + "/gradsyncd'"));
}

TEST_F(StarterTest, FindsTheBinaryInThePath) {
  WriteDaemon("exit 0\n");
  discovery_.daemon_binary.clear();
  discovery_.path = ":relative:/nowhere:" + root_ + ":/usr/bin";
  EXPECT_EQ(FindDaemonBinary(discovery_).value_or(""), root_ + "/gradsyncd");
}

TEST_F(StarterTest, DiscoveryPrefersTheCallersSocketToTheEnvironments) {
  Environment environment;
  environment.socket = "/env.sock";
  EXPECT_EQ(DiscoveryFrom("/option.sock", environment).fixed_socket, "/option.sock");
  EXPECT_EQ(DiscoveryFrom("", environment).fixed_socket, "/env.sock");
  EXPECT_FALSE(DiscoveryFrom("", {}).is_fixed());
}

TEST_F(StarterTest, ThePrivateDirectoryIsInTheRuntimeDirectoryIfThereIsOne) {
  Environment environment;
  environment.runtime_dir = "/run/user/7";
  EXPECT_EQ(DiscoveryFrom("", environment).private_directory, "/run/user/7/gradsync");
  environment.runtime_dir = "relative";
  EXPECT_EQ(DiscoveryFrom("", environment).private_directory,
            "/tmp/gradsync-" + std::to_string(geteuid()));
}

}  // namespace
}  // namespace gradsync
