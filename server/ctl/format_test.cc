#include "server/ctl/format.h"

#include <gtest/gtest.h>

#include "server/inspect/sample_snapshots.h"
#include "server/inspect/to_proto.h"

namespace gradsync {
namespace {

using std::chrono::hours;
using std::chrono::microseconds;
using std::chrono::milliseconds;
using std::chrono::minutes;
using std::chrono::seconds;

TEST(FormatTest, JobsAreATable) {
  v1::ListJobsResponse jobs;
  for (const JobSnapshot& job : {JoiningJob(), TrainingJob(), FailedJob()}) {
    *jobs.add_jobs() = ToSummary(job);
  }
  JobSnapshot quiet = TrainingJob();
  quiet.groups.clear();
  *jobs.add_jobs() = ToSummary(quiet);
  EXPECT_EQ(FormatJobs(jobs),
            R"(JOB      UID  GENERATION  STATE    RANKS    AGE  DETAIL
vit     1001           0  joining    1/4  2.5 s  has not all of its 4 ranks yet
lm-27m  1000           2  active     2/2  3m12s  waits 412 ms for rank 1: bucket_reduce of 6553600 float32 (avg), bucket 1 of 3 (encoder.5.weight ... encoder.0.bias)
bert    1000           2  failed     1/2  3m12s  job 'bert': rank 1 (pid 4243) died
lm-27m  1000           2  active     2/2  3m12s
)");
}

TEST(FormatTest, NoJobsAreSaidInWords) {
  EXPECT_EQ(FormatJobs({}), "No jobs: no trainer is connected to this daemon.\n");
}

TEST(FormatTest, AJobShowsRanksGroupsAndBuckets) {
  EXPECT_EQ(FormatJob(ToJob(TrainingJob())),
            R"(Job lm-27m (uid 1000, generation 2): active, 2 of 2 ranks connected, 3m12s old

RANK  LOCAL   PID  STATE      SHARED MEMORY  PROGRAM
   0      0  4242  connected      109.0 MiB  train.py
   1      1  4243  connected      109.0 MiB  train.py

Group ddp/0 (ranks 0, 1): 1830 operations, 48.0 GiB per rank, the last in 0.115 ms
  waits 412 ms for rank 1: bucket_reduce of 6553600 float32 (avg), bucket 1 of 3 (encoder.5.weight ... encoder.0.bias)
BUCKET      SIZE  TYPE      STATE             REDUCED  LAST RANK  WAIT ms  QUEUE ms  REDUCE ms  TOTAL ms  PARAMETERS  NAMES
     0   1.0 MiB  float32   reducing              610          1    0.120     0.003      0.210     0.333           1  lm_head.weight
     1  25.0 MiB  float32   waits for rank 1      610          0    1.850     0.040      2.470     4.360          24  encoder.5.weight ... encoder.0.bias
     2   2.0 KiB  bfloat16  idle                    0          -        -         -          -         -           2  norm.weight norm.bias

Group world (ranks 0, 1): no operation yet
)");
}

TEST(FormatTest, BucketsOnGpusShowHowTheyAreHandedOver) {
  JobSnapshot job = GpuJob();
  const std::string text = FormatJob(ToJob(job));
  const size_t table = text.find("BUCKET ");
  ASSERT_NE(table, std::string::npos) << text;
  EXPECT_EQ(
      text.substr(table, text.find("\n\n", table) - table),
      R"(BUCKET      SIZE  TYPE      STATE             REDUCED  LAST RANK  WAIT ms  QUEUE ms  REDUCE ms  TOTAL ms  PARAMETERS  MEMORY              NAMES
     0   1.0 MiB  float32   reducing              610          1    0.120     0.003      0.210     0.333           1  gpu: daemon memory  lm_head.weight
     1  25.0 MiB  float32   waits for rank 1      610          0    1.850     0.040      2.470     4.360          24  gpu: exported       encoder.5.weight ... encoder.0.bias
     2  25.0 MiB  float32   waits for rank 1      610          0    1.850     0.040      2.470     4.360          24  gpu: legacy IPC     encoder.5.weight ... encoder.0.bias
     3   2.0 KiB  bfloat16  idle                    0          -        -         -          -         -           2  -                   norm.weight norm.bias)");
}

TEST(FormatTest, BucketsOfOneGroupOnGpusAndOnCpusAreToldApart) {
  JobSnapshot job = TrainingJob();
  job.groups[0].buckets[1].hand_over = HandOver::kDaemonMemory;
  EXPECT_NE(FormatJob(ToJob(job)).find("  1  host                lm_head.weight\n"),
            std::string::npos);
}

TEST(FormatTest, AFailedJobSaysWhy) {
  JobSnapshot job = FailedJob();
  job.groups[0].buckets.clear();
  job.groups[1].failure = "something else";
  EXPECT_EQ(FormatJob(ToJob(job)),
            R"(Job bert (uid 1000, generation 2): failed, 1 of 2 ranks connected, 3m12s old
  failed: job 'bert': rank 1 (pid 4243) died

RANK  LOCAL   PID  STATE      SHARED MEMORY  PROGRAM
   0      0  4242  connected      109.0 MiB  train.py
   1      1  4243  gone           109.0 MiB  train.py

Group ddp/0 (ranks 0, 1): 1830 operations, 48.0 GiB per rank, the last in 0.115 ms

Group world (ranks 0, 1): no operation yet
  failed: something else
)");
}

TEST(FormatTest, ABucketThatEveryRankHandedInWaitsForItsTurn) {
  JobSnapshot job = TrainingJob();
  job.groups[0].buckets[1].ready_ranks = {0, 1};
  EXPECT_NE(FormatJob(ToJob(job)).find(" waits for its turn "), std::string::npos);
}

TEST(FormatTest, RanksThatStandAsideAreShownAndNotWaitedFor) {
  JobSnapshot job = TrainingJob();
  job.groups[0].aside_ranks = {1};
  job.groups[0].waiting_operation.reset();
  const std::string text = FormatJob(ToJob(job));
  EXPECT_NE(text.find("  goes on without rank 1, out of input\n"), std::string::npos) << text;
  EXPECT_EQ(text.find("waits for rank 1"), std::string::npos) << text;
}

TEST(FormatTest, NamesCannotCommandTheTerminal) {
  JobSnapshot job = FailedJob();
  job.job = "a\x1B[2J";
  job.failure = "b\nc";
  job.ranks[0].program = "d\te";
  job.groups[0].tag = "f\rg";
  job.groups[0].failure = "h\x07";  // not the job's, so it is shown
  job.groups[0].waiting_operation = "i\x1B";
  job.groups[0].missing_ranks = {0};
  job.groups[0].buckets[0].parameters = "j\x7F";
  v1::ListJobsResponse jobs;
  *jobs.add_jobs() = ToSummary(job);
  for (const std::string& text : {FormatJob(ToJob(job)), FormatJobs(jobs)}) {
    for (const char byte : text) {
      EXPECT_TRUE(byte == '\n' || (byte >= ' ' && byte != '\x7F')) << text;
    }
    EXPECT_NE(text.find("b?c"), std::string::npos);
  }
}

TEST(FormatTest, BytesHaveAUnitThatFits) {
  EXPECT_EQ(FormatBytes(0), "0 B");
  EXPECT_EQ(FormatBytes(1023), "1023 B");
  EXPECT_EQ(FormatBytes(1024), "1.0 KiB");
  EXPECT_EQ(FormatBytes((1 << 20) - 1), "1.0 MiB");
  EXPECT_EQ(FormatBytes(25 << 20), "25.0 MiB");
  EXPECT_EQ(FormatBytes(uint64_t{3} << 29), "1.5 GiB");
  EXPECT_EQ(FormatBytes(uint64_t{5000} << 40), "5000.0 TiB");
}

TEST(FormatTest, TimesHaveAUnitThatFits) {
  EXPECT_EQ(FormatTime(microseconds(999)), "0 ms");
  EXPECT_EQ(FormatTime(milliseconds(412)), "412 ms");
  EXPECT_EQ(FormatTime(milliseconds(2590)), "2.5 s");
  EXPECT_EQ(FormatTime(seconds(59)), "59.0 s");
  EXPECT_EQ(FormatTime(seconds(192)), "3m12s");
  EXPECT_EQ(FormatTime(minutes(63)), "1h03m");
  EXPECT_EQ(FormatTime(hours(52)), "2d04h");
}

TEST(FormatTest, RanksAreShownAsRanges) {
  EXPECT_EQ(FormatRanks({3}), "rank 3");
  EXPECT_EQ(FormatRanks({0, 1}), "ranks 0, 1");
  EXPECT_EQ(FormatRanks({0, 1, 2, 3, 7}), "ranks 0-3, 7");
  EXPECT_EQ(FormatRanks({1, 3, 5, 6}), "ranks 1, 3, 5, 6");
  EXPECT_EQ(FormatRanks({2, 1, 0}), "ranks 2, 1, 0");
}

TEST(FormatTest, ControlCharactersAreReplacedAndTheRestIsKept) {
  EXPECT_EQ(Printable("größe 層 \xC2\xA0"), "größe 層 \xC2\xA0");
  EXPECT_EQ(Printable("a\x1B[1mb\n\x7F"), "a?[1mb??");
  EXPECT_EQ(Printable("a\xC2\x9B"
                      "2Jb"),
            "a?2Jb");
}

}  // namespace
}  // namespace gradsync
