#include "server/job/group_scheduler.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "server/job/job_testing.h"

namespace gradsync {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

const Status kDied(Code::kRankLost, "job bert-7: rank 1 died (its process ended)");
const Status kLeft(Code::kRankLost, "job bert-7: rank 1 has left the job");

GroupScheduler MakeGroup(uint32_t size) {
  std::vector<uint32_t> ranks(size);
  for (uint32_t rank = 0; rank < size; ++rank) ranks[rank] = rank;
  return {"bert-7", "ddp:0", ranks};
}

bool IsNothing(const Decision& decision) {
  return decision.rejected.ok() && !decision.completed && decision.failure.ok() &&
         decision.starts.empty() && decision.asides.empty();
}

// ---- Order --------------------------------------------------------------------------------------

TEST(GroupSchedulerTest, OperationStartsOnlyWhenEveryMemberHasSubmittedIt) {
  GroupScheduler group = MakeGroup(3);
  EXPECT_TRUE(IsNothing(group.Submit(1, AllReduce(0), HalfMinute(), Time())));
  EXPECT_TRUE(IsNothing(group.Submit(0, AllReduce(0), HalfMinute(), Time())));
  const Decision decision = group.Submit(2, AllReduce(0), HalfMinute(), Time());
  ASSERT_EQ(decision.starts.size(), 1u);
  EXPECT_EQ(decision.starts.front().sequence, 0u);
  EXPECT_TRUE(group.running());
}

TEST(GroupSchedulerTest, BucketsStartInIndexOrderWhateverOrderTheyBecomeReadyIn) {
  GroupScheduler group = MakeGroup(2);
  for (const uint64_t sequence : {2, 1}) {
    for (uint32_t member = 0; member < 2; ++member) {
      EXPECT_TRUE(IsNothing(group.Submit(member, BucketReduce(sequence, 0), HalfMinute(), Time())));
    }
  }
  EXPECT_TRUE(IsNothing(group.Submit(0, BucketReduce(0, 0), HalfMinute(), Time())));
  EXPECT_EQ(group.Submit(1, BucketReduce(0, 0), HalfMinute(), Time()).starts.at(0).sequence, 0u);
  for (uint64_t sequence = 0; sequence < 2; ++sequence) {
    const Decision decision = group.Finished(sequence, OkStatus(), Time());
    EXPECT_EQ(decision.completed, sequence + 1);
    ASSERT_EQ(decision.starts.size(), 1u);
    EXPECT_EQ(decision.starts.front().sequence, sequence + 1);
  }
  EXPECT_TRUE(group.Finished(2, OkStatus(), Time()).starts.empty());
  EXPECT_FALSE(group.running());
}

TEST(GroupSchedulerTest, OneOperationRunsAtATime) {
  GroupScheduler group = MakeGroup(1);
  EXPECT_EQ(group.Submit(0, AllReduce(0), HalfMinute(), Time()).starts.size(), 1u);
  EXPECT_TRUE(IsNothing(group.Submit(0, AllReduce(1), HalfMinute(), Time())));
  EXPECT_EQ(group.Finished(0, OkStatus(), Time()).starts.size(), 1u);
}

TEST(GroupSchedulerTest, OnlyTheRunningOperationCanFinish) {
  GroupScheduler group = MakeGroup(1);
  EXPECT_TRUE(IsNothing(group.Finished(0, OkStatus(), Time())));
  (void)group.Submit(0, AllReduce(0), HalfMinute(), Time());
  EXPECT_TRUE(IsNothing(group.Finished(1, OkStatus(), Time())));
  EXPECT_EQ(group.Finished(0, OkStatus(), Time()).completed, 1u);
  EXPECT_TRUE(IsNothing(group.Finished(0, OkStatus(), Time())));
}

TEST(GroupSchedulerTest, TaskHoldsTheDescriptorAndEveryMembersMemory) {
  GroupScheduler group = MakeGroup(2);
  std::array<std::byte, 4> memory{};
  const auto mapping = std::make_shared<int>();
  const Operation operation = {.sequence = 0,
                               .kind = OpKind::kBroadcast,
                               .dtype = DType::kInt16,
                               .reduce_op = ReduceOp::kMax,
                               .root = 1,
                               .count = 9};
  (void)group.Submit(1, operation, {&memory[0], &memory[1], mapping, seconds(1)}, Time());
  auto task = group.Submit(0, operation, {&memory[2], &memory[3], mapping, seconds(1)}, Time())
                  .starts.front()
                  .task;
  ASSERT_NE(task, nullptr);
  EXPECT_EQ(task->kind, OpKind::kBroadcast);
  EXPECT_EQ(task->dtype, DType::kInt16);
  EXPECT_EQ(task->reduce_op, ReduceOp::kMax);
  EXPECT_EQ(task->root, 1u);
  EXPECT_EQ(task->count, 9u);
  EXPECT_THAT(task->inputs, ElementsAre(&memory[2], &memory[0]));
  EXPECT_THAT(task->outputs, ElementsAre(&memory[3], &memory[1]));
  EXPECT_EQ(mapping.use_count(), 3);
  task.reset();
  EXPECT_EQ(mapping.use_count(), 1) << "the scheduler keeps memory that only the engine needs";
}

// ---- Rules --------------------------------------------------------------------------------------

TEST(GroupSchedulerTest, SubmittingANumberTwiceIsRejected) {
  GroupScheduler group = MakeGroup(2);
  (void)group.Submit(0, AllReduce(0), HalfMinute(), Time());
  Decision decision = group.Submit(0, AllReduce(0), HalfMinute(), Time());
  EXPECT_EQ(decision.rejected.code(), Code::kProtocol);
  EXPECT_EQ(decision.rejected.message(),
            "job bert-7, group ddp:0: rank 0 submitted operation 0 twice");
  // Also while it runs, and when it is complete.
  (void)group.Submit(1, AllReduce(0), HalfMinute(), Time());
  EXPECT_EQ(group.Submit(1, AllReduce(0), HalfMinute(), Time()).rejected.code(), Code::kProtocol);
  (void)group.Finished(0, OkStatus(), Time());
  EXPECT_EQ(group.Submit(1, AllReduce(0), HalfMinute(), Time()).rejected.code(), Code::kProtocol);
}

TEST(GroupSchedulerTest, SubmittingBeyondTheWindowIsRejected) {
  GroupScheduler group = MakeGroup(2);
  const Decision decision = group.Submit(0, AllReduce(kSequenceWindow), HalfMinute(), Time());
  EXPECT_EQ(decision.rejected.code(), Code::kProtocol);
  EXPECT_EQ(
      decision.rejected.message(),
      "job bert-7, group ddp:0: rank 0 submitted operation 65536 when operations below 0 were "
      "complete; 65536 at most may be under way");
  EXPECT_TRUE(IsNothing(group.Submit(0, AllReduce(kSequenceWindow - 1), HalfMinute(), Time())));
  EXPECT_EQ(group.Submit(0, AllReduce(~uint64_t{0}), HalfMinute(), Time()).rejected.code(),
            Code::kProtocol);
}

TEST(GroupSchedulerTest, WindowMovesWithWhatIsComplete) {
  GroupScheduler group = MakeGroup(1);
  (void)group.Submit(0, AllReduce(0), HalfMinute(), Time());
  (void)group.Finished(0, OkStatus(), Time());
  EXPECT_TRUE(IsNothing(group.Submit(0, AllReduce(kSequenceWindow), HalfMinute(), Time())));
}

// ---- Mismatches ---------------------------------------------------------------------------------

TEST(GroupSchedulerTest, DifferentOperationsFailTheGroupAsSoonAsTwoAreThere) {
  GroupScheduler group = MakeGroup(3);
  (void)group.Submit(1, AllReduce(12, 90), HalfMinute(), Time());
  const Decision decision = group.Submit(0, AllReduce(12, 100), HalfMinute(), Time());
  EXPECT_EQ(decision.failure.code(), Code::kMismatch);
  EXPECT_EQ(decision.failure.message(),
            "job bert-7, group ddp:0: operation 12 differs: rank 0 submitted all_reduce of 100 "
            "float32 (sum), rank 1 submitted all_reduce of 90 float32 (sum); they differ in count. "
            "Every rank must make the same calls in the same order.");
  EXPECT_EQ(group.failure().code(), Code::kMismatch);
}

TEST(GroupSchedulerTest, MismatchOfBucketsSaysWhatTheyHold) {
  GroupScheduler group = MakeGroup(2);
  ASSERT_TRUE(group.DescribeBucket(0, Describe(0, 1)).ok());
  (void)group.Submit(0, BucketReduce(0, 0), HalfMinute(), Time());
  EXPECT_THAT(group.Submit(1, Barrier(0), HalfMinute(), Time()).failure.message(),
              HasSubstr("rank 0 submitted bucket_reduce of 1000 float32 (avg), bucket 0 of 1 "
                        "(encoder.5.weight ... encoder.3.bias), rank 1 submitted barrier; they "
                        "differ in kind."));
}

TEST(GroupSchedulerTest, DescriptionThatDiffersNamesJobAndGroup) {
  GroupScheduler group = MakeGroup(2);
  ASSERT_TRUE(group.DescribeBucket(0, Describe(0, 1, 5)).ok());
  const Status status = group.DescribeBucket(1, Describe(0, 1, 6));
  EXPECT_EQ(status.code(), Code::kMismatch);
  EXPECT_THAT(status.message(), HasSubstr("job bert-7, group ddp:0: bucket 0 differs: rank 0"));
}

TEST(GroupSchedulerTest, FailureIsAnnouncedWhenTheRunningOperationIsComplete) {
  GroupScheduler group = MakeGroup(2);
  for (uint32_t member = 0; member < 2; ++member) {
    (void)group.Submit(member, AllReduce(0), HalfMinute(), Time());
    (void)group.Submit(member, AllReduce(1), HalfMinute(), Time());
  }
  (void)group.Submit(0, AllReduce(2, 1), HalfMinute(), Time());
  EXPECT_TRUE(IsNothing(group.Submit(1, AllReduce(2, 2), HalfMinute(), Time())));
  EXPECT_EQ(group.failure().code(), Code::kMismatch);
  const Decision decision = group.Finished(0, OkStatus(), Time());
  EXPECT_EQ(decision.completed, 1u);
  EXPECT_EQ(decision.failure.code(), Code::kMismatch);
  EXPECT_TRUE(decision.starts.empty()) << "operation 1 was ready, but the group has failed";
}

TEST(GroupSchedulerTest, AfterAFailureNothingMoreHappens) {
  GroupScheduler group = MakeGroup(1);
  EXPECT_EQ(group.Stop({Code::kShuttingDown, "going"}).failure.code(), Code::kShuttingDown);
  EXPECT_TRUE(IsNothing(group.Submit(0, AllReduce(0), HalfMinute(), Time())));
  EXPECT_TRUE(IsNothing(group.Submit(0, AllReduce(0), HalfMinute(), Time())));
  EXPECT_TRUE(IsNothing(group.MemberGone(0, /*orderly=*/false, kDied)));
  EXPECT_TRUE(IsNothing(group.Stop(kDied)));
  EXPECT_EQ(group.NextDeadline(), std::nullopt);
  EXPECT_TRUE(IsNothing(group.CheckDeadline(At(seconds(1000)))));
  EXPECT_EQ(group.failure().code(), Code::kShuttingDown) << "the first reason is kept";
}

TEST(GroupSchedulerTest, FailureLetsGoOfTheMemoryOfWhatIsPending) {
  GroupScheduler group = MakeGroup(2);
  const auto mapping = std::make_shared<int>();
  (void)group.Submit(0, AllReduce(0), {nullptr, nullptr, mapping, seconds(1)}, Time());
  EXPECT_EQ(mapping.use_count(), 2);
  (void)group.MemberGone(1, /*orderly=*/false, kDied);
  EXPECT_EQ(mapping.use_count(), 1);
}

// ---- Deadlines ----------------------------------------------------------------------------------

TEST(GroupSchedulerTest, NoMemberWaitsLongerThanItAskedFor) {
  GroupScheduler group = MakeGroup(3);
  (void)group.Submit(0, AllReduce(0), WithTimeout(seconds(30)), At(seconds(2)));
  EXPECT_EQ(group.NextDeadline(), At(seconds(32)));
  (void)group.Submit(1, AllReduce(0), WithTimeout(seconds(1)), At(seconds(3)));
  EXPECT_EQ(group.NextDeadline(), At(seconds(4)));
  EXPECT_TRUE(IsNothing(group.CheckDeadline(At(milliseconds(3999)))));
  const Status failure = group.CheckDeadline(At(seconds(4))).failure;
  EXPECT_EQ(failure.code(), Code::kDeadlineExceeded);
  EXPECT_THAT(failure.message(), testing::HasSubstr("timed out after 1 s waiting for rank 2"));
}

TEST(GroupSchedulerTest, ALaterMembersLongerTimeoutDoesNotMoveTheDeadline) {
  GroupScheduler group = MakeGroup(3);
  EXPECT_EQ(group.NextDeadline(), std::nullopt);
  (void)group.Submit(0, AllReduce(0), WithTimeout(seconds(30)), At(seconds(2)));
  (void)group.Submit(1, AllReduce(0), WithTimeout(seconds(30)), At(seconds(3)));
  EXPECT_EQ(group.NextDeadline(), At(seconds(32)));
  EXPECT_TRUE(IsNothing(group.CheckDeadline(At(milliseconds(31999)))));
  EXPECT_EQ(group.CheckDeadline(At(seconds(32))).failure.code(), Code::kDeadlineExceeded);
}

TEST(GroupSchedulerTest, DeadlineTextNamesWhoIsMissingWhoWaitsAndForWhichParameters) {
  GroupScheduler group = MakeGroup(4);
  ASSERT_TRUE(group.DescribeBucket(0, Describe(0, 2)).ok());
  ASSERT_TRUE(group.DescribeBucket(0, Describe(1, 2)).ok());
  (void)group.Submit(1, BucketReduce(1, 1), HalfMinute(), At(seconds(0)));
  (void)group.Submit(1, BucketReduce(0, 0), HalfMinute(), At(seconds(0)));
  (void)group.Submit(0, BucketReduce(0, 0), HalfMinute(), At(seconds(1)));
  (void)group.Submit(3, BucketReduce(1, 1), HalfMinute(), At(seconds(2)));
  EXPECT_EQ(
      group.CheckDeadline(At(seconds(30))).failure.message(),
      "job bert-7, group ddp:0: operation 0, bucket_reduce of 1000 float32 (avg), bucket 0 of "
      "2 (encoder.5.weight ... encoder.3.bias), timed out after 30 s waiting for ranks 2-3: "
      "rank 2 has submitted nothing yet; rank 3 last submitted operation 1, bucket_reduce of "
      "1000 float32 (avg), bucket 1, 28 s ago. Waiting: ranks 0-1, rank 1 for 30 s. Find out "
      "what the missing ranks are doing: stuck, on another code path, or only slow, in which "
      "case a longer timeout helps.");
}

TEST(GroupSchedulerTest, DeadlineTextNamesTheEarlierOperationThatHoldsThingsUp) {
  GroupScheduler group = MakeGroup(2);
  (void)group.Submit(0, AllReduce(0), WithTimeout(seconds(60)), Time());
  (void)group.Submit(0, Barrier(1), WithTimeout(seconds(5)), Time());
  (void)group.Submit(1, Barrier(1), WithTimeout(seconds(5)), Time());
  EXPECT_EQ(group.NextDeadline(), At(seconds(5)));
  EXPECT_THAT(
      group.CheckDeadline(At(seconds(5))).failure.message(),
      HasSubstr("operation 1, barrier, timed out after 5 s waiting for rank 1 (it comes "
                "after operation 0, all_reduce of 100 float32 (sum)): rank 1 last submitted "
                "operation 1, barrier, 5 s ago. Waiting: ranks 0-1, rank 0 for 5 s."));
}

TEST(GroupSchedulerTest, OperationThatNobodySubmitsHoldsUpLaterOnesUntilTheirDeadline) {
  GroupScheduler group = MakeGroup(2);
  (void)group.Submit(0, Barrier(1), HalfMinute(), Time());
  (void)group.Submit(1, Barrier(1), HalfMinute(), Time());
  EXPECT_EQ(group.NextDeadline(), At(seconds(30)));
  EXPECT_THAT(
      group.CheckDeadline(At(seconds(30))).failure.message(),
      HasSubstr("waiting for ranks 0-1 (it comes after operation 0, which no rank has "
                "submitted): rank 0 last submitted operation 1, barrier, 30 s ago; rank 1"));
}

TEST(GroupSchedulerTest, WhatWaitsForTheEngineAloneHasNoDeadline) {
  GroupScheduler group = MakeGroup(2);
  for (uint64_t sequence = 0; sequence < 3; ++sequence) {
    for (uint32_t member = 0; member < 2; ++member) {
      (void)group.Submit(member, AllReduce(sequence), HalfMinute(), Time());
    }
  }
  EXPECT_EQ(group.NextDeadline(), std::nullopt);
  EXPECT_TRUE(IsNothing(group.CheckDeadline(At(seconds(1000)))));
  (void)group.Submit(0, AllReduce(3), HalfMinute(), At(seconds(1)));
  EXPECT_EQ(group.NextDeadline(), At(seconds(31)));
}

TEST(GroupSchedulerTest, LongListsOfMissingRanksAreCutShort) {
  GroupScheduler group = MakeGroup(200);
  (void)group.Submit(0, Barrier(0), HalfMinute(), Time());
  const std::string text = group.CheckDeadline(At(seconds(30))).failure.message();
  EXPECT_THAT(text, HasSubstr("waiting for ranks 1-199: rank 1 has"));
  EXPECT_THAT(text, HasSubstr("rank 6 has submitted nothing yet. Waiting"));
}

// ---- Members that leave -------------------------------------------------------------------------

TEST(GroupSchedulerTest, LostMemberFailsTheGroupAtOnce) {
  GroupScheduler group = MakeGroup(2);
  ASSERT_TRUE(group.DescribeBucket(0, Describe(0, 1)).ok());
  (void)group.Submit(0, BucketReduce(0, 0), HalfMinute(), Time());
  const Decision decision = group.MemberGone(1, /*orderly=*/false, kDied);
  EXPECT_EQ(decision.failure.code(), Code::kRankLost);
  EXPECT_EQ(decision.failure.message(),
            "job bert-7: rank 1 died (its process ended); group ddp:0 cannot go on in operation 0, "
            "bucket_reduce of 1000 float32 (avg), bucket 0 of 1 (encoder.5.weight ... "
            "encoder.3.bias), which rank 1 had not submitted. Look at that rank's own output for "
            "the cause.");
}

TEST(GroupSchedulerTest, LostMemberFailsAnIdleGroupToo) {
  GroupScheduler group = MakeGroup(2);
  EXPECT_EQ(group.MemberGone(1, /*orderly=*/false, kDied).failure.message(),
            "job bert-7: rank 1 died (its process ended); group ddp:0 cannot go on. Look at that "
            "rank's own output for the cause.");
}

TEST(GroupSchedulerTest, LostMemberFailsTheGroupAfterTheRunningOperation) {
  GroupScheduler group = MakeGroup(2);
  (void)group.Submit(0, AllReduce(0), HalfMinute(), Time());
  (void)group.Submit(1, AllReduce(0), HalfMinute(), Time());
  EXPECT_TRUE(IsNothing(group.MemberGone(1, /*orderly=*/false, kDied)));
  const Decision decision = group.Finished(0, OkStatus(), Time());
  EXPECT_EQ(decision.completed, 1u);
  EXPECT_THAT(decision.failure.message(),
              HasSubstr("cannot go on after operation 0, all_reduce of 100 float32 (sum). Look"));
}

TEST(GroupSchedulerTest, OrderlyLeavingFailsOnlyWhatNeedsTheMember) {
  GroupScheduler group = MakeGroup(2);
  (void)group.Submit(1, AllReduce(0), HalfMinute(), Time());
  EXPECT_TRUE(IsNothing(group.MemberGone(1, /*orderly=*/true, kLeft)));
  EXPECT_EQ(group.Submit(0, AllReduce(0), HalfMinute(), Time()).starts.size(), 1u)
      << "what it had submitted still counts";
  EXPECT_EQ(group.Finished(0, OkStatus(), Time()).completed, 1u);
  const Decision decision = group.Submit(0, AllReduce(1), HalfMinute(), Time());
  EXPECT_EQ(decision.failure.code(), Code::kRankLost);
  EXPECT_EQ(decision.failure.message(),
            "job bert-7: rank 1 has left the job; operation 1 of group ddp:0, all_reduce of 100 "
            "float32 (sum), cannot start without it. Every rank must make the same calls.");
}

TEST(GroupSchedulerTest, OrderlyLeavingFailsAtOnceWhatIsAlreadyWaiting) {
  GroupScheduler group = MakeGroup(2);
  (void)group.Submit(0, AllReduce(0), HalfMinute(), Time());
  EXPECT_EQ(group.MemberGone(1, /*orderly=*/true, kLeft).failure.code(), Code::kRankLost);
}

TEST(GroupSchedulerTest, OrderlyLeavingFailsWhatComesAfterAGap) {
  GroupScheduler group = MakeGroup(2);
  (void)group.Submit(1, AllReduce(0), HalfMinute(), Time());
  (void)group.Submit(1, AllReduce(2), HalfMinute(), Time());
  EXPECT_TRUE(IsNothing(group.MemberGone(1, /*orderly=*/true, kLeft)));
  EXPECT_EQ(group.Submit(0, AllReduce(2), HalfMinute(), Time()).failure.code(), Code::kRankLost);
}

TEST(GroupSchedulerTest, OperationsOfMembersThatHaveLeftFailNobody) {
  GroupScheduler group = MakeGroup(3);
  (void)group.Submit(0, AllReduce(0), HalfMinute(), Time());
  EXPECT_TRUE(IsNothing(group.MemberGone(0, /*orderly=*/true, kLeft)));
  EXPECT_TRUE(IsNothing(group.MemberGone(1, /*orderly=*/true, kLeft)));
}

TEST(GroupSchedulerTest, StopFailsAnIdleGroupAtOnceAndABusyOneAfterwards) {
  GroupScheduler idle = MakeGroup(1);
  EXPECT_EQ(idle.Stop({Code::kShuttingDown, "going"}).failure.message(), "going");

  GroupScheduler busy = MakeGroup(1);
  (void)busy.Submit(0, AllReduce(0), HalfMinute(), Time());
  (void)busy.Submit(0, AllReduce(1), HalfMinute(), Time());
  EXPECT_TRUE(IsNothing(busy.Stop({Code::kShuttingDown, "going"})));
  const Decision decision = busy.Finished(0, OkStatus(), Time());
  EXPECT_EQ(decision.completed, 1u);
  EXPECT_EQ(decision.failure.code(), Code::kShuttingDown);
  EXPECT_TRUE(decision.starts.empty());
}

// ---- Inspection ---------------------------------------------------------------------------------

TEST(GroupSchedulerTest, TimingsTellWaitingQueueingAndReducingApart) {
  GroupScheduler group = MakeGroup(2);
  ASSERT_TRUE(group.DescribeBucket(0, Describe(0, 2)).ok());
  ASSERT_TRUE(group.DescribeBucket(0, Describe(1, 2)).ok());
  (void)group.Submit(0, BucketReduce(0, 0), HalfMinute(), At(milliseconds(0)));
  (void)group.Submit(1, BucketReduce(1, 1), HalfMinute(), At(milliseconds(1)));
  (void)group.Submit(1, BucketReduce(0, 0), HalfMinute(), At(milliseconds(2)));
  (void)group.Submit(0, BucketReduce(1, 1), HalfMinute(), At(milliseconds(5)));
  (void)group.Finished(0, OkStatus(), At(milliseconds(9)));
  (void)group.Finished(1, OkStatus(), At(milliseconds(20)));
  const GroupSnapshot snapshot = group.Snapshot(At(milliseconds(20)));
  EXPECT_EQ(snapshot.tag, "ddp:0");
  EXPECT_THAT(snapshot.ranks, ElementsAre(0, 1));
  EXPECT_EQ(snapshot.completed, 2u);
  EXPECT_EQ(snapshot.bytes, 8000u);
  EXPECT_EQ(snapshot.buckets[0].last.wait, milliseconds(2));
  EXPECT_EQ(snapshot.buckets[0].last.queue, milliseconds(0));
  EXPECT_EQ(snapshot.buckets[0].last.reduce, milliseconds(7));
  EXPECT_EQ(snapshot.buckets[0].last_rank, 1u);
  EXPECT_EQ(snapshot.buckets[1].last.wait, milliseconds(4));
  EXPECT_EQ(snapshot.buckets[1].last.queue, milliseconds(4));
  EXPECT_EQ(snapshot.buckets[1].last.reduce, milliseconds(11));
  EXPECT_EQ(snapshot.buckets[1].last_rank, 0u);
  EXPECT_EQ(snapshot.last.total(), snapshot.buckets[1].last.total());
  EXPECT_EQ(snapshot.waiting_operation, std::nullopt);
}

TEST(GroupSchedulerTest, BytesAreThoseOfEachRanksOutput) {
  GroupScheduler group = MakeGroup(1);
  (void)group.Submit(0, Barrier(0), HalfMinute(), Time());
  (void)group.Finished(0, OkStatus(), Time());
  EXPECT_EQ(group.Snapshot(Time()).bytes, 0u);

  GroupScheduler pair = MakeGroup(2);
  const Operation gather = {.kind = OpKind::kAllGather, .dtype = DType::kInt64, .count = 3};
  (void)pair.Submit(0, gather, HalfMinute(), Time());
  (void)pair.Submit(1, gather, HalfMinute(), Time());
  (void)pair.Finished(0, OkStatus(), Time());
  EXPECT_EQ(pair.Snapshot(Time()).bytes, 48u);
}

TEST(GroupSchedulerTest, SnapshotShowsBucketStatesAndWhoIsMissing) {
  GroupScheduler group = MakeGroup(2);
  for (uint32_t bucket = 0; bucket < 4; ++bucket) {
    ASSERT_TRUE(group.DescribeBucket(0, Describe(bucket, 4)).ok());
  }
  (void)group.Submit(0, BucketReduce(0, 0), HalfMinute(), Time());
  (void)group.Submit(1, BucketReduce(0, 0), HalfMinute(), Time());
  (void)group.Submit(1, BucketReduce(1, 1), HalfMinute(), At(seconds(1)));
  (void)group.Submit(0, BucketReduce(2, 2), HalfMinute(), At(seconds(1)));
  (void)group.Submit(1, BucketReduce(2, 2), HalfMinute(), At(seconds(1)));
  (void)group.Submit(1, BucketReduce(4, 0), HalfMinute(), At(seconds(1)));
  const GroupSnapshot snapshot = group.Snapshot(At(seconds(3)));
  EXPECT_EQ(snapshot.buckets[0].state, BucketState::kRunning) << "not that of its next reduction";
  EXPECT_THAT(snapshot.buckets[0].ready_ranks, ElementsAre(0, 1));
  EXPECT_EQ(snapshot.buckets[1].state, BucketState::kWaiting);
  EXPECT_THAT(snapshot.buckets[1].ready_ranks, ElementsAre(1));
  EXPECT_EQ(snapshot.buckets[2].state, BucketState::kWaiting);
  EXPECT_THAT(snapshot.buckets[2].ready_ranks, ElementsAre(0, 1));
  EXPECT_EQ(snapshot.buckets[3].state, BucketState::kIdle);
  EXPECT_THAT(snapshot.buckets[3].ready_ranks, IsEmpty());
  EXPECT_EQ(snapshot.waiting_operation,
            "operation 1, bucket_reduce of 1000 float32 (avg), bucket 1 of 4 (encoder.5.weight ... "
            "encoder.3.bias)");
  EXPECT_THAT(snapshot.missing_ranks, ElementsAre(0));
  EXPECT_EQ(snapshot.waiting, seconds(2));
}

TEST(GroupSchedulerTest, SnapshotShowsAnOperationThatNobodyHasSubmitted) {
  GroupScheduler group = MakeGroup(2);
  (void)group.Submit(0, Barrier(1), HalfMinute(), Time());
  const GroupSnapshot snapshot = group.Snapshot(At(seconds(2)));
  EXPECT_EQ(snapshot.waiting_operation, "operation 0, which no rank has submitted");
  EXPECT_THAT(snapshot.missing_ranks, ElementsAre(0, 1));
  EXPECT_EQ(snapshot.waiting, seconds(2));
}

TEST(GroupSchedulerTest, SnapshotShowsWhyTheGroupFailed) {
  GroupScheduler group = MakeGroup(1);
  (void)group.Stop({Code::kShuttingDown, "going"});
  EXPECT_EQ(group.Snapshot(Time()).failure, "going");
}

// ---- Standing aside -----------------------------------------------------------------------------

AsideRequest Aside(uint64_t next_sequence, AsidePolicy policy = AsidePolicy::kAverageOverAll) {
  return {.request_id = 7,
          .next_sequence = next_sequence,
          .policy = policy,
          .timeout = std::chrono::seconds(30)};
}

TEST(GroupSchedulerTest, TheOthersGoOnWithoutAMemberThatStandsAside) {
  for (const AsidePolicy policy :
       {AsidePolicy::kAverageOverAll, AsidePolicy::kAverageOverPresent}) {
    GroupScheduler group = MakeGroup(3);
    EXPECT_TRUE(IsNothing(group.StandAside(1, Aside(0, policy), Time())));
    EXPECT_TRUE(IsNothing(group.Submit(0, BucketReduce(0, 0), HalfMinute(), Time())));
    EXPECT_THAT(group.Snapshot(Time()).aside_ranks, ElementsAre(1));
    EXPECT_THAT(group.Snapshot(Time()).missing_ranks, ElementsAre(2));
    const Decision decision = group.Submit(2, BucketReduce(0, 0), HalfMinute(), Time());
    ASSERT_EQ(decision.starts.size(), 1u);
    EXPECT_EQ(decision.starts.front().task->inputs.size(), 2u);
    EXPECT_EQ(decision.starts.front().task->outputs.size(), 2u);
    EXPECT_EQ(decision.starts.front().task->divisor,
              policy == AsidePolicy::kAverageOverAll ? 3u : 0u);
  }
}

TEST(GroupSchedulerTest, StandingAsideStartsWhatWaitedForTheMember) {
  GroupScheduler group = MakeGroup(2);
  (void)group.Submit(0, AllReduce(0), HalfMinute(), Time());
  const Decision decision = group.StandAside(1, Aside(0), Time());
  ASSERT_EQ(decision.starts.size(), 1u);
  EXPECT_EQ(decision.starts.front().task->inputs.size(), 1u);
}

TEST(GroupSchedulerTest, WhenAllStandAsideTheyGoOnBehindTheLastOfThem) {
  GroupScheduler group = MakeGroup(3);
  (void)group.StandAside(0, Aside(0), Time());
  for (const uint32_t member : {1, 2}) {
    (void)group.Submit(member, AllReduce(0), HalfMinute(), Time());
    (void)group.Submit(member, AllReduce(1), HalfMinute(), Time());
  }
  (void)group.StandAside(2, Aside(2), Time());
  const Decision decision = group.StandAside(1, Aside(2), Time());
  ASSERT_EQ(decision.asides.size(), 3u);
  for (const AsideAnswer& answer : decision.asides) {
    EXPECT_TRUE(answer.status.ok());
    EXPECT_EQ(answer.next_sequence, 2u);
    EXPECT_EQ(answer.last_member, 2u);
    EXPECT_EQ(answer.request_id, 7u);
  }
  (void)group.Finished(0, OkStatus(), Time());
  (void)group.Finished(1, OkStatus(), Time());
  // All take part again.
  (void)group.Submit(1, AllReduce(2), HalfMinute(), Time());
  (void)group.Submit(2, AllReduce(2), HalfMinute(), Time());
  EXPECT_FALSE(group.running());
  EXPECT_EQ(group.Submit(0, AllReduce(2), HalfMinute(), Time()).starts.size(), 1u);
}

TEST(GroupSchedulerTest, WhatCannotDoWithoutTheMemberFailsWithItsName) {
  GroupScheduler group = MakeGroup(2);
  (void)group.StandAside(1, Aside(0), Time());
  Operation gather = AllReduce(0);
  gather.kind = OpKind::kAllGather;
  const Decision decision = group.Submit(0, gather, HalfMinute(), Time());
  EXPECT_EQ(decision.failure.code(), Code::kFailedPrecondition);
  EXPECT_THAT(decision.failure.message(), HasSubstr("all_gather"));
  EXPECT_THAT(decision.failure.message(), HasSubstr("needs every rank, but rank 1 ran out"));
  ASSERT_EQ(decision.asides.size(), 1u);
  EXPECT_EQ(decision.asides[0].status.message(), decision.failure.message());
}

TEST(GroupSchedulerTest, MaximaCannotDoWithoutAMemberButSharesAndBarriersCan) {
  Operation operation = AllReduce(0);
  operation.reduce_op = ReduceOp::kMax;
  GroupScheduler group = MakeGroup(2);
  (void)group.StandAside(1, Aside(0), Time());
  EXPECT_FALSE(group.Submit(0, operation, HalfMinute(), Time()).failure.ok());
  for (const OpKind kind : {OpKind::kShare, OpKind::kBarrier}) {
    GroupScheduler other = MakeGroup(2);
    (void)other.StandAside(1, Aside(0), Time());
    operation.kind = kind;
    EXPECT_EQ(other.Submit(0, operation, HalfMinute(), Time()).starts.size(), 1u);
  }
}

TEST(GroupSchedulerTest, AMemberThatForbidsToGoOnWithoutItEndsTheGroupInTorchsWords) {
  GroupScheduler group = MakeGroup(2);
  EXPECT_TRUE(IsNothing(group.StandAside(1, Aside(0, AsidePolicy::kForbid), Time())));
  const Decision decision = group.Submit(0, BucketReduce(0, 0), HalfMinute(), Time());
  EXPECT_THAT(decision.failure.message(),
              HasSubstr("Detected at least one rank that exhausted inputs. Throwing across all "
                        "ranks."));
  EXPECT_THAT(decision.failure.message(), HasSubstr("rank 1 ran out before operation 0"));
}

TEST(GroupSchedulerTest, AllMayForbidIfNoneHasMoreThanAnother) {
  GroupScheduler group = MakeGroup(2);
  for (const uint32_t member : {0, 1}) (void)group.Submit(member, AllReduce(0), HalfMinute(), {});
  (void)group.StandAside(0, Aside(1, AsidePolicy::kForbid), Time());
  const Decision decision = group.StandAside(1, Aside(1, AsidePolicy::kForbid), Time());
  EXPECT_TRUE(decision.failure.ok());
  EXPECT_EQ(decision.asides.size(), 2u);
}

TEST(GroupSchedulerTest, PoliciesThatDifferFailTheGroup) {
  GroupScheduler group = MakeGroup(3);
  (void)group.StandAside(2, Aside(0), Time());
  const Decision decision = group.StandAside(0, Aside(0, AsidePolicy::kAverageOverPresent), Time());
  EXPECT_EQ(decision.failure.code(), Code::kMismatch);
  EXPECT_THAT(decision.failure.message(), HasSubstr("rank 0"));
  EXPECT_THAT(decision.failure.message(), HasSubstr("rank 2"));
  EXPECT_EQ(decision.asides.size(), 2u);
}

TEST(GroupSchedulerTest, StandingAsideTwiceOrInTheMiddleIsRejected) {
  GroupScheduler group = MakeGroup(2);
  (void)group.Submit(0, AllReduce(1), HalfMinute(), Time());
  EXPECT_EQ(group.StandAside(0, Aside(0), Time()).rejected.code(), Code::kProtocol);
  EXPECT_EQ(group.StandAside(0, Aside(2), Time()).rejected.code(), Code::kProtocol);
  (void)group.Submit(0, AllReduce(0), HalfMinute(), Time());
  EXPECT_TRUE(group.StandAside(0, Aside(2), Time()).rejected.ok());
  EXPECT_EQ(group.StandAside(0, Aside(2), Time()).rejected.code(), Code::kProtocol);
  EXPECT_EQ(group.Submit(0, AllReduce(2), HalfMinute(), Time()).rejected.code(), Code::kProtocol);
}

TEST(GroupSchedulerTest, WhoStandsAsideWaitsAsLongAsTheOthersGetOn) {
  GroupScheduler group = MakeGroup(2);
  (void)group.StandAside(1, Aside(0), At(seconds(0)));
  EXPECT_EQ(group.NextDeadline(), At(seconds(30)));
  (void)group.Submit(0, AllReduce(0), HalfMinute(), At(seconds(20)));
  EXPECT_EQ(group.NextDeadline(), std::nullopt);  // the engine is at work
  (void)group.Finished(0, OkStatus(), At(seconds(40)));
  EXPECT_EQ(group.NextDeadline(), At(seconds(70)));
  EXPECT_TRUE(IsNothing(group.CheckDeadline(At(seconds(69)))));
  const Decision decision = group.CheckDeadline(At(seconds(70)));
  EXPECT_EQ(decision.failure.code(), Code::kDeadlineExceeded);
  EXPECT_THAT(decision.failure.message(), HasSubstr("rank 1 ran out of input and waited for rank "
                                                    "0, of which nothing came"));
}

TEST(GroupSchedulerTest, WhoStandsAsideDoesNotWaitForAMemberThatHasLeft) {
  GroupScheduler left_after = MakeGroup(2);
  (void)left_after.StandAside(0, Aside(0), Time());
  EXPECT_THAT(left_after.Snapshot(At(seconds(3))).missing_ranks, ElementsAre(1));
  EXPECT_EQ(left_after.Snapshot(At(seconds(3))).waiting, seconds(3));
  const Decision first = left_after.MemberGone(1, /*orderly=*/true, kLeft);
  EXPECT_EQ(first.failure.code(), Code::kRankLost);
  EXPECT_THAT(first.failure.message(), HasSubstr("rank 1 has left the job; rank 0 of group ddp:0"));
  EXPECT_EQ(first.asides.size(), 1u);
  GroupScheduler left_before = MakeGroup(2);
  (void)left_before.MemberGone(1, /*orderly=*/true, kLeft);
  const Decision second = left_before.StandAside(0, Aside(0), Time());
  EXPECT_EQ(second.failure.code(), Code::kRankLost);
  EXPECT_EQ(second.asides.size(), 1u);
}

TEST(GroupSchedulerTest, WhoStandsAsideHearsOfAFailureWhenTheRunningOperationIsComplete) {
  GroupScheduler group = MakeGroup(2);
  for (const uint32_t member : {0, 1}) (void)group.Submit(member, AllReduce(0), HalfMinute(), {});
  (void)group.StandAside(0, Aside(1), Time());
  EXPECT_TRUE(IsNothing(group.MemberGone(1, /*orderly=*/false, kDied)));
  const Decision decision = group.Finished(0, OkStatus(), Time());
  ASSERT_EQ(decision.asides.size(), 1u);
  EXPECT_EQ(decision.asides[0].status.code(), Code::kRankLost);
  // And one that comes later hears at once.
  EXPECT_EQ(group.StandAside(0, Aside(1), Time()).asides.size(), 1u);
}

}  // namespace
}  // namespace gradsync
