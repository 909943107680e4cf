#include "server/inspect/to_proto.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "google/protobuf/util/time_util.h"
#include "server/inspect/sample_snapshots.h"

namespace gradsync {
namespace {

using google::protobuf::util::TimeUtil;
using ::testing::ElementsAre;
using ::testing::IsEmpty;

int64_t Ns(const google::protobuf::Duration& time) { return TimeUtil::DurationToNanoseconds(time); }

TEST(ToProtoTest, SummaryTellsStateRanksAndWait) {
  const v1::JobSummary summary = ToSummary(TrainingJob());
  EXPECT_EQ(summary.name(), "lm-27m");
  EXPECT_EQ(summary.uid(), 1000U);
  EXPECT_EQ(summary.generation(), 2U);
  EXPECT_EQ(summary.state(), v1::JOB_STATE_ACTIVE);
  EXPECT_EQ(summary.world_size(), 2U);
  EXPECT_EQ(summary.connected_ranks(), 2U);
  EXPECT_EQ(Ns(summary.age()), 192'000'000'000);
  EXPECT_EQ(summary.failure(), "");
  EXPECT_EQ(summary.wait().operation(),
            "bucket_reduce of 6553600 float32 (avg), bucket 1 of 3 (encoder.5.weight ... "
            "encoder.0.bias)");
  EXPECT_EQ(summary.wait().group(), "ddp/0");
  EXPECT_THAT(summary.wait().missing_ranks(), ElementsAre(1));
  EXPECT_EQ(Ns(summary.wait().duration()), 412'000'000);
}

TEST(ToProtoTest, StateFollowsTheRanks) {
  EXPECT_EQ(ToSummary(JoiningJob()).state(), v1::JOB_STATE_JOINING);
  JobSnapshot job = TrainingJob();
  job.ranks[0].connected = false;
  EXPECT_EQ(ToSummary(job).state(), v1::JOB_STATE_LEAVING);
  EXPECT_EQ(ToSummary(job).connected_ranks(), 1U);
  EXPECT_EQ(ToSummary(FailedJob()).state(), v1::JOB_STATE_FAILED);
}

TEST(ToProtoTest, AFailedGroupIsAFailureOfItsJob) {
  JobSnapshot job = TrainingJob();
  job.groups[1].failure = "ranks 0 and 1 differ";
  EXPECT_EQ(ToSummary(job).state(), v1::JOB_STATE_FAILED);
  EXPECT_EQ(ToSummary(job).failure(), "ranks 0 and 1 differ");
  job.failure = "rank 1 died";
  EXPECT_EQ(ToSummary(job).failure(), "rank 1 died");
}

TEST(ToProtoTest, SummaryShowsTheLongestWait) {
  JobSnapshot job = TrainingJob();
  job.groups[1].waiting_operation = "barrier";
  job.groups[1].missing_ranks = {1, 0};
  job.groups[1].waiting = std::chrono::seconds(3);
  EXPECT_EQ(ToSummary(job).wait().group(), "world");
  EXPECT_THAT(ToSummary(job).wait().missing_ranks(), ElementsAre(0, 1));
  job.groups[1].waiting = std::chrono::milliseconds(1);
  EXPECT_EQ(ToSummary(job).wait().group(), "ddp/0");
}

TEST(ToProtoTest, AnOperationThatEveryRankHandedInWaitsForNobody) {
  JobSnapshot job = TrainingJob();
  job.groups[0].missing_ranks.clear();
  EXPECT_FALSE(ToSummary(job).has_wait());
  EXPECT_FALSE(ToJob(job).groups(0).has_wait());
}

TEST(ToProtoTest, JobHasItsRanksAndGroups) {
  const v1::Job job = ToJob(TrainingJob());
  EXPECT_EQ(job.summary().name(), "lm-27m");
  ASSERT_EQ(job.ranks_size(), 2);
  EXPECT_EQ(job.ranks(1).rank(), 1U);
  EXPECT_EQ(job.ranks(1).local_rank(), 1U);
  EXPECT_EQ(job.ranks(1).pid(), 4243U);
  EXPECT_EQ(job.ranks(1).program(), "train.py");
  EXPECT_TRUE(job.ranks(1).connected());
  EXPECT_EQ(job.ranks(1).segment_bytes(), 109U << 20);
  ASSERT_EQ(job.groups_size(), 2);
  const v1::Group& group = job.groups(0);
  EXPECT_EQ(group.id(), 7U);
  EXPECT_EQ(group.tag(), "ddp/0");
  EXPECT_THAT(group.ranks(), ElementsAre(0, 1));
  EXPECT_EQ(group.completed_operations(), 1830U);
  EXPECT_EQ(group.bytes(), 48ULL << 30);
  EXPECT_EQ(Ns(group.last().total()), 115'000);
  EXPECT_THAT(group.wait().missing_ranks(), ElementsAre(1));
  EXPECT_EQ(ToJob(FailedJob()).groups(0).failure(), "job 'bert': rank 1 (pid 4243) died");
}

TEST(ToProtoTest, GroupThatHasDoneNothingHasNoTimes) {
  const v1::Group group = ToJob(TrainingJob()).groups(1);
  EXPECT_FALSE(group.has_last());
  EXPECT_FALSE(group.has_wait());
  EXPECT_EQ(group.buckets_size(), 0);
}

TEST(ToProtoTest, BucketHasSizeStateAndTimes) {
  const v1::Job job = ToJob(TrainingJob());
  ASSERT_EQ(job.groups(0).buckets_size(), 3);
  const v1::Bucket& running = job.groups(0).buckets(0);
  EXPECT_EQ(running.state(), v1::BUCKET_STATE_RUNNING);
  EXPECT_THAT(running.ready_ranks(), ElementsAre(0, 1));

  const v1::Bucket& waiting = job.groups(0).buckets(1);
  EXPECT_EQ(waiting.index(), 1U);
  EXPECT_EQ(waiting.parameter_count(), 24U);
  EXPECT_EQ(waiting.parameters(), "encoder.5.weight ... encoder.0.bias");
  EXPECT_EQ(waiting.dtype(), "float32");
  EXPECT_EQ(waiting.count(), 6553600U);
  EXPECT_EQ(waiting.bytes(), 25U << 20);
  EXPECT_EQ(waiting.state(), v1::BUCKET_STATE_WAITING);
  EXPECT_THAT(waiting.ready_ranks(), ElementsAre(0));
  EXPECT_EQ(waiting.reductions(), 610U);
  EXPECT_EQ(Ns(waiting.last().wait()), 1'850'000);
  EXPECT_EQ(Ns(waiting.last().queue()), 40'000);
  EXPECT_EQ(Ns(waiting.last().reduce()), 2'470'000);
  EXPECT_EQ(Ns(waiting.last().total()), 4'360'000);
  EXPECT_TRUE(waiting.has_last_rank());
  EXPECT_EQ(waiting.last_rank(), 0U);

  const v1::Bucket& fresh = job.groups(0).buckets(2);
  EXPECT_EQ(fresh.bytes(), 2000U);
  EXPECT_EQ(fresh.state(), v1::BUCKET_STATE_IDLE);
  EXPECT_THAT(fresh.ready_ranks(), IsEmpty());
  EXPECT_FALSE(fresh.has_last());
  EXPECT_FALSE(fresh.has_last_rank());
}

TEST(ToProtoTest, BucketTellsHowItIsHandedOverOnceItHasBeenReduced) {
  const v1::Job host = ToJob(TrainingJob());
  EXPECT_EQ(host.groups(0).buckets(0).hand_over(), v1::HAND_OVER_HOST_MEMORY);
  EXPECT_EQ(host.groups(0).buckets(2).hand_over(), v1::HAND_OVER_UNSPECIFIED);

  const v1::Job gpu = ToJob(GpuJob());
  ASSERT_EQ(gpu.groups(0).buckets_size(), 4);
  EXPECT_EQ(gpu.groups(0).buckets(0).hand_over(), v1::HAND_OVER_DAEMON_MEMORY);
  EXPECT_EQ(gpu.groups(0).buckets(1).hand_over(), v1::HAND_OVER_EXPORTED_MEMORY);
  EXPECT_EQ(gpu.groups(0).buckets(2).hand_over(), v1::HAND_OVER_LEGACY_HANDLE);
  EXPECT_EQ(gpu.groups(0).buckets(3).hand_over(), v1::HAND_OVER_UNSPECIFIED);
}

TEST(ToProtoTest, TextsFromTrainersBecomeUtf8) {
  JobSnapshot job = FailedJob();
  job.job = "j\xFF";
  job.failure = "f\xFF";
  job.ranks[0].program = "p\xFF";
  job.groups[0].tag = "t\xFF";
  job.groups[0].failure = "g\xFF";
  job.groups[0].waiting_operation = "o\xFF";
  job.groups[0].missing_ranks = {0};
  job.groups[0].buckets[0].parameters = "b\xFF";
  v1::Job parsed;
  ASSERT_TRUE(parsed.ParseFromString(ToJob(job).SerializeAsString()));
  EXPECT_EQ(parsed.summary().name(), "j\uFFFD");
  EXPECT_EQ(parsed.summary().failure(), "f\uFFFD");
  EXPECT_EQ(parsed.ranks(0).program(), "p\uFFFD");
  EXPECT_EQ(parsed.groups(0).tag(), "t\uFFFD");
  EXPECT_EQ(parsed.groups(0).failure(), "g\uFFFD");
  EXPECT_EQ(parsed.groups(0).wait().operation(), "o\uFFFD");
  EXPECT_EQ(parsed.groups(0).buckets(0).parameters(), "b\uFFFD");
}

}  // namespace
}  // namespace gradsync
