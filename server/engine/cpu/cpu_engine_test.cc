#include "server/engine/cpu/cpu_engine.h"

#include <gtest/gtest.h>

#include <cstring>
#include <latch>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "server/engine/cpu/reference_reduce.h"

namespace gradsync {
namespace {

std::unique_ptr<CpuEngine> MakeEngine(int threads = 2) {
  CpuEngineOptions options;
  options.threads = threads;
  Result<std::unique_ptr<CpuEngine>> engine = CpuEngine::Create(options);
  EXPECT_TRUE(engine.has_value()) << engine.error().ToString();
  return std::move(*engine);
}

// A task and the memory that it is over.
struct Job {
  Job(OpKind kind, DType dtype, ReduceOp op, size_t ranks, uint64_t count, bool in_place,
      uint64_t seed = 1) {
    task->kind = kind;
    task->dtype = dtype;
    task->reduce_op = op;
    task->count = count;
    const size_t bytes = count * DTypeSize(dtype);
    const size_t output_bytes = kind == OpKind::kAllGather ? ranks * bytes : bytes;
    for (size_t rank = 0; rank < ranks; ++rank) {
      before.push_back(RandomElements(dtype, count, seed + rank));
      inputs.push_back(before.back());
      if (in_place) inputs.back().resize(output_bytes);
      outputs.emplace_back(in_place ? 0 : output_bytes, std::byte{0x77});
    }
    for (size_t rank = 0; rank < ranks; ++rank) {
      task->inputs.push_back(inputs[rank].data());
      task->outputs.push_back(in_place ? inputs[rank].data() : outputs[rank].data());
    }
  }

  // Runs the task to its end. True if that was on this thread.
  bool Run(CpuEngine& engine) const {
    std::latch done(1);
    const std::thread::id caller = std::this_thread::get_id();
    if (engine.Run(task, [&] {
          EXPECT_NE(std::this_thread::get_id(), caller);
          done.count_down();
        })) {
      return true;
    }
    done.wait();
    return false;
  }

  void ExpectEveryOutput(const Bytes& expected) const {
    for (const std::byte* output : task->outputs) {
      EXPECT_EQ(Difference(task->dtype, output, expected), "");
    }
  }
  void ExpectReduced() const {
    ExpectEveryOutput(ReferenceReduce(task->dtype, task->reduce_op, before));
  }

  std::vector<Bytes> before;
  std::vector<Bytes> inputs;
  std::vector<Bytes> outputs;
  std::shared_ptr<Task> task = std::make_shared<Task>();
};

constexpr uint64_t kSmall = 777;
constexpr uint64_t kLarge = 300'001;

TEST(CpuEngineTest, ReducesEveryTypeInPlaceAndOutOfPlaceInlineAndInThePool) {
  const auto engine = MakeEngine();
  for (uint8_t d = 0; d < kDTypeCount; ++d) {
    for (uint8_t o = 0; o < kReduceOpCount; ++o) {
      const auto dtype = static_cast<DType>(d);
      const auto op = static_cast<ReduceOp>(o);
      if (!IsSupported(dtype, op)) continue;
      for (const bool in_place : {false, true}) {
        for (const uint64_t count : {kSmall, uint64_t{70'001}}) {
          const Job job(OpKind::kAllReduce, dtype, op, 3, count, in_place);
          EXPECT_EQ(job.Run(*engine), count == kSmall || DTypeSize(dtype) == 0 ||
                                          6 * count * DTypeSize(dtype) <= 256 * 1024);
          job.ExpectReduced();
        }
      }
    }
  }
}

TEST(CpuEngineTest, ReducesAnyNumberOfRanks) {
  const auto engine = MakeEngine(3);
  for (size_t ranks = 1; ranks <= 9; ++ranks) {
    for (const bool in_place : {false, true}) {
      const Job job(OpKind::kBucketReduce, DType::kFloat32, ReduceOp::kAvg, ranks, kLarge,
                    in_place);
      EXPECT_FALSE(job.Run(*engine));
      job.ExpectReduced();
    }
  }
}

TEST(CpuEngineTest, ReducesWhereOnlySomeRanksAreInPlace) {
  const auto engine = MakeEngine();
  for (const uint64_t count : {kSmall, kLarge}) {
    Job job(OpKind::kAllReduce, DType::kFloat32, ReduceOp::kSum, 3, count, false);
    job.task->outputs[1] = job.inputs[1].data();
    job.Run(*engine);
    job.ExpectReduced();
    EXPECT_EQ(job.inputs[0], job.before[0]);
    EXPECT_EQ(job.inputs[2], job.before[2]);
  }
}

TEST(CpuEngineTest, OutOfPlaceLeavesInputsAlone) {
  const auto engine = MakeEngine();
  const Job job(OpKind::kAllReduce, DType::kFloat64, ReduceOp::kAvg, 2, kLarge, false);
  job.Run(*engine);
  EXPECT_EQ(job.inputs, job.before);
}

TEST(CpuEngineTest, BroadcastCopiesTheRootsInput) {
  const auto engine = MakeEngine();
  for (const uint64_t count : {kSmall, kLarge}) {
    for (const bool in_place : {false, true}) {
      Job job(OpKind::kBroadcast, DType::kInt32, ReduceOp::kSum, 3, count, in_place);
      job.task->root = 2;
      EXPECT_EQ(job.Run(*engine), count == kSmall);
      job.ExpectEveryOutput(job.before[2]);
    }
  }
}

TEST(CpuEngineTest, AllGatherPutsEveryInputIntoItsPlace) {
  const auto engine = MakeEngine();
  for (const uint64_t count : {kSmall, kLarge}) {
    for (const bool in_place : {false, true}) {
      const Job job(OpKind::kAllGather, DType::kUInt8, ReduceOp::kSum, 3, count, in_place);
      EXPECT_EQ(job.Run(*engine), count == kSmall);
      Bytes expected;
      for (const Bytes& input : job.before) {
        expected.insert(expected.end(), input.begin(), input.end());
      }
      job.ExpectEveryOutput(expected);
    }
  }
}

TEST(CpuEngineTest, ReduceStoresTheResultOnTheRootAlone) {
  const auto engine = MakeEngine();
  for (const uint64_t count : {kSmall, kLarge}) {
    for (const bool in_place : {false, true}) {
      Job job(OpKind::kReduce, DType::kFloat32, ReduceOp::kAvg, 3, count, false);
      job.task->root = 1;
      job.task->outputs = {nullptr, job.outputs[1].data(), nullptr};
      if (in_place) job.task->outputs[1] = job.inputs[1].data();
      EXPECT_EQ(job.Run(*engine), count == kSmall);
      const Bytes expected = ReferenceReduce(DType::kFloat32, ReduceOp::kAvg, job.before);
      EXPECT_EQ(Difference(DType::kFloat32, job.task->outputs[1], expected), "");
      EXPECT_EQ(job.inputs[0], job.before[0]);
      EXPECT_EQ(job.inputs[2], job.before[2]);
    }
  }
}

// A task of a kind that has a block for each rank on some side; rank 1 is the root.
struct BlockJob : Job {
  BlockJob(OpKind kind, size_t ranks, uint64_t count)
      : Job(kind, DType::kInt32, ReduceOp::kSum, ranks, ranks * count, false), bytes(count * 4) {
    task->count = count;
    task->root = 1;
    for (size_t rank = 0; rank < ranks; ++rank) {
      outputs[rank].assign(ranks * bytes, std::byte{0x77});
      task->outputs[rank] = outputs[rank].data();
    }
  }

  Bytes InputBlock(size_t rank, size_t block) const {
    const auto begin = before[rank].begin() + static_cast<std::ptrdiff_t>(block * bytes);
    return {begin, begin + static_cast<std::ptrdiff_t>(bytes)};
  }
  std::string OutputDiffers(size_t rank, size_t block, const Bytes& expected) const {
    return Difference(DType::kInt32, outputs[rank].data() + block * bytes, expected);
  }

  uint64_t bytes;
};

TEST(CpuEngineTest, GatherScatterReduceScatterAndAllToAllMoveBlocks) {
  const auto engine = MakeEngine();
  constexpr size_t kRanks = 3;
  for (const uint64_t count : {kSmall, kLarge}) {
    const BlockJob gather(OpKind::kGather, kRanks, count);
    const BlockJob scatter(OpKind::kScatter, kRanks, count);
    const BlockJob reduce_scatter(OpKind::kReduceScatter, kRanks, count);
    const BlockJob all_to_all(OpKind::kAllToAll, kRanks, count);
    for (const BlockJob* one : {&gather, &scatter, &reduce_scatter, &all_to_all}) {
      EXPECT_EQ(one->Run(*engine), count == kSmall);
      EXPECT_EQ(one->inputs, one->before);
    }
    for (size_t rank = 0; rank < kRanks; ++rank) {
      EXPECT_EQ(gather.OutputDiffers(1, rank, gather.InputBlock(rank, 0)), "");
      EXPECT_EQ(scatter.OutputDiffers(rank, 0, scatter.InputBlock(1, rank)), "");
      std::vector<Bytes> blocks;
      for (size_t other = 0; other < kRanks; ++other) {
        blocks.push_back(reduce_scatter.InputBlock(other, rank));
        EXPECT_EQ(all_to_all.OutputDiffers(rank, other, all_to_all.InputBlock(other, rank)), "");
      }
      const Bytes sum = ReferenceReduce(DType::kInt32, ReduceOp::kSum, blocks);
      EXPECT_EQ(reduce_scatter.OutputDiffers(rank, 0, sum), "");
    }
    EXPECT_EQ(gather.outputs[0], Bytes(kRanks * count * 4, std::byte{0x77}));
  }
}

TEST(CpuEngineTest, ShareCopiesTheLastRanksBlockAlsoInPlace) {
  const auto engine = MakeEngine();
  for (const uint64_t count : {kSmall, kLarge}) {
    for (const bool in_place : {false, true}) {
      const Job job(OpKind::kShare, DType::kInt32, ReduceOp::kSum, 3, count, in_place, 5);
      job.Run(*engine);
      job.ExpectEveryOutput(job.before.back());
    }
  }
}

TEST(CpuEngineTest, BarrierAndEmptyTasksAreDoneAtOnce) {
  const auto engine = MakeEngine();
  EXPECT_TRUE(Job(OpKind::kBarrier, DType::kFloat32, ReduceOp::kSum, 3, 0, false).Run(*engine));
  for (const OpKind kind : {OpKind::kAllReduce, OpKind::kBroadcast, OpKind::kAllGather}) {
    EXPECT_TRUE(Job(kind, DType::kFloat32, ReduceOp::kSum, 3, 0, true).Run(*engine));
  }
}

TEST(CpuEngineTest, MoreTasksThanJournalRecordsAllFinish) {
  std::vector<std::unique_ptr<Job>> jobs;
  for (uint64_t i = 0; i < 3 * kJournalRecords; ++i) {
    jobs.push_back(std::make_unique<Job>(OpKind::kBucketReduce, DType::kFloat32, ReduceOp::kAvg, 2,
                                         20'000 + i, true, i));
  }
  std::latch done(static_cast<std::ptrdiff_t>(jobs.size()));
  const auto engine = MakeEngine();
  for (const auto& job : jobs) {
    EXPECT_FALSE(engine->Run(job->task, [&] { done.count_down(); }));
  }
  done.wait();
  for (const auto& job : jobs) job->ExpectReduced();
}

TEST(CpuEngineTest, DestructorFinishesEveryTask) {
  std::vector<std::unique_ptr<Job>> jobs;
  for (uint64_t i = 0; i < kJournalRecords + 9; ++i) {
    jobs.push_back(std::make_unique<Job>(OpKind::kBucketReduce, DType::kFloat32, ReduceOp::kAvg, 2,
                                         20'000, true, i));
  }
  std::atomic<size_t> done{0};
  auto engine = MakeEngine();
  for (const auto& job : jobs) engine->Run(job->task, [&] { ++done; });
  engine.reset();
  EXPECT_EQ(done, jobs.size());
  for (const auto& job : jobs) job->ExpectReduced();
}

TEST(CpuEngineTest, KeepsATasksMemoryUntilItIsDone) {
  const auto engine = MakeEngine();
  auto token = std::make_shared<int>(0);
  const std::weak_ptr<int> watch = token;
  Job job(OpKind::kBucketReduce, DType::kFloat32, ReduceOp::kSum, 2, kLarge, true);
  job.task->keep_alive.push_back(std::move(token));
  std::latch done(1);
  engine->Run(std::exchange(job.task, nullptr), [&] {
    EXPECT_FALSE(watch.expired());
    done.count_down();
  });
  done.wait();
}

TEST(CpuEngineTest, RefusesAJournalThatIsTooSmall) {
  std::vector<std::byte> memory(4096);
  CpuEngineOptions options;
  options.threads = 2;
  options.journal = memory;
  const auto engine = CpuEngine::Create(options);
  ASSERT_FALSE(engine.has_value());
  EXPECT_EQ(engine.error().code(), Code::kInvalidArgument);
}

TEST(CpuEngineTest, DefaultThreadsAreTheCoresUpToSixteen) {
  CpuEngineOptions options;
  const auto engine = CpuEngine::Create(options);
  ASSERT_TRUE(engine.has_value());
  EXPECT_EQ((*engine)->threads(), CpuEngine::DefaultThreads());
  EXPECT_GE((*engine)->threads(), 1);
  EXPECT_LE((*engine)->threads(), 16);
}

}  // namespace
}  // namespace gradsync
