#include "client/ddp/bucket_plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>

namespace gradsync {
namespace {

using ::testing::ElementsAre;

// float32 vectors of the given sizes in bytes.
std::vector<ParameterSpec> Vectors(const std::vector<int64_t>& sizes) {
  std::vector<ParameterSpec> parameters;
  parameters.reserve(sizes.size());
  for (const int64_t size : sizes) {
    parameters.push_back({.name = "p" + std::to_string(parameters.size()), .shape = {size / 4}});
  }
  return parameters;
}

std::vector<std::vector<uint32_t>> Groups(const BucketPlan& plan) {
  std::vector<std::vector<uint32_t>> groups;
  for (const PlannedBucket& bucket : plan.buckets) groups.push_back(bucket.parameters);
  return groups;
}

TEST(BucketPlanTest, ParameterThatReachesTheCapIsTheBucketsLast) {
  const auto parameters = Vectors({40, 40, 40, 40, 40});
  const std::vector<uint64_t> caps = {80};
  EXPECT_THAT(Groups(PlanBuckets(parameters, ReversedOrder(5), caps)),
              ElementsAre(ElementsAre(4, 3), ElementsAre(2, 1), ElementsAre(0)));
}

TEST(BucketPlanTest, BucketMayExceedItsCapByItsLastParameterOnly) {
  const auto parameters = Vectors({4, 400, 4, 76});
  const std::vector<uint64_t> caps = {80};
  EXPECT_THAT(Groups(PlanBuckets(parameters, ReversedOrder(4), caps)),
              ElementsAre(ElementsAre(3, 2), ElementsAre(1), ElementsAre(0)));
}

TEST(BucketPlanTest, EachKindHasItsOwnFirstCap) {
  auto parameters = Vectors({40, 40, 40, 40, 40, 40});
  for (const size_t i : {1, 3, 5}) parameters[i].dtype = DType::kBFloat16;  // 20 bytes each
  const std::vector<uint64_t> caps = {20, 80};
  // In the order 5 4 3 2 1 0: both kinds close a first bucket at 20 bytes, then go on to 80.
  EXPECT_THAT(Groups(PlanBuckets(parameters, ReversedOrder(6), caps)),
              ElementsAre(ElementsAre(5), ElementsAre(4), ElementsAre(3, 1), ElementsAre(2, 0)));
}

TEST(BucketPlanTest, DevicesNeverShareABucket) {
  auto parameters = Vectors({4, 4, 4, 4});
  parameters[1].device = 1;
  parameters[3].device = 1;
  const std::vector<uint64_t> caps = {1000};
  EXPECT_THAT(Groups(PlanBuckets(parameters, ReversedOrder(4), caps)),
              ElementsAre(ElementsAre(3, 1), ElementsAre(2, 0)));
}

TEST(BucketPlanTest, BucketsAreNumberedByTheirFirstParameterNotByTheirLast) {
  auto parameters = Vectors({4, 4, 4});
  parameters[0].dtype = DType::kFloat64;
  const std::vector<uint64_t> caps = {8};
  const std::vector<uint32_t> order = {1, 0, 2};  // float64 closes first, but float32 began first
  EXPECT_THAT(Groups(PlanBuckets(parameters, order, caps)),
              ElementsAre(ElementsAre(1, 2), ElementsAre(0)));
}

TEST(BucketPlanTest, CapsAdvanceAndTheLastHoldsForAllThatFollow) {
  const auto parameters = Vectors({4, 4, 4, 4, 4, 4, 4, 4});
  const std::vector<uint64_t> caps = {4, 8, 12};
  const std::vector<uint32_t> order = {0, 1, 2, 3, 4, 5, 6, 7};
  EXPECT_THAT(
      Groups(PlanBuckets(parameters, order, caps)),
      ElementsAre(ElementsAre(0), ElementsAre(1, 2), ElementsAre(3, 4, 5), ElementsAre(6, 7)));
}

TEST(BucketPlanTest, FilledFromTheFrontBucketsAreNumberedFromTheLast) {
  auto parameters = Vectors({40, 400, 40, 40, 40, 40});
  parameters[3].dtype = DType::kBFloat16;
  const std::vector<uint64_t> caps = {40, 80};
  const BucketPlan plan = PlanBucketsFromFront(parameters, caps);
  EXPECT_THAT(Groups(plan), ElementsAre(ElementsAre(5), ElementsAre(3), ElementsAre(2, 4),
                                        ElementsAre(1), ElementsAre(0)));
  EXPECT_EQ(plan.buckets[0].offset, 0U);
  EXPECT_EQ(plan.slots[4].bucket, 2U);
  EXPECT_EQ(plan.slots[4].offset, plan.buckets[2].offset + 40);
  EXPECT_EQ(plan.slots[0].bucket, 4U);
  EXPECT_EQ(plan.slots[0].offset, plan.buckets[4].offset);
}

TEST(BucketPlanTest, BucketOfEmptyParametersOnlyHoldsOneElementOfPadding) {
  const auto parameters = Vectors({0, 0});
  const std::vector<uint64_t> caps = {100};
  const BucketPlan plan = PlanBuckets(parameters, ReversedOrder(2), caps);
  ASSERT_EQ(plan.buckets.size(), 1U);
  EXPECT_EQ(plan.buckets[0].count, 1U);
  EXPECT_EQ(plan.bytes, kBucketAlignment);
}

TEST(BucketPlanTest, PermutationsAreToldFromOtherLists) {
  EXPECT_TRUE(IsPermutation(std::vector<uint32_t>{2, 0, 1}, 3));
  EXPECT_FALSE(IsPermutation(std::vector<uint32_t>{2, 0}, 3));
  EXPECT_FALSE(IsPermutation(std::vector<uint32_t>{2, 0, 0}, 3));
  EXPECT_FALSE(IsPermutation(std::vector<uint32_t>{2, 0, 3}, 3));
}

TEST(BucketPlanTest, DigestTellsPlansApart) {
  const auto parameters = Vectors({4, 4, 4});
  const std::vector<uint64_t> caps = {8};
  const BucketPlan plan = PlanBuckets(parameters, ReversedOrder(3), caps);
  EXPECT_EQ(PlanDigest(plan), PlanDigest(PlanBuckets(parameters, ReversedOrder(3), caps)));
  const std::vector<uint32_t> swapped = {1, 2, 0};
  EXPECT_NE(PlanDigest(plan), PlanDigest(PlanBuckets(parameters, swapped, caps)));
  const std::vector<uint64_t> other_caps = {12};
  EXPECT_NE(PlanDigest(plan), PlanDigest(PlanBuckets(parameters, ReversedOrder(3), other_caps)));
}

// The digest crosses machines and builds, so its values are fixed.
TEST(BucketPlanTest, DigestIsTheSameInEveryBuild) {
  DigestBuilder digest;
  digest.Add(1);
  digest.Add(2);
  EXPECT_EQ(digest.Finish().high, 0x577a6375027ca822U);
  EXPECT_EQ(digest.Finish().low, 0xfe8e3b903fb66664U);
}

// Properties of the plans of random models.

struct RandomCase {
  std::vector<ParameterSpec> parameters;
  std::vector<uint32_t> order;
  std::vector<uint64_t> caps;
};

RandomCase MakeCase(uint32_t seed) {
  std::mt19937 random(seed);
  const auto below = [&](uint32_t n) { return static_cast<uint32_t>(random() % n); };
  RandomCase result;
  const uint32_t count = 1 + below(60);
  constexpr DType kDTypes[] = {DType::kFloat32, DType::kBFloat16, DType::kFloat64,
                               DType::kComplex128};
  for (uint32_t i = 0; i < count; ++i) {
    ParameterSpec& parameter = result.parameters.emplace_back();
    parameter.name = "p" + std::to_string(i);
    parameter.dtype = kDTypes[below(4)];
    parameter.device = below(2);
    for (uint32_t dims = below(4); dims > 0; --dims) parameter.shape.push_back(below(12));
  }
  result.order = ReversedOrder(count);
  if (below(2) == 1) std::shuffle(result.order.begin(), result.order.end(), random);
  for (uint32_t caps = 1 + below(3); caps > 0; --caps) result.caps.push_back(1 + below(4000));
  return result;
}

class RandomPlanTest : public ::testing::TestWithParam<uint32_t> {
 protected:
  RandomPlanTest()
      : case_(MakeCase(GetParam())),
        plan_(PlanBuckets(case_.parameters, case_.order, case_.caps)) {}

  uint64_t BytesOf(const PlannedBucket& bucket) const {
    uint64_t bytes = 0;
    for (const uint32_t p : bucket.parameters) bytes += GradientBytes(case_.parameters[p]);
    return bytes;
  }

  RandomCase case_;
  BucketPlan plan_;
};

TEST_P(RandomPlanTest, EveryParameterIsInExactlyOneBucketInTheGivenOrder) {
  std::vector<uint32_t> place(case_.order.size());
  for (uint32_t i = 0; i < case_.order.size(); ++i) place[case_.order[i]] = i;
  std::vector<uint32_t> all;
  for (uint32_t b = 0; b < plan_.buckets.size(); ++b) {
    const std::vector<uint32_t>& parameters = plan_.buckets[b].parameters;
    ASSERT_FALSE(parameters.empty());
    EXPECT_TRUE(std::is_sorted(parameters.begin(), parameters.end(),
                               [&](uint32_t x, uint32_t y) { return place[x] < place[y]; }));
    for (const uint32_t p : parameters) EXPECT_EQ(plan_.slots[p].bucket, b);
    all.insert(all.end(), parameters.begin(), parameters.end());
    if (b > 0) {
      EXPECT_LT(place[plan_.buckets[b - 1].parameters[0]], place[parameters[0]]);
    }
  }
  EXPECT_TRUE(IsPermutation(all, static_cast<uint32_t>(case_.parameters.size())));
}

TEST_P(RandomPlanTest, BucketHoldsOneKindAndIsClosedByTheParameterThatReachesItsCap) {
  std::map<std::pair<DType, uint32_t>, std::vector<const PlannedBucket*>> kinds;
  for (const PlannedBucket& bucket : plan_.buckets) {
    const ParameterSpec& first = case_.parameters[bucket.parameters[0]];
    for (const uint32_t p : bucket.parameters) {
      EXPECT_EQ(case_.parameters[p].dtype, bucket.dtype);
      EXPECT_EQ(case_.parameters[p].device, first.device);
    }
    kinds[{bucket.dtype, first.device}].push_back(&bucket);
  }
  for (const auto& [kind, buckets] : kinds) {
    for (size_t i = 0; i < buckets.size(); ++i) {
      const uint64_t cap = case_.caps[std::min(i, case_.caps.size() - 1)];
      const uint64_t last = GradientBytes(case_.parameters[buckets[i]->parameters.back()]);
      EXPECT_TRUE(BytesOf(*buckets[i]) >= cap || i + 1 == buckets.size());
      EXPECT_TRUE(BytesOf(*buckets[i]) - last < cap);
    }
  }
}

TEST_P(RandomPlanTest, MemoryIsPackedInsideABucketAndBucketsAreAlignedAndDisjoint) {
  uint64_t end = 0;
  for (const PlannedBucket& bucket : plan_.buckets) {
    EXPECT_EQ(bucket.offset % kBucketAlignment, 0U);
    EXPECT_GE(bucket.offset, end);
    uint64_t at = bucket.offset;
    for (const uint32_t p : bucket.parameters) {
      EXPECT_EQ(plan_.slots[p].offset, at);
      EXPECT_EQ(plan_.slots[p].bytes, GradientBytes(case_.parameters[p]));
      at += plan_.slots[p].bytes;
    }
    end = bucket.offset + bucket.count * DTypeSize(bucket.dtype);
    EXPECT_EQ(end, std::max(at, bucket.offset + DTypeSize(bucket.dtype)));
  }
  EXPECT_GE(plan_.bytes, end);
}

TEST_P(RandomPlanTest, MemoryExceedsTheGradientsByLessThanALineForEachBucket) {
  uint64_t gradients = 0;
  for (const ParameterSpec& parameter : case_.parameters) gradients += GradientBytes(parameter);
  EXPECT_LE(plan_.bytes, gradients + kBucketAlignment * plan_.buckets.size());
}

TEST_P(RandomPlanTest, TheSameInputGivesTheSamePlan) {
  const BucketPlan again = PlanBuckets(case_.parameters, case_.order, case_.caps);
  EXPECT_EQ(again, plan_);
  EXPECT_EQ(PlanDigest(again), PlanDigest(plan_));
}

INSTANTIATE_TEST_SUITE_P(Seeds, RandomPlanTest, ::testing::Range(0U, 200U));

}  // namespace
}  // namespace gradsync
