#include "shm/socket_lock.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <string>

namespace gradsync {
namespace {

using Right = SocketLock::Right;

class SocketLockTest : public ::testing::Test {
 protected:
  SocketLockTest() {
    std::string directory = ::testing::TempDir() + "/socket_lock_XXXXXX";
    directory_ = mkdtemp(directory.data());
  }
  ~SocketLockTest() override { std::filesystem::remove_all(directory_); }

  std::string socket() const { return directory_ + "/s"; }
  bool IsFree(Right right) const { return SocketLock::TryTake(socket(), right)->has_value(); }

 private:
  std::string directory_;
};

TEST_F(SocketLockTest, IsPrivateAndHeldByOneAtATime) {
  auto lock = *SocketLock::TryTake(socket(), Right::kStarting);
  ASSERT_TRUE(lock.has_value());
  struct stat info {};
  ASSERT_EQ(stat((socket() + ".lock").c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0600);
  EXPECT_FALSE(IsFree(Right::kStarting));
  lock.reset();
  EXPECT_TRUE(IsFree(Right::kStarting));
}

TEST_F(SocketLockTest, TheRightsAreIndependent) {
  const auto serving = *SocketLock::TryTake(socket(), Right::kServing);
  ASSERT_TRUE(serving.has_value());
  EXPECT_FALSE(IsFree(Right::kServing));
  EXPECT_TRUE(IsFree(Right::kStarting));
  EXPECT_FALSE(IsFree(Right::kServing));
}

TEST_F(SocketLockTest, AChildThatWasForkedDoesNotKeepWhatWasReleased) {
  auto lock = *SocketLock::TryTake(socket(), Right::kStarting);
  ASSERT_TRUE(lock.has_value());
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    pause();
    _exit(0);
  }
  lock.reset();
  EXPECT_TRUE(IsFree(Right::kStarting));
  kill(child, SIGKILL);
  waitpid(child, nullptr, 0);
}

TEST_F(SocketLockTest, EndsWithItsProcess) {
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    const auto lock = SocketLock::TryTake(socket(), Right::kServing);
    _exit(lock && lock->has_value() ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  EXPECT_TRUE(IsFree(Right::kServing));
}

TEST_F(SocketLockTest, AFileThatCannotBeOpenedIsAnError) {
  EXPECT_EQ(SocketLock::TryTake("/nonexistent/s", Right::kStarting).error().code(),
            Code::kPermissionDenied);
}

}  // namespace
}  // namespace gradsync
