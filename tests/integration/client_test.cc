// libgradsync against a daemon in this process: each rank is a thread with a session of its own.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>

#include <array>
#include <atomic>
#include <chrono>
#include <complex>
#include <cstring>
#include <functional>
#include <latch>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "client/core/daemon_group.h"
#include "client/core/pieces.h"
#include "client/core/session.h"
#include "shm/frame_socket.h"
#include "shm/protocol.h"
#include "tests/integration/daemon_fixture.h"
#include "tests/integration/raw_client.h"

namespace gradsync::testing {
namespace {

using ::testing::Each;
using ::testing::HasSubstr;

constexpr uint64_t kLarge =
    3 * kPieceBytes / sizeof(float) + 12345;  // several pieces, the last odd
constexpr Timeout kPatient{60000};
constexpr Timeout kShort{300};

struct Rank {
  std::shared_ptr<Session> session;
  std::shared_ptr<DaemonGroup> group;

  Status AllReduce(float* data, uint64_t count, Timeout timeout = kPatient) const {
    return group->AllReduce(data, count, DType::kFloat32, ReduceOp::kSum, timeout);
  }
  std::shared_ptr<SharedBuffer> Buffer(uint64_t bytes) const {
    auto buffer = session->Allocate(bytes, "test");
    EXPECT_TRUE(buffer) << buffer.error().ToString();
    return buffer.value_or(nullptr);
  }
};

float* Floats(const std::shared_ptr<SharedBuffer>& buffer, uint64_t offset = 0) {
  return reinterpret_cast<float*>(buffer->data()) + offset;
}

class ClientTest : public ::testing::Test {
 protected:
  explicit ClientTest(ServerOptions options = {}) : daemon_(std::move(options)) {}

  Result<std::shared_ptr<Session>> Open(uint32_t rank, uint32_t world_size,
                                        const std::string& job = "job") const {
    SessionRequest request;
    request.socket = daemon_.socket();
    request.job = job;
    request.rank = rank;
    request.world_size = world_size;
    return Session::Open(request, {});
  }

  // Runs `body` for every rank of a job, each on a thread, in a group of all.
  void RunRanks(uint32_t world_size, const std::function<void(const Rank&)>& body) const {
    std::vector<std::thread> threads;
    for (uint32_t rank = 0; rank < world_size; ++rank) {
      threads.emplace_back([=, this, &body] {
        auto session = Open(rank, world_size);
        ASSERT_TRUE(session) << session.error().ToString();
        auto group = DaemonGroup::Create(*session, "all", {}, kPatient);
        ASSERT_TRUE(group) << group.error().ToString();
        EXPECT_EQ((*group)->rank(), rank);
        body({*session, *group});
      });
    }
    for (std::thread& thread : threads) thread.join();
  }

  // Whether a group waits for a rank.
  bool IsWaiting() {
    bool waiting = false;
    const Status called = daemon_.server().Call(
        [&waiting](const JobTable& table, Time now) {
          for (const JobSnapshot& job : table.Snapshot(now)) {
            for (const GroupSnapshot& group : job.groups) {
              if (group.waiting_operation) waiting = true;
            }
          }
        },
        SoonEnough());
    EXPECT_TRUE(called.ok()) << called.ToString();
    return waiting;
  }

  InProcessDaemon daemon_;
};

// value(rank, i), small enough that every sum is exact.
float Value(uint32_t rank, uint64_t i) { return static_cast<float>(i % 1000 + rank * 7); }
float SumOfValues(uint32_t ranks, uint64_t i) {
  float sum = 0;
  for (uint32_t rank = 0; rank < ranks; ++rank) sum += Value(rank, i);
  return sum;
}

void Fill(float* data, uint64_t count, uint32_t rank) {
  for (uint64_t i = 0; i < count; ++i) data[i] = Value(rank, i);
}
void ExpectSums(const float* data, uint64_t count, uint32_t ranks) {
  for (uint64_t i = 0; i < count; ++i) ASSERT_EQ(data[i], SumOfValues(ranks, i)) << "at " << i;
}

TEST_F(ClientTest, AllReduceSumsOrdinaryMemoryOfAnySize) {
  RunRanks(2, [](const Rank& rank) {
    for (const uint64_t count : {uint64_t{1}, uint64_t{257}, uint64_t{20000}, kLarge}) {
      std::vector<float> data(count);
      Fill(data.data(), count, rank.group->rank());
      ASSERT_TRUE(rank.AllReduce(data.data(), count).ok());
      ExpectSums(data.data(), count, 2);
    }
  });
}

TEST_F(ClientTest, AllReduceSumsSharedMemoryWhereItLies) {
  RunRanks(3, [](const Rank& rank) {
    const auto buffer = rank.Buffer((kLarge + 16) * sizeof(float));
    float* const data = Floats(buffer, 16);
    Fill(data, kLarge, rank.group->rank());
    ASSERT_TRUE(rank.AllReduce(data, kLarge).ok());
    ExpectSums(data, kLarge, 3);
  });
}

// Where memory lies is a rank's own affair: it must not make the ranks' operations differ.
TEST_F(ClientTest, RanksMayMixSharedOrdinaryAndUnalignedMemory) {
  RunRanks(3, [](const Rank& rank) {
    std::vector<float> ordinary(kLarge);
    const auto buffer = rank.Buffer((kLarge + 1) * sizeof(float));
    auto* const unaligned = buffer->data() + 2;
    const uint32_t me = rank.group->rank();
    Fill(ordinary.data(), kLarge, me);
    void* data = ordinary.data();
    if (me == 1) data = buffer->data();
    if (me == 2) data = unaligned;
    std::memcpy(data, ordinary.data(), kLarge * sizeof(float));
    ASSERT_TRUE(
        rank.group->AllReduce(data, kLarge, DType::kFloat32, ReduceOp::kSum, kPatient).ok());
    std::memcpy(ordinary.data(), data, kLarge * sizeof(float));
    ExpectSums(ordinary.data(), kLarge, 3);
  });
}

TEST_F(ClientTest, MemoryThatIsOnlyPartlySharedIsStaged) {
  RunRanks(2, [](const Rank& rank) {
    const auto buffer = rank.Buffer(4096);
    EXPECT_TRUE(rank.session->Find(buffer->data() + 4000, 96));
    EXPECT_FALSE(rank.session->Find(buffer->data() + 4000, 97));
    EXPECT_FALSE(rank.session->Find(buffer->data() - 1, 2));
  });
}

TEST_F(ClientTest, EveryTypeAndReductionIsCombined) {
  RunRanks(2, [](const Rank& rank) {
    const auto me = static_cast<int>(rank.group->rank());
    std::array<int64_t, 2> ints = {me + 1, 5};
    EXPECT_TRUE(
        rank.group->AllReduce(ints.data(), 2, DType::kInt64, ReduceOp::kProduct, kPatient).ok());
    EXPECT_THAT(ints, ::testing::ElementsAre(2, 25));
    double maximum = me;
    EXPECT_TRUE(rank.group->AllReduce(&maximum, 1, DType::kFloat64, ReduceOp::kMax, kPatient).ok());
    EXPECT_EQ(maximum, 1);
    std::complex<float> mean(static_cast<float>(me), 4);
    EXPECT_TRUE(rank.group->AllReduce(&mean, 1, DType::kComplex64, ReduceOp::kAvg, kPatient).ok());
    EXPECT_EQ(mean, std::complex<float>(0.5, 4));
    const Status refused =
        rank.group->AllReduce(ints.data(), 2, DType::kInt64, ReduceOp::kAvg, kPatient);
    EXPECT_EQ(refused.code(), Code::kInvalidArgument);
    EXPECT_THAT(refused.message(), HasSubstr("int64 cannot be combined by avg"));
    EXPECT_EQ(rank.group->AllReduce(ints.data(), 2, DType{77}, ReduceOp::kSum, kPatient).code(),
              Code::kInvalidArgument);
    EXPECT_EQ(rank.group->AllReduce(ints.data(), 2, DType::kInt64, ReduceOp{77}, kPatient).code(),
              Code::kInvalidArgument);
    EXPECT_TRUE(rank.group->Barrier(kPatient).ok());  // what was refused did no harm
  });
}

TEST_F(ClientTest, BroadcastGivesEveryRankTheRootsValues) {
  RunRanks(3, [](const Rank& rank) {
    const uint32_t me = rank.group->rank();
    for (uint32_t root = 0; root < 3; ++root) {
      for (const uint64_t count : {uint64_t{3}, kLarge}) {
        std::vector<float> data(count);
        Fill(data.data(), count, me);
        ASSERT_TRUE(
            rank.group->Broadcast(data.data(), count, DType::kFloat32, root, kPatient).ok());
        for (uint64_t i = 0; i < count; ++i) ASSERT_EQ(data[i], Value(root, i));
      }
    }
    const auto shared = rank.Buffer(kLarge * sizeof(float));
    Fill(Floats(shared), kLarge, me);
    ASSERT_TRUE(rank.group->Broadcast(shared->data(), kLarge, DType::kFloat32, 1, kPatient).ok());
    for (uint64_t i = 0; i < kLarge; ++i) ASSERT_EQ(Floats(shared)[i], Value(1, i));
    EXPECT_EQ(rank.group->Broadcast(shared->data(), 1, DType::kFloat32, 3, kPatient).code(),
              Code::kInvalidArgument);
  });
}

void ExpectGathered(const float* output, uint64_t count, uint32_t ranks) {
  for (uint32_t rank = 0; rank < ranks; ++rank) {
    for (uint64_t i = 0; i < count; ++i) {
      ASSERT_EQ(output[rank * count + i], Value(rank, i)) << "of rank " << rank << " at " << i;
    }
  }
}

TEST_F(ClientTest, AllGatherCollectsEveryRanksInput) {
  RunRanks(3, [](const Rank& rank) {
    for (const uint64_t count : {uint64_t{5}, uint64_t{30000}, kLarge}) {
      const auto shared = rank.Buffer(3 * count * sizeof(float));
      std::vector<float> input(count);
      std::vector<float> output(3 * count);
      Fill(input.data(), count, rank.group->rank());
      ASSERT_TRUE(
          rank.group->AllGather(input.data(), output.data(), count, DType::kFloat32, kPatient)
              .ok());
      ExpectGathered(output.data(), count, 3);
      ASSERT_TRUE(
          rank.group->AllGather(input.data(), shared->data(), count, DType::kFloat32, kPatient)
              .ok());
      ExpectGathered(Floats(shared), count, 3);
    }
  });
}

TEST_F(ClientTest, AllGatherTakesItsInputFromTheOutputToo) {
  RunRanks(2, [](const Rank& rank) {
    constexpr uint64_t kCount = 1000;
    const auto shared = rank.Buffer(2 * kCount * sizeof(float));
    float* const own = Floats(shared, rank.group->rank() * kCount);
    Fill(own, kCount, rank.group->rank());
    ASSERT_TRUE(rank.group->AllGather(own, shared->data(), kCount, DType::kFloat32, kPatient).ok());
    ExpectGathered(Floats(shared), kCount, 2);
  });
}

// Element i of the block that `from` has for `to`.
float BlockValue(uint32_t from, uint32_t to, uint64_t i) {
  return static_cast<float>(i % 100 + from * 7 + to * 1000);
}

void FillBlocks(float* data, uint64_t count, uint32_t own, uint32_t ranks) {
  for (uint32_t to = 0; to < ranks; ++to) {
    for (uint64_t i = 0; i < count; ++i) data[to * count + i] = BlockValue(own, to, i);
  }
}

// Ordinary memory, or a shared buffer.
class Memory {
 public:
  Memory(const Rank& rank, uint64_t count, bool shared)
      : own_(shared ? 0 : count), buffer_(shared ? rank.Buffer(count * sizeof(float)) : nullptr) {}
  float* data() { return buffer_ != nullptr ? Floats(buffer_) : own_.data(); }

 private:
  std::vector<float> own_;
  std::shared_ptr<SharedBuffer> buffer_;
};

TEST_F(ClientTest, ReduceGivesTheSumToTheRootAndLeavesTheOthersAlone) {
  RunRanks(3, [](const Rank& rank) {
    const uint32_t own = rank.group->rank();
    for (const uint64_t count : {uint64_t{1}, uint64_t{20000}, kLarge}) {
      for (const bool shared : {false, true}) {
        Memory memory(rank, count, shared);
        Fill(memory.data(), count, own);
        ASSERT_TRUE(
            rank.group->Reduce(memory.data(), count, DType::kFloat32, ReduceOp::kSum, 1, kPatient)
                .ok());
        if (own == 1) {
          ExpectSums(memory.data(), count, 3);
        } else {
          for (uint64_t i = 0; i < count; ++i) ASSERT_EQ(memory.data()[i], Value(own, i));
        }
      }
    }
  });
}

TEST_F(ClientTest, GatherAndScatterMoveBlocksToAndFromTheRoot) {
  RunRanks(3, [](const Rank& rank) {
    const uint32_t own = rank.group->rank();
    for (const uint64_t count : {uint64_t{1}, uint64_t{20000}, kLarge}) {
      // Ranks may differ in where their memory lies.
      for (const bool shared : {false, own != 1, true}) {
        Memory blocks(rank, 3 * count, shared);
        Memory block(rank, count, shared);
        FillBlocks(blocks.data(), count, own, 3);
        const bool is_root = own == 1;
        ASSERT_TRUE(rank.group
                        ->Scatter(is_root ? blocks.data() : nullptr, block.data(), count,
                                  DType::kFloat32, 1, kPatient)
                        .ok());
        for (uint64_t i = 0; i < count; ++i) ASSERT_EQ(block.data()[i], BlockValue(1, own, i));
        std::memset(blocks.data(), 0, 3 * count * sizeof(float));
        ASSERT_TRUE(rank.group
                        ->Gather(block.data(), is_root ? blocks.data() : nullptr, count,
                                 DType::kFloat32, 1, kPatient)
                        .ok());
        for (uint64_t i = 0; i < 3 * count; ++i) {
          const float expected =
              is_root ? BlockValue(1, static_cast<uint32_t>(i / count), i % count) : 0;
          ASSERT_EQ(blocks.data()[i], expected);
        }
      }
    }
  });
}

TEST_F(ClientTest, ReduceScatterGivesEveryRankItsBlockOfTheSum) {
  RunRanks(3, [](const Rank& rank) {
    const uint32_t own = rank.group->rank();
    for (const uint64_t count : {uint64_t{1}, uint64_t{20000}, kLarge}) {
      for (const bool shared : {false, true}) {
        for (const bool into_input : {false, true}) {
          Memory blocks(rank, 3 * count, shared);
          Memory other(rank, count, shared);
          FillBlocks(blocks.data(), count, own, 3);
          float* const output = into_input ? blocks.data() + own * count : other.data();
          ASSERT_TRUE(rank.group
                          ->ReduceScatter(blocks.data(), output, count, DType::kFloat32,
                                          ReduceOp::kSum, kPatient)
                          .ok());
          for (uint64_t i = 0; i < count; ++i) {
            ASSERT_EQ(output[i],
                      BlockValue(0, own, i) + BlockValue(1, own, i) + BlockValue(2, own, i));
          }
        }
      }
    }
  });
}

TEST_F(ClientTest, AllToAllSwapsBlocksAlsoInPlace) {
  RunRanks(3, [](const Rank& rank) {
    const uint32_t own = rank.group->rank();
    for (const uint64_t count : {uint64_t{1}, uint64_t{20000}, kLarge}) {
      for (const bool shared : {false, true}) {
        for (const bool in_place : {false, true}) {
          Memory input(rank, 3 * count, shared);
          Memory other(rank, 3 * count, shared);
          FillBlocks(input.data(), count, own, 3);
          float* const output = in_place ? input.data() : other.data();
          ASSERT_TRUE(
              rank.group->AllToAll(input.data(), output, count, DType::kFloat32, kPatient).ok());
          for (uint64_t i = 0; i < 3 * count; ++i) {
            ASSERT_EQ(output[i], BlockValue(static_cast<uint32_t>(i / count), own, i % count));
          }
        }
      }
    }
  });
}

// Sends, and says whether it was taken.
Status SendText(const Rank& rank, const std::string& text, uint32_t to, uint64_t tag) {
  auto request = rank.group->BeginSend(reinterpret_cast<const std::byte*>(text.data()), text.size(),
                                       to, tag, kPatient);
  if (!request) return request.error();
  const auto end = request->End(nullptr, 0);
  return end ? OkStatus() : end.error();
}

std::string ReceiveText(const Rank& rank, std::optional<uint32_t> from, uint64_t tag,
                        uint64_t bytes, Timeout timeout = kPatient) {
  std::string text(bytes, '?');
  auto request = rank.group->BeginReceive(from, tag, timeout);
  if (!request) return request.error().ToString();
  const auto end = request->End(reinterpret_cast<std::byte*>(text.data()), bytes);
  return end ? text : end.error().ToString();
}

TEST_F(ClientTest, RanksThatSendToEachOtherFirstBothReceive) {
  RunRanks(2, [](const Rank& rank) {
    const uint32_t own = rank.group->rank();
    for (const uint64_t bytes : {uint64_t{0}, uint64_t{5}, uint64_t{kInlineMessageBytes},
                                 uint64_t{kInlineMessageBytes + 1}, uint64_t{3'000'001}}) {
      const std::string mine(bytes, own == 0 ? 'a' : 'b');
      ASSERT_TRUE(SendText(rank, mine, 1 - own, 7).ok());
      EXPECT_EQ(ReceiveText(rank, 1 - own, 7, bytes), std::string(bytes, own == 0 ? 'b' : 'a'));
    }
  });
}

TEST_F(ClientTest, MessagesAndCollectivesKeepNoOrderWithEachOther) {
  RunRanks(2, [](const Rank& rank) {
    float value = 1;
    if (rank.group->rank() == 0) {
      auto receive = rank.group->BeginReceive(1, 3, kPatient);
      ASSERT_TRUE(receive);
      ASSERT_TRUE(rank.AllReduce(&value, 1).ok());
      std::byte byte{};
      ASSERT_TRUE(receive->End(&byte, 1));
      EXPECT_EQ(byte, std::byte{'x'});
    } else {
      ASSERT_TRUE(rank.AllReduce(&value, 1).ok());
      ASSERT_TRUE(SendText(rank, "x", 0, 3).ok());
    }
  });
}

TEST_F(ClientTest, TagsAndAnySourceChooseMessages) {
  RunRanks(3, [](const Rank& rank) {
    const uint32_t own = rank.group->rank();
    if (own != 0) {
      ASSERT_TRUE(SendText(rank, "first", 0, own).ok());
      ASSERT_TRUE(SendText(rank, "other", 0, 9).ok());
      return;
    }
    EXPECT_EQ(ReceiveText(rank, std::nullopt, 2, 5), "first");
    EXPECT_EQ(ReceiveText(rank, std::nullopt, 9, 5), "other");
    EXPECT_EQ(ReceiveText(rank, std::nullopt, 9, 5), "other");
    EXPECT_EQ(ReceiveText(rank, 1, 1, 5), "first");
  });
}

TEST_F(ClientTest, AReceiveThatIsInVainEndsAtItsDeadlineAndTheGroupGoesOn) {
  RunRanks(2, [](const Rank& rank) {
    if (rank.group->rank() == 0) {
      EXPECT_THAT(
          ReceiveText(rank, 1, 3, 1, kShort),
          HasSubstr("Timed out waiting 300 ms for a message to rank 0 from rank 1 (tag 3)"));
    }
    EXPECT_TRUE(rank.group->Barrier(kPatient).ok());
  });
}

TEST_F(ClientTest, AMessageOfAnotherSizeIsAMismatch) {
  RunRanks(2, [](const Rank& rank) {
    if (rank.group->rank() == 0) {
      ASSERT_TRUE(SendText(rank, "four", 1, 3).ok());
    } else {
      EXPECT_THAT(ReceiveText(rank, 0, 3, 5), HasSubstr("has 4 bytes, but 5 were to be received"));
    }
  });
}

TEST_F(ClientTest, ACancelledReceiveEndsAndLeavesTheMessageToTheNext) {
  RunRanks(2, [](const Rank& rank) {
    if (rank.group->rank() == 1) {
      ASSERT_TRUE(rank.group->Barrier(kPatient).ok());
      ASSERT_TRUE(SendText(rank, "x", 0, 3).ok());
      return;
    }
    auto cancelled = rank.group->BeginReceive(1, 3, kPatient);
    auto dropped = rank.group->BeginReceive(1, 3, kPatient);
    cancelled->Cancel();
    const auto end = cancelled->End(nullptr, 0);
    ASSERT_FALSE(end);
    EXPECT_EQ(end.error().code(), Code::kFailedPrecondition);
    { const auto gone = *std::move(dropped); }
    ASSERT_TRUE(rank.group->Barrier(kPatient).ok());
    EXPECT_EQ(ReceiveText(rank, 1, 3, 1), "x");
  });
}

TEST_F(ClientTest, WhoWaitsForAnyHearsOfTheFirst) {
  RunRanks(2, [](const Rank& rank) {
    if (rank.group->rank() == 1) {
      ASSERT_TRUE(SendText(rank, "x", 0, 5).ok());
      ASSERT_TRUE(rank.group->Barrier(kPatient).ok());
      ASSERT_TRUE(SendText(rank, "y", 0, 4).ok());
      return;
    }
    const auto four = rank.group->BeginReceive(1, 4, kPatient);
    const auto five = rank.group->BeginReceive(1, 5, kPatient);
    const std::array<const MessageRequest*, 2> both = {&*four, &*five};
    size_t first = both.size();
    while (first == both.size()) first = *MessageRequest::WaitAny(both);
    EXPECT_EQ(first, 1U);
    ASSERT_TRUE(rank.group->Barrier(kPatient).ok());
    const std::array<const MessageRequest*, 1> rest = {&*four};
    while (*MessageRequest::WaitAny(rest) != 0) {
    }
  });
}

TEST_F(ClientTest, MoreMessagesThanAreTakenAtOnceAllArrive) {
  constexpr int kMessages = 1500;  // whose answers are more than a socket holds
  RunRanks(2, [](const Rank& rank) {
    if (rank.group->rank() == 0) {
      std::vector<MessageRequest> sends;
      for (int i = 0; i < kMessages; ++i) {
        const std::byte byte{static_cast<unsigned char>(i)};
        auto send = rank.group->BeginSend(&byte, 1, 1, 3, kPatient);
        ASSERT_TRUE(send) << send.error().ToString();
        sends.push_back(*std::move(send));
      }
      ASSERT_TRUE(rank.group->Barrier(kPatient).ok());
      for (MessageRequest& send : sends) ASSERT_TRUE(send.End(nullptr, 0));
    } else {
      ASSERT_TRUE(rank.group->Barrier(kPatient).ok());
      for (int i = 0; i < kMessages; ++i) {
        ASSERT_EQ(ReceiveText(rank, 0, 3, 1), std::string(1, static_cast<char>(i)));
      }
    }
  });
}

TEST_F(ClientTest, WhoWaitsForARankThatLeavesIsToldSo) {
  RunRanks(2, [](const Rank& rank) {
    if (rank.group->rank() == 0) {
      EXPECT_THAT(ReceiveText(rank, 1, 3, 1), HasSubstr("rank 1"));
    } else {
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
      rank.session->Close();
    }
  });
}

TEST_F(ClientTest, BucketsMayBeSubmittedInAnyOrder) {
  RunRanks(2, [](const Rank& rank) {
    constexpr uint64_t kCount = 1024;
    const auto buffer = rank.Buffer(2 * kCount * sizeof(float));
    Fill(Floats(buffer), kCount, rank.group->rank());
    Fill(Floats(buffer, kCount), kCount, rank.group->rank());
    std::array<BucketInfo, 2> buckets;
    for (uint32_t i = 0; i < 2; ++i) {
      buckets[i] = {i, 2, 1, kCount, DType::kFloat32, "weight"};
      ASSERT_TRUE(rank.group->DescribeBucket(buckets[i]).ok());
    }
    const uint64_t first = rank.group->ReserveSequences(2);
    for (const uint32_t i : {1U, 0U}) {
      ASSERT_TRUE(rank.group
                      ->SubmitBucket(first + i, buckets[i], *buffer, i * kCount * sizeof(float),
                                     ReduceOp::kSum, kPatient, nullptr)
                      .ok());
    }
    ASSERT_TRUE(rank.group->Wait(first + 1, kPatient).ok());
    ASSERT_TRUE(rank.group->Wait(first, kPatient).ok());
    ExpectSums(Floats(buffer), kCount, 2);
    ExpectSums(Floats(buffer, kCount), kCount, 2);
    ASSERT_TRUE(rank.AllReduce(Floats(buffer), 1).ok());  // the order goes on behind them
  });
}

TEST_F(ClientTest, CollectivesWithoutElementsKeepTheirPlace) {
  RunRanks(2, [](const Rank& rank) {
    EXPECT_TRUE(rank.AllReduce(nullptr, 0).ok());
    EXPECT_TRUE(rank.group->Broadcast(nullptr, 0, DType::kInt8, 1, kPatient).ok());
    EXPECT_TRUE(rank.group->AllGather(nullptr, nullptr, 0, DType::kInt8, kPatient).ok());
    float one = 1;
    EXPECT_TRUE(rank.AllReduce(&one, 1).ok());
    EXPECT_EQ(one, 2);
    const Status status = rank.AllReduce(&one, rank.group->rank());
    EXPECT_EQ(status.code(), Code::kMismatch);
    EXPECT_THAT(status.message(), HasSubstr("count"));
  });
}

TEST_F(ClientTest, ThreadsOfARankMayWorkInGroupsAtTheSameTime) {
  RunRanks(2, [](const Rank& rank) {
    std::vector<std::thread> threads;
    for (int i = 0; i < 3; ++i) {
      threads.emplace_back([&rank, i] {
        const auto group =
            DaemonGroup::Create(rank.session, "thread " + std::to_string(i), {}, kPatient);
        ASSERT_TRUE(group);
        std::vector<float> data(kLarge);
        for (int round = 0; round < 3; ++round) {
          Fill(data.data(), kLarge, (*group)->rank());
          ASSERT_TRUE(
              (*group)
                  ->AllReduce(data.data(), kLarge, DType::kFloat32, ReduceOp::kSum, kPatient)
                  .ok());
          ExpectSums(data.data(), kLarge, 2);
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
  });
}

TEST_F(ClientTest, ARequestThatWaitsForOtherRanksHoldsUpNoOther) {
  std::latch allocated(1);
  RunRanks(2, [&](const Rank& rank) {
    if (rank.group->rank() == 1) {
      allocated.wait();
      EXPECT_TRUE(DaemonGroup::Create(rank.session, "late", {}, kPatient));
      return;
    }
    std::thread waiter(
        [&] { EXPECT_TRUE(DaemonGroup::Create(rank.session, "late", {}, kPatient)); });
    for (int i = 0; i < 20; ++i) EXPECT_NE(rank.Buffer(4096), nullptr);
    allocated.count_down();
    waiter.join();
  });
}

TEST_F(ClientTest, SubgroupsNumberTheirMembersInTheOrderGiven) {
  RunRanks(3, [](const Rank& rank) {
    if (rank.session->identity().rank == 1) return;
    const auto group = DaemonGroup::Create(rank.session, "outer", {2, 0}, kPatient);
    ASSERT_TRUE(group) << group.error().ToString();
    EXPECT_EQ((*group)->rank(), rank.session->identity().rank == 2 ? 0 : 1);
    EXPECT_EQ((*group)->job_rank(0), 2);
    float value = static_cast<float>(rank.session->identity().rank);
    EXPECT_TRUE((*group)->Broadcast(&value, 1, DType::kFloat32, 0, kPatient).ok());
    EXPECT_EQ(value, 2);
  });
}

TEST_F(ClientTest, GroupsThatCannotBeAreRefused) {
  const auto session = Open(0, 2);
  ASSERT_TRUE(session);
  const auto refusal = [&](const std::string& tag, std::vector<uint32_t> ranks) {
    const auto group = DaemonGroup::Create(*session, tag, std::move(ranks), kShort);
    return group ? OkStatus() : group.error();
  };
  EXPECT_THAT(refusal("g", {0, 0}).message(), HasSubstr("twice"));
  EXPECT_THAT(refusal("g", {0, 2}).message(), HasSubstr("rank 2, but job 'job' has 2 ranks"));
  EXPECT_THAT(refusal("g", {1}).message(), HasSubstr("does not name this rank, 0"));
  EXPECT_THAT(refusal("", {0}).message(), HasSubstr("1 to 127 bytes"));
  EXPECT_THAT(refusal(std::string(128, 't'), {0}).message(), HasSubstr("1 to 127 bytes"));
  const Status late = refusal("g", {0, 1});
  EXPECT_EQ(late.code(), Code::kDeadlineExceeded);
  EXPECT_THAT(late.message(), HasSubstr("rank 1"));
}

TEST_F(ClientTest, ARankThatNeverComesToACollectiveIsNamedAtTheDeadline) {
  std::latch failed(1);
  RunRanks(2, [&](const Rank& rank) {
    if (rank.group->rank() == 1) return failed.wait();
    float value = 1;
    const Status status = rank.AllReduce(&value, 1, kShort);
    EXPECT_EQ(status.code(), Code::kDeadlineExceeded);
    EXPECT_THAT(status.message(), HasSubstr("rank 1"));
    EXPECT_EQ(rank.AllReduce(&value, 1).code(), Code::kDeadlineExceeded);  // for good
    failed.count_down();
  });
}

// A group has one order of collectives: the other ranks would wait for one that never begins.
TEST_F(ClientTest, AThreadThatCannotBeginItsCollectiveInTimeAbortsTheGroup) {
  std::latch done(2);
  RunRanks(2, [&](const Rank& rank) {
    if (rank.group->rank() == 1) return done.arrive_and_wait();  // takes no part
    Status first;
    std::thread other([&] {
      float value = 0;
      first = rank.AllReduce(&value, 1);
    });
    while (!IsWaiting()) std::this_thread::yield();
    const Status late = rank.group->Barrier(kShort);
    other.join();
    done.arrive_and_wait();
    EXPECT_EQ(late.code(), Code::kDeadlineExceeded) << late.ToString();
    EXPECT_THAT(late.message(), HasSubstr("another thread's was under way"));
    EXPECT_EQ(first.code(), Code::kDeadlineExceeded) << first.ToString();
    EXPECT_THAT(first.message(), HasSubstr("another thread's was under way"));
  });
}

TEST_F(ClientTest, ShareGivesEveryRankTheLastOnesValues) {
  RunRanks(3, [](const Rank& rank) {
    for (const uint64_t count : {uint64_t{3}, kLarge}) {
      std::vector<float> data(count);
      Fill(data.data(), count, rank.group->rank());
      ASSERT_TRUE(rank.group->Share(data.data(), count, DType::kFloat32, kPatient).ok());
      for (uint64_t i = 0; i < count; ++i) ASSERT_EQ(data[i], Value(2, i));
    }
  });
}

// Rank r makes r rounds of what can be made without the others, twice over.
TEST_F(ClientTest, TheOthersGoOnWithoutRanksThatStandAside) {
  RunRanks(3, [](const Rank& rank) {
    const uint32_t own = rank.group->rank();
    for (const AsidePolicy policy :
         {AsidePolicy::kAverageOverAll, AsidePolicy::kAverageOverPresent}) {
      for (uint32_t round = 0; round < own; ++round) {
        const uint32_t present = 2 - round;  // the ranks above `round`
        std::vector<float> data(kLarge, 6);
        ASSERT_TRUE(
            rank.group->AllReduce(data.data(), kLarge, DType::kFloat32, ReduceOp::kAvg, kPatient)
                .ok());
        const bool over_all = policy == AsidePolicy::kAverageOverAll;
        EXPECT_EQ(data.back(), over_all ? 2.0F * static_cast<float>(present) : 6.0F);
        auto shared = static_cast<int32_t>(own);
        ASSERT_TRUE(rank.group->Share(&shared, 1, DType::kInt32, kPatient).ok());
        EXPECT_EQ(shared, 2);
        ASSERT_TRUE(rank.group->Barrier(kPatient).ok());
      }
      ASSERT_TRUE(rank.group->StandAside(policy, kPatient).ok());
      const Status refused = rank.group->Barrier(kPatient);
      EXPECT_EQ(refused.code(), Code::kFailedPrecondition);
      EXPECT_THAT(refused.message(), HasSubstr("stands aside"));
      const Result<uint32_t> last = rank.group->Rejoin();
      ASSERT_TRUE(last) << last.error().ToString();
      EXPECT_EQ(*last, 2U);
      float sum = 1;
      ASSERT_TRUE(rank.AllReduce(&sum, 1).ok());
      EXPECT_EQ(sum, 3);
    }
    EXPECT_EQ(rank.group->Rejoin().error().code(), Code::kFailedPrecondition);
    EXPECT_EQ(rank.group->StandAside(AsidePolicy{9}, kPatient).code(), Code::kInvalidArgument);
  });
}

TEST_F(ClientTest, ARankMayForbidThatTheOthersGoOnWithoutIt) {
  RunRanks(2, [](const Rank& rank) {
    float sum = 1;
    ASSERT_TRUE(rank.AllReduce(&sum, 1).ok());
    Status status;
    if (rank.group->rank() == 0) {
      ASSERT_TRUE(rank.group->StandAside(AsidePolicy::kForbid, kPatient).ok());
      status = rank.group->Rejoin().error();
    } else {
      status = rank.AllReduce(&sum, 1);
    }
    EXPECT_EQ(status.code(), Code::kFailedPrecondition);
    EXPECT_THAT(status.message(), HasSubstr("at least one rank that exhausted inputs"));
    EXPECT_THAT(status.message(), HasSubstr("rank 0 ran out"));
  });
}

TEST_F(ClientTest, WhoStandsAsideHearsOfARankThatLeavesOrDoesNothing) {
  RunRanks(2, [](const Rank& rank) {
    if (rank.group->rank() == 1) return;  // leaves, and the session with it
    ASSERT_TRUE(rank.group->StandAside(AsidePolicy::kAverageOverAll, kPatient).ok());
    const Status status = rank.group->Rejoin().error();
    EXPECT_EQ(status.code(), Code::kRankLost) << status.ToString();
    EXPECT_THAT(status.message(), HasSubstr("rank 1 has destroyed its group"));
  });
  std::latch heard(1);
  RunRanks(2, [&](const Rank& rank) {
    if (rank.group->rank() == 1) return heard.wait();
    ASSERT_TRUE(rank.group->StandAside(AsidePolicy::kAverageOverAll, kShort).ok());
    const Status status = rank.group->Rejoin().error();
    EXPECT_EQ(status.code(), Code::kDeadlineExceeded) << status.ToString();
    EXPECT_THAT(status.message(), HasSubstr("waited for rank 1"));
    heard.count_down();
  });
}

TEST_F(ClientTest, AbortTellsEveryRankWhy) {
  RunRanks(2, [](const Rank& rank) {
    if (rank.group->rank() == 1) {
      rank.group->Abort({Code::kInternal, "the dog ate it"});
    }
    const Status status = rank.group->Barrier(kPatient);
    EXPECT_EQ(status.code(), Code::kInternal);
    EXPECT_THAT(status.message(), HasSubstr("the dog ate it"));
  });
}

TEST_F(ClientTest, BuffersAreZeroedAlignedAndAtLeastAsLargeAsAsked) {
  const auto session = Open(0, 1);
  ASSERT_TRUE(session);
  const auto buffer = (*session)->Allocate(5000, "odd");
  ASSERT_TRUE(buffer);
  EXPECT_GE((*buffer)->size(), 5000);
  EXPECT_EQ(reinterpret_cast<uintptr_t>((*buffer)->data()) % 4096, 0);
  EXPECT_THAT(std::vector<std::byte>((*buffer)->data(), (*buffer)->data() + 5000),
              Each(std::byte{0}));
  EXPECT_EQ((*session)->Allocate(0, "none").error().code(), Code::kInvalidArgument);
}

TEST_F(ClientTest, MoreMemoryThanThereIsIsAnErrorAndTheSessionGoesOn) {
  const auto session = Open(0, 1);
  ASSERT_TRUE(session);
  const auto buffer = (*session)->Allocate(uint64_t{1} << 50, "giant");
  ASSERT_FALSE(buffer);
  EXPECT_EQ(buffer.error().code(), Code::kOutOfMemory);
  EXPECT_THAT(buffer.error().message(), HasSubstr("buffer 'giant': 1125899906842624 bytes"));
  EXPECT_TRUE((*session)->Allocate(4096, "small"));
}

TEST_F(ClientTest, WhatIsMadeFromAClosedSessionSaysSo) {
  const auto session = Open(0, 1);
  ASSERT_TRUE(session);
  const auto group = DaemonGroup::Create(*session, "all", {}, kPatient);
  ASSERT_TRUE(group);
  const auto buffer = (*session)->Allocate(4096, "kept");
  ASSERT_TRUE(buffer);
  (*session)->Close();
  const Status status = (*group)->Barrier(kPatient);
  EXPECT_EQ(status.code(), Code::kFailedPrecondition);
  EXPECT_THAT(status.message(), HasSubstr("rank 0 of job 'job' has closed its session"));
  EXPECT_EQ((*session)->Allocate(4096, "x").error().code(), Code::kFailedPrecondition);
  (*buffer)->data()[4095] = std::byte{1};
}

TEST_F(ClientTest, ARankThatHasLeftIsNamedToThoseWhoWaitForIt) {
  RunRanks(2, [](const Rank& rank) {
    if (rank.group->rank() == 1) return rank.session->Close();
    const Status status = rank.group->Barrier(kPatient);
    EXPECT_EQ(status.code(), Code::kRankLost);
    EXPECT_THAT(status.message(), HasSubstr("rank 1"));
  });
}

TEST_F(ClientTest, AnEndingDaemonTellsItsClientsThatItEnds) {
  std::latch ready(2);
  std::thread stopper([&] {
    ready.wait();
    EXPECT_TRUE(daemon_.Stop().ok());
  });
  RunRanks(2, [&](const Rank& rank) {
    ready.count_down();
    if (rank.group->rank() == 1) {
      // Known without an operation as well, though only once the socket is closed.
      while (rank.session->connection().CheckAlive().ok()) std::this_thread::yield();
    }
    EXPECT_EQ(rank.group->Barrier(kPatient).code(), Code::kShuttingDown);
    EXPECT_EQ(rank.group->Barrier(kPatient).code(), Code::kShuttingDown);
  });
  stopper.join();
}

// A daemon that gives a session too little to stage pieces.
class PoorClientTest : public ClientTest {
 protected:
  PoorClientTest() : ClientTest(Options()) {}
  static ServerOptions Options() {
    ServerOptions options;
    options.max_session_bytes = uint64_t{1} << 20;
    return options;
  }
};

TEST_F(PoorClientTest, FreedBuffersCanBeHadAgain) {
  const auto session = Open(0, 1);
  ASSERT_TRUE(session);
  for (int i = 0; i < 8; ++i) {
    const auto buffer = (*session)->Allocate(300 << 10, "again");
    ASSERT_TRUE(buffer) << buffer.error().ToString();
  }
  const auto first = (*session)->Allocate(300 << 10, "first");
  const auto second = (*session)->Allocate(900 << 10, "second");
  ASSERT_TRUE(first);
  ASSERT_FALSE(second);
  EXPECT_EQ(second.error().code(), Code::kOutOfMemory);
  EXPECT_THAT(second.error().message(), HasSubstr("max-session-bytes"));
}

// The others would wait for what this rank cannot hand over.
TEST_F(PoorClientTest, ARankWithoutRoomToStageTellsTheOthersAtOnce) {
  RunRanks(2, [](const Rank& rank) {
    std::vector<float> data(kLarge);
    for (int i = 0; i < 2; ++i) {
      const Status status = rank.AllReduce(data.data(), kLarge);
      EXPECT_EQ(status.code(), Code::kOutOfMemory) << status.ToString();
    }
  });
}

// Something that listens at a socket and answers every frame with `reply`.
class FakeDaemon {
 public:
  explicit FakeDaemon(std::vector<std::byte> reply) {
    auto listener = ListenAt(socket(), 0600);
    EXPECT_TRUE(listener);
    listener_ = *std::move(listener);
    thread_ = std::thread([this, reply = std::move(reply)] {
      for (;;) {
        const UniqueFd peer(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
        if (!peer.valid()) {
          if (stopped_) return;
          std::this_thread::yield();
          continue;
        }
        if (!ReceiveFrame(peer.get(), SoonEnough())) continue;
        if (reply.empty()) continue;
        EXPECT_TRUE(SendFrame(peer.get(), reply, {}, SoonEnough()).ok());
      }
    });
  }
  ~FakeDaemon() {
    stopped_ = true;
    thread_.join();
  }
  std::string socket() const { return directory_.File("s"); }

  Status Refusal() const {
    SessionRequest request;
    request.socket = socket();
    request.job = "job";
    request.world_size = 1;
    const auto session = Session::Open(request, {});
    return session ? OkStatus() : session.error();
  }

 private:
  TemporaryDirectory directory_;
  UniqueFd listener_;
  std::thread thread_;
  std::atomic<bool> stopped_{false};
};

TEST(FakeDaemonTest, ADaemonOfAnotherVersionIsNamedAsSuch) {
  auto reply = MakeMessage<ErrorReply>(1);
  reply.header.version = kProtocolVersion + 1;
  const auto bytes = AsBytes(reply);
  const FakeDaemon daemon({bytes.begin(), bytes.end()});
  const Status status = daemon.Refusal();
  EXPECT_EQ(status.code(), Code::kProtocol);
  EXPECT_THAT(status.message(),
              HasSubstr("speaks version " + std::to_string(kProtocolVersion + 1)));
}

TEST(FakeDaemonTest, AWelcomeWithoutItsSegmentIsRefused) {
  const auto reply = MakeMessage<Welcome>(1);
  const auto bytes = AsBytes(reply);
  const FakeDaemon daemon({bytes.begin(), bytes.end()});
  EXPECT_EQ(daemon.Refusal().code(), Code::kProtocol);
}

TEST(FakeDaemonTest, ADaemonThatHangsUpInsteadOfAWelcomeIsLost) {
  const FakeDaemon daemon({});
  const Status status = daemon.Refusal();
  EXPECT_EQ(status.code(), Code::kDaemonLost);
  EXPECT_THAT(status.message(), HasSubstr("rank 0 of job 'job' lost gradsyncd"));
}

}  // namespace
}  // namespace gradsync::testing
