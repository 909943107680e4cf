// Trainers that fork data-loader workers while their sessions are open.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdlib>
#include <string>
#include <thread>
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

class ForkTest : public ::testing::Test {
 protected:
  ForkTest() : daemon_({"--socket=" + socket()}) { EXPECT_TRUE(daemon_.WaitUntilReady()); }
  std::string socket() const { return directory_.File("s"); }

  TemporaryDirectory directory_;
  DaemonProcess daemon_;
};

Status Sum(DaemonGroup& group) {
  float value = 1;
  GRADSYNC_RETURN_IF_ERROR(group.AllReduce(&value, 1, DType::kFloat32, ReduceOp::kSum, kPatience));
  return value == static_cast<float>(group.size()) ? OkStatus()
                                                   : Status(Code::kInternal, "a wrong sum");
}

// All that a child could do with what it inherited.
std::string UseEverything(Session& session, DaemonGroup& group, SharedBuffer& buffer) {
  const std::vector<Status> answers = {
      Sum(group),
      group.Barrier(kPatience),
      group.Wait(0, kPatience),
      group.DescribeBucket({}),
      group.SubmitBucket(0, {0, 1, 1, 4, DType::kFloat32, "w"}, buffer, 0, ReduceOp::kSum,
                         kPatience, nullptr),
      session.Allocate(4096, "child").error(),
      session.connection().CheckAlive(),
  };
  group.Abort({Code::kInternal, "a child"});
  session.Close();
  for (const Status& answer : answers) {
    if (answer.code() != Code::kFailedPrecondition) return answer.ToString();
    if (answer.message().find("forked child") == std::string::npos) return answer.ToString();
  }
  return "refused";
}

TEST_F(ForkTest, AChildIsRefusedAndDisturbsNothingAsItEnds) {
  RankProcess trainer([this](const Channel& channel) {
    auto session = OpenSession(At(socket()), 0, 1);
    if (!session) return channel.Say(session.error());
    auto group = DaemonGroup::Create(*session, "all", {}, kPatience);
    if (!group) return channel.Say(group.error());
    auto buffer = (*session)->Allocate(4096, "shared");
    if (!buffer) return channel.Say(buffer.error());
    channel.Say(Sum(**group));
    const pid_t child = fork();
    if (child == 0) {
      channel.Say(UseEverything(**session, **group, **buffer));
      // Everything is destroyed as in a child that leaves by way of exit handlers.
      buffer->reset();
      group->reset();
      session->reset();
      _exit(7);
    }
    int status = 0;
    waitpid(child, &status, 0);
    channel.Say(WIFEXITED(status) && WEXITSTATUS(status) == 7 ? "child ended" : "child crashed");
    channel.Say(Sum(**group));
    channel.Say((*session)->Allocate(4096, "after") ? "allocated" : "not allocated");
  });
  EXPECT_EQ(trainer.Hear(), "OK");
  EXPECT_EQ(trainer.Hear(), "refused");
  EXPECT_EQ(trainer.Hear(), "child ended");
  EXPECT_EQ(trainer.Hear(), "OK");
  EXPECT_EQ(trainer.Hear(), "allocated");
}

// At the fork another thread of the trainer may hold any lock of the session.
TEST_F(ForkTest, AChildForkedInTheMidstOfCollectivesDoesNotHang) {
  RankProcess trainer([this](const Channel& channel) {
    const auto session = OpenSession(At(socket()), 0, 1);
    if (!session) return channel.Say(session.error());
    const auto group = DaemonGroup::Create(*session, "all", {}, kPatience);
    if (!group) return channel.Say(group.error());
    const auto buffer = (*session)->Allocate(4096, "shared");
    if (!buffer) return channel.Say(buffer.error());
    std::jthread worker([&](const std::stop_token& stop) {
      while (!stop.stop_requested()) {
        if (const Status status = Sum(**group); !status.ok()) channel.Say(status);
        static_cast<void>((*session)->Allocate(4096, "busy"));
      }
    });
    int good = 0;
    for (int i = 0; i < 50; ++i) {
      const pid_t child = fork();
      if (child == 0) _exit(UseEverything(**session, **group, **buffer) == "refused" ? 7 : 1);
      int status = 0;
      waitpid(child, &status, 0);
      if (WIFEXITED(status) && WEXITSTATUS(status) == 7) ++good;
    }
    channel.Say(std::to_string(good));
  });
  EXPECT_EQ(trainer.Hear(), "50");
}

TEST_F(ForkTest, WorkersThatOutliveAKilledTrainerDoNotHideItsDeath) {
  // Orphaned workers come to this process, which ends them.
  ASSERT_EQ(prctl(PR_SET_CHILD_SUBREAPER, 1), 0);
  RankProcess survivor([this](const Channel& channel) {
    const auto session = OpenSession(At(socket()), 0, 2);
    const auto group = DaemonGroup::Create(*session, "all", {}, kPatience);
    channel.Say(Sum(**group));
    channel.Say(Sum(**group));
  });
  RankProcess trainer([this](const Channel& channel) {
    const auto session = OpenSession(At(socket()), 1, 2);
    const auto group = DaemonGroup::Create(*session, "all", {}, kPatience);
    channel.Say(Sum(**group));
    const pid_t worker = fork();
    if (worker == 0) {
      for (;;) pause();
    }
    channel.Say(std::to_string(worker));
    pause();
  });
  EXPECT_EQ(survivor.Hear(), "OK");
  EXPECT_EQ(trainer.Hear(), "OK");
  const pid_t worker = static_cast<pid_t>(std::stoi(trainer.Hear()));
  const auto killed_at = Clock::now();
  trainer.Kill();
  EXPECT_THAT(survivor.Hear(), AllOf(StartsWith("RANK_LOST"), HasSubstr("rank 1")));
  EXPECT_LT(Clock::now() - killed_at, std::chrono::seconds(1));
  EXPECT_EQ(kill(worker, 0), 0) << "the worker is to outlive the trainer";
  kill(worker, SIGKILL);
  trainer.WaitForEnd();
  waitpid(worker, nullptr, 0);
  ASSERT_EQ(prctl(PR_SET_CHILD_SUBREAPER, 0), 0);
}

TEST_F(ForkTest, AChildMayOpenASessionOfItsOwn) {
  RankProcess parent([this](const Channel& channel) {
    const auto session = OpenSession(At(socket()), 0, 1, "parent");
    const pid_t child = fork();
    if (child == 0) {
      const auto own = OpenSession(At(socket()), 0, 1, "child");
      const auto group = DaemonGroup::Create(*own, "all", {}, kPatience);
      channel.Say(Sum(**group));
      _exit(0);
    }
    waitpid(child, nullptr, 0);
    const auto group = DaemonGroup::Create(*session, "all", {}, kPatience);
    channel.Say(Sum(**group));
  });
  EXPECT_EQ(parent.Hear(), "OK");
  EXPECT_EQ(parent.Hear(), "OK");
}

}  // namespace
}  // namespace gradsync::testing
