// The real gradsyncctl, asking an inspection server in this process.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <string>

#include "server/ctl/run_gradsyncctl.h"
#include "server/inspect/inspect_server.h"
#include "server/inspect/sample_snapshots.h"
#include "server/inspect/socket_path.h"

namespace gradsync {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::StartsWith;

class GradsyncctlTest : public ::testing::Test {
 protected:
  GradsyncctlTest() {
    std::string pattern = ::testing::TempDir() + "gradsync-XXXXXX";
    directory_ = mkdtemp(pattern.data());
    socket_ = directory_ + "/gradsyncd.sock";
  }
  ~GradsyncctlTest() override {
    server_.reset();
    rmdir(directory_.c_str());
  }

  void Start() {
    auto server = InspectServer::Start(DefaultInspectSocket(socket_), [](auto) {
      return std::vector<JobSnapshot>{JoiningJob(), TrainingJob()};
    });
    ASSERT_TRUE(server) << server.error().ToString();
    server_ = std::move(*server);
  }

  std::string directory_;
  std::string socket_;
  std::unique_ptr<InspectServer> server_;
};

TEST_F(GradsyncctlTest, ShowsTheJobs) {
  Start();
  const Outcome outcome = RunGradsyncctl("jobs --socket " + socket_);
  EXPECT_EQ(outcome.exit_code, 0);
  EXPECT_THAT(outcome.output,
              AllOf(StartsWith("JOB "), HasSubstr("\nvit "), HasSubstr("\nlm-27m ")));
}

TEST_F(GradsyncctlTest, ShowsAJob) {
  Start();
  const Outcome outcome = RunGradsyncctl("job lm-27m --uid 1000 --generation 2 --inspect-socket " +
                                         DefaultInspectSocket(socket_));
  EXPECT_EQ(outcome.exit_code, 0);
  EXPECT_THAT(outcome.output, AllOf(StartsWith("Job lm-27m "), HasSubstr("waits for rank 1")));
}

TEST_F(GradsyncctlTest, FindsTheDaemonThatATrainerWouldUse) {
  Start();
  const Outcome outcome = RunGradsyncctl("jobs", "GRADSYNC_SOCKET=" + socket_);
  EXPECT_EQ(outcome.exit_code, 0);
  EXPECT_THAT(outcome.output, HasSubstr("lm-27m"));
}

TEST_F(GradsyncctlTest, PrintsJson) {
  Start();
  Outcome outcome = RunGradsyncctl("jobs --json --socket " + socket_);
  EXPECT_EQ(outcome.exit_code, 0);
  EXPECT_THAT(outcome.output,
              AllOf(StartsWith("{"), HasSubstr("\"name\": \"lm-27m\""),
                    HasSubstr("\"state\": \"JOB_STATE_ACTIVE\""), HasSubstr("\"age\": \"192s\"")));
  outcome = RunGradsyncctl("job --json lm-27m --socket " + socket_);
  EXPECT_EQ(outcome.exit_code, 0);
  EXPECT_THAT(outcome.output,
              AllOf(HasSubstr("\"parameter_count\": 24"), HasSubstr("\"bytes\": \"26214400\""),
                    HasSubstr("\"total\": \"0.004360s\"")));
}

TEST_F(GradsyncctlTest, AnUnknownJobIsExitCode1) {
  Start();
  const Outcome outcome = RunGradsyncctl("job nobody --socket " + socket_);
  EXPECT_EQ(outcome.exit_code, 1);
  EXPECT_THAT(outcome.output, StartsWith("gradsyncctl: this daemon has no job 'nobody'"));
}

TEST_F(GradsyncctlTest, ABadCommandLineIsExitCode2) {
  const Outcome outcome = RunGradsyncctl("jobs --frob");
  EXPECT_EQ(outcome.exit_code, 2);
  EXPECT_THAT(outcome.output, AllOf(HasSubstr("--frob"), HasSubstr("--help")));
  EXPECT_EQ(RunGradsyncctl("").exit_code, 2);
}

TEST_F(GradsyncctlTest, NoDaemonIsExitCode3) {
  const Outcome outcome = RunGradsyncctl("jobs --socket " + socket_);
  EXPECT_EQ(outcome.exit_code, 3);
  EXPECT_THAT(outcome.output, AllOf(StartsWith("gradsyncctl: no gradsyncd answers"),
                                    HasSubstr(socket_ + ".inspect")));
}

TEST_F(GradsyncctlTest, ADaemonThatIsShuttingDownIsExitCode3) {
  Start();
  server_->Drain();
  const Outcome outcome = RunGradsyncctl("jobs --socket " + socket_);
  EXPECT_EQ(outcome.exit_code, 3);
  EXPECT_THAT(outcome.output, HasSubstr("shutting down"));
}

TEST_F(GradsyncctlTest, OutputThatCannotBeWrittenIsAnError) {
  Start();
  const Outcome outcome = RunGradsyncctl("jobs --socket " + socket_ + " >/dev/full");
  EXPECT_EQ(outcome.exit_code, 1);
}

TEST_F(GradsyncctlTest, HelpAndVersionNeedNoDaemon) {
  const Outcome help = RunGradsyncctl("--help");
  EXPECT_EQ(help.exit_code, 0);
  EXPECT_THAT(help.output, AllOf(StartsWith("usage: gradsyncctl"), HasSubstr("exit status")));
  const Outcome version = RunGradsyncctl("--version");
  EXPECT_EQ(version.exit_code, 0);
  EXPECT_EQ(version.output, "gradsyncctl " GRADSYNC_VERSION "\n");
}

}  // namespace
}  // namespace gradsync
