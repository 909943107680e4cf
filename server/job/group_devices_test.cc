// Operations on GPUs in the order of a group: several are in their engine at a time, and finish in
// order.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <deque>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "server/job/group_scheduler.h"
#include "server/job/job_testing.h"

namespace gradsync {
namespace {

using std::chrono::seconds;
using testing::ElementsAre;
using testing::HasSubstr;

const Status kDied(Code::kRankLost, "job bert-7: rank 1 died (its process ended)");

Operation OnDevice(Operation operation) {
  operation.on_device = true;
  return operation;
}

MemberBuffers OfDevice(uint32_t device) {
  MemberBuffers buffers = HalfMinute();
  buffers.device = device;
  buffers.hand_over = HandOver::kDaemonMemory;
  return buffers;
}

std::vector<uint64_t> Started(const Decision& decision) {
  std::vector<uint64_t> sequences;
  for (const Decision::Start& start : decision.starts) sequences.push_back(start.sequence);
  return sequences;
}

class GroupDevicesTest : public testing::Test {
 protected:
  Decision Submit(uint32_t member, const Operation& operation) {
    return group_.Submit(member, operation, operation.on_device ? OfDevice(member) : HalfMinute(),
                         Time());
  }
  Decision SubmitAll(const Operation& operation) {
    (void)Submit(0, operation);
    return Submit(1, operation);
  }

  GroupScheduler group_{"bert-7", "ddp:0", {0, 1}, 7};
};

TEST_F(GroupDevicesTest, OperationsOnGpusAreInTheEngineTogether) {
  EXPECT_THAT(Started(SubmitAll(OnDevice(AllReduce(0)))), ElementsAre(0));
  EXPECT_THAT(Started(SubmitAll(OnDevice(AllReduce(2)))), ElementsAre());
  EXPECT_THAT(Started(SubmitAll(OnDevice(AllReduce(1)))), ElementsAre(1, 2));
  EXPECT_EQ(group_.operation_count(), 3u);
  EXPECT_FALSE(group_.Finished(1, OkStatus(), Time()).finished) << "they finish in order";
  EXPECT_EQ(group_.Finished(0, OkStatus(), Time()).completed, 1u);
  EXPECT_EQ(group_.Finished(1, OkStatus(), Time()).completed, 2u);
  EXPECT_EQ(group_.Finished(2, OkStatus(), Time()).completed, 3u);
  EXPECT_FALSE(group_.running());
}

TEST_F(GroupDevicesTest, EnginesTakeTurns) {
  (void)SubmitAll(OnDevice(AllReduce(0)));
  (void)SubmitAll(OnDevice(AllReduce(1)));
  EXPECT_THAT(Started(SubmitAll(AllReduce(2))), ElementsAre());
  EXPECT_THAT(Started(SubmitAll(OnDevice(AllReduce(3)))), ElementsAre());
  EXPECT_THAT(Started(group_.Finished(0, OkStatus(), Time())), ElementsAre());
  EXPECT_THAT(Started(group_.Finished(1, OkStatus(), Time())), ElementsAre(2));
  EXPECT_THAT(Started(group_.Finished(2, OkStatus(), Time())), ElementsAre(3));
}

TEST_F(GroupDevicesTest, ATaskKnowsItsGroupAndTheGpuOfEveryRank) {
  const Decision decision = SubmitAll(OnDevice(AllReduce(0)));
  ASSERT_EQ(decision.starts.size(), 1u);
  EXPECT_EQ(decision.starts[0].timeout, seconds(30));
  const DeviceSide* device = decision.starts[0].task->device.get();
  ASSERT_NE(device, nullptr);
  EXPECT_EQ(device->group, 7u);
  ASSERT_EQ(device->parts.size(), 2u);
  EXPECT_EQ(device->parts[1].device, 1u);
  EXPECT_EQ(device->parts[1].rank, 1u);
}

TEST_F(GroupDevicesTest, WhoStandsAsideHasNoPartInIt) {
  (void)group_.StandAside(0, {.request_id = 1, .next_sequence = 0, .timeout = seconds(30)}, Time());
  const Decision decision = Submit(1, OnDevice(AllReduce(0)));
  ASSERT_EQ(decision.starts.size(), 1u);
  const DeviceSide& device = *decision.starts[0].task->device;
  ASSERT_EQ(device.parts.size(), 1u);
  EXPECT_EQ(device.parts[0].rank, 1u);
}

TEST_F(GroupDevicesTest, RanksMustAgreeOnWhereTheMemoryIs) {
  (void)Submit(0, AllReduce(0));
  const Decision decision = Submit(1, OnDevice(AllReduce(0)));
  EXPECT_EQ(decision.failure.code(), Code::kMismatch);
  EXPECT_THAT(decision.failure.message(),
              HasSubstr("rank 1 submitted all_reduce of 100 float32 (sum) on GPUs; they differ in "
                        "device"));
}

TEST_F(GroupDevicesTest, ALossAbandonsWhatIsInTheEngineAndIsToldWhenThatHasEnded) {
  (void)SubmitAll(OnDevice(AllReduce(0)));
  (void)SubmitAll(OnDevice(AllReduce(1)));
  const Decision lost = group_.MemberGone(1, /*orderly=*/false, kDied);
  EXPECT_TRUE(lost.abandon);
  EXPECT_TRUE(lost.failure.ok());
  EXPECT_TRUE(group_.Finished(0, OkStatus(), Time()).failure.ok());
  const Decision last = group_.Finished(1, OkStatus(), Time());
  EXPECT_EQ(last.failure.code(), Code::kRankLost);
  EXPECT_FALSE(group_.running());
}

TEST_F(GroupDevicesTest, ALossWithoutWorkOnGpusAbandonsNothing) {
  (void)SubmitAll(AllReduce(0));
  EXPECT_FALSE(group_.MemberGone(1, /*orderly=*/false, kDied).abandon);
}

TEST_F(GroupDevicesTest, WhatTheEngineCannotDoFailsTheGroupNamingTheOperation) {
  (void)SubmitAll(OnDevice(AllReduce(0)));
  (void)SubmitAll(OnDevice(AllReduce(1)));
  const Status broken(Code::kInternal, "GPU 0 has failed");
  const Decision first = group_.Finished(0, broken, Time());
  EXPECT_TRUE(first.abandon);
  EXPECT_FALSE(first.completed);
  EXPECT_TRUE(first.failure.ok()) << "one is still in the engine";
  const Decision last = group_.Finished(1, broken, Time());
  EXPECT_EQ(last.failure.code(), Code::kInternal);
  EXPECT_THAT(last.failure.message(),
              HasSubstr("group ddp:0: operation 0, all_reduce of 100 float32 (sum) on GPUs: GPU 0 "
                        "has failed"));
}

// Random operations of both engines by random ranks in random order; whatever happens, what is in
// an engine is there by the rules, and a failure is told once, when nothing is in an engine.
TEST(GroupDevicesInterleavingTest, EnginesNeverMixAndNothingIsLost) {
  for (uint32_t seed = 0; seed < 2000; ++seed) {
    std::mt19937 random(seed);
    const auto below = [&random](uint32_t bound) {
      return static_cast<uint32_t>(random() % bound);
    };
    const uint32_t size = 1 + below(3);
    std::vector<uint32_t> ranks(size);
    for (uint32_t rank = 0; rank < size; ++rank) ranks[rank] = rank;
    GroupScheduler group("job", "tag", ranks);
    std::vector<Operation> operations;
    for (uint64_t sequence = 0; sequence < 12; ++sequence) {
      operations.push_back(AllReduce(sequence));
      operations.back().on_device = below(2) == 0;
    }
    std::vector<std::vector<uint64_t>> to_submit(size);
    for (auto& sequences : to_submit) {
      for (uint64_t sequence = 0; sequence < operations.size(); ++sequence) {
        sequences.insert(sequences.begin() + below(static_cast<uint32_t>(sequences.size()) + 1),
                         sequence);
      }
    }
    const bool fails = below(4) == 0;
    std::deque<uint64_t> engine;
    uint64_t next_start = 0;
    bool failed = false;
    bool told = false;
    const auto apply = [&](const Decision& decision) {
      ASSERT_TRUE(decision.rejected.ok());
      if (!decision.failure.ok()) {
        EXPECT_TRUE(engine.empty()) << "seed " << seed;
        EXPECT_FALSE(told) << "seed " << seed;
        told = true;
      }
      for (const Decision::Start& start : decision.starts) {
        EXPECT_FALSE(failed) << "seed " << seed;
        EXPECT_EQ(start.sequence, next_start++) << "seed " << seed;
        for (const uint64_t other : engine) {
          EXPECT_TRUE(operations[other].on_device && operations[start.sequence].on_device);
        }
        engine.push_back(start.sequence);
      }
    };
    for (int step = 0; step < 400 && !told; ++step) {
      const uint32_t choice = below(100);
      if (choice < 60) {
        std::vector<uint64_t>& mine = to_submit[below(size)];
        if (mine.empty() || failed) continue;
        const auto member = static_cast<uint32_t>(&mine - to_submit.data());
        apply(group.Submit(member, operations[mine.back()], HalfMinute(), Time()));
        mine.pop_back();
      } else if (choice < 98) {
        if (engine.empty()) continue;
        const uint64_t first = engine.front();
        engine.pop_front();
        const bool breaks = fails && operations[first].on_device && below(6) == 0;
        failed |= breaks;
        apply(
            group.Finished(first, breaks ? Status(Code::kInternal, "broken") : OkStatus(), Time()));
      } else if (fails && !failed) {
        failed = true;
        const bool on_device = !engine.empty() && operations[engine.back()].on_device;
        const Decision decision = group.MemberGone(0, /*orderly=*/false, kDied);
        EXPECT_EQ(decision.abandon, on_device) << "seed " << seed;
        apply(decision);
      }
    }
    if (!failed) {
      EXPECT_EQ(next_start, operations.size()) << "seed " << seed;
    } else {
      EXPECT_TRUE(told) << "seed " << seed;
    }
  }
}

}  // namespace
}  // namespace gradsync
