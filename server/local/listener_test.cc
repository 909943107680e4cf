#include "server/local/listener.h"

#include <gtest/gtest.h>
#include <sys/resource.h>

#include "shm/frame_socket.h"
#include "tests/integration/daemon_fixture.h"

namespace gradsync {
namespace {

TEST(ListenerTest, AcceptsWhoConnectsAndDoesNotWaitForMore) {
  const testing::TemporaryDirectory directory;
  auto listener = *Listener::Open(directory.File("s"), 0600);
  EXPECT_EQ(listener.Accept().error().code(), Code::kDeadlineExceeded);
  const auto client = ConnectTo(directory.File("s"));
  ASSERT_TRUE(client.has_value());
  EXPECT_TRUE(listener.Accept().has_value());
  EXPECT_EQ(listener.Accept().error().code(), Code::kDeadlineExceeded);
}

TEST(ListenerTest, TheSocketIsServedByOneAtATime) {
  const testing::TemporaryDirectory directory;
  auto first = *Listener::Open(directory.File("s"), 0600);
  EXPECT_EQ(Listener::Open(directory.File("s"), 0600).error().code(), Code::kAlreadyExists);
  first.Close();
  EXPECT_TRUE(Listener::Open(directory.File("s"), 0600).has_value());
}

// As when the system has no memory: whoever connects can be neither accepted nor refused.
TEST(ListenerTest, AConnectionThatCannotBeTakenAtAllIsAnErrorAndIsKept) {
  const testing::TemporaryDirectory directory;
  auto listener = *Listener::Open(directory.File("s"), 0600);
  const auto client = ConnectTo(directory.File("s"));
  ASSERT_TRUE(client.has_value());
  rlimit limit{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &limit), 0);
  const rlimit none{.rlim_cur = 0, .rlim_max = limit.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &none), 0);
  const Code code = listener.Accept().error().code();
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &limit), 0);
  EXPECT_EQ(code, Code::kOutOfMemory);
  EXPECT_TRUE(listener.Accept().has_value());
}

}  // namespace
}  // namespace gradsync
