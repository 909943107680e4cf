#include "server/local/idle.h"

#include <gtest/gtest.h>
#include <sys/file.h>
#include <sys/stat.h>

#include "tests/integration/daemon_fixture.h"

namespace gradsync {
namespace {

TEST(StartLockTest, IsPrivateAndHeldByOneAtATime) {
  const testing::TemporaryDirectory directory;
  const std::string socket = directory.File("s");
  auto first = TryStartLock(socket);
  ASSERT_TRUE(first.has_value());
  ASSERT_TRUE(first->has_value());
  struct stat info {};
  ASSERT_EQ(stat(StartLockPath(socket).c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0600);

  auto second = TryStartLock(socket);
  ASSERT_TRUE(second.has_value());
  EXPECT_FALSE(second->has_value());
  first->reset();
  second = TryStartLock(socket);
  EXPECT_TRUE(second.has_value() && second->has_value());
}

TEST(StartLockTest, AFileThatCannotBeOpenedIsAnError) {
  EXPECT_EQ(OpenStartLock("/nonexistent/s").error().code(), Code::kPermissionDenied);
}

}  // namespace
}  // namespace gradsync
