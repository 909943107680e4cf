// The real gradsyncctl doctor, on this machine without a GPU, with and without the real gradsyncd.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <string>

#include "server/ctl/run_gradsyncctl.h"
#include "shm/protocol.h"
#include "tests/integration/daemon_fixture.h"
#include "tests/integration/raw_client.h"

namespace gradsync::testing {
namespace {

using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::Not;

class GradsyncctlDoctorTest : public ::testing::Test {
 protected:
  // As on a machine whose driver, if any, has no GPU for this process.
  Outcome Ask(const std::string& arguments, const std::string& settings = "") const {
    return RunGradsyncctl(
        "doctor " + arguments,
        "-u LD_LIBRARY_PATH CUDA_VISIBLE_DEVICES= XDG_RUNTIME_DIR=" + directory_.path() +
            " GRADSYNC_DAEMON=" GRADSYNC_DAEMON_BINARY " " + settings);
  }
  std::string socket() const { return directory_.File("s"); }

  TemporaryDirectory directory_;
};

TEST_F(GradsyncctlDoctorTest, ADaemonThatRunsIsFine) {
  DaemonProcess daemon({"--socket=" + socket()});
  ASSERT_TRUE(daemon.WaitUntilReady()) << daemon.Output();
  const Outcome outcome = Ask("--socket " + socket());
  EXPECT_EQ(outcome.exit_code, 0) << outcome.output;
  EXPECT_THAT(
      outcome.output,
      AllOf(ContainsRegex("(ok|note) +kernel +Linux [0-9]"), ContainsRegex("ok +shared memory "),
            ContainsRegex("ok +futex "), ContainsRegex("(ok|note) +cores +[0-9]+ of [0-9]+ "),
            ContainsRegex("(ok|note) +memory +[0-9.]+ .iB available"),
            ContainsRegex("ok +daemon +" + socket()),
            HasSubstr("uid " + std::to_string(geteuid()) + ", pid " + std::to_string(daemon.pid()) +
                      ", answers with protocol " + std::to_string(kProtocolVersion) + "\n")));
  EXPECT_THAT(outcome.output, AllOf(ContainsRegex("note +GPU "), Not(HasSubstr("NCCL"))));
  // It still serves, and no job has come of it.
  EXPECT_THAT(RunGradsyncctl("jobs --socket " + socket()).output, HasSubstr("No jobs"));
  EXPECT_TRUE(RawClient::Join(socket(), "job", 0, 1).has_value());
}

TEST_F(GradsyncctlDoctorTest, ADaemonThatIsMissingWhereOneIsNamedIsAProblem) {
  const Outcome outcome = Ask("--socket " + socket());
  EXPECT_EQ(outcome.exit_code, 1);
  EXPECT_THAT(outcome.output, AllOf(ContainsRegex("problem +daemon +none runs at "),
                                    HasSubstr("--socket names this socket")));
  EXPECT_THAT(Ask("", "GRADSYNC_SOCKET=" + socket()).output,
              HasSubstr("GRADSYNC_SOCKET names this socket"));
}

TEST_F(GradsyncctlDoctorTest, APrivateDaemonNeedNotRunYet) {
  if (access(kSystemSocket, F_OK) == 0) GTEST_SKIP() << "this machine has a daemon of its own";
  const Outcome outcome = Ask("");
  EXPECT_EQ(outcome.exit_code, 0) << outcome.output;
  EXPECT_THAT(outcome.output,
              AllOf(ContainsRegex("ok +daemon +none runs at "),
                    HasSubstr("the first trainer starts " GRADSYNC_DAEMON_BINARY "\n"),
                    HasSubstr(directory_.File("gradsync") + " (not there yet)")));
  EXPECT_NE(access(directory_.File("gradsync").c_str(), F_OK), 0) << "doctor has made it";
}

TEST_F(GradsyncctlDoctorTest, APrivateDirectoryThatOthersCanReachIsAProblem) {
  if (access(kSystemSocket, F_OK) == 0) GTEST_SKIP() << "this machine has a daemon of its own";
  ASSERT_EQ(mkdir(directory_.File("gradsync").c_str(), 0700), 0);
  ASSERT_EQ(chmod(directory_.File("gradsync").c_str(), 0755), 0);
  const Outcome outcome = Ask("");
  EXPECT_EQ(outcome.exit_code, 1);
  EXPECT_THAT(outcome.output,
              AllOf(ContainsRegex("problem +private directory "), HasSubstr("mode 0755")));
}

TEST_F(GradsyncctlDoctorTest, AnotherUserIsToldThatTheSocketIsNotTheirs) {
  if (geteuid() != 0) GTEST_SKIP() << "only root can become another user";
  DaemonProcess daemon({"--socket=" + socket()});
  ASSERT_TRUE(daemon.WaitUntilReady()) << daemon.Output();
  ASSERT_EQ(chmod(directory_.path().c_str(), 0755), 0);
  const Outcome outcome = Ask("--socket " + socket(), "setpriv --reuid 65534 --clear-groups");
  EXPECT_EQ(outcome.exit_code, 1);
  EXPECT_THAT(outcome.output, AllOf(ContainsRegex("problem +daemon "),
                                    HasSubstr("(uid 0's, mode 0600): this user may not connect")));
}

TEST_F(GradsyncctlDoctorTest, JsonIsTheSame) {
  const Outcome outcome = Ask("--json --socket " + socket());
  EXPECT_EQ(outcome.exit_code, 1);
  EXPECT_THAT(outcome.output,
              AllOf(HasSubstr("\"findings\": ["), HasSubstr("\"level\": \"problem\""),
                    HasSubstr("\"check\": \"daemon\"")));
}

}  // namespace
}  // namespace gradsync::testing
