// What ranks that contradict each other are told, and what one is told that may not or cannot.
#include <gmock/gmock.h>
#include <grp.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <chrono>
#include <functional>
#include <string>
#include <vector>

#include "tests/fault/rank_process.h"
#include "tests/integration/daemon_fixture.h"
#include "tests/integration/raw_client.h"

namespace gradsync::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::StartsWith;

constexpr Timeout kShort{300};
constexpr uid_t kNobody = 65534;

class RefusalTest : public ::testing::Test {
 protected:
  RefusalTest() : daemon_({"--socket=" + socket(), "--socket-mode=0666"}) {
    EXPECT_TRUE(daemon_.WaitUntilReady());
  }
  std::string socket() const { return directory_.File("s"); }

  // A rank that opens a session and says how that went, then forms the group when told to go, and
  // runs `body`.
  RankProcess Start(uint32_t rank, uint32_t world_size,
                    std::function<void(const Channel&, DaemonGroup&)> body) const {
    return RankProcess([=, this](const Channel& channel) {
      const auto session = OpenSession(At(socket()), rank, world_size);
      channel.Say(session ? "open" : session.error().ToString());
      if (!session || channel.Hear() != "go") return;
      const auto group = DaemonGroup::Create(*session, "all", {}, kPatience);
      if (!group) return channel.Say(group.error());
      body(channel, **group);
    });
  }

  TemporaryDirectory directory_;
  DaemonProcess daemon_;
};

void SayBarrier(const Channel& channel, DaemonGroup& group) {
  channel.Say(group.Barrier(kPatience));
}

TEST_F(RefusalTest, TheSecondProcessThatClaimsARankIsRefusedAndTheFirstGoesOn) {
  const RankProcess first = Start(0, 2, SayBarrier);
  ASSERT_EQ(first.Hear(), "open");
  const RankProcess second = Start(0, 2, SayBarrier);
  EXPECT_THAT(second.Hear(), AllOf(StartsWith("ALREADY_EXISTS"), HasSubstr("rank 0")));
  const RankProcess other = Start(1, 2, SayBarrier);
  ASSERT_EQ(other.Hear(), "open");
  first.Say("go");
  other.Say("go");
  EXPECT_EQ(first.Hear(), "OK");
  EXPECT_EQ(other.Hear(), "OK");
}

TEST_F(RefusalTest, WorldSizesThatDifferAreToldToBoth) {
  const RankProcess first = Start(0, 2, SayBarrier);
  ASSERT_EQ(first.Hear(), "open");
  const RankProcess second = Start(1, 3, SayBarrier);
  EXPECT_THAT(second.Hear(), AllOf(StartsWith("MISMATCH"), HasSubstr("2"), HasSubstr("3")));
  first.Say("go");
  EXPECT_THAT(first.Hear(), AllOf(StartsWith("MISMATCH"), HasSubstr("2"), HasSubstr("3")));
}

TEST_F(RefusalTest, OperationsThatDifferNameTheRanksAndTheField) {
  const auto body = [](const Channel& channel, DaemonGroup& group) {
    const DType dtype = group.rank() == 0 ? DType::kFloat32 : DType::kInt32;
    int32_t value = 0;
    channel.Say(group.AllReduce(&value, 1, dtype, ReduceOp::kSum, kPatience));
  };
  const RankProcess first = Start(0, 2, body);
  const RankProcess second = Start(1, 2, body);
  for (const RankProcess* rank : {&first, &second}) {
    EXPECT_EQ(rank->Hear(), "open");
    rank->Say("go");
  }
  for (const RankProcess* rank : {&first, &second}) {
    EXPECT_THAT(rank->Hear(), AllOf(StartsWith("MISMATCH"), HasSubstr("rank 0"),
                                    HasSubstr("rank 1"), HasSubstr("float32"), HasSubstr("int32")));
  }
}

TEST_F(RefusalTest, ARankThatNeverArrivesIsNamedAtTheDeadline) {
  const RankProcess rank([this](const Channel& channel) {
    const auto session = OpenSession(At(socket()), 0, 3);
    if (!session) return channel.Say(session.error());
    const auto group = DaemonGroup::Create(*session, "all", {}, kShort);
    channel.Say(group ? OkStatus() : group.error());
  });
  EXPECT_THAT(rank.Hear(), AllOf(StartsWith("DEADLINE_EXCEEDED"), HasSubstr("1"), HasSubstr("2")));
}

TEST_F(RefusalTest, ASystemDaemonThatThisUserMayNotUseIsNotQuietlyReplaced) {
  if (geteuid() != 0) GTEST_SKIP() << "needs root, to become another user";
  ASSERT_EQ(chmod(directory_.path().c_str(), 0755), 0);
  ASSERT_EQ(chmod(socket().c_str(), 0660), 0);
  const RankProcess rank([this](const Channel& channel) {
    if (setgroups(0, nullptr) != 0 || setgid(kNobody) != 0 || setuid(kNobody) != 0) {
      return channel.Say("cannot become another user");
    }
    Discovery discovery = PrivateIn("/nonexistent");
    discovery.system_socket = socket();
    const auto session = OpenSession(discovery, 0, 1);
    channel.Say(session ? "open" : session.error().ToString());
    const auto fixed = OpenSession(At(socket()), 0, 1);
    channel.Say(fixed ? "open" : fixed.error().ToString());
  });
  EXPECT_THAT(rank.Hear(), AllOf(StartsWith("PERMISSION_DENIED"), HasSubstr(socket()),
                                 HasSubstr("ask to be made a member of the socket's group")));
  EXPECT_THAT(rank.Hear(), AllOf(StartsWith("PERMISSION_DENIED"), HasSubstr(socket())));
}

// Address space stands for memory: a limit that every machine has.
TEST_F(RefusalTest, ARankWithoutMemoryForASegmentIsToldAndGoesOn) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "sanitizers need all of the address space";
#endif
  const RankProcess rank([this](const Channel& channel) {
    const auto session = OpenSession(At(socket()), 0, 1);
    if (!session) return channel.Say(session.error());
    const rlimit limit{256 << 20, 256 << 20};
    setrlimit(RLIMIT_AS, &limit);
    const auto large = (*session)->Allocate(512 << 20, "gradients");
    channel.Say(large ? "allocated" : large.error().ToString());
    const auto small = (*session)->Allocate(1 << 20, "small");
    channel.Say(small ? "allocated" : small.error().ToString());
  });
  EXPECT_THAT(rank.Hear(), AllOf(StartsWith("OUT_OF_MEMORY"), HasSubstr("buffer 'gradients'"),
                                 HasSubstr("536870912 bytes")));
  EXPECT_EQ(rank.Hear(), "allocated");
}

}  // namespace
}  // namespace gradsync::testing
