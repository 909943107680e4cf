#include "client/ddp/ddp.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <latch>
#include <random>
#include <set>
#include <thread>

#include "client/ddp/fake_group.h"
#include "gradsync/gradsync.h"
#include "shm/session_layout.h"

namespace gradsync {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::ElementsAreArray;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;
using ::testing::StartsWith;

constexpr char kUnfinished[] =
    "Expected to have finished reduction in the prior iteration before starting a new one. This "
    "error indicates that your module has parameters that were not used in producing loss. You can "
    "enable unused parameter detection by passing the keyword argument "
    "`find_unused_parameters=True` to `torch.nn.parallel.DistributedDataParallel`, and by making "
    "sure all `forward` function outputs participate in calculating loss.";

// float32 parameters of odd sizes, a float64 one, a scalar and an empty one.
std::vector<ParameterSpec> SmallModel() {
  return {{.name = "embedding", .shape = {7, 3}},
          {.name = "hidden.weight", .shape = {5, 3}},
          {.name = "hidden.bias", .shape = {5}},
          {.name = "scale", .shape = {}},
          {.name = "precise", .dtype = DType::kFloat64, .shape = {3}},
          {.name = "empty", .shape = {0, 4}},
          {.name = "head", .shape = {2, 5}}};
}

DdpOptions SmallBuckets() { return {.bucket_bytes = 48, .first_bucket_bytes = 16}; }

// The gradient of one element on one rank in one step: values whose sums round.
template <typename T>
T GradientOf(uint32_t rank, uint32_t step, uint32_t parameter, uint64_t element) {
  return static_cast<T>(rank + 1) / static_cast<T>(3 + step) +
         static_cast<T>(parameter) * static_cast<T>(0.1) + static_cast<T>(element) / 7;
}

template <typename T>
void Fill(const Slot& slot, uint32_t rank, uint32_t step, uint32_t parameter) {
  auto* values = reinterpret_cast<T*>(slot.data);
  for (uint64_t i = 0; i < slot.count; ++i) {
    values[i] = GradientOf<T>(rank, step, parameter, i);
  }
}

// float32: the sum in rank order, divided. float64: the sum of the divided values.
template <typename T>
std::vector<T> Averages(const Slot& slot, uint32_t ranks, uint32_t step, uint32_t parameter) {
  constexpr bool kPreDivide = sizeof(T) == 8;
  std::vector<T> expected(slot.count);
  for (uint64_t i = 0; i < slot.count; ++i) {
    T sum = 0;
    for (uint32_t rank = 0; rank < ranks; ++rank) {
      const T value = GradientOf<T>(rank, step, parameter, i);
      sum += kPreDivide ? value / static_cast<T>(ranks) : value;
    }
    expected[i] = kPreDivide ? sum : sum / static_cast<T>(ranks);
  }
  return expected;
}

template <typename T>
void ExpectAverages(const Slot& slot, uint32_t ranks, uint32_t step, uint32_t parameter) {
  const std::vector<T> expected = Averages<T>(slot, ranks, step, parameter);
  EXPECT_TRUE(std::equal(slot.data, slot.data + slot.count * sizeof(T),
                         reinterpret_cast<const std::byte*>(expected.data())))
      << "parameter " << parameter << " in step " << step;
}

// One rank of a test, which trains with the model above.
class Trainer {
 public:
  Trainer(std::shared_ptr<Group> group, const DdpOptions& options)
      : group_(std::move(group)), specs_(SmallModel()) {
    Result<std::unique_ptr<Ddp>> ddp = Ddp::Create(group_, specs_, options);
    if (ddp) {
      ddp_ = *std::move(ddp);
    } else {
      ADD_FAILURE() << ddp.error().ToString();
    }
  }

  Ddp& ddp() { return *ddp_; }
  uint32_t parameter_count() const { return ddp_->parameter_count(); }

  // Backward: makes the gradients in `order`. True if the last call said that all are ready.
  bool Backward(std::span<const uint32_t> order, uint32_t step) {
    bool all_ready = false;
    for (const uint32_t parameter : order) {
      EXPECT_FALSE(all_ready);
      FillGradient(parameter, step);
      const Result<bool> ready = ddp_->Ready(parameter);
      if (!ready) {
        ADD_FAILURE() << ready.error().ToString();
        return false;
      }
      all_ready = *ready;
    }
    return all_ready;
  }

  void FillGradient(uint32_t parameter, uint32_t step) {
    const Slot slot = *ddp_->GetSlot(parameter);
    if (specs_[parameter].dtype == DType::kFloat64) {
      Fill<double>(slot, group_->rank(), step, parameter);
    } else {
      Fill<float>(slot, group_->rank(), step, parameter);
    }
  }

  void WaitForAll() {
    for (uint32_t bucket = 0; bucket < ddp_->bucket_count(); ++bucket) {
      const Status status = ddp_->Wait(bucket);
      EXPECT_TRUE(status.ok()) << status.ToString();
    }
  }

  // As if this rank were alone: nobody has changed its gradients.
  void CheckOwn(uint32_t step) {
    std::vector<float> expected;
    const Slot slot = *ddp_->GetSlot(0);
    for (uint64_t i = 0; i < slot.count; ++i) {
      expected.push_back(GradientOf<float>(group_->rank(), step, 0, i));
    }
    EXPECT_EQ(std::memcmp(slot.data, expected.data(), slot.count * sizeof(float)), 0);
  }

  void CheckAverages(uint32_t step) {
    for (uint32_t parameter = 0; parameter < parameter_count(); ++parameter) {
      const Slot slot = *ddp_->GetSlot(parameter);
      if (specs_[parameter].dtype == DType::kFloat64) {
        ExpectAverages<double>(slot, group_->size(), step, parameter);
      } else {
        ExpectAverages<float>(slot, group_->size(), step, parameter);
      }
    }
  }

  void Step(std::span<const uint32_t> order, uint32_t step) {
    EXPECT_TRUE(ddp_->Begin().ok());
    EXPECT_TRUE(Backward(order, step));
    WaitForAll();
    EXPECT_TRUE(ddp_->End().ok());
    CheckAverages(step);
  }

 private:
  std::shared_ptr<Group> group_;
  std::vector<ParameterSpec> specs_;
  std::unique_ptr<Ddp> ddp_;
};

std::vector<uint32_t> Shuffled(uint32_t count, uint32_t seed) {
  std::vector<uint32_t> order = ReversedOrder(count);
  std::mt19937 random(seed);
  std::shuffle(order.begin(), order.end(), random);
  return order;
}

// ---- What a Ddp is made of ---------------------------------------------------------------------

TEST(DdpTest, SlotsAndBucketsShareOneZeroedBuffer) {
  FakeNetwork network(1);
  network.Run([](const std::shared_ptr<Group>& group) {
    Trainer trainer(group, SmallBuckets());
    Ddp& ddp = trainer.ddp();
    const std::byte* begin = ddp.buffer()->data();
    EXPECT_TRUE(std::all_of(begin, begin + ddp.buffer()->size(),
                            [](std::byte byte) { return byte == std::byte{0}; }));
    for (uint32_t b = 0; b < ddp.bucket_count(); ++b) {
      const Bucket bucket = *ddp.GetBucket(b);
      const std::byte* at = bucket.data;
      for (const uint32_t parameter : bucket.parameters) {
        const Slot slot = *ddp.GetSlot(parameter);
        EXPECT_EQ(slot.bucket, b);
        EXPECT_EQ(slot.data, at);
        at += slot.count * DTypeSize(bucket.dtype);
      }
      EXPECT_LE(at, begin + ddp.buffer()->size());
    }
  });
  EXPECT_THAT(network.log(0).allocated, SizeIs(1));
}

TEST(DdpTest, DefaultBucketsAreOneMiBAndThenTwentyFive) {
  FakeNetwork network(1);
  network.Run([](const std::shared_ptr<Group>& group) {
    std::vector<ParameterSpec> specs;
    specs.assign(60, {.name = "p", .shape = {1 << 18}});  // 1 MiB
    const auto ddp = *Ddp::Create(group, specs, {});
    ASSERT_EQ(ddp->bucket_count(), 4U);
    EXPECT_THAT(ddp->GetBucket(0)->parameters, ElementsAre(59));
    EXPECT_THAT(ddp->GetBucket(1)->parameters, SizeIs(25));
    EXPECT_THAT(ddp->GetBucket(2)->parameters, SizeIs(25));
    EXPECT_THAT(ddp->GetBucket(3)->parameters, SizeIs(9));
  });
}

TEST(DdpTest, GivenBucketSizeHoldsForTheFirstBucketToo) {
  FakeNetwork network(1);
  network.Run([](const std::shared_ptr<Group>& group) {
    const std::vector<ParameterSpec> specs(6, {.name = "p", .shape = {4}});
    const auto ddp = *Ddp::Create(group, specs, {.bucket_bytes = 32});
    EXPECT_EQ(ddp->bucket_count(), 3U);
  });
}

TEST(DdpTest, BucketsAreDescribedToTheGroupInIndexOrder) {
  FakeNetwork network(2);
  network.Run([](const std::shared_ptr<Group>& group) { Trainer(group, SmallBuckets()); });
  const std::vector<BucketInfo>& described = network.log(1).described;
  ASSERT_THAT(described, SizeIs(4));
  for (uint32_t i = 0; i < described.size(); ++i) {
    EXPECT_EQ(described[i].index, i);
    EXPECT_EQ(described[i].bucket_count, 4U);
  }
  EXPECT_EQ(described[0].parameters, "head");
  EXPECT_EQ(described[1].parameters, "empty ... hidden.weight");
  EXPECT_EQ(described[1].parameter_count, 4U);
  EXPECT_EQ(described[1].count, 21U);
  EXPECT_EQ(described[2].dtype, DType::kFloat64);
}

TEST(DdpTest, MemoryShortageOnOneRankIsTheSameErrorOnEveryRank) {
  FakeNetwork network(3);
  network.FailNextAllocation(1);
  network.Run([](const std::shared_ptr<Group>& group) {
    const auto ddp = Ddp::Create(group, SmallModel(), {});
    ASSERT_FALSE(ddp);
    EXPECT_EQ(ddp.error().code(), Code::kOutOfMemory);
    EXPECT_EQ(ddp.error().message(), "rank 1: no memory for gradients");
  });
}

TEST(DdpTest, InvalidParameterOnOneRankIsTheSameErrorOnEveryRank) {
  FakeNetwork network(2);
  network.Run([](const std::shared_ptr<Group>& group) {
    std::vector<ParameterSpec> specs = SmallModel();
    if (group->rank() == 1) specs[2].dtype = DType::kInt64;
    const auto ddp = Ddp::Create(group, specs, {});
    ASSERT_FALSE(ddp);
    EXPECT_EQ(ddp.error().code(), Code::kInvalidArgument);
    EXPECT_THAT(ddp.error().message(), StartsWith("rank 1: parameter 2 (hidden.bias, int64 [5])"));
  });
}

TEST(DdpTest, ModelsThatDifferAreAMismatchOnEveryRank) {
  FakeNetwork network(2);
  network.Run([](const std::shared_ptr<Group>& group) {
    std::vector<ParameterSpec> specs = SmallModel();
    if (group->rank() == 1) specs.pop_back();
    const auto ddp = Ddp::Create(group, specs, {});
    ASSERT_FALSE(ddp);
    EXPECT_EQ(ddp.error().code(), Code::kMismatch);
    EXPECT_THAT(ddp.error().message(), HasSubstr("Rank 1 has 6 params, while rank 0 has"));
  });
}

TEST(DdpTest, DifferentOptionsAreAMismatch) {
  FakeNetwork network(2);
  network.Run([](const std::shared_ptr<Group>& group) {
    const auto ddp = Ddp::Create(group, SmallModel(), {.bucket_bytes = 64 + group->rank()});
    ASSERT_FALSE(ddp);
    EXPECT_THAT(ddp.error().message(), HasSubstr("is 64 on rank 0 and 65 on rank 1"));
  });
}

TEST(DdpTest, IndicesOutOfRangeAreInvalidArguments) {
  FakeNetwork network(1);
  network.Run([](const std::shared_ptr<Group>& group) {
    Trainer trainer(group, SmallBuckets());
    Ddp& ddp = trainer.ddp();
    EXPECT_EQ(ddp.GetSlot(7).error().code(), Code::kInvalidArgument);
    EXPECT_EQ(ddp.GetBucket(4).error().code(), Code::kInvalidArgument);
    ASSERT_TRUE(ddp.Begin().ok());
    EXPECT_EQ(ddp.Ready(7).error().code(), Code::kInvalidArgument);
    EXPECT_EQ(ddp.Wait(4).code(), Code::kInvalidArgument);
    trainer.Backward(ReversedOrder(7), 0);  // none of it was taken for an end
    trainer.WaitForAll();
    EXPECT_TRUE(ddp.End().ok());
  });
}

// ---- Iterations --------------------------------------------------------------------------------

class DdpIterationTest : public ::testing::TestWithParam<uint32_t> {};

TEST_P(DdpIterationTest, AveragesAreExactInWhateverOrderGradientsBecomeReady) {
  FakeNetwork network(GetParam());
  network.Run([](const std::shared_ptr<Group>& group) {
    Trainer trainer(group, SmallBuckets());
    for (uint32_t step = 0; step < 30; ++step) {
      trainer.Step(Shuffled(trainer.parameter_count(), step * 10 + group->rank()), step);
    }
  });
}

TEST_P(DdpIterationTest, AveragesStayExactThroughTheReplan) {
  FakeNetwork network(GetParam());
  network.Run([](const std::shared_ptr<Group>& group) {
    Trainer trainer(group, SmallBuckets());
    for (uint32_t step = 0; step < 10; ++step) {
      const Result<bool> replanned = trainer.ddp().Replan();
      ASSERT_TRUE(replanned) << replanned.error().ToString();
      EXPECT_EQ(*replanned, step == 1);
      trainer.Step(Shuffled(trainer.parameter_count(), step * 10 + 3 + group->rank()), step);
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, DdpIterationTest, ::testing::Values(1U, 2U, 3U, 4U));

TEST(DdpTest, BucketsAreSubmittedAsTheyBecomeReadyUnderNumbersInIndexOrder) {
  FakeNetwork network(2);
  network.Run([](const std::shared_ptr<Group>& group) {
    Trainer trainer(group, SmallBuckets());
    std::vector<uint32_t> backwards;
    for (uint32_t bucket = trainer.ddp().bucket_count(); bucket-- > 0;) {
      const std::span<const uint32_t> parameters = trainer.ddp().GetBucket(bucket)->parameters;
      backwards.insert(backwards.end(), parameters.begin(), parameters.end());
    }
    trainer.Step(backwards, 0);
  });
  const uint64_t base = network.log(0).collectives;
  EXPECT_THAT(network.log(0).bucket_sequences, ElementsAre(base + 3, base + 2, base + 1, base));
}

TEST(DdpTest, ForwardWithoutBackwardTakesNoNumbersAndIsGivenUp) {
  FakeNetwork network(2);
  network.Run([](const std::shared_ptr<Group>& group) {
    Trainer trainer(group, SmallBuckets());
    // Only one of the ranks evaluates: were numbers taken, the ranks would part.
    if (group->rank() == 1) {
      EXPECT_TRUE(trainer.ddp().Begin().ok());
      EXPECT_TRUE(trainer.ddp().Begin().ok());
    }
    trainer.Step(ReversedOrder(trainer.parameter_count()), 0);
  });
}

TEST(DdpTest, GradientsAccumulatedOutsideAnIterationAreReducedInTheNext) {
  FakeNetwork network(2);
  network.Run([](const std::shared_ptr<Group>& group) {
    Trainer trainer(group, SmallBuckets());
    const Slot slot = *trainer.ddp().GetSlot(1);
    auto* values = reinterpret_cast<float*>(slot.data);
    for (int backward = 0; backward < 3; ++backward) {  // no_sync: no call at all
      for (uint64_t i = 0; i < slot.count; ++i) values[i] += static_cast<float>(group->rank() + 1);
    }
    ASSERT_TRUE(trainer.ddp().Begin().ok());
    for (uint32_t p = trainer.parameter_count(); p-- > 0;) ASSERT_TRUE(trainer.ddp().Ready(p));
    trainer.WaitForAll();
    ASSERT_TRUE(trainer.ddp().End().ok());
    EXPECT_THAT(std::span<const float>(values, slot.count),
                ElementsAreArray(std::vector<float>(slot.count, 4.5F)));
  });
}

TEST(DdpTest, UnreadyTellsWhatTheIterationLacks) {
  FakeNetwork network(1);
  network.Run([](const std::shared_ptr<Group>& group) {
    Trainer trainer(group, SmallBuckets());
    EXPECT_THAT(trainer.ddp().Unready(), IsEmpty());
    ASSERT_TRUE(trainer.ddp().Begin().ok());
    trainer.Backward(std::vector<uint32_t>{6, 1, 4}, 0);
    EXPECT_THAT(trainer.ddp().Unready(), ElementsAre(0, 2, 3, 5));
    trainer.Backward(std::vector<uint32_t>{0, 2, 3, 5}, 0);
    EXPECT_THAT(trainer.ddp().Unready(), IsEmpty());
    trainer.WaitForAll();
    EXPECT_TRUE(trainer.ddp().End().ok());
  });
}

TEST(DdpTest, CallsOfOneIterationMayComeFromDifferentThreads) {
  FakeNetwork network(2);
  network.Run([](const std::shared_ptr<Group>& group) {
    Trainer trainer(group, SmallBuckets());
    ASSERT_TRUE(trainer.ddp().Begin().ok());
    for (uint32_t p = trainer.parameter_count(); p-- > 0;) {
      std::thread([&] { trainer.Backward(std::vector<uint32_t>{p}, 0); }).join();
    }
    std::thread([&] { trainer.WaitForAll(); }).join();
    EXPECT_TRUE(trainer.ddp().End().ok());
    trainer.CheckAverages(0);
  });
}

// ---- The replan --------------------------------------------------------------------------------

TEST(DdpTest, ReplanFollowsTheOrderSeenOnRankZeroOnEveryRank) {
  FakeNetwork network(3);
  network.Run([](const std::shared_ptr<Group>& group) {
    Trainer trainer(group, SmallBuckets());
    const std::vector<uint32_t> seen = {1, 0, 4, 2, 3, 6, 5};
    const std::vector<uint32_t> other = Shuffled(7, group->rank());
    trainer.Step(group->rank() == 0 ? seen : other, 0);
    const Result<bool> replanned = trainer.ddp().Replan();
    ASSERT_TRUE(replanned) << replanned.error().ToString();
    EXPECT_TRUE(*replanned);
    ASSERT_EQ(trainer.ddp().bucket_count(), 5U);
    EXPECT_THAT(trainer.ddp().GetBucket(0)->parameters, ElementsAre(1));
    EXPECT_THAT(trainer.ddp().GetBucket(1)->parameters, ElementsAre(0));
    EXPECT_THAT(trainer.ddp().GetBucket(2)->parameters, ElementsAre(4));
    EXPECT_THAT(trainer.ddp().GetBucket(3)->parameters, ElementsAre(2, 3, 6));
    EXPECT_THAT(trainer.ddp().GetBucket(4)->parameters, ElementsAre(5));
  });
  EXPECT_THAT(network.log(2).described, SizeIs(4 + 5));
}

TEST(DdpTest, ReplanMovesWhatLiesInTheSlotsAndLeavesTheOldBufferAsItWas) {
  FakeNetwork network(2);
  network.Run([](const std::shared_ptr<Group>& group) {
    Trainer trainer(group, SmallBuckets());
    trainer.Step(Shuffled(7, 5), 0);
    for (uint32_t p = 0; p < trainer.parameter_count(); ++p) trainer.FillGradient(p, 77);
    const std::shared_ptr<SharedBuffer> old = trainer.ddp().buffer();
    const std::vector<std::byte> before(old->data(), old->data() + old->size());
    std::vector<std::vector<std::byte>> gradients;
    const auto bytes_of = [&](uint32_t p) {
      const Slot slot = *trainer.ddp().GetSlot(p);
      const uint64_t bytes = slot.count * DTypeSize(SmallModel()[p].dtype);
      return std::vector<std::byte>(slot.data, slot.data + bytes);
    };
    for (uint32_t p = 0; p < trainer.parameter_count(); ++p) gradients.push_back(bytes_of(p));
    ASSERT_TRUE(trainer.ddp().Replan().value_or(false));
    EXPECT_NE(trainer.ddp().buffer(), old);
    for (uint32_t p = 0; p < trainer.parameter_count(); ++p) EXPECT_EQ(bytes_of(p), gradients[p]);
    EXPECT_EQ(std::memcmp(old->data(), before.data(), before.size()), 0);
    EXPECT_EQ(old.use_count(), 1);
  });
}

TEST(DdpTest, TheOthersLearnOfADdpThatEndsInTheMiddleOfAnIteration) {
  FakeNetwork network(2);
  network.Run([](const std::shared_ptr<Group>& group) {
    Trainer trainer(group, SmallBuckets());
    ASSERT_TRUE(trainer.ddp().Begin().ok());
    const std::vector<uint32_t> order = ReversedOrder(7);
    if (group->rank() == 1) {
      trainer.Backward(std::span(order).first(1), 0);
      return;  // an exception in backward, say
    }
    // Whichever call it is that first meets the other rank's end.
    Status status;
    for (uint32_t parameter = 7; parameter-- > 0 && status.ok();) {
      const Result<bool> ready = trainer.ddp().Ready(parameter);
      status = ready ? OkStatus() : ready.error();
    }
    // The last bucket: the other rank may have handed over the first.
    if (status.ok()) status = trainer.ddp().Wait(trainer.ddp().bucket_count() - 1);
    EXPECT_EQ(status.code(), Code::kFailedPrecondition);
    EXPECT_THAT(status.message(), HasSubstr("Expected to have finished reduction"));
  });
}

TEST(DdpTest, RenewGivesZeroedMemoryOnOneRankAloneAndLeavesTheOldBufferAsItWas) {
  FakeNetwork network(2);
  network.Run([](const std::shared_ptr<Group>& group) {
    Trainer trainer(group, SmallBuckets());
    trainer.Step(ReversedOrder(7), 0);
    if (group->rank() == 1) {
      const std::shared_ptr<SharedBuffer> old = trainer.ddp().buffer();
      const std::vector<std::byte> before(old->data(), old->data() + old->size());
      ASSERT_TRUE(trainer.ddp().Renew().ok());
      EXPECT_NE(trainer.ddp().buffer(), old);
      EXPECT_EQ(trainer.ddp().buffer()->size(), old->size());
      EXPECT_EQ(std::memcmp(old->data(), before.data(), before.size()), 0);
      EXPECT_EQ(old.use_count(), 1);
    }
    trainer.Step(ReversedOrder(7), 1);
  });
  EXPECT_THAT(network.log(0).allocated, SizeIs(1));
  EXPECT_THAT(network.log(1).allocated, SizeIs(2));
}

TEST(DdpTest, RenewIsRefusedWhileGradientsAreHandedOver) {
  FakeNetwork network(1);
  network.Run([](const std::shared_ptr<Group>& group) {
    Trainer trainer(group, SmallBuckets());
    ASSERT_TRUE(trainer.ddp().Begin().ok());
    EXPECT_TRUE(trainer.ddp().Renew().ok());
    ASSERT_TRUE(trainer.ddp().Ready(6));
    const std::shared_ptr<SharedBuffer> buffer = trainer.ddp().buffer();
    EXPECT_EQ(trainer.ddp().Renew().code(), Code::kFailedPrecondition);
    EXPECT_EQ(trainer.ddp().buffer(), buffer);
  });
}

TEST(DdpTest, ReplanToTheSamePlanMovesNothing) {
  FakeNetwork network(2);
  network.Run([](const std::shared_ptr<Group>& group) {
    Trainer trainer(group, SmallBuckets());
    trainer.Step(ReversedOrder(7), 0);
    const std::shared_ptr<SharedBuffer> buffer = trainer.ddp().buffer();
    const Result<bool> replanned = trainer.ddp().Replan();
    ASSERT_TRUE(replanned) << replanned.error().ToString();
    EXPECT_FALSE(*replanned);
    EXPECT_EQ(trainer.ddp().buffer(), buffer);
    trainer.Step(ReversedOrder(7), 1);
  });
  EXPECT_THAT(network.log(0).allocated, SizeIs(1));
}

TEST(DdpTest, ReplanWithoutAWholeIterationOrWithAFixedPlanMakesNoCollective) {
  FakeNetwork network(2);
  network.Run([](const std::shared_ptr<Group>& group) {
    DdpOptions options = SmallBuckets();
    options.fixed_plan = true;
    Trainer trainer(group, options);
    EXPECT_FALSE(trainer.ddp().Replan().value_or(true));
    trainer.Step(Shuffled(7, 5), 0);
    EXPECT_FALSE(trainer.ddp().Replan().value_or(true));
  });
  EXPECT_EQ(network.log(0).collectives, 2U);  // those of Create
}

TEST(DdpTest, ReplanUsesTheFirstWholeIterationEvenAfterAForwardWithoutBackward) {
  FakeNetwork network(2);
  network.Run([](const std::shared_ptr<Group>& group) {
    Trainer trainer(group, SmallBuckets());
    trainer.Step(std::vector<uint32_t>{1, 0, 4, 2, 3, 6, 5}, 0);
    trainer.Step(ReversedOrder(7), 1);
    ASSERT_TRUE(trainer.ddp().Begin().ok());
    ASSERT_TRUE(trainer.ddp().Replan().value_or(false));
    EXPECT_THAT(trainer.ddp().GetBucket(0)->parameters, ElementsAre(1));
    EXPECT_EQ(trainer.ddp().Ready(0).error().code(), Code::kFailedPrecondition);
    trainer.Step(Shuffled(7, 9), 2);
  });
}

TEST(DdpTest, ReplanKeepsThePlanOnEveryRankIfOneLacksTheMemory) {
  FakeNetwork network(2);
  network.Run([&](const std::shared_ptr<Group>& group) {
    Trainer trainer(group, SmallBuckets());
    trainer.Step(Shuffled(7, 5), 0);
    if (group->rank() == 1) network.FailNextAllocation(1);
    const std::shared_ptr<SharedBuffer> buffer = trainer.ddp().buffer();
    const Result<bool> replanned = trainer.ddp().Replan();
    ASSERT_TRUE(replanned) << replanned.error().ToString();
    EXPECT_FALSE(*replanned);
    EXPECT_EQ(trainer.ddp().buffer(), buffer);
    trainer.Step(Shuffled(7, 6), 1);
  });
}

// ---- Trouble -----------------------------------------------------------------------------------

TEST(DdpTest, ParameterWithoutGradientFailsTheNextIterationWithPyTorchsWordsAndItsName) {
  FakeNetwork network(1);
  network.Run([](const std::shared_ptr<Group>& group) {
    Trainer trainer(group, SmallBuckets());
    ASSERT_TRUE(trainer.ddp().Begin().ok());
    trainer.Backward(std::vector<uint32_t>{6, 5, 4, 3, 0}, 0);
    const Status status = trainer.ddp().Begin();
    EXPECT_EQ(status.code(), Code::kFailedPrecondition);
    EXPECT_EQ(
        status.message(),
        std::string(kUnfinished) +
            "\nParameter indices which did not receive grad for rank 0: 1 2"
            "\nParameters which did not receive grad for rank 0: hidden.weight, hidden.bias"
            "\nIn addition, you can set the environment variable TORCH_DISTRIBUTED_DEBUG to either "
            "INFO or DETAIL to have torch print more about this rank.");
    // And it lasts: the ranks are out of step for good.
    EXPECT_EQ(trainer.ddp().Begin().message(), status.message());
    EXPECT_EQ(trainer.ddp().Ready(1).error().message(), status.message());
    EXPECT_EQ(trainer.ddp().Wait(0).message(), status.message());
    EXPECT_EQ(trainer.ddp().End().message(), status.message());
    EXPECT_EQ(trainer.ddp().Replan().error().message(), status.message());
  });
}

TEST(DdpTest, UnfinishedIterationWithoutAnyWholeBucketIsRefusedToo) {
  FakeNetwork network(1);
  network.Run([](const std::shared_ptr<Group>& group) {
    Trainer trainer(group, {});
    ASSERT_TRUE(trainer.ddp().Begin().ok());
    trainer.Backward(std::vector<uint32_t>{6}, 0);
    EXPECT_THAT(trainer.ddp().Begin().message(), StartsWith(kUnfinished));
  });
}

TEST(DdpTest, ReplanRefusesAnUnfinishedIteration) {
  FakeNetwork network(1);
  network.Run([](const std::shared_ptr<Group>& group) {
    Trainer trainer(group, SmallBuckets());
    ASSERT_TRUE(trainer.ddp().Begin().ok());
    trainer.Backward(std::vector<uint32_t>{6}, 0);
    EXPECT_THAT(trainer.ddp().Replan().error().message(), StartsWith(kUnfinished));
  });
}

TEST(DdpTest, OtherRanksLearnWhoIsUnfinishedAndWhatItLacks) {
  FakeNetwork network(std::vector<uint32_t>{4, 9});
  network.Run([](const std::shared_ptr<Group>& group) {
    Trainer trainer(group, SmallBuckets());
    Ddp& ddp = trainer.ddp();
    ASSERT_TRUE(ddp.Begin().ok());
    if (group->rank() == 1) {
      trainer.Backward(std::vector<uint32_t>{6, 5, 4, 3, 2, 0}, 0);
      EXPECT_FALSE(ddp.Begin().ok());
      return;
    }
    trainer.Backward(ReversedOrder(7), 0);
    const Status status = ddp.Wait(ddp.bucket_count() - 1);
    EXPECT_THAT(status.message(),
                AllOf(StartsWith(kUnfinished),
                      HasSubstr("did not receive grad for rank 9: hidden.weight")));
    EXPECT_EQ(ddp.Begin().message(), status.message());
  });
}

// Two ranks that each give up an iteration, rank 1 first: before rank 0 begins its own, or before
// rank 0 hands anything over.
class GivingUpTest : public ::testing::TestWithParam<bool> {
 protected:
  // `late` is the rest of rank 0's part.
  static void Run(const std::function<void(Ddp&, Trainer&)>& late) {
    FakeNetwork network(2);
    std::latch begun(2);
    std::latch given_up(1);
    network.Run([&](const std::shared_ptr<Group>& group) {
      Trainer trainer(group, SmallBuckets());
      Ddp& ddp = trainer.ddp();
      if (group->rank() == 0 && GetParam()) {
        EXPECT_TRUE(ddp.Begin().ok());
      }
      begun.arrive_and_wait();
      if (group->rank() == 1) {
        EXPECT_TRUE(ddp.Begin().ok());
        trainer.Backward(std::vector<uint32_t>{6, 5, 4, 3, 2, 0}, 0);
        EXPECT_THAT(ddp.Begin().message(), HasSubstr("for rank 1: hidden.weight"));
        given_up.count_down();
        return;
      }
      given_up.wait();
      EXPECT_TRUE(GetParam() || ddp.Begin().ok());
      EXPECT_TRUE(ddp.Begin().ok());  // a forward without a backward in between
      late(ddp, trainer);
    });
  }
};

TEST_P(GivingUpTest, TheLaterRankNamesWhatItLacksItself) {
  Run([](Ddp& ddp, Trainer& trainer) {
    trainer.Backward(std::vector<uint32_t>{6, 5, 4, 3, 2, 1}, 0);
    const Status status = ddp.Begin();
    EXPECT_THAT(status.message(), AllOf(StartsWith(kUnfinished),
                                        HasSubstr("did not receive grad for rank 0: embedding")));
    EXPECT_EQ(ddp.Ready(0).error().message(), status.message());
  });
}

TEST_P(GivingUpTest, TheLaterRankIsToldByWaitIfItLacksNothing) {
  Run([](Ddp& ddp, Trainer& trainer) {
    EXPECT_TRUE(trainer.Backward(ReversedOrder(7), 0));
    EXPECT_THAT(ddp.Wait(0).message(), HasSubstr("did not receive grad for rank 1: hidden.weight"));
    EXPECT_FALSE(ddp.End().ok());
  });
}

TEST_P(GivingUpTest, TheLaterRankIsToldByBeginIfItDidNotWait) {
  Run([](Ddp& ddp, Trainer& trainer) {
    EXPECT_TRUE(trainer.Backward(ReversedOrder(7), 0));
    EXPECT_THAT(ddp.Begin().message(), HasSubstr("did not receive grad for rank 1: hidden.weight"));
  });
}

TEST_P(GivingUpTest, TheLaterRankIsToldThoughItReducesElsewhere) {
  Run([](Ddp& ddp, Trainer& trainer) {
    ASSERT_TRUE(ddp.ReduceElsewhere().ok());
    EXPECT_TRUE(trainer.Backward(ReversedOrder(7), 0));
    EXPECT_THAT(ddp.Wait(0).message(), HasSubstr("did not receive grad for rank 1: hidden.weight"));
  });
}

INSTANTIATE_TEST_SUITE_P(BegunBefore, GivingUpTest, ::testing::Bool());

TEST(DdpTest, ManyUnusedParametersMakeASentenceThatFitsAFailedGroupsText) {
  FakeNetwork network(2);
  network.Run([](const std::shared_ptr<Group>& group) {
    std::vector<ParameterSpec> specs;
    specs.reserve(5000);
    for (int i = 0; i < 5000; ++i) {
      specs.push_back({.name = std::string(300, 'n') + std::to_string(i), .shape = {1}});
    }
    const auto ddp = *Ddp::Create(group, specs, {});
    ASSERT_TRUE(ddp->Begin().ok());
    const bool waits = group->rank() == 0;
    for (uint32_t i = waits ? 0 : 4999; i < 5000; ++i) ASSERT_TRUE(ddp->Ready(i));
    const std::string message = waits ? ddp->Wait(0).message() : ddp->Begin().message();
    EXPECT_LT(message.size(), waits ? kErrorTextBytes : sizeof(gradsync_error::message));
    EXPECT_THAT(message, HasSubstr("nn0"));
    EXPECT_THAT(message, HasSubstr("more\nIn addition"));
    EXPECT_THAT(message, HasSubstr("0 1 2 3 4"));
  });
}

TEST(DdpTest, AveragesThatWereNeverCollectedAreAnUnfinishedIteration) {
  FakeNetwork network(1);
  network.Run([](const std::shared_ptr<Group>& group) {
    Trainer trainer(group, SmallBuckets());
    ASSERT_TRUE(trainer.ddp().Begin().ok());
    trainer.Backward(ReversedOrder(7), 0);
    EXPECT_THAT(trainer.ddp().Begin().message(),
                AllOf(StartsWith("Expected to have finished reduction in the prior iteration"),
                      HasSubstr("before the averages were collected")));
  });
}

TEST(DdpTest, ParameterThatIsReadyTwiceIsNamed) {
  FakeNetwork network(1);
  network.Run([](const std::shared_ptr<Group>& group) {
    Trainer trainer(group, SmallBuckets());
    ASSERT_TRUE(trainer.ddp().Begin().ok());
    trainer.Backward(std::vector<uint32_t>{2}, 0);
    const Result<bool> again = trainer.ddp().Ready(2);
    ASSERT_FALSE(again);
    EXPECT_EQ(again.error().code(), Code::kFailedPrecondition);
    EXPECT_THAT(again.error().message(),
                AllOf(StartsWith("Expected to mark a variable ready only once."),
                      HasSubstr("Parameter at index 2 with name hidden.bias has been marked as "
                                "ready twice")));
  });
  EXPECT_THAT(network.log(0).bucket_sequences, IsEmpty());
}

TEST(DdpTest, WaitForABucketThatWasNotHandedOverNamesWhatItLacks) {
  FakeNetwork network(1);
  network.Run([](const std::shared_ptr<Group>& group) {
    Trainer trainer(group, SmallBuckets());
    ASSERT_TRUE(trainer.ddp().Begin().ok());
    trainer.Backward(std::vector<uint32_t>{6, 5, 2}, 0);
    EXPECT_TRUE(trainer.ddp().Wait(0).ok());
    const Status status = trainer.ddp().Wait(1);
    EXPECT_EQ(status.code(), Code::kFailedPrecondition);
    EXPECT_EQ(status.message(),
              "bucket 1 has not been handed over; it lacks the gradients of scale, hidden.weight");
  });
}

TEST(DdpTest, EndBeforeEveryBucketWasWaitedForIsRefusedAndCanBeMadeGood) {
  FakeNetwork network(1);
  network.Run([](const std::shared_ptr<Group>& group) {
    Trainer trainer(group, SmallBuckets());
    ASSERT_TRUE(trainer.ddp().Begin().ok());
    trainer.Backward(ReversedOrder(7), 0);
    ASSERT_TRUE(trainer.ddp().Wait(0).ok());
    ASSERT_TRUE(trainer.ddp().Wait(0).ok());
    EXPECT_EQ(trainer.ddp().End().code(), Code::kFailedPrecondition);
    trainer.WaitForAll();
    EXPECT_TRUE(trainer.ddp().End().ok());
  });
}

TEST(DdpTest, CallsOutsideAnIterationAreRefused) {
  FakeNetwork network(1);
  network.Run([](const std::shared_ptr<Group>& group) {
    Trainer trainer(group, SmallBuckets());
    Ddp& ddp = trainer.ddp();
    for (uint32_t step = 0; step < 2; ++step) {  // before the first, and between two
      EXPECT_EQ(ddp.Ready(0).error().code(), Code::kFailedPrecondition);
      EXPECT_EQ(ddp.Wait(0).code(), Code::kFailedPrecondition);
      EXPECT_EQ(ddp.End().code(), Code::kFailedPrecondition);
      trainer.Step(ReversedOrder(7), step);
    }
  });
}

// One iteration in which the group's rank 0 uses parameters 0, 1, 2 and rank 1 uses 0 and 3.
void StepWithUnused(Trainer& trainer, uint32_t rank) {
  Ddp& ddp = trainer.ddp();
  const std::set<uint32_t> used =
      rank == 0 ? std::set<uint32_t>{0, 1, 2} : std::set<uint32_t>{0, 3};
  ASSERT_TRUE(ddp.Begin().ok());
  for (uint32_t parameter = 0; parameter < ddp.parameter_count(); ++parameter) {
    const Result<bool> ready =
        used.contains(parameter) ? ddp.Ready(parameter) : ddp.ReadyUnused(parameter);
    ASSERT_TRUE(ready);
    EXPECT_EQ(*ready, parameter == 6);
  }
  trainer.WaitForAll();
  ASSERT_TRUE(ddp.End().ok());
}

std::vector<uint32_t> Uses(const Ddp& ddp) {
  std::vector<uint32_t> uses;
  for (uint32_t i = 0; i < ddp.parameter_count(); ++i) uses.push_back(ddp.UsedBy(i));
  return uses;
}

TEST(DdpTest, EveryIterationCountsTheRanksThatUsedAParameter) {
  FakeNetwork network(2);
  network.Run([](const std::shared_ptr<Group>& group) {
    Trainer trainer(group, SmallBuckets());
    EXPECT_THAT(Uses(trainer.ddp()), ElementsAre(2, 2, 2, 2, 2, 2, 2));
    ASSERT_TRUE(trainer.ddp().SetUnusedPolicy(UnusedPolicy::kFind).ok());
    StepWithUnused(trainer, group->rank());
    EXPECT_THAT(Uses(trainer.ddp()), ElementsAre(2, 1, 1, 1, 0, 0, 0));
    StepWithUnused(trainer, 1 - group->rank());
    StepWithUnused(trainer, 1);
    EXPECT_THAT(Uses(trainer.ddp()), ElementsAre(2, 0, 0, 2, 0, 0, 0));
    EXPECT_FALSE(*trainer.ddp().Replan());
  });
  EXPECT_EQ(network.log(0).all_reduces, 3U);
}

TEST(DdpTest, AStaticGraphCountsInTheFirstIterationOnly) {
  FakeNetwork network(2);
  network.Run([](const std::shared_ptr<Group>& group) {
    Trainer trainer(group, SmallBuckets());
    ASSERT_TRUE(trainer.ddp().SetUnusedPolicy(UnusedPolicy::kStatic).ok());
    StepWithUnused(trainer, group->rank());
    EXPECT_TRUE(*trainer.ddp().Replan());
    StepWithUnused(trainer, 1);
    EXPECT_THAT(Uses(trainer.ddp()), ElementsAre(2, 1, 1, 1, 0, 0, 0));
  });
  EXPECT_EQ(network.log(0).all_reduces, 1U);
}

TEST(DdpTest, ASkippedBucketIsNoOperation) {
  FakeNetwork network(2);
  network.Run([](const std::shared_ptr<Group>& group) {
    Trainer trainer(group, SmallBuckets());
    Ddp& ddp = trainer.ddp();
    const uint32_t last = ddp.bucket_count() - 1;
    for (const uint32_t skipped : {0U, last}) {
      ASSERT_TRUE(ddp.Begin().ok());
      ASSERT_TRUE(ddp.Skip(skipped).ok());
      EXPECT_TRUE(trainer.Backward(ReversedOrder(7), 0));
      EXPECT_EQ(ddp.Skip(1).code(), Code::kFailedPrecondition);
      trainer.WaitForAll();
      ASSERT_TRUE(ddp.End().ok());
    }
    trainer.Step(ReversedOrder(7), 1);
    trainer.CheckAverages(1);
  });
  const size_t buckets = network.log(0).described.size();
  EXPECT_THAT(network.log(0).bucket_sequences, SizeIs(3 * buckets - 2));
}

TEST(DdpTest, BucketsThatAreReducedElsewhereAreNotHandedOver) {
  FakeNetwork network(2);
  network.Run([](const std::shared_ptr<Group>& group) {
    Trainer trainer(group, SmallBuckets());
    Ddp& ddp = trainer.ddp();
    ASSERT_TRUE(ddp.ReduceElsewhere().ok());
    ASSERT_TRUE(ddp.SetUnusedPolicy(UnusedPolicy::kFind).ok());
    ASSERT_TRUE(ddp.Begin().ok());
    trainer.Backward(std::vector<uint32_t>{6}, 0);
    EXPECT_TRUE(ddp.IsBucketReady(0));
    EXPECT_FALSE(ddp.IsBucketReady(1));
    EXPECT_FALSE(ddp.IsBucketReady(ddp.bucket_count()));
    EXPECT_TRUE(trainer.Backward(std::vector<uint32_t>{5, 4, 3, 2, 1, 0}, 0));
    trainer.WaitForAll();
    ASSERT_TRUE(ddp.End().ok());
    EXPECT_THAT(Uses(ddp), ElementsAre(2, 2, 2, 2, 2, 2, 2));
    trainer.CheckOwn(0);
    EXPECT_EQ(ddp.ReduceElsewhere().code(), Code::kFailedPrecondition);
    EXPECT_EQ(ddp.SetUnusedPolicy(UnusedPolicy::kError).code(), Code::kFailedPrecondition);
  });
  EXPECT_THAT(network.log(0).bucket_sequences, IsEmpty());
}

TEST(DdpTest, TheAdviceFitsWhatWasAskedFor) {
  const auto message = [](UnusedPolicy policy) {
    std::string text;
    FakeNetwork network(1);
    network.Run([&](const std::shared_ptr<Group>& group) {
      Trainer trainer(group, SmallBuckets());
      ASSERT_TRUE(trainer.ddp().SetUnusedPolicy(policy).ok());
      ASSERT_TRUE(trainer.ddp().Begin().ok());
      ASSERT_TRUE(trainer.ddp().Ready(6));
      text = trainer.ddp().Begin().message();
    });
    return text;
  };
  EXPECT_THAT(message(UnusedPolicy::kError), HasSubstr("keyword argument `find_unused_parameters"));
  EXPECT_THAT(message(UnusedPolicy::kFind),
              HasSubstr("Since `find_unused_parameters=True` is enabled"));
  EXPECT_THAT(message(UnusedPolicy::kStatic),
              HasSubstr("your training graph has changed in this iteration"));
}

TEST(DdpTest, AListGivesEachBucketItsSize) {
  FakeNetwork network(1);
  network.Run([](const std::shared_ptr<Group>& group) {
    const auto ddp = *Ddp::Create(group, std::vector<ParameterSpec>(6, {.name = "p", .shape = {1}}),
                                  {.bucket_bytes_list = {4, 12, 8}});
    EXPECT_THAT(ddp->GetBucket(0)->parameters, SizeIs(1));
    EXPECT_THAT(ddp->GetBucket(1)->parameters, SizeIs(3));
    EXPECT_THAT(ddp->GetBucket(2)->parameters, SizeIs(2));
  });
}

TEST(DdpTest, BucketsMayBeFilledFromTheFront) {
  FakeNetwork network(2);
  network.Run([](const std::shared_ptr<Group>& group) {
    DdpOptions options = SmallBuckets();
    options.fill_from_front = true;
    Trainer trainer(group, options);
    EXPECT_THAT(trainer.ddp().GetBucket(1)->parameters, ElementsAre(2, 3, 5, 6));
    EXPECT_THAT(trainer.ddp().GetBucket(3)->parameters, ElementsAre(0));
    trainer.Step(Shuffled(7, 5), 0);
  });
}

TEST(DdpTest, ListsOfSizesThatDifferAreAMismatch) {
  FakeNetwork network(2);
  network.Run([](const std::shared_ptr<Group>& group) {
    const auto ddp =
        Ddp::Create(group, SmallModel(), {.bucket_bytes_list = {8, 16 + group->rank()}});
    ASSERT_FALSE(ddp);
    EXPECT_EQ(ddp.error().code(), Code::kMismatch);
    EXPECT_THAT(ddp.error().message(), HasSubstr("lists of bucket sizes of ranks 0 and 1 differ"));
  });
}

TEST(DdpTest, RankThatIsLostIsTheErrorOfEveryLaterCall) {
  FakeNetwork network(2);
  network.Run([](const std::shared_ptr<Group>& group) {
    Trainer trainer(group, SmallBuckets());
    if (group->rank() == 1) return;
    ASSERT_TRUE(trainer.ddp().Begin().ok());
    for (const uint32_t parameter : ReversedOrder(7)) {
      if (!trainer.ddp().Ready(parameter)) break;  // told already, or by the wait
    }
    const Status status = trainer.ddp().Wait(0);
    EXPECT_EQ(status.code(), Code::kRankLost);
    EXPECT_EQ(trainer.ddp().Begin().ToString(), status.ToString());
    EXPECT_EQ(trainer.ddp().Replan().error().ToString(), status.ToString());
  });
}

// ---- Ranks that run out of input ----------------------------------------------------------------

// Two ranks; rank 0 has `iterations` of them and rank 1 has four.
void TrainUnevenly(uint32_t iterations, AsidePolicy policy, float expected_share) {
  FakeNetwork network(2);
  network.Run([&](const std::shared_ptr<Group>& group) {
    Trainer trainer(group, SmallBuckets());
    const uint32_t own = group->rank() == 0 ? iterations : 4;
    for (uint32_t step = 0; step < own; ++step) {
      if (step == 1) {
        ASSERT_TRUE(trainer.ddp().Replan());
      }
      if (step < iterations) {
        trainer.Step(ReversedOrder(7), step);
        continue;
      }
      ASSERT_TRUE(trainer.ddp().Begin().ok());
      ASSERT_TRUE(trainer.Backward(ReversedOrder(7), step));
      trainer.WaitForAll();
      ASSERT_TRUE(trainer.ddp().End().ok());
      const Slot slot = *trainer.ddp().GetSlot(0);
      EXPECT_EQ(*reinterpret_cast<const float*>(slot.data),
                GradientOf<float>(1, step, 0, 0) * expected_share);
    }
    ASSERT_TRUE(trainer.ddp().StandAside(policy).ok());
    const Result<uint32_t> last = group->Rejoin();
    ASSERT_TRUE(last);
    EXPECT_EQ(*last, 1U);
    // And on with all of them, which plan nothing anew any more.
    EXPECT_FALSE(*trainer.ddp().Replan());
    trainer.Step(ReversedOrder(7), 9);
  });
}

TEST(DdpTest, ARankThatRunsOutIsLeftOutOfTheAverages) {
  TrainUnevenly(2, AsidePolicy::kAverageOverPresent, 1.0F);
}

TEST(DdpTest, ARankThatRunsOutMayCountAsZeros) {
  TrainUnevenly(2, AsidePolicy::kAverageOverAll, 0.5F);
}

TEST(DdpTest, NothingIsReplannedWithoutARankThatRanOut) {
  TrainUnevenly(1, AsidePolicy::kAverageOverAll, 0.5F);
}

TEST(DdpTest, ARankMayHaveNoIterationAtAll) {
  TrainUnevenly(0, AsidePolicy::kAverageOverAll, 0.5F);
}

TEST(DdpTest, StandingAsideIsRefusedWhereTheDaemonDoesNotKnowWhatRanksDo) {
  FakeNetwork network(1);
  network.Run([](const std::shared_ptr<Group>& group) {
    Trainer hooked(group, SmallBuckets());
    ASSERT_TRUE(hooked.ddp().ReduceElsewhere().ok());
    EXPECT_EQ(hooked.ddp().StandAside(AsidePolicy::kForbid).code(), Code::kUnsupported);
    Trainer fixed(group, SmallBuckets());
    ASSERT_TRUE(fixed.ddp().SetUnusedPolicy(UnusedPolicy::kStatic).ok());
    EXPECT_EQ(fixed.ddp().StandAside(AsidePolicy::kForbid).code(), Code::kUnsupported);
  });
}

TEST(DdpTest, StandingAsideInTheMiddleOfAnIterationIsRefused) {
  FakeNetwork network(1);
  network.Run([](const std::shared_ptr<Group>& group) {
    Trainer trainer(group, SmallBuckets());
    ASSERT_TRUE(trainer.ddp().Begin().ok());
    ASSERT_TRUE(trainer.ddp().Ready(6));
    const Status refused = trainer.ddp().StandAside(AsidePolicy::kAverageOverAll);
    EXPECT_EQ(refused.code(), Code::kFailedPrecondition);
    EXPECT_THAT(refused.message(), HasSubstr("Expected to have finished reduction"));
  });
}

}  // namespace
}  // namespace gradsync
