#include "client/ddp/readiness.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <random>

namespace gradsync {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using Event = Readiness::Event;

// `sizes[b]` parameters in bucket b, numbered on from bucket to bucket.
BucketPlan PlanOf(const std::vector<uint32_t>& sizes) {
  BucketPlan plan;
  for (uint32_t b = 0; b < sizes.size(); ++b) {
    PlannedBucket& bucket = plan.buckets.emplace_back();
    for (uint32_t i = 0; i < sizes[b]; ++i) {
      bucket.parameters.push_back(static_cast<uint32_t>(plan.slots.size()));
      plan.slots.push_back({.bucket = b});
    }
  }
  return plan;
}

TEST(ReadinessTest, BucketIsCompleteWithItsLastParameter) {
  Readiness readiness(PlanOf({2, 1}));
  EXPECT_EQ(readiness.MarkReady(1), Event::kCounted);
  EXPECT_FALSE(readiness.IsBucketComplete(0));
  EXPECT_EQ(readiness.MarkReady(2), Event::kBucketComplete);
  EXPECT_TRUE(readiness.IsBucketComplete(1));
  EXPECT_FALSE(readiness.all_ready());
  EXPECT_EQ(readiness.MarkReady(0), Event::kBucketComplete);
  EXPECT_TRUE(readiness.all_ready());
  EXPECT_THAT(readiness.order(), ElementsAre(1, 2, 0));
}

TEST(ReadinessTest, SecondTimeIsToldAndChangesNothing) {
  Readiness readiness(PlanOf({2}));
  readiness.MarkReady(1);
  EXPECT_EQ(readiness.MarkReady(1), Event::kAlreadyReady);
  EXPECT_FALSE(readiness.IsBucketComplete(0));
  EXPECT_THAT(readiness.order(), ElementsAre(1));
  EXPECT_THAT(readiness.Unready(), ElementsAre(0));
}

TEST(ReadinessTest, ResetForgetsTheIteration) {
  Readiness readiness(PlanOf({1, 2}));
  for (const uint32_t parameter : {0, 2, 1}) readiness.MarkReady(parameter);
  readiness.Reset();
  EXPECT_FALSE(readiness.any_ready());
  EXPECT_THAT(readiness.order(), IsEmpty());
  EXPECT_THAT(readiness.Unready(), ElementsAre(0, 1, 2));
  EXPECT_EQ(readiness.MarkReady(0), Event::kBucketComplete);
}

TEST(ReadinessTest, EachBucketCompletesOnceInAnyOrderOfParameters) {
  const std::vector<uint32_t> sizes = {3, 1, 4, 2};
  const BucketPlan plan = PlanOf(sizes);
  Readiness readiness(plan);
  std::vector<uint32_t> order = ReversedOrder(10);
  std::mt19937 random(1);
  for (int round = 0; round < 200; ++round) {
    std::shuffle(order.begin(), order.end(), random);
    readiness.Reset();
    std::vector<uint32_t> left = sizes;
    for (const uint32_t parameter : order) {
      const uint32_t bucket = plan.slots[parameter].bucket;
      const bool last = --left[bucket] == 0;
      EXPECT_EQ(readiness.MarkReady(parameter), last ? Event::kBucketComplete : Event::kCounted);
      EXPECT_EQ(readiness.IsBucketComplete(bucket), last);
    }
    EXPECT_TRUE(readiness.all_ready());
    EXPECT_THAT(readiness.order(), ::testing::ElementsAreArray(order));
  }
}

}  // namespace
}  // namespace gradsync
