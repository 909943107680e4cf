// The real gradsyncctl, asking the real gradsyncd about trainers that are connected to it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <string>
#include <string_view>

#include "server/ctl/run_gradsyncctl.h"
#include "server/inspect/socket_path.h"
#include "shm/protocol.h"
#include "tests/integration/daemon_fixture.h"
#include "tests/integration/raw_client.h"

namespace gradsync::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr uint64_t kCount = 1 << 20;

class GradsyncctlDaemonTest : public ::testing::Test {
 protected:
  GradsyncctlDaemonTest() : daemon_({"--socket=" + socket()}) {}
  void SetUp() override { ASSERT_TRUE(daemon_.WaitUntilReady()) << daemon_.Output(); }

  std::string socket() const { return directory_.File("s"); }

  Outcome Ask(const std::string& arguments) const {
    return RunGradsyncctl(arguments + " --socket " + socket());
  }

  // Asks until the answer has `text` in it: what trainers do arrives when the daemon gets to it.
  Outcome AskUntil(const std::string& arguments, std::string_view text) const {
    const Deadline deadline = SoonEnough();
    Outcome outcome;
    do {
      outcome = Ask(arguments);
    } while (outcome.output.find(text) == std::string::npos &&
             std::chrono::steady_clock::now() < deadline);
    return outcome;
  }

  TemporaryDirectory directory_;
  DaemonProcess daemon_;
};

DescribeBucket MakeDescription(uint32_t group) {
  auto description = MakeMessage<DescribeBucket>();
  description.group = group;
  description.bucket_count = 1;
  description.parameter_count = 3;
  description.count = kCount;
  description.dtype = static_cast<uint8_t>(DType::kFloat32);
  description.parameters.Set("first.weight ... last.bias");
  return description;
}

Submission MakeBucketReduce(uint32_t group, const RawSegment& segment) {
  Submission submission = MakeAllReduce(group, 0, kCount, segment);
  submission.kind = static_cast<uint8_t>(OpKind::kBucketReduce);
  return submission;
}

TEST_F(GradsyncctlDaemonTest, ABucketsWayCanBeFollowed) {
  auto job = RawJob::Start(socket(), "follow", 2, kCount * sizeof(float));
  ASSERT_TRUE(job) << job.error().ToString();
  for (size_t rank : {0, 1}) {
    ASSERT_TRUE(job->ranks[rank].Ask(MakeDescription(job->groups[rank])).ok());
  }
  EXPECT_THAT(Ask("job follow").output,
              AllOf(HasSubstr("active, 2 of 2 ranks connected"), HasSubstr("no operation yet"),
                    HasSubstr("4.0 MiB  float32  idle"), HasSubstr("first.weight ... last.bias")));

  ASSERT_TRUE(job->ranks[0].Push(MakeBucketReduce(job->groups[0], job->segments[0])));
  const Outcome waiting = AskUntil("job follow", " waits for rank 1 ");
  EXPECT_EQ(waiting.exit_code, 0);
  EXPECT_THAT(waiting.output, HasSubstr(" waits for rank 1 "));
  EXPECT_THAT(Ask("jobs").output, AllOf(HasSubstr("\nfollow "), HasSubstr(" for rank 1: ")));

  ASSERT_TRUE(job->ranks[1].Push(MakeBucketReduce(job->groups[1], job->segments[1])));
  for (size_t rank : {0, 1}) ASSERT_TRUE(job->ranks[rank].Wait(job->groups[rank], 0).ok());
  EXPECT_THAT(Ask("job follow").output,
              AllOf(HasSubstr("1 operations, 4.0 MiB per rank"), HasSubstr("  idle "),
                    ::testing::ContainsRegex("  idle +1 +1 +[0-9.]+ +[0-9.]+ +[0-9.]+ +[0-9.]+ ")));
}

TEST_F(GradsyncctlDaemonTest, AJobEndsWithItsLastRank) {
  EXPECT_THAT(Ask("jobs").output, HasSubstr("No jobs"));
  {
    auto lone = RawClient::Join(socket(), "lone", 1, 2);
    ASSERT_TRUE(lone) << lone.error().ToString();
    EXPECT_THAT(Ask("jobs").output, AllOf(HasSubstr("\nlone "), HasSubstr(" joining ")));
  }
  EXPECT_THAT(AskUntil("jobs", "No jobs").output, HasSubstr("No jobs"));
  const Outcome gone = Ask("job lone");
  EXPECT_EQ(gone.exit_code, 1);
  EXPECT_THAT(gone.output, HasSubstr("no job 'lone'"));
}

TEST_F(GradsyncctlDaemonTest, ADaemonThatEndedLeavesNoInspectionSocket) {
  ASSERT_EQ(access(DefaultInspectSocket(socket()).c_str(), F_OK), 0);
  daemon_.Signal(SIGTERM);
  EXPECT_EQ(daemon_.WaitForEnd(), 0) << daemon_.Output();
  EXPECT_NE(access(DefaultInspectSocket(socket()).c_str(), F_OK), 0);
  EXPECT_EQ(Ask("jobs").exit_code, 3);
}

TEST_F(GradsyncctlDaemonTest, AStoppedDaemonIsReportedAndNotWaitedForForEver) {
  daemon_.Signal(SIGSTOP);
  const Outcome outcome = Ask("jobs");
  daemon_.Signal(SIGCONT);
  EXPECT_EQ(outcome.exit_code, 1);
  EXPECT_THAT(outcome.output, HasSubstr("listens but did not answer"));
}

TEST_F(GradsyncctlDaemonTest, AnotherUserMayNotLook) {
  if (geteuid() != 0) GTEST_SKIP() << "only root can become another user";
  const Outcome outcome =
      RunGradsyncctl("jobs --socket " + socket(), "setpriv --reuid 65534 --clear-groups");
  EXPECT_EQ(outcome.exit_code, 3);
  EXPECT_THAT(outcome.output, HasSubstr("only the daemon's own user and root"));
}

TEST(GradsyncctlOtherSocketTest, TheInspectionSocketMayBeElsewhereOrNowhere) {
  const TemporaryDirectory directory;
  {
    DaemonProcess daemon(
        {"--socket=" + directory.File("s"), "--inspect-socket=" + directory.File("elsewhere")});
    ASSERT_TRUE(daemon.WaitUntilReady()) << daemon.Output();
    EXPECT_EQ(RunGradsyncctl("jobs --inspect-socket " + directory.File("elsewhere")).exit_code, 0);
    EXPECT_EQ(RunGradsyncctl("jobs --socket " + directory.File("s")).exit_code, 3);
  }
  DaemonProcess daemon({"--socket=" + directory.File("t"), "--inspect-socket="});
  ASSERT_TRUE(daemon.WaitUntilReady()) << daemon.Output();
  EXPECT_EQ(RunGradsyncctl("jobs --socket " + directory.File("t")).exit_code, 3);
}

TEST(GradsyncctlOtherSocketTest, TrainersAreServedThoughTheDefaultInspectionSocketCannotBe) {
  const TemporaryDirectory directory;
  const std::string socket = directory.File("s");
  ASSERT_EQ(mkdir(DefaultInspectSocket(socket).c_str(), 0700), 0);
  DaemonProcess daemon({"--socket=" + socket});
  ASSERT_TRUE(daemon.WaitUntilReady()) << daemon.Output();
  EXPECT_THAT(daemon.Output(), HasSubstr("event=inspect_off"));
  EXPECT_TRUE(RawClient::Join(socket, "job", 0, 1).has_value());

  DaemonProcess asked(
      {"--socket=" + directory.File("t"), "--inspect-socket=" + DefaultInspectSocket(socket)});
  EXPECT_FALSE(asked.WaitUntilReady());
  EXPECT_EQ(asked.WaitForEnd(), 1);
}

}  // namespace
}  // namespace gradsync::testing
