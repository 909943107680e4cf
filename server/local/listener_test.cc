#include "server/local/listener.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <vector>

#include "shm/frame_socket.h"
#include "shm/protocol.h"
#include "shm/unique_fd.h"
#include "tests/integration/daemon_fixture.h"

namespace gradsync {
namespace {

// How many descriptors this process may have, while it lives.
class DescriptorLimit {
 public:
  explicit DescriptorLimit(rlim_t descriptors) {
    EXPECT_EQ(getrlimit(RLIMIT_NOFILE, &before_), 0);
    const rlimit limit{.rlim_cur = descriptors, .rlim_max = before_.rlim_max};
    EXPECT_EQ(setrlimit(RLIMIT_NOFILE, &limit), 0);
  }
  ~DescriptorLimit() { EXPECT_EQ(setrlimit(RLIMIT_NOFILE, &before_), 0); }
  DescriptorLimit(const DescriptorLimit&) = delete;
  DescriptorLimit& operator=(const DescriptorLimit&) = delete;

 private:
  rlimit before_{};
};

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

TEST(ListenerTest, WithoutADescriptorLeftAConnectionIsRefusedWithAWordWhy) {
  const testing::TemporaryDirectory directory;
  auto listener = *Listener::Open(directory.File("s"), 0600);
  const auto client = ConnectTo(directory.File("s"));
  ASSERT_TRUE(client.has_value());
  std::vector<UniqueFd> all;
  const DescriptorLimit limit(64);
  while (all.emplace_back(fcntl(client->get(), F_DUPFD_CLOEXEC, 0)).valid()) {
  }
  for (int i = 0; i < 3; ++i) EXPECT_EQ(listener.Accept().error().code(), Code::kDeadlineExceeded);
  all.clear();
  const auto frame = ReceiveFrame(client->get(), {});
  ASSERT_TRUE(frame.has_value());
  const auto reply = ReadMessage<ErrorReply>(frame->bytes);
  ASSERT_TRUE(reply.has_value());
  EXPECT_EQ(reply->code, static_cast<int>(Code::kOutOfMemory));
}

// As when the system has no memory: whoever connects can be neither accepted nor refused.
TEST(ListenerTest, AConnectionThatCannotBeTakenAtAllIsAnErrorAndIsKept) {
  const testing::TemporaryDirectory directory;
  auto listener = *Listener::Open(directory.File("s"), 0600);
  const auto client = ConnectTo(directory.File("s"));
  ASSERT_TRUE(client.has_value());
  {
    const DescriptorLimit none(0);
    EXPECT_EQ(listener.Accept().error().code(), Code::kOutOfMemory);
  }
  EXPECT_TRUE(listener.Accept().has_value());
}

}  // namespace
}  // namespace gradsync
