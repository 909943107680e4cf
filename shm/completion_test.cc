#include "shm/completion.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "shm/segment.h"

namespace gradsync {
namespace {

using std::chrono::milliseconds;

Deadline In(milliseconds time) { return std::chrono::steady_clock::now() + time; }

Status Alive() { return OkStatus(); }

constexpr milliseconds kLong{20000};
constexpr milliseconds kNoSpin{0};

class CompletionTest : public ::testing::Test {
 protected:
  CompletionTest() { std::memset(static_cast<void*>(words_.get()), 0, sizeof(GroupWords)); }

  std::unique_ptr<GroupWords> words_ = std::make_unique<GroupWords>();
  CompletionWriter writer_{words_.get()};
  CompletionReader reader_{words_.get()};
};

TEST_F(CompletionTest, AnOperationIsCompleteOnceTheCountPassesItsNumber) {
  EXPECT_FALSE(reader_.IsComplete(0));
  writer_.Complete(1);
  EXPECT_TRUE(reader_.IsComplete(0));
  EXPECT_FALSE(reader_.IsComplete(1));
  EXPECT_TRUE(reader_.Wait(0, In(kLong), kNoSpin, Alive).ok());
}

TEST_F(CompletionTest, AWaitEndsAtItsDeadline) {
  EXPECT_EQ(reader_.Wait(0, In(milliseconds(20)), kNoSpin, Alive).code(), Code::kDeadlineExceeded);
}

TEST_F(CompletionTest, AWaitEndsWhenTheDaemonIsGone) {
  const auto gone = [] { return Status(Code::kDaemonLost, "gone"); };
  EXPECT_EQ(reader_.Wait(0, In(kLong), kNoSpin, gone).code(), Code::kDaemonLost);
}

TEST_F(CompletionTest, AFailureWakesTheWaiterAndSaysWhy) {
  std::thread daemon([&] { writer_.Fail({Code::kRankLost, "rank 1 died"}); });
  const Status status = reader_.Wait(5, In(kLong), kNoSpin, Alive);
  daemon.join();
  EXPECT_EQ(status.code(), Code::kRankLost);
  EXPECT_EQ(status.message(), "rank 1 died");
}

TEST_F(CompletionTest, WhatWasCompleteBeforeTheFailureStaysComplete) {
  writer_.Complete(3);
  writer_.Fail({Code::kRankLost, "rank 1 died"});
  EXPECT_TRUE(reader_.Wait(2, In(kLong), kNoSpin, Alive).ok());
  EXPECT_EQ(reader_.Wait(3, In(kLong), kNoSpin, Alive).code(), Code::kRankLost);
}

TEST_F(CompletionTest, TheFirstFailureIsKept) {
  writer_.Fail({Code::kRankLost, "first"});
  writer_.Fail({Code::kShuttingDown, "second"});
  EXPECT_EQ(reader_.Failure().message(), "first");
}

TEST_F(CompletionTest, ALongTextIsCutBetweenCharacters) {
  std::string text;
  while (text.size() < 2 * kErrorTextBytes) text += "\u00e9";  // two bytes each
  writer_.Fail({Code::kMismatch, "x" + text});
  const std::string cut = reader_.Failure().message();
  EXPECT_EQ(cut.size() % 2, 1U);
  EXPECT_LE(cut.size(), kErrorTextBytes);
  EXPECT_GE(cut.size(), kErrorTextBytes - 2);
}

TEST_F(CompletionTest, ForgedWordsAreReadWithinBounds) {
  words_->text_bytes = 0xffffffff;
  words_->code = 12345;
  words_->state = static_cast<uint32_t>(GroupState::kFailed);
  const Status failure = reader_.Failure();
  EXPECT_EQ(failure.code(), Code::kProtocol);
  EXPECT_EQ(failure.message().size(), kErrorTextBytes);
}

TEST_F(CompletionTest, ResetMakesTheWordsThoseOfANewGroup) {
  writer_.Complete(9);
  writer_.Fail({Code::kRankLost, "old"});
  writer_.Reset();
  EXPECT_TRUE(reader_.Failure().ok());
  EXPECT_FALSE(reader_.IsComplete(0));
  writer_.Fail({Code::kRankLost, "new"});
  EXPECT_EQ(reader_.Failure().message(), "new");
}

TEST_F(CompletionTest, SeveralThreadsWaitForSeveralOperations) {
  std::vector<std::thread> threads;
  for (uint64_t i = 0; i < 4; ++i) {
    threads.emplace_back([this, i] {
      for (uint64_t sequence = i; sequence < 2000; sequence += 4) {
        ASSERT_TRUE(reader_.Wait(sequence, In(kLong), kNoSpin, Alive).ok());
      }
    });
  }
  for (uint64_t completed = 1; completed <= 2000; ++completed) writer_.Complete(completed);
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(words_->waiters.load(), 0U);
}

// Two processes in lockstep through one segment: a lost wake-up would cost a whole liveness
// interval each time, and a private futex would never wake at all.
TEST(CompletionAcrossProcessesTest, WakesAWaiterInAnotherProcess) {
  constexpr uint64_t kRounds = 500;
  const auto fd = CreateSealedMemfd("gradsync-test", 2 * sizeof(GroupWords));
  ASSERT_TRUE(fd);
  const auto mapping = Mapping::Map(fd->get(), 2 * sizeof(GroupWords));
  ASSERT_TRUE(mapping);
  auto* there = reinterpret_cast<GroupWords*>(mapping->data());
  GroupWords* back = there + 1;
  const pid_t child = fork();
  if (child == 0) {
    CompletionWriter writer(back);
    const CompletionReader reader(there);
    for (uint64_t i = 0; i < kRounds; ++i) {
      if (!reader.Wait(i, In(kLong), kNoSpin, Alive).ok()) _exit(1);
      writer.Complete(i + 1);
    }
    _exit(0);
  }
  CompletionWriter writer(there);
  const CompletionReader reader(back);
  const auto begin = std::chrono::steady_clock::now();
  for (uint64_t i = 0; i < kRounds; ++i) {
    writer.Complete(i + 1);
    ASSERT_TRUE(reader.Wait(i, In(kLong), kNoSpin, Alive).ok());
  }
  const auto took = std::chrono::steady_clock::now() - begin;
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  EXPECT_LT(took, kRounds * CompletionReader::kLivenessInterval / 4) << "wake-ups were lost";
}

}  // namespace
}  // namespace gradsync
