#include "server/ctl/inspector.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>

#include "server/inspect/inspect_server.h"
#include "server/inspect/sample_snapshots.h"

namespace gradsync {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

Discovery ByDefault() {
  Discovery discovery;
  discovery.private_directory = "/run/user/7/gradsync";
  return discovery;
}

TEST(InspectSocketsTest, LooksWhereATrainerWould) {
  EXPECT_THAT(InspectSockets({}, ByDefault()),
              ElementsAre("/run/gradsync/gradsyncd.sock.inspect",
                          ByDefault().private_socket() + ".inspect"));
}

TEST(InspectSocketsTest, LooksNowhereElseWhenTheSocketIsGiven) {
  Discovery discovery = ByDefault();
  discovery.fixed_socket = "/run/x.sock";
  EXPECT_THAT(InspectSockets({}, discovery), ElementsAre("/run/x.sock.inspect"));
  CommandLine command;
  command.inspect_socket = "/run/y";
  EXPECT_THAT(InspectSockets(command, discovery), ElementsAre("/run/y"));
}

class InspectorTest : public ::testing::Test {
 protected:
  InspectorTest() {
    std::string pattern = ::testing::TempDir() + "gradsync-XXXXXX";
    directory_ = mkdtemp(pattern.data());
    socket_ = directory_ + "/inspect";
  }
  ~InspectorTest() override {
    server_.reset();
    rmdir(directory_.c_str());
  }

  void Start(SnapshotSource source) {
    auto server = InspectServer::Start(socket_, std::move(source));
    ASSERT_TRUE(server) << server.error().ToString();
    server_ = std::move(*server);
  }

  void Start() {
    Start([](auto) { return std::vector<JobSnapshot>{TrainingJob()}; });
  }

  std::string directory_;
  std::string socket_;
  std::unique_ptr<InspectServer> server_;
};

TEST_F(InspectorTest, AsksTheFirstDaemonThatAnswers) {
  Start();
  auto inspector = Inspector::Connect({directory_ + "/absent", socket_, directory_ + "/other"});
  ASSERT_TRUE(inspector) << inspector.error().ToString();
  const auto jobs = inspector->ListJobs();
  ASSERT_TRUE(jobs) << jobs.error().ToString();
  EXPECT_EQ(jobs->jobs(0).name(), "lm-27m");
  v1::GetJobRequest request;
  request.set_name("lm-27m");
  const auto job = inspector->GetJob(request);
  ASSERT_TRUE(job) << job.error().ToString();
  EXPECT_EQ(job->ranks_size(), 2);
}

TEST_F(InspectorTest, NamesEveryPlaceWhereNoDaemonAnswered) {
  const auto inspector = Inspector::Connect({socket_, directory_ + "/other"});
  ASSERT_FALSE(inspector);
  EXPECT_EQ(inspector.error().code(), Code::kDaemonLost);
  EXPECT_THAT(inspector.error().message(),
              AllOf(HasSubstr(socket_), HasSubstr(directory_ + "/other"), HasSubstr("--socket")));
}

TEST_F(InspectorTest, TheTrainersSocketIsNotMistakenForTheInspectionSocket) {
  const auto trainers = ListenAt(directory_ + "/trainers", 0600);
  ASSERT_TRUE(trainers);
  const auto inspector = Inspector::Connect({directory_ + "/trainers"});
  unlink((directory_ + "/trainers").c_str());
  ASSERT_FALSE(inspector);
  EXPECT_EQ(inspector.error().code(), Code::kProtocol);
}

TEST_F(InspectorTest, PassesTheDaemonsWordsOn) {
  Start();
  auto inspector = Inspector::Connect({socket_});
  ASSERT_TRUE(inspector);
  v1::GetJobRequest request;
  request.set_name("nobody");
  const auto job = inspector->GetJob(request);
  ASSERT_FALSE(job);
  EXPECT_EQ(job.error().code(), Code::kFailedPrecondition);
  EXPECT_THAT(job.error().message(), HasSubstr("has no job 'nobody'"));
}

TEST_F(InspectorTest, ADaemonThatGoesIsLost) {
  Start();
  auto inspector = Inspector::Connect({socket_});
  ASSERT_TRUE(inspector);
  server_->Drain();
  auto jobs = inspector->ListJobs();
  ASSERT_FALSE(jobs);
  EXPECT_EQ(jobs.error().code(), Code::kDaemonLost);
  EXPECT_THAT(jobs.error().message(), AllOf(HasSubstr(socket_), HasSubstr("shutting down")));
  server_.reset();
  jobs = inspector->ListJobs();
  ASSERT_FALSE(jobs);
  EXPECT_EQ(jobs.error().code(), Code::kDaemonLost);
}

TEST_F(InspectorTest, ADaemonThatDoesNotAnswerInTimeIsNamed) {
  Start([](auto) -> Result<std::vector<JobSnapshot>> {
    return Unexpected(Code::kDeadlineExceeded, "the reactor is busy");
  });
  auto inspector = Inspector::Connect({socket_});
  ASSERT_TRUE(inspector);
  const auto jobs = inspector->ListJobs();
  ASSERT_FALSE(jobs);
  EXPECT_EQ(jobs.error().code(), Code::kDeadlineExceeded);
  EXPECT_THAT(jobs.error().message(), HasSubstr(socket_));
}

TEST_F(InspectorTest, TakesAnswersOfMoreThanGrpcsDefaultSize) {
  JobSnapshot job = TrainingJob();
  job.groups[0].buckets.resize(60000, job.groups[0].buckets[1]);
  Start([job](auto) { return std::vector<JobSnapshot>{job}; });
  auto inspector = Inspector::Connect({socket_});
  ASSERT_TRUE(inspector);
  v1::GetJobRequest request;
  request.set_name("lm-27m");
  const auto answer = inspector->GetJob(request);
  ASSERT_TRUE(answer) << answer.error().ToString();
  EXPECT_GT(answer->ByteSizeLong(), 4U << 20);
  EXPECT_EQ(answer->groups(0).buckets_size(), 60000);
}

}  // namespace
}  // namespace gradsync
