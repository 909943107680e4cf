#include "server/job/describe.h"

#include <gtest/gtest.h>

#include <chrono>
#include <vector>

#include "server/job/job_testing.h"

namespace gradsync {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;
using std::chrono::seconds;

TEST(DescribeTest, OperationTextSaysWhatMattersToItsKind) {
  EXPECT_EQ(DescribeOperation(AllReduce(3)), "all_reduce of 100 float32 (sum)");
  EXPECT_EQ(DescribeOperation(BucketReduce(3, 7)), "bucket_reduce of 1000 float32 (avg), bucket 7");
  EXPECT_EQ(DescribeOperation(Barrier(3)), "barrier");
  EXPECT_EQ(DescribeOperation(
                {.kind = OpKind::kBroadcast, .dtype = DType::kInt64, .root = 2, .count = 8}),
            "broadcast of 8 int64 from root 2");
  EXPECT_EQ(DescribeOperation({.kind = OpKind::kAllGather, .dtype = DType::kBool, .count = 1}),
            "all_gather of 1 bool");
}

TEST(DescribeTest, EveryFieldThatDiffersIsNamed) {
  Operation other = BucketReduce(0, 1, 90);
  other.dtype = DType::kFloat64;
  other.reduce_op = ReduceOp::kSum;
  EXPECT_EQ(DifferingFields(BucketReduce(0, 0, 100), other), "dtype, count, reduce op, bucket");
  EXPECT_EQ(DifferingFields({.kind = OpKind::kBroadcast, .root = 0},
                            {.kind = OpKind::kBroadcast, .root = 1}),
            "root");
  EXPECT_EQ(DifferingFields(AllReduce(0, 100), BucketReduce(0, 0, 100)), "kind, reduce op");
  EXPECT_EQ(DifferingFields(AllReduce(0), Barrier(0)), "kind");
}

TEST(DescribeTest, FieldsThatMeanNothingToTheKindAreNotCompared) {
  EXPECT_TRUE(SameOperation(Barrier(0), {.kind = OpKind::kBarrier, .root = 1, .count = 5}));
  EXPECT_TRUE(SameOperation({.kind = OpKind::kAllGather, .reduce_op = ReduceOp::kMax, .count = 5},
                            {.kind = OpKind::kAllGather, .bucket = 3, .count = 5}));
  EXPECT_FALSE(SameOperation(AllReduce(0, 1), AllReduce(0, 2)));
}

TEST(DescribeTest, RanksAreListedInTheirOrderWithRunsShortened) {
  EXPECT_EQ(DescribeRanks(std::vector<uint32_t>{3}), "rank 3");
  EXPECT_EQ(DescribeRanks(std::vector<uint32_t>{0, 1, 2, 5}), "ranks 0-2, 5");
  EXPECT_EQ(DescribeRanks(std::vector<uint32_t>{1, 0}), "ranks 1, 0");
}

TEST(DescribeTest, DurationsAreAsPreciseAsAPersonWants) {
  EXPECT_EQ(DescribeDuration(microseconds(250400)), "250 ms");
  EXPECT_EQ(DescribeDuration(microseconds(999600)), "1 s");
  EXPECT_EQ(DescribeDuration(milliseconds(1500)), "1.5 s");
  EXPECT_EQ(DescribeDuration(milliseconds(9960)), "10 s");
  EXPECT_EQ(DescribeDuration(seconds(600)), "600 s");
}

}  // namespace
}  // namespace gradsync
