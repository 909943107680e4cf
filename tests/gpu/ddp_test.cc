// The DDP core on GPUs: what it promises on the processor, and that it waits for no GPU.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <atomic>
#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include "tests/gpu/gpu_model.h"
#include "tests/gpu/gpu_rank.h"

namespace gradsync::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

const std::vector<int64_t> kSizes = {1000, 1, 4096, 333, 20000, 7, 128, 50000};

// Several buckets.
DdpOptions SmallBuckets() {
  DdpOptions options;
  options.bucket_bytes = 64 * 1024;
  options.first_bucket_bytes = 4 * 1024;
  return options;
}

class GpuDdpTest : public GpuTest, public ::testing::WithParamInterface<int> {
 protected:
  GpuDdpTest() : GpuTest(GetParam()) {}
};

INSTANTIATE_TEST_SUITE_P(Gpus, GpuDdpTest, ::testing::Values(1, 2));

TEST_P(GpuDdpTest, EveryGradientIsAveragedWhateverTheOrderOfReadiness) {
  RunRanks(2, [](GpuRank& self) {
    GpuModel model(&self, kSizes);
    ASSERT_EQ(model.CreateDdp(SmallBuckets()).ToString(), "OK");
    EXPECT_GT(model.ddp().bucket_count(), 2u);
    EXPECT_EQ(model.ddp().buffer()->device(), self.device());
    for (uint32_t iteration = 0; iteration < 6; ++iteration) {
      ASSERT_EQ(model.Iterate(iteration).ToString(), "OK");
      EXPECT_EQ(model.Differences(2, iteration), "");
    }
  });
}

TEST_P(GpuDdpTest, FourRanksShareWhatGpusThereAre) {
  RunRanks(4, [](GpuRank& self) {
    GpuModel model(&self, kSizes);
    ASSERT_EQ(model.CreateDdp(SmallBuckets()).ToString(), "OK");
    for (uint32_t iteration = 0; iteration < 3; ++iteration) {
      ASSERT_EQ(model.Iterate(iteration).ToString(), "OK");
      EXPECT_EQ(model.Differences(4, iteration), "");
    }
  });
}

// A word that a stream waits for, and the processor writes.
class Gate {
 public:
  explicit Gate(GpuRank* rank) : rank_(rank) {
    memory_ = mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    EXPECT_EQ(rank->cuda().cuMemHostRegister(memory_, 4096, CU_MEMHOSTREGISTER_DEVICEMAP),
              CUDA_SUCCESS);
    EXPECT_EQ(
        rank->cuda().cuStreamWaitValue64(rank->stream(), reinterpret_cast<CUdeviceptr>(memory_), 1,
                                         CU_STREAM_WAIT_VALUE_GEQ),
        CUDA_SUCCESS);
  }
  Gate(const Gate&) = delete;
  Gate& operator=(const Gate&) = delete;
  ~Gate() {
    Open();
    EXPECT_EQ(rank_->cuda().cuStreamSynchronize(rank_->stream()), CUDA_SUCCESS);
    EXPECT_EQ(rank_->cuda().cuMemHostUnregister(memory_), CUDA_SUCCESS);
    munmap(memory_, 4096);
  }
  void Open() { static_cast<std::atomic<uint64_t>*>(memory_)->store(1); }

 private:
  GpuRank* const rank_;
  void* memory_ = nullptr;
};

TEST_P(GpuDdpTest, NoCallOfAnIterationWaitsForTheGpu) {
  RunRanks(2, [](GpuRank& self) {
    GpuModel model(&self, kSizes);
    ASSERT_EQ(model.CreateDdp(SmallBuckets()).ToString(), "OK");
    {
      Gate gate(&self);
      // All of it is enqueued while no GPU has begun: a round trip through a processor would hang.
      for (uint32_t iteration = 0; iteration < 5; ++iteration) {
        ASSERT_EQ(model.Iterate(iteration).ToString(), "OK");
      }
      EXPECT_EQ(self.cuda().cuStreamQuery(self.stream()), CUDA_ERROR_NOT_READY);
    }
    EXPECT_EQ(model.Differences(2, 4), "");
  });
}

TEST_P(GpuDdpTest, ALateStreamHoldsUpItsOwnBucketsOnly) {
  RunRanks(2, [](GpuRank& self) {
    GpuModel model(&self, kSizes);
    ASSERT_EQ(model.CreateDdp(SmallBuckets()).ToString(), "OK");
    Gate gate(&self);
    ASSERT_EQ(model.Iterate(0).ToString(), "OK");
    // Another group of the same ranks goes on meanwhile.
    auto other = DaemonGroup::Create(self.session(), "other", {}, {});
    ASSERT_TRUE(other);
    const CUstream stream = self.MakeStream();
    const auto memory = self.Malloc(4000);
    Collective collective;
    collective.kind = OpKind::kAllReduce;
    collective.count = 1000;
    collective.input = memory.get();
    collective.output = memory.get();
    auto work = (*other)->Enqueue(collective, self.device(), stream, {});
    ASSERT_TRUE(work) << work.error().ToString();
    EXPECT_EQ((*work)->Synchronize().ToString(), "OK");
    gate.Open();
    EXPECT_EQ(model.Differences(2, 0), "");
    work->reset();
    other->reset();
    ASSERT_EQ(self.cuda().cuStreamDestroy(stream), CUDA_SUCCESS);
  });
}

TEST_P(GpuDdpTest, TheReplannedSlotsKeepTheirGradients) {
  RunRanks(2, [](GpuRank& self) {
    GpuModel model(&self, kSizes);
    ASSERT_EQ(model.CreateDdp(SmallBuckets()).ToString(), "OK");
    // Ready from the first on: the plan is made anew in that order.
    ASSERT_EQ(model.ddp().Begin().ToString(), "OK");
    for (uint32_t parameter = 0; parameter < model.parameter_count(); ++parameter) {
      ASSERT_EQ(model.Make(0, parameter).ToString(), "OK");
      ASSERT_TRUE(model.ddp().Ready(parameter));
    }
    for (uint32_t bucket = 0; bucket < model.ddp().bucket_count(); ++bucket) {
      ASSERT_EQ(model.ddp().Wait(bucket).ToString(), "OK");
    }
    ASSERT_EQ(model.ddp().End().ToString(), "OK");
    const auto before = model.ddp().buffer();
    const Result<bool> moved = model.ddp().Replan();
    ASSERT_TRUE(moved) << moved.error().ToString();
    EXPECT_TRUE(*moved);
    EXPECT_NE(model.ddp().buffer(), before);
    EXPECT_EQ(model.Differences(2, 0), "");
    ASSERT_EQ(model.Iterate(1).ToString(), "OK");
    EXPECT_EQ(model.Differences(2, 1), "");
  });
}

TEST_P(GpuDdpTest, OtherMemoryMayBeTakenBetweenIterations) {
  RunRanks(2, [](GpuRank& self) {
    GpuModel model(&self, kSizes);
    ASSERT_EQ(model.CreateDdp(SmallBuckets()).ToString(), "OK");
    for (uint32_t iteration = 0; iteration < 4; ++iteration) {
      const auto kept = model.ddp().buffer();
      if (self.rank() == 0) {
        ASSERT_EQ(model.ddp().Renew().ToString(), "OK");
        EXPECT_EQ(model.Slot(0), std::vector<float>(1000, 0.0F));
      }
      ASSERT_EQ(model.Iterate(iteration).ToString(), "OK");
      EXPECT_EQ(model.Differences(2, iteration), "");
    }
  });
}

TEST_P(GpuDdpTest, UnusedParametersAreFound) {
  RunRanks(2, [](GpuRank& self) {
    GpuModel model(&self, kSizes);
    ASSERT_EQ(model.CreateDdp(SmallBuckets()).ToString(), "OK");
    ASSERT_EQ(model.ddp().SetUnusedPolicy(UnusedPolicy::kFind).ToString(), "OK");
    for (uint32_t iteration = 0; iteration < 3; ++iteration) {
      ASSERT_EQ(model.ddp().Begin().ToString(), "OK");
      for (uint32_t parameter = 0; parameter < model.parameter_count(); ++parameter) {
        const bool used = parameter != 2 && (parameter != 3 || self.rank() == 1);
        if (used) {
          ASSERT_EQ(model.Make(iteration, parameter).ToString(), "OK");
        }
        ASSERT_TRUE(used ? model.ddp().Ready(parameter) : model.ddp().ReadyUnused(parameter));
      }
      for (uint32_t bucket = 0; bucket < model.ddp().bucket_count(); ++bucket) {
        ASSERT_EQ(model.ddp().Wait(bucket).ToString(), "OK");
      }
      ASSERT_EQ(model.ddp().End().ToString(), "OK");
      EXPECT_EQ(model.ddp().UsedBy(0), 2u);
      EXPECT_EQ(model.ddp().UsedBy(2), 0u);
      EXPECT_EQ(model.ddp().UsedBy(3), 1u);
      EXPECT_EQ(model.Slot(0), model.Average(2, iteration, 0));
    }
  });
}

TEST_P(GpuDdpTest, ASkippedBucketIsLeftAlone) {
  RunRanks(2, [](GpuRank& self) {
    GpuModel model(&self, kSizes);
    DdpOptions options = SmallBuckets();
    options.fixed_plan = true;
    ASSERT_EQ(model.CreateDdp(options).ToString(), "OK");
    ASSERT_EQ(model.ddp().Begin().ToString(), "OK");
    ASSERT_EQ(model.ddp().Skip(1).ToString(), "OK");
    for (uint32_t parameter = 0; parameter < model.parameter_count(); ++parameter) {
      ASSERT_EQ(model.Make(0, parameter).ToString(), "OK");
      ASSERT_TRUE(model.ddp().Ready(parameter));
    }
    for (uint32_t bucket = 0; bucket < model.ddp().bucket_count(); ++bucket) {
      ASSERT_EQ(model.ddp().Wait(bucket).ToString(), "OK");
    }
    ASSERT_EQ(model.ddp().End().ToString(), "OK");
    for (uint32_t parameter = 0; parameter < model.parameter_count(); ++parameter) {
      const bool skipped = model.ddp().GetSlot(parameter)->bucket == 1;
      EXPECT_EQ(model.Slot(parameter), skipped ? model.Gradient(self.rank(), 0, parameter)
                                               : model.Average(2, 0, parameter));
    }
  });
}

TEST_P(GpuDdpTest, ARankThatRanOutOfInputStandsAside) {
  RunRanks(3, [](GpuRank& self) {
    GpuModel model(&self, kSizes);
    ASSERT_EQ(model.CreateDdp(SmallBuckets()).ToString(), "OK");
    // Rank 2 has one iteration, rank 1 two, rank 0 three.
    for (uint32_t iteration = 0; iteration < 3 - self.rank(); ++iteration) {
      ASSERT_EQ(model.Iterate(iteration).ToString(), "OK");
      EXPECT_EQ(model.Differences(3 - iteration, iteration, 3), "") << "iteration " << iteration;
    }
    ASSERT_EQ(model.ddp().StandAside(AsidePolicy::kAverageOverAll).ToString(), "OK");
    const Result<uint32_t> last = self.group()->Rejoin();
    ASSERT_TRUE(last) << last.error().ToString();
    EXPECT_EQ(*last, 0u);
    ASSERT_EQ(model.Iterate(3).ToString(), "OK");
    EXPECT_EQ(model.Differences(3, 3), "");
  });
}

TEST_P(GpuDdpTest, AnUnfinishedIterationIsToldToEveryRank) {
  RunRanks(2, [](GpuRank& self) {
    GpuModel model(&self, kSizes);
    ASSERT_EQ(model.CreateDdp(SmallBuckets()).ToString(), "OK");
    ASSERT_EQ(model.Iterate(0).ToString(), "OK");
    ASSERT_EQ(self.group()->Barrier({}).ToString(), "OK");
    ASSERT_EQ(model.ddp().Begin().ToString(), "OK");
    for (uint32_t parameter = 0; parameter < model.parameter_count(); ++parameter) {
      if (self.rank() == 1 && parameter == 3) continue;
      ASSERT_EQ(model.Make(1, parameter).ToString(), "OK");
      ASSERT_TRUE(model.ddp().Ready(parameter));
    }
    if (self.rank() == 1) {
      EXPECT_THAT(model.ddp().Begin().message(),
                  AllOf(HasSubstr("Expected to have finished reduction"), HasSubstr("p3")));
      return;
    }
    // The streams are enqueued and let go; the host is told at the latest by the next iteration.
    Status status;
    for (uint32_t bucket = 0; bucket < model.ddp().bucket_count() && status.ok(); ++bucket) {
      status = model.ddp().Wait(bucket);
    }
    EXPECT_EQ(self.cuda().cuStreamSynchronize(self.stream()), CUDA_SUCCESS);
    if (status.ok()) status = model.ddp().End();
    if (status.ok()) status = model.ddp().Begin();
    if (status.ok()) status = model.Iterate(2);
    EXPECT_THAT(status.message(), HasSubstr("Expected to have finished reduction"));
  });
}

TEST_F(GpuTest, AModelOnTwoDevicesAndOneOnTheProcessorAreRefusedOnEveryRank) {
  RunRanks(2, [](GpuRank& self) {
    GpuModel model(&self, kSizes);
    if (self.rank() == 1) model.specs()[4].device = kCpu;
    EXPECT_THAT(model.CreateDdp().message(),
                AllOf(HasSubstr("rank 1"), HasSubstr("on another device than parameter 0")));
    for (ParameterSpec& spec : model.specs()) spec.device = self.rank() == 1 ? kCpu : self.device();
    EXPECT_THAT(model.CreateDdp().message(), HasSubstr("on_gpu"));
  });
}

TEST_F(GpuTest, GpusAndTheProcessorTakeTurnsInAGroup) {
  RunRanks(2, [](GpuRank& self) {
    GpuModel model(&self, kSizes);
    ASSERT_EQ(model.CreateDdp(SmallBuckets()).ToString(), "OK");
    for (uint32_t iteration = 0; iteration < 5; ++iteration) {
      ASSERT_EQ(model.Iterate(iteration).ToString(), "OK");
      std::vector<float> host(100, 1.0F);
      ASSERT_EQ(
          self.group()->AllReduce(host.data(), 100, DType::kFloat32, ReduceOp::kSum, {}).ToString(),
          "OK");
      EXPECT_EQ(host, std::vector<float>(100, 2.0F));
      EXPECT_EQ(model.Differences(2, iteration), "");
    }
  });
}

}  // namespace
}  // namespace gradsync::testing
