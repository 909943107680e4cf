#include "server/job/described_plan.h"

#include <gtest/gtest.h>

#include <chrono>

#include "server/job/job_testing.h"

namespace gradsync {
namespace {

using std::chrono::milliseconds;

TEST(DescribedPlanTest, EveryMemberMayDescribeTheSamePlan) {
  DescribedPlan plan({4, 7});
  for (uint32_t member = 0; member < 2; ++member) {
    EXPECT_TRUE(plan.Describe(member, Describe(0, 2)).ok());
    EXPECT_TRUE(plan.Describe(member, Describe(1, 2)).ok());
  }
  EXPECT_EQ(plan.Snapshot().size(), 2u);
  ASSERT_NE(plan.Find(1), nullptr);
  EXPECT_EQ(plan.Find(1)->count, 1000u);
  EXPECT_EQ(plan.Find(2), nullptr);
}

TEST(DescribedPlanTest, DifferentDescriptionsNameRanksAndField) {
  DescribedPlan plan({4, 7});
  ASSERT_TRUE(plan.Describe(0, Describe(0, 1, 100)).ok());
  const Status status = plan.Describe(1, Describe(0, 1, 90));
  EXPECT_EQ(status.code(), Code::kMismatch);
  EXPECT_EQ(status.message(),
            "bucket 0 differs: rank 4 has 100 float32 of 2 parameters (encoder.5.weight ... "
            "encoder.3.bias), 1 buckets in all; rank 7 has 90 float32 of 2 parameters "
            "(encoder.5.weight ... encoder.3.bias), 1 buckets in all; they differ in count");
}

TEST(DescribedPlanTest, EveryFieldOfADescriptionButTheNamesIsCompared) {
  const auto field = [](auto change) {
    DescribedPlan plan({0, 1});
    EXPECT_TRUE(plan.Describe(0, Describe(0, 2)).ok());
    BucketDescription other = Describe(0, 2);
    change(&other);
    const std::string text = plan.Describe(1, other).message();
    return text.substr(text.rfind("they differ in ") + 15);
  };
  EXPECT_EQ(field([](BucketDescription* d) { d->bucket_count = 3; }), "number of buckets");
  EXPECT_EQ(field([](BucketDescription* d) { d->count = 3; }), "count");
  EXPECT_EQ(field([](BucketDescription* d) { d->dtype = DType::kFloat16; }), "dtype");
  EXPECT_EQ(field([](BucketDescription* d) { d->parameter_count = 3; }), "number of parameters");
}

TEST(DescribedPlanTest, RanksMayKnowAParameterByDifferentNames) {
  DescribedPlan plan({0, 1});
  ASSERT_TRUE(plan.Describe(0, Describe(0, 1)).ok());
  BucketDescription other = Describe(0, 1);
  other.parameters = "x";
  EXPECT_TRUE(plan.Describe(1, other).ok());
}

TEST(DescribedPlanTest, BucketsAreDescribedInOrderAndOnce) {
  DescribedPlan plan({0});
  EXPECT_EQ(plan.Describe(0, Describe(1, 2)).code(), Code::kInvalidArgument);
  ASSERT_TRUE(plan.Describe(0, Describe(0, 2)).ok());
  EXPECT_EQ(plan.Describe(0, Describe(1, 3)).code(), Code::kInvalidArgument);
  ASSERT_TRUE(plan.Describe(0, Describe(1, 2)).ok());
  EXPECT_EQ(plan.Describe(0, Describe(2, 2)).code(), Code::kInvalidArgument);
  EXPECT_EQ(plan.Describe(0, Describe(1, 2)).message(),
            "rank 0 described bucket 1 of 2 after 2 of 2; the buckets of a plan are described in "
            "index order, each once");
}

TEST(DescribedPlanTest, NumberOfBucketsIsLimited) {
  DescribedPlan plan({0});
  EXPECT_EQ(plan.Describe(0, Describe(0, 0)).code(), Code::kInvalidArgument);
  EXPECT_EQ(plan.Describe(0, Describe(0, kSequenceWindow + 1)).code(), Code::kInvalidArgument);
}

TEST(DescribedPlanTest, FirstMemberOfANewPlanReplacesTheOldOneAndItsStatistics) {
  DescribedPlan plan({0, 1});
  for (uint32_t member = 0; member < 2; ++member) {
    ASSERT_TRUE(plan.Describe(member, Describe(0, 1, 100)).ok());
  }
  plan.Record(0, {.wait = milliseconds(1)}, 1, HandOver::kHostMemory);
  ASSERT_TRUE(plan.Describe(1, Describe(0, 2, 50)).ok());
  EXPECT_EQ(plan.Snapshot().at(0).count, 50u);
  EXPECT_EQ(plan.Snapshot().at(0).reductions, 0u);
  plan.Record(0, {.wait = milliseconds(1)}, 0, HandOver::kHostMemory);
  // The other member describes the same plan: compared, and nothing is forgotten.
  EXPECT_TRUE(plan.Describe(0, Describe(0, 2, 50)).ok());
  EXPECT_EQ(plan.Snapshot().at(0).reductions, 1u);
}

TEST(DescribedPlanTest, MemberThatIsAPlanBehindDisturbsNothing) {
  DescribedPlan plan({0, 1});
  ASSERT_TRUE(plan.Describe(0, Describe(0, 1, 100)).ok());
  ASSERT_TRUE(plan.Describe(0, Describe(0, 1, 50)).ok());
  EXPECT_TRUE(plan.Describe(1, Describe(0, 1, 100)).ok());
  EXPECT_EQ(plan.Snapshot().at(0).count, 50u);
}

TEST(DescribedPlanTest, StatisticsAreTheLastReductions) {
  DescribedPlan plan({0});
  ASSERT_TRUE(plan.Describe(0, Describe(0, 1)).ok());
  plan.Record(0, {.wait = milliseconds(1)}, 3, HandOver::kHostMemory);
  plan.Record(0, {.wait = milliseconds(2), .queue = milliseconds(3), .reduce = milliseconds(4)}, 5,
              HandOver::kHostMemory);
  plan.Record(9, {}, 0, HandOver::kHostMemory);
  const BucketSnapshot bucket = plan.Snapshot().at(0);
  EXPECT_EQ(bucket.reductions, 2u);
  EXPECT_EQ(bucket.last_rank, 5u);
  EXPECT_EQ(bucket.last.total(), milliseconds(9));
}

}  // namespace
}  // namespace gradsync
