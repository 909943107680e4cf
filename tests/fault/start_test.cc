// A private daemon, started by whoever needs one: exactly one, however many ask, and however one
// ends.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <csignal>
#include <fstream>
#include <random>
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

class StartTest : public ::testing::Test {
 protected:
  ~StartTest() override { KillPrivateDaemon(discovery_); }

  TemporaryDirectory directory_;
  Discovery discovery_ = PrivateIn(directory_.path());
};

TEST_F(StartTest, RanksThatStartTogetherStartOneDaemonAndMeetThere) {
  constexpr uint32_t kRanks = 8;
  for (int round = 0; round < 20; ++round) {
    const Discovery discovery = PrivateIn(directory_.File(std::to_string(round)));
    ASSERT_EQ(mkdir(directory_.File(std::to_string(round)).c_str(), 0700), 0);
    std::vector<RankProcess> ranks;
    for (uint32_t rank = 0; rank < kRanks; ++rank) {
      ranks.emplace_back([&discovery, rank](const Channel& channel) {
        channel.Hear();
        const auto session = OpenSession(discovery, rank, kRanks);
        if (!session) return channel.Say(session.error());
        const auto group = DaemonGroup::Create(*session, "all", {}, kPatience);
        if (!group) return channel.Say(group.error());
        channel.Say((*group)->Barrier(kPatience));
      });
    }
    for (const RankProcess& rank : ranks) rank.Say("go");
    for (const RankProcess& rank : ranks) EXPECT_EQ(rank.Hear(), "OK");
    EXPECT_EQ(PrivateStarts(discovery), 1);
    KillPrivateDaemon(discovery);
  }
}

TEST_F(StartTest, TheTrainerKeepsNoChild) {
  RankProcess trainer([this](const Channel& channel) {
    const auto session = OpenSession(discovery_, 0, 1);
    if (!session) return channel.Say(session.error());
    const pid_t child = waitpid(-1, nullptr, WNOHANG);
    channel.Say(child < 0 && errno == ECHILD ? "no child" : "a child");
  });
  EXPECT_EQ(trainer.Hear(), "no child");
}

TEST_F(StartTest, ADaemonStartsForATrainerThatIgnoresItsChildrenAndHasNoStandardDescriptors) {
  RankProcess trainer([this](const Channel& channel) {
    std::signal(SIGCHLD, SIG_IGN);
    for (int fd = 0; fd < 3; ++fd) close(fd);
    const auto session = OpenSession(discovery_, 0, 1);
    channel.Say(session ? "open" : session.error().ToString());
  });
  EXPECT_EQ(trainer.Hear(), "open");
}

TEST_F(StartTest, TheDaemonOutlivesTheTrainerThatStartedIt) {
  RankProcess first([this](const Channel& channel) {
    const auto session = OpenSession(discovery_, 0, 1);
    channel.Say(session ? "open" : session.error().ToString());
    pause();
  });
  ASSERT_EQ(first.Hear(), "open");
  first.Kill();
  first.WaitForEnd();
  RankProcess second([this](const Channel& channel) {
    const auto session = OpenSession(discovery_, 0, 1, "second");
    channel.Say(session ? "open" : session.error().ToString());
  });
  EXPECT_EQ(second.Hear(), "open");
  EXPECT_EQ(PrivateStarts(discovery_), 1);
}

TEST_F(StartTest, AStaleSocketOfAKilledDaemonIsReplaced) {
  const auto open = [this](const Channel& channel) {
    const auto session = OpenSession(discovery_, 0, 1);
    channel.Say(session ? "open" : session.error().ToString());
  };
  EXPECT_EQ(RankProcess(open).Hear(), "open");
  KillPrivateDaemon(discovery_);
  ASSERT_EQ(access(discovery_.private_socket().c_str(), F_OK), 0);
  EXPECT_EQ(RankProcess(open).Hear(), "open");
  EXPECT_EQ(PrivateStarts(discovery_), 2);
}

TEST_F(StartTest, AFileInTheSocketsPlaceIsReportedNotRemoved) {
  ASSERT_TRUE(EnsurePrivateDirectory(discovery_.private_directory, geteuid()).ok());
  std::ofstream(discovery_.private_socket()) << "precious";
  RankProcess rank([this](const Channel& channel) {
    const auto session = OpenSession(discovery_, 0, 1);
    channel.Say(session ? "open" : session.error().ToString());
  });
  EXPECT_THAT(rank.Hear(), AllOf(StartsWith("DAEMON_LOST"), HasSubstr("did not start"),
                                 HasSubstr("exists and is not a socket")));
  std::string kept;
  std::ifstream(discovery_.private_socket()) >> kept;
  EXPECT_EQ(kept, "precious");
}

// Newcomers find a daemon that is just ending by idleness, has just ended, or is just starting.
TEST_F(StartTest, NoNewcomerFallsBetweenADaemonThatEndsAndOneThatStarts) {
  constexpr int kProcesses = 4;
  constexpr int kOpenings = 25;
  const Discovery restless = PrivateIn(directory_.path(), "20ms");
  std::vector<RankProcess> processes;
  for (int process = 0; process < kProcesses; ++process) {
    processes.emplace_back([&restless, process](const Channel& channel) {
      std::mt19937 random(static_cast<unsigned>(process));
      for (int i = 0; i < kOpenings; ++i) {
        const auto session =
            OpenSession(restless, 0, 1, "job " + std::to_string(process) + "." + std::to_string(i));
        if (!session) return channel.Say(session.error());
        const auto group = DaemonGroup::Create(*session, "all", {}, kPatience);
        if (!group) return channel.Say(group.error());
        (*session)->Close();
        // Around the daemon's idle time, to meet it in every state.
        std::this_thread::sleep_for(std::chrono::milliseconds(random() % 60));
      }
      channel.Say("all opened");
    });
  }
  for (const RankProcess& process : processes) EXPECT_EQ(process.Hear(), "all opened");
  EXPECT_GT(PrivateStarts(restless), 1) << "the test met no ending daemon";
}

}  // namespace
}  // namespace gradsync::testing
