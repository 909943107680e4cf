// A rank or the daemon is lost in mid-iteration: the survivors are told who, within a second.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
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
using Clock = std::chrono::steady_clock;

// What is promised to users, not a measurement: see the design's "never a silent hang".
constexpr std::chrono::seconds kPromise{1};

class LossTest : public ::testing::Test {
 protected:
  LossTest() : daemon_({"--socket=" + socket(), "--threads=2"}) {
    EXPECT_TRUE(daemon_.WaitUntilReady());
  }
  std::string socket() const { return directory_.File("s"); }

  // Ranks of one job in one group. Each says "ready" when the group is formed, and then runs
  // `body`.
  std::vector<RankProcess> Start(uint32_t world_size,
                                 std::function<void(const Channel&, DaemonGroup&)> body) const {
    std::vector<RankProcess> ranks;
    for (uint32_t rank = 0; rank < world_size; ++rank) {
      ranks.emplace_back([this, rank, world_size, &body](const Channel& channel) {
        const auto session = OpenSession(At(socket()), rank, world_size);
        if (!session) return channel.Say(session.error());
        const auto group = DaemonGroup::Create(*session, "all", {}, kPatience);
        if (!group) return channel.Say(group.error());
        channel.Say("ready");
        body(channel, **group);
      });
    }
    for (const RankProcess& rank : ranks) EXPECT_EQ(rank.Hear(), "ready");
    return ranks;
  }

  TemporaryDirectory directory_;
  DaemonProcess daemon_;
};

// Collectives until one fails.
Status Iterate(DaemonGroup& group, uint64_t count) {
  std::vector<float> data(count, 1.0F);
  for (;;) {
    GRADSYNC_RETURN_IF_ERROR(
        group.AllReduce(data.data(), count, DType::kFloat32, ReduceOp::kAvg, kPatience));
  }
}

TEST_F(LossTest, ARankThatIsKilledIsNamedToEveryOtherWithinASecond) {
  const auto ranks = Start(
      4, [](const Channel& channel, DaemonGroup& group) { channel.Say(Iterate(group, 1 << 20)); });
  const auto killed_at = Clock::now();
  ranks[2].Kill();
  for (const uint32_t survivor : {0U, 1U, 3U}) {
    EXPECT_THAT(ranks[survivor].Hear(), AllOf(StartsWith("RANK_LOST"), HasSubstr("rank 2")));
  }
  EXPECT_LT(Clock::now() - killed_at, kPromise);
}

TEST_F(LossTest, ARankThatIsKilledWhileOthersWaitForItIsNamed) {
  const auto ranks = Start(2, [](const Channel& channel, DaemonGroup& group) {
    if (group.rank() == 1) pause();
    channel.Say(group.Barrier(kPatience));
  });
  const auto killed_at = Clock::now();
  ranks[1].Kill();
  EXPECT_THAT(ranks[0].Hear(), AllOf(StartsWith("RANK_LOST"), HasSubstr("rank 1")));
  EXPECT_LT(Clock::now() - killed_at, kPromise);
}

TEST_F(LossTest, EveryRankLearnsWithinASecondThatTheDaemonWasKilled) {
  const auto ranks = Start(3, [](const Channel& channel, DaemonGroup& group) {
    if (group.rank() == 2) channel.Say(group.Wait(group.ReserveSequences(1), kPatience));
    channel.Say(Iterate(group, 1 << 20));
  });
  const auto killed_at = Clock::now();
  daemon_.Signal(SIGKILL);
  for (const RankProcess& rank : ranks) {
    EXPECT_THAT(rank.Hear(),
                AllOf(StartsWith("DAEMON_LOST"), HasSubstr("lost gradsyncd at '" + socket())));
  }
  EXPECT_LT(Clock::now() - killed_at, kPromise);
}

TEST_F(LossTest, RanksThatWaitForAGroupLearnThatTheDaemonWasKilled) {
  RankProcess rank([this](const Channel& channel) {
    const auto session = OpenSession(At(socket()), 0, 2);
    if (!session) return channel.Say(session.error());
    channel.Say("ready");
    const auto group = DaemonGroup::Create(*session, "all", {}, kPatience);
    channel.Say(group ? OkStatus() : group.error());
  });
  ASSERT_EQ(rank.Hear(), "ready");
  daemon_.Signal(SIGKILL);
  EXPECT_THAT(rank.Hear(), StartsWith("DAEMON_LOST"));
}

// A stopped daemon is as bad as none, but only a deadline can tell.
TEST_F(LossTest, ADaemonThatDoesNotAnswerIsGivenUp) {
  const auto ranks = Start(1, [](const Channel& channel, DaemonGroup& group) {
    EXPECT_EQ(channel.Hear(), "go");
    channel.Say(group.Barrier(std::chrono::milliseconds(10)));
    channel.Say(group.Barrier(kPatience));
  });
  daemon_.Signal(SIGSTOP);
  ranks[0].Say("go");
  EXPECT_THAT(ranks[0].Hear(), AllOf(StartsWith("DAEMON_LOST"), HasSubstr("did not answer")));
  EXPECT_THAT(ranks[0].Hear(), StartsWith("DAEMON_LOST"));  // at once
  daemon_.Signal(SIGCONT);
}

TEST_F(LossTest, AKilledRankDisturbsNoOtherJob) {
  const auto ranks = Start(2, [](const Channel& channel, DaemonGroup& group) {
    std::vector<float> data(1 << 16, 1.0F);
    while (true) {
      const std::string order = channel.Hear();
      if (order != "reduce") return;
      channel.Say(
          group.AllReduce(data.data(), data.size(), DType::kFloat32, ReduceOp::kAvg, kPatience));
    }
  });
  RankProcess other([this](const Channel& channel) {
    const auto session = OpenSession(At(socket()), 0, 1, "other");
    channel.Say(session ? "ready" : session.error().ToString());
    pause();
  });
  ASSERT_EQ(other.Hear(), "ready");
  other.Kill();
  for (int i = 0; i < 3; ++i) {
    for (const RankProcess& rank : ranks) rank.Say("reduce");
    for (const RankProcess& rank : ranks) EXPECT_EQ(rank.Hear(), "OK");
  }
}

}  // namespace
}  // namespace gradsync::testing
