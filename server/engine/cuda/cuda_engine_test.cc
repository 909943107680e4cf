// Who waits for whom, and what becomes of it when somebody does not come.
#include "server/engine/cuda/cuda_engine.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "server/engine/cuda/engine_fixture.h"
#include "server/engine/cuda_module.h"

namespace gradsync::cuda {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::StartsWith;

// Long enough for what would happen wrongly to happen.
constexpr milliseconds kAWhile{60};

Bytes Floats(std::initializer_list<float> values) {
  Bytes bytes(values.size() * sizeof(float));
  std::memcpy(bytes.data(), values.begin(), bytes.size());
  return bytes;
}

class CudaEngineDevicesTest : public CudaEngineTest,
                              public testing::WithParamInterface<std::vector<uint32_t>> {};

INSTANTIATE_TEST_SUITE_P(OnOneGpuAndOnTwo, CudaEngineDevicesTest,
                         testing::Values(std::vector<uint32_t>{0, 0, 0},
                                         std::vector<uint32_t>{0, 1, 0}));

TEST_F(CudaEngineTest, KnowsItsGpus) {
  const std::vector<DeviceInfo>& devices = engine().devices();
  ASSERT_EQ(devices.size(), 4U);
  EXPECT_NE(devices[0].uuid, devices[1].uuid);
  EXPECT_FALSE(devices[0].name.empty());
  EXPECT_GT(devices[0].memory_bytes, 0U);
  EXPECT_THAT(engine().Describe(), AllOf(StartsWith("CUDA driver 1"), HasSubstr(", NCCL 2.")));
}

TEST_F(CudaEngineTest, AGpuThatNobodyUsesHasNoContext) {
  const std::vector<TestRank> ranks = MakeRanks({1, 1});
  ASSERT_TRUE(Finish(ranks, MakeTask(ranks, OpKind::kAllReduce, 0, 4)).ok());
  for (const int device : {0, 1, 2, 3}) {
    unsigned flags = 0;
    int is_active = 0;
    ASSERT_EQ(driver().cuDevicePrimaryCtxGetState(device, &flags, &is_active), CUDA_SUCCESS);
    EXPECT_EQ(is_active, device == 1 ? 1 : 0) << device;
  }
}

TEST_P(CudaEngineDevicesTest, StartsOnlyAfterEveryRanksStreamHasCome) {
  const std::vector<TestRank> ranks = MakeRanks(GetParam());
  for (const TestRank& rank : ranks) Write(*rank.input, Floats({1, 2, 3, 4}));
  Answers answers;
  for (const size_t late : {0U, 1U, 2U}) {
    engine().Run(MakeTask(ranks, OpKind::kAllReduce, late, 4), seconds(20), answers.Next());
    for (size_t rank = 0; rank < ranks.size(); ++rank) {
      if (rank != late) ranks[rank].ComeTo(late);
    }
    std::this_thread::sleep_for(kAWhile);
    EXPECT_EQ(answers.count(), late);
    for (const TestRank& rank : ranks) EXPECT_EQ(rank.done(), late);
    ranks[late].ComeTo(late);
    EXPECT_TRUE(answers.Wait(late + 1)[late].ok());
    for (const TestRank& rank : ranks) {
      EXPECT_EQ(rank.done(), late + 1);
      EXPECT_EQ(Difference(DType::kFloat32, Read(*rank.output, 16).data(), Floats({3, 6, 9, 12})),
                "");
    }
  }
}

TEST_P(CudaEngineDevicesTest, BarrierWaitsForAll) {
  const std::vector<TestRank> ranks = MakeRanks(GetParam());
  Answers answers;
  engine().Run(MakeTask(ranks, OpKind::kBarrier, 0), seconds(20), answers.Next());
  ranks[0].ComeTo(0);
  ranks[2].ComeTo(0);
  std::this_thread::sleep_for(kAWhile);
  for (const TestRank& rank : ranks) EXPECT_EQ(rank.done(), 0U);
  ranks[1].ComeTo(0);
  EXPECT_TRUE(answers.Wait(1)[0].ok());
  for (const TestRank& rank : ranks) EXPECT_EQ(rank.done(), 1U);
}

// More than are launched at once, and than there are slots; each takes the sum of the one before.
TEST_P(CudaEngineDevicesTest, ManyOperationsOfAGroupAreInFlight) {
  constexpr uint64_t kOperations = 300;
  const std::vector<TestRank> ranks = MakeRanks(GetParam());
  for (const TestRank& rank : ranks) Write(*rank.output, Floats({1, 0, 0, 0}));
  Answers answers;
  const auto trainer = [&](const TestRank& rank) {
    for (uint64_t sequence = 0; sequence < kOperations; ++sequence) {
      while (sequence >= rank.done() + kFlagSlots) std::this_thread::yield();
      rank.ComeTo(sequence);
    }
  };
  std::vector<std::thread> trainers;
  for (const TestRank& rank : ranks) trainers.emplace_back(trainer, std::cref(rank));
  for (uint64_t sequence = 0; sequence < kOperations; ++sequence) {
    const auto task = MakeTask(ranks, OpKind::kAllReduce, sequence, 4);
    task->reduce_op = sequence % 2 == 0 ? ReduceOp::kSum : ReduceOp::kAvg;
    task->divisor = 9;  // so that a sum and an average together leave it as it was
    MakeInPlace(*task);
    engine().Run(task, seconds(20), answers.Next());
  }
  for (const Status& status : answers.Wait(kOperations))
    EXPECT_TRUE(status.ok()) << status.ToString();
  for (std::thread& each : trainers) each.join();
  const Bytes result = Read(*ranks[0].output, 4);
  float value = 0;
  std::memcpy(&value, result.data(), sizeof(value));
  EXPECT_NEAR(value, 1, 1e-3);
}

TEST_F(CudaEngineTest, GroupsDoNotWaitForEachOther) {
  const std::vector<TestRank> first = MakeRanks({0, 1});
  const std::vector<TestRank> second = MakeRanks({0, 1});
  Answers stuck;
  engine().Run(MakeTask(first, OpKind::kAllReduce, 0, 4, 1), seconds(20), stuck.Next());
  const auto task = MakeTask(second, OpKind::kAllReduce, 0, 4, 2);
  EXPECT_TRUE(Finish(second, task).ok());
  EXPECT_EQ(stuck.count(), 0U);
  for (const TestRank& rank : first) rank.ComeTo(0);
  EXPECT_TRUE(stuck.Wait(1)[0].ok());
}

TEST_F(CudaEngineTest, RanksThatStandAsideTakeTheirGpuWithThem) {
  const std::vector<TestRank> ranks = MakeRanks({0, 1, 2});
  for (const TestRank& rank : ranks) Write(*rank.input, Floats({3, 6}));
  ASSERT_TRUE(Finish(ranks, MakeTask(ranks, OpKind::kAllReduce, 0, 2)).ok());
  const std::vector<TestRank> present = {ranks[0], ranks[2]};
  const auto task = MakeTask(present, OpKind::kAllReduce, 1, 2);
  task->reduce_op = ReduceOp::kAvg;
  task->divisor = 3;
  ASSERT_TRUE(Finish(present, task).ok());
  for (const TestRank& rank : present) {
    EXPECT_EQ(Difference(DType::kFloat32, Read(*rank.output, 8).data(), Floats({2, 4})), "");
  }
  EXPECT_EQ(ranks[1].done(), 1U);
  ASSERT_TRUE(Finish(ranks, MakeTask(ranks, OpKind::kAllReduce, 2, 2)).ok());
}

TEST_P(CudaEngineDevicesTest, AbandonEndsWhatNobodyComesTo) {
  const std::vector<TestRank> ranks = MakeRanks(GetParam());
  Answers answers;
  for (const TestRank& rank : ranks) rank.ComeTo(0);
  for (uint64_t sequence = 0; sequence < 40; ++sequence) {
    engine().Run(MakeTask(ranks, OpKind::kAllReduce, sequence, 4), seconds(20), answers.Next());
  }
  EXPECT_TRUE(answers.Wait(1)[0].ok());
  engine().Abandon(1);
  const std::vector<Status> statuses = answers.Wait(40);
  for (size_t i = 1; i < 40; ++i) EXPECT_EQ(statuses[i].code(), Code::kFailedPrecondition) << i;
  for (const TestRank& rank : ranks) {
    EXPECT_EQ(rank.done(), kReleased);
    EXPECT_EQ(rank.page()->ready[7].load(), kReleased);
  }
  engine().Run(MakeTask(ranks, OpKind::kAllReduce, 40, 4), seconds(20), answers.Next());
  EXPECT_EQ(answers.Wait(41)[40].code(), Code::kFailedPrecondition);
}

TEST_P(CudaEngineDevicesTest, AbandonWhileTheFirstOperationIsBeingLaunched) {
  const std::vector<TestRank> ranks = MakeRanks(GetParam());
  Answers answers;
  engine().Run(MakeTask(ranks, OpKind::kAllReduce, 0, 4), seconds(20), answers.Next());
  engine().Abandon(1);
  EXPECT_FALSE(answers.Wait(1)[0].ok());
}

TEST_P(CudaEngineDevicesTest, DeadlineNamesTheRanksThatHaveNotCome) {
  const std::vector<TestRank> ranks = MakeRanks(GetParam());
  Answers answers;
  ranks[1].ComeTo(7);
  engine().Run(MakeTask(ranks, OpKind::kAllReduce, 7, 4), milliseconds(300), answers.Next());
  engine().Run(MakeTask(ranks, OpKind::kBarrier, 8), seconds(20), answers.Next());
  const std::vector<Status> statuses = answers.Wait(2);
  EXPECT_EQ(statuses[0].code(), Code::kDeadlineExceeded);
  EXPECT_EQ(statuses[0].message(),
            "the GPU streams of ranks 0 and 2 have not come to operation 7 (all_reduce of 4 "
            "float32) within 300 ms");
  EXPECT_EQ(statuses[1].message(), statuses[0].message());
}

TEST_F(CudaEngineTest, DeadlineNamesTheOneRankThatHasNotCome) {
  const std::vector<TestRank> ranks = MakeRanks({0, 1});
  Answers answers;
  ranks[0].ComeTo(0);
  engine().Run(MakeTask(ranks, OpKind::kBarrier, 0), seconds(1), answers.Next());
  EXPECT_EQ(answers.Wait(1)[0].message(),
            "rank 1's GPU stream has not come to operation 0 (barrier) within 1 s");
}

TEST_F(CudaEngineTest, AGpuThatFailsTakesItsOwnTasksOnly) {
  const std::vector<TestRank> ranks = MakeRanks({2, 3});
  const std::vector<TestRank> others = MakeRanks({2, 2});
  Answers answers;
  const auto bad = MakeTask(ranks, OpKind::kAllReduce, 0, 4);
  ASSERT_TRUE(Finish(ranks, bad).ok());
  const auto wild = MakeTask({ranks[1], ranks[1]}, OpKind::kAllReduce, 0, 4, 2);
  wild->inputs[0] = reinterpret_cast<const std::byte*>(uintptr_t{16});  // no memory of anybody's
  ranks[1].ComeTo(0);
  engine().Run(MakeTask(ranks, OpKind::kAllReduce, 1, 4), seconds(20), answers.Next());
  Answers of_wild;
  engine().Run(wild, seconds(20), of_wild.Next());
  EXPECT_THAT(of_wild.Wait(1)[0].message(),
              AllOf(StartsWith("GPU 3 ("), HasSubstr(") failed: "), HasSubstr("CUDA_ERROR_"),
                    HasSubstr("gradsyncd must be restarted")));
  EXPECT_EQ(answers.Wait(1)[0].message(), of_wild.Wait(1)[0].message());
  EXPECT_FALSE(engine().Allocate(3, 4096));
  EXPECT_FALSE(engine().CheckSupported(OpKind::kBarrier, DType::kUInt8, ReduceOp::kSum, {3}).ok());
  EXPECT_TRUE(Finish(others, MakeTask(others, OpKind::kAllReduce, 0, 4, 3)).ok());
}

TEST_F(CudaEngineTest, WithoutNcclThereIsWorkWithinAGpuOnly) {
  CudaOptions options;
  options.nccl = "libnothing.so.2";
  Start(options);
  EXPECT_THAT(engine().Describe(), HasSubstr(", no NCCL"));
  const std::vector<TestRank> here = MakeRanks({1, 1});
  EXPECT_TRUE(Finish(here, MakeTask(here, OpKind::kAllReduce, 0, 4, 1)).ok());
  const std::vector<TestRank> across = MakeRanks({0, 1});
  EXPECT_TRUE(Finish(across, MakeTask(across, OpKind::kBarrier, 0, 0, 2)).ok());
  const Status status = Finish(across, MakeTask(across, OpKind::kAllReduce, 1, 4, 2));
  EXPECT_EQ(status.code(), Code::kUnsupported);
  EXPECT_THAT(status.message(), AllOf(HasSubstr("NCCL (libnothing.so.2) could not be loaded: "),
                                      HasSubstr("install it or pass --nccl")));
  EXPECT_EQ(engine()
                .CheckSupported(OpKind::kAllGather, DType::kFloat32, ReduceOp::kSum, {0, 1})
                .message(),
            "all_gather" + status.message().substr(std::string("all_reduce").size()));
}

TEST_F(CudaEngineTest, SaysWhatItDoesNotOffer) {
  const auto check = [&](OpKind kind, DType dtype, ReduceOp op, std::vector<uint32_t> devices) {
    return engine().CheckSupported(kind, dtype, op, devices).message();
  };
  EXPECT_THAT(check(OpKind::kAllToAll, DType::kFloat32, ReduceOp::kSum, {0}),
              StartsWith("all_to_all is not offered on GPUs"));
  EXPECT_THAT(check(OpKind::kAllReduce, DType::kInt16, ReduceOp::kSum, {0, 1}),
              StartsWith("sum of int16 is not offered over several GPUs"));
  EXPECT_EQ(check(OpKind::kAllReduce, DType::kInt16, ReduceOp::kSum, {1, 1}), "");
  EXPECT_EQ(check(OpKind::kAllGather, DType::kInt16, ReduceOp::kSum, {0, 1}), "");
  EXPECT_EQ(check(OpKind::kAllReduce, DType::kFloat32, ReduceOp::kSum, {0, 9}),
            "there is no GPU 9");
  EXPECT_NE(
      check(OpKind::kAllReduce, DType::kFloat32, ReduceOp::kSum, std::vector<uint32_t>(129, 0)),
      "");
}

TEST_F(CudaEngineTest, AForgottenGroupLeavesNothingBehind) {
  const std::vector<TestRank> ranks = MakeRanks({0, 1});
  for (uint64_t group = 0; group < 20; ++group) {
    Answers answers;
    for (uint64_t sequence = 0; sequence < 3; ++sequence) {
      for (const TestRank& rank : ranks) rank.ComeTo(sequence);
      engine().Run(MakeTask(ranks, OpKind::kAllReduce, sequence, 4, group), seconds(20),
                   answers.Next());
    }
    if (group % 2 == 0) answers.Wait(3);
    engine().Forget(group);
    answers.Wait(3);
  }
}

TEST_F(CudaEngineTest, TheEndWaitsForWhatIsInTheEngine) {
  const std::vector<TestRank> ranks = MakeRanks({0, 1});
  Answers answers;
  for (uint64_t sequence = 0; sequence < 40; ++sequence) {
    engine().Run(MakeTask(ranks, OpKind::kAllReduce, sequence, 4), seconds(20), answers.Next());
  }
  std::thread late([&] {
    std::this_thread::sleep_for(kAWhile);
    for (uint64_t sequence = 0; sequence < 40; ++sequence) {
      for (const TestRank& rank : ranks) rank.ComeTo(sequence);
    }
  });
  Stop();
  EXPECT_EQ(answers.count(), 40U);
  for (const Status& status : answers.Wait(40)) EXPECT_TRUE(status.ok());
  late.join();
}

TEST_F(CudaEngineTest, TheModuleGivesAnEngine) {
  CudaOptions options = WithNccl();
  options.module = GRADSYNC_CUDA_MODULE;
  const Result<std::unique_ptr<DeviceEngine>> engine = LoadCudaEngine(options);
  ASSERT_TRUE(engine) << engine.error().ToString();
  EXPECT_EQ((*engine)->devices().size(), 4U);
  options.module = "/nowhere/gradsync_cuda.so";
  const Result<std::unique_ptr<DeviceEngine>> nothing = LoadCudaEngine(options);
  ASSERT_FALSE(nothing);
  EXPECT_EQ(nothing.error().message(), "there is no GPU module: not /nowhere/gradsync_cuda.so");
}

}  // namespace
}  // namespace gradsync::cuda
