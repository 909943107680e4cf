#include "server/engine/cuda/plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <vector>

#include "server/engine/device_engine.h"

namespace gradsync::cuda {
namespace {

using testing::ElementsAre;
using testing::IsEmpty;
using testing::SizeIs;

// Addresses by which a step tells whose memory it is: rank r's input at (r + 1) << 20.
uint64_t InputOf(uint64_t rank) { return (rank + 1) << 20; }
uint64_t OutputOf(uint64_t rank) { return (rank + 1) << 30; }

Task MakeTask(OpKind kind, const std::vector<uint32_t>& devices) {
  Task task;
  task.kind = kind;
  task.count = 10;
  task.device = std::make_shared<DeviceSide>();
  for (uint32_t rank = 0; rank < devices.size(); ++rank) {
    task.inputs.push_back(reinterpret_cast<const std::byte*>(InputOf(rank)));
    task.outputs.push_back(reinterpret_cast<std::byte*>(OutputOf(rank)));
    task.device->parts.push_back({devices[rank], rank, nullptr});
  }
  return task;
}

Task MakeAverage(OpKind kind, DType dtype, uint32_t divisor, const std::vector<uint32_t>& devices) {
  Task task = MakeTask(kind, devices);
  task.reduce_op = ReduceOp::kAvg;
  task.dtype = dtype;
  task.divisor = divisor;
  return task;
}

TEST(PlanTest, OneGpuNeedsNoNccl) {
  const Plan plan = MakePlan(MakeTask(OpKind::kAllReduce, {3, 3}));
  EXPECT_FALSE(plan.uses_nccl());
  ASSERT_THAT(plan.devices, SizeIs(1));
  EXPECT_EQ(plan.devices[0].device, 3U);
  ASSERT_THAT(plan.devices[0].before, SizeIs(1));
  const auto& reduce = std::get<ReduceStep>(plan.devices[0].before[0]);
  EXPECT_THAT(reduce.inputs, ElementsAre(Place{InputOf(0)}, Place{InputOf(1)}));
  EXPECT_THAT(reduce.outputs, ElementsAre(Place{OutputOf(0)}, Place{OutputOf(1)}));
  EXPECT_EQ(reduce.divisor, 2U);
}

TEST(PlanTest, OneRankPerGpuIsLeftToNccl) {
  const Plan plan = MakePlan(MakeTask(OpKind::kAllReduce, {1, 0}));
  ASSERT_THAT(plan.devices, SizeIs(2));
  EXPECT_EQ(plan.devices[0].device, 1U);
  for (uint64_t rank : {0U, 1U}) {
    const DevicePlan& device = plan.devices[rank];
    EXPECT_THAT(device.before, IsEmpty());
    EXPECT_THAT(device.after, IsEmpty());
    ASSERT_THAT(device.collectives, SizeIs(1));
    EXPECT_EQ(device.collectives[0].from, Place{InputOf(rank)});
    EXPECT_EQ(device.collectives[0].to, Place{OutputOf(rank)});
    EXPECT_EQ(device.collectives[0].count, 10U);
  }
}

TEST(PlanTest, RanksThatShareAGpuAreReducedThereFirst) {
  const Plan plan = MakePlan(MakeAverage(OpKind::kAllReduce, DType::kFloat32, 0, {0, 1, 0}));
  ASSERT_THAT(plan.devices, SizeIs(2));
  EXPECT_THAT(plan.devices[0].ranks, ElementsAre(0, 2));
  const auto& reduce = std::get<ReduceStep>(plan.devices[0].before[0]);
  EXPECT_EQ(reduce.divisor, 3U);
  EXPECT_THAT(reduce.outputs, ElementsAre(Place{OutputOf(0)}));
  for (const DevicePlan& device : plan.devices) {
    EXPECT_EQ(device.collectives[0].op, Collective::Op::kSum);
    EXPECT_EQ(device.collectives[0].from, device.collectives[0].to);
  }
  EXPECT_THAT(plan.devices[0].after, ElementsAre(Step(CopyStep{{OutputOf(0)}, {OutputOf(2)}, 40})));
}

TEST(PlanTest, AveragesByNcclAsExactlyAsItCan) {
  const auto collective = [](DType dtype, uint32_t divisor, std::vector<uint32_t> devices) {
    const Plan plan = MakePlan(MakeAverage(OpKind::kAllReduce, dtype, divisor, devices));
    EXPECT_EQ(plan.devices[0].before.empty(),
              plan.devices[0].collectives[0].op != Collective::Op::kSum);
    return plan.devices[0].collectives[0];
  };
  EXPECT_EQ(collective(DType::kFloat32, 0, {0, 1, 2}).op, Collective::Op::kAverage);
  EXPECT_EQ(collective(DType::kFloat32, 5, {0, 1, 2}).op, Collective::Op::kScaledSum);
  EXPECT_EQ(collective(DType::kFloat64, 5, {0, 1, 2}).scale, 0.2);
  EXPECT_EQ(collective(DType::kComplex64, 0, {0, 1}).count, 20U);
  EXPECT_EQ(collective(DType::kBFloat16, 0, {0, 1}).scale, 0.5);
  // A third is not a bfloat16: the kernel divides instead.
  EXPECT_EQ(collective(DType::kBFloat16, 0, {0, 1, 2}).op, Collective::Op::kSum);
}

TEST(PlanTest, BlocksThatLieInOrderAreGatheredInOneCall) {
  const Plan plan = MakePlan(MakeTask(OpKind::kAllGather, {5, 5, 2, 2}));
  ASSERT_THAT(plan.devices[1].collectives, SizeIs(1));
  const Collective& gather = plan.devices[1].collectives[0];
  EXPECT_EQ(gather.kind, Collective::Kind::kAllGather);
  EXPECT_EQ(gather.count, 80U);
  EXPECT_EQ(gather.to, Place{OutputOf(2)});
  EXPECT_EQ(gather.from, Place{OutputOf(2)} + 80);
}

TEST(PlanTest, BlocksThatDoNotAreBroadcastOneByOne) {
  const Plan plan = MakePlan(MakeTask(OpKind::kAllGather, {5, 2, 5}));
  for (const DevicePlan& device : plan.devices) {
    ASSERT_THAT(device.collectives, SizeIs(3));
    EXPECT_EQ(device.collectives[0].root, 0);
    EXPECT_EQ(device.collectives[1].root, 1);
    EXPECT_EQ(device.collectives[2].root, 0);
  }
}

TEST(PlanTest, ReduceScatterInPlaceGoesThroughScratch) {
  Task task = MakeTask(OpKind::kReduceScatter, {0, 1});
  for (size_t rank = 0; rank < 2; ++rank) task.inputs[rank] = task.outputs[rank];
  const Plan plan = MakePlan(task);
  // Where rank 0's output belongs NCCL takes it in place.
  EXPECT_EQ(plan.devices[0].scratch_bytes, 0U);
  EXPECT_EQ(plan.devices[1].scratch_bytes, 40U);
  EXPECT_EQ(plan.devices[1].collectives[0].to, (Place{0, true}));
  EXPECT_THAT(plan.devices[1].after, ElementsAre(Step(CopyStep{{0, true}, {OutputOf(1)}, 40})));
}

TEST(PlanTest, RefusesWhatNcclLacksOverSeveralGpusOnly) {
  const auto is_offered = [](DType dtype, ReduceOp op, std::vector<uint32_t> devices) {
    return CheckPlan(OpKind::kAllReduce, dtype, op, devices).ok();
  };
  EXPECT_TRUE(is_offered(DType::kComplex64, ReduceOp::kProduct, {1, 1}));
  EXPECT_FALSE(is_offered(DType::kComplex64, ReduceOp::kProduct, {1, 0}));
  EXPECT_TRUE(is_offered(DType::kBool, ReduceOp::kBitAnd, {1, 0}));
  EXPECT_FALSE(is_offered(DType::kInt32, ReduceOp::kBitAnd, {1, 0}));
  EXPECT_FALSE(is_offered(DType::kBool, ReduceOp::kBitXor, {1, 0}));
}

}  // namespace
}  // namespace gradsync::cuda
