// Collectives over memory of GPUs: every kind, with every element type, wherever the memory lies.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cstring>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "server/engine/cpu/reference_reduce.h"
#include "tests/gpu/gpu_rank.h"

namespace gradsync::testing {
namespace {

using std::chrono::milliseconds;
using ::testing::HasSubstr;

Collective Make(OpKind kind, DType dtype, uint64_t count, const void* input, void* output) {
  Collective collective;
  collective.kind = kind;
  collective.dtype = dtype;
  collective.count = count;
  collective.input = static_cast<const std::byte*>(input);
  collective.output = static_cast<std::byte*>(output);
  return collective;
}

Collective AllReduce(void* data, uint64_t count, ReduceOp op = ReduceOp::kSum,
                     DType dtype = DType::kFloat32) {
  Collective collective = Make(OpKind::kAllReduce, dtype, count, data, data);
  collective.op = op;
  return collective;
}

// value(rank, i), small enough that every sum is exact.
std::vector<float> Values(uint32_t rank, size_t count) {
  std::vector<float> values(count);
  for (size_t i = 0; i < count; ++i) values[i] = static_cast<float>(i % 1000 + rank * 7);
  return values;
}

std::vector<float> SumOfValues(uint32_t ranks, size_t count) {
  std::vector<float> sum(count, 0.0F);
  for (uint32_t rank = 0; rank < ranks; ++rank) {
    const std::vector<float> values = Values(rank, count);
    for (size_t i = 0; i < count; ++i) sum[i] += values[i];
  }
  return sum;
}

// On how many GPUs the ranks are.
class GpuCollectivesTest : public GpuTest, public ::testing::WithParamInterface<int> {
 protected:
  GpuCollectivesTest() : GpuTest(GetParam()) {}
};

INSTANTIATE_TEST_SUITE_P(Gpus, GpuCollectivesTest, ::testing::Values(1, 2));

TEST_P(GpuCollectivesTest, AllReduceSumsOrdinaryMemoryOfAnySize) {
  RunRanks(3, [](GpuRank& self) {
    for (const size_t count : {size_t{1}, size_t{257}, size_t{1} << 20}) {
      const auto memory = self.Malloc(count * sizeof(float));
      self.Write(memory.get(), Values(self.rank(), count));
      ASSERT_EQ(self.Perform(AllReduce(memory.get(), count)).ToString(), "OK");
      EXPECT_EQ(self.Read<float>(memory.get(), count), SumOfValues(3, count));
    }
  });
}

TEST_P(GpuCollectivesTest, WhatIsLargerThanTheStagingGoesInPieces) {
  RunRanks(2, [](GpuRank& self) {
    const size_t count = (80 << 20) / sizeof(float) + 13;
    const auto memory = self.Malloc(count * sizeof(float));
    self.Write(memory.get(), Values(self.rank(), count));
    ASSERT_EQ(self.Perform(AllReduce(memory.get(), count)).ToString(), "OK");
    EXPECT_EQ(self.Read<float>(memory.get(), count), SumOfValues(2, count));
  });
}

TEST_P(GpuCollectivesTest, ABufferIsUsedInPlace) {
  RunRanks(2, [](GpuRank& self) {
    const size_t count = 100000;
    const auto buffer = self.session()->Allocate(count * sizeof(float), "test", self.device());
    ASSERT_TRUE(buffer) << buffer.error().ToString();
    EXPECT_EQ((*buffer)->device(), self.device());
    self.Write((*buffer)->data(), Values(self.rank(), count));
    ASSERT_EQ(self.Perform(AllReduce((*buffer)->data(), count)).ToString(), "OK");
    EXPECT_EQ(self.Read<float>((*buffer)->data(), count), SumOfValues(2, count));
  });
}

TEST_P(GpuCollectivesTest, RegisteredMemoryIsUsedWhereItLiesUntilItIsFreed) {
  RunRanks(2, [](GpuRank& self) {
    const size_t count = 100000;
    for (int round = 0; round < 3; ++round) {
      auto memory = self.Malloc(count * sizeof(float));
      ASSERT_EQ(self.session()->Register(self.device(), memory.get(), 4096).ToString(), "OK");
      self.Write(memory.get(), Values(self.rank(), count));
      ASSERT_EQ(self.Perform(AllReduce(memory.get(), count)).ToString(), "OK");
      EXPECT_EQ(self.Read<float>(memory.get(), count), SumOfValues(2, count));
      // Freed at once: the daemon has closed it when this returns.
      ASSERT_EQ(self.session()->Unregister(memory.get()).ToString(), "OK");
    }
    const auto memory = self.Malloc(64);
    EXPECT_EQ(self.session()->Unregister(memory.get()).code(), Code::kInvalidArgument);
  });
}

TEST_P(GpuCollectivesTest, BroadcastAndShare) {
  RunRanks(3, [](GpuRank& self) {
    const size_t count = 5000;
    const auto memory = self.Malloc(count * sizeof(float));
    for (uint32_t root = 0; root < 3; ++root) {
      self.Write(memory.get(), Values(self.rank(), count));
      Collective broadcast = Make(OpKind::kBroadcast, DType::kFloat32, count, nullptr, nullptr);
      broadcast.root = root;
      broadcast.input = root == self.rank() ? memory.get() : nullptr;
      broadcast.output = root == self.rank() ? nullptr : memory.get();
      ASSERT_EQ(self.Perform(broadcast).ToString(), "OK");
      EXPECT_EQ(self.Read<float>(memory.get(), count), Values(root, count));
    }
    self.Write(memory.get(), Values(self.rank(), count));
    ASSERT_EQ(self.Perform(Make(OpKind::kShare, DType::kFloat32, count, memory.get(), memory.get()))
                  .ToString(),
              "OK");
    EXPECT_EQ(self.Read<float>(memory.get(), count), Values(2, count));
  });
}

TEST_P(GpuCollectivesTest, AllGatherAndReduceScatter) {
  RunRanks(3, [](GpuRank& self) {
    const size_t count = 3001;
    const auto input = self.Malloc(count * sizeof(float));
    const auto output = self.Malloc(3 * count * sizeof(float));
    self.Write(input.get(), Values(self.rank(), count));
    ASSERT_EQ(
        self.Perform(Make(OpKind::kAllGather, DType::kFloat32, count, input.get(), output.get()))
            .ToString(),
        "OK");
    std::vector<float> expected;
    for (uint32_t rank = 0; rank < 3; ++rank) {
      const std::vector<float> block = Values(rank, count);
      expected.insert(expected.end(), block.begin(), block.end());
    }
    EXPECT_EQ(self.Read<float>(output.get(), 3 * count), expected);
    // Every rank has gathered the same, so that rank r gets three times block r.
    ASSERT_EQ(self.Perform(Make(OpKind::kReduceScatter, DType::kFloat32, count, output.get(),
                                input.get()))
                  .ToString(),
              "OK");
    std::vector<float> own = Values(self.rank(), count);
    for (float& value : own) value *= 3;
    EXPECT_EQ(self.Read<float>(input.get(), count), own);
  });
}

TEST_P(GpuCollectivesTest, ABarrierEndsWhenEveryRankHasComeToIt) {
  RunRanks(3, [](GpuRank& self) {
    for (int i = 0; i < 5; ++i) ASSERT_EQ(self.Perform({}).ToString(), "OK");
    Collective nothing = AllReduce(nullptr, 0);
    ASSERT_EQ(self.Perform(nothing).ToString(), "OK");
  });
}

TEST_P(GpuCollectivesTest, ManyInFlightComeOutInOrder) {
  RunRanks(2, [](GpuRank& self) {
    const size_t count = 1000;
    const auto buffer = self.session()->Allocate(count * sizeof(float), "test", self.device());
    ASSERT_TRUE(buffer);
    self.Write((*buffer)->data(), std::vector<float>(count, 1.0F));
    std::vector<std::unique_ptr<DeviceWork>> works;
    // More than the flag page has slots; each doubles what the one before has left, up to where
    // float32 is exact, and then halves it again.
    for (int i = 0; i < 600; ++i) {
      auto work = self.group()->Enqueue(
          AllReduce((*buffer)->data(), count, i % 2 == 0 ? ReduceOp::kSum : ReduceOp::kMax),
          self.device(), self.stream(), Timeout(0));
      ASSERT_TRUE(work) << work.error().ToString();
      works.push_back(*std::move(work));
      if (i % 2 == 0) continue;
      auto half = self.group()->Enqueue(AllReduce((*buffer)->data(), count, ReduceOp::kAvg),
                                        self.device(), self.stream(), Timeout(0));
      ASSERT_TRUE(half);
      if (i == 39) break;
    }
    for (const auto& work : works) ASSERT_EQ(work->Synchronize().ToString(), "OK");
    ASSERT_EQ(self.Perform({}).ToString(), "OK");
    EXPECT_EQ(self.Read<float>((*buffer)->data(), count),
              std::vector<float>(count, static_cast<float>(1 << 20)));
    // And more than there are slots.
    for (int i = 0; i < 600; ++i) {
      auto work = self.group()->Enqueue(AllReduce((*buffer)->data(), count, ReduceOp::kMax),
                                        self.device(), self.stream(), Timeout(0));
      ASSERT_TRUE(work) << work.error().ToString();
    }
    ASSERT_EQ(self.Perform({}).ToString(), "OK");
    EXPECT_EQ(self.Read<float>((*buffer)->data(), count),
              std::vector<float>(count, static_cast<float>(1 << 20)));
  });
}

TEST_P(GpuCollectivesTest, ResultsAreOrderedBehindWhatTheStreamDoes) {
  RunRanks(2, [](GpuRank& self) {
    const size_t count = 1 << 20;
    const auto memory = self.Malloc(count * sizeof(float));
    const auto result = self.Malloc(count * sizeof(float));
    const CUstream other = self.MakeStream();
    std::vector<float> values = Values(self.rank(), count);
    // Nothing here waits on the host: written, summed, copied by another stream.
    ASSERT_EQ(self.cuda().cuMemcpyHtoDAsync(reinterpret_cast<CUdeviceptr>(memory.get()),
                                            values.data(), count * sizeof(float), self.stream()),
              CUDA_SUCCESS);
    auto work =
        self.group()->Enqueue(AllReduce(memory.get(), count), self.device(), self.stream(), {});
    ASSERT_TRUE(work);
    ASSERT_EQ((*work)->Wait(other).ToString(), "OK");
    ASSERT_EQ(self.cuda().cuMemcpyDtoDAsync(reinterpret_cast<CUdeviceptr>(result.get()),
                                            reinterpret_cast<CUdeviceptr>(memory.get()),
                                            count * sizeof(float), other),
              CUDA_SUCCESS);
    ASSERT_EQ(self.cuda().cuStreamSynchronize(other), CUDA_SUCCESS);
    const Result<bool> done = (*work)->IsDone();
    ASSERT_TRUE(done) << done.error().ToString();
    EXPECT_TRUE(*done);
    EXPECT_EQ(self.Read<float>(result.get(), count), SumOfValues(2, count));
    ASSERT_EQ(self.cuda().cuStreamDestroy(other), CUDA_SUCCESS);
  });
}

// The same bits as on the processor, where the ranks share a GPU.
TEST_F(GpuTest, EveryTypeAndReductionIsTheProcessorsOnOneGpu) {
  RunRanks(3, [](GpuRank& self) {
    const size_t count = 777;
    for (uint8_t type = 0; type < kDTypeCount; ++type) {
      for (uint8_t number = 0; number < kReduceOpCount; ++number) {
        const auto dtype = DType{type};
        const auto op = ReduceOp{number};
        if (!IsSupported(dtype, op) || number >= static_cast<uint8_t>(ReduceOp::kBitAnd)) continue;
        SCOPED_TRACE(std::string(DTypeName(dtype)) + " " + ReduceOpName(op));
        const size_t bytes = count * DTypeSize(dtype);
        std::vector<Bytes> inputs;
        for (uint32_t rank = 0; rank < 3; ++rank) {
          inputs.push_back(RandomElements(dtype, count, rank * 1000 + type * 16 + number));
        }
        const auto memory = self.Malloc(bytes);
        self.Write(memory.get(), inputs[self.rank()]);
        ASSERT_EQ(self.Perform(AllReduce(memory.get(), count, op, dtype)).ToString(), "OK");
        const Bytes result = self.Read<std::byte>(memory.get(), bytes);
        EXPECT_EQ(Difference(dtype, result.data(), ReferenceReduce(dtype, op, inputs)), "");
      }
    }
  });
}

TEST_F(GpuTest, RanksThatDisagreeAreToldWhereTheirMemoryIs) {
  RunRanks(2, [](GpuRank& self) {
    Status status;
    if (self.rank() == 0) {
      std::vector<float> host(100);
      status = self.group()->AllReduce(host.data(), 100, DType::kFloat32, ReduceOp::kSum, {});
    } else {
      const auto memory = self.Malloc(400);
      status = self.Perform(AllReduce(memory.get(), 100));
    }
    EXPECT_EQ(status.code(), Code::kMismatch);
    EXPECT_THAT(status.message(), HasSubstr("on GPUs; they differ in device"));
  });
}

TEST_F(GpuTest, ARankThatNeverComesIsNamedAtTheDeadline) {
  RunRanks(2, [](GpuRank& self) {
    if (self.rank() == 1) {
      std::this_thread::sleep_for(milliseconds(600));
      EXPECT_EQ(self.group()->Barrier({}).code(), Code::kDeadlineExceeded);
      return;
    }
    const auto memory = self.Malloc(400);
    const Status status = self.Perform(AllReduce(memory.get(), 100), milliseconds(300));
    EXPECT_EQ(status.code(), Code::kDeadlineExceeded);
    EXPECT_THAT(status.message(), HasSubstr("waiting for rank 1"));
  });
}

TEST_F(GpuTest, AnotherGpuOrAnUnknownOneIsRefused) {
  RunRanks(1, [](GpuRank& self) {
    EXPECT_EQ(self.session()->Allocate(100, "x", self.device() + 1).error().code(),
              Code::kInvalidArgument);
    EXPECT_EQ(self.group()->Enqueue({}, self.device() + 7, self.stream(), {}).error().code(),
              Code::kInvalidArgument);
  });
}

}  // namespace
}  // namespace gradsync::testing
