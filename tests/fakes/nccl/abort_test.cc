// Collectives of the stand-in for NCCL that do not complete.
#include <unistd.h>

#include <thread>

#include "tests/fakes/nccl/nccl_fixture.h"

namespace gradsync::fake_nccl {
namespace {

using ::testing::ExitedWithCode;
using ::testing::HasSubstr;

class AbortTest : public NcclTest {
 protected:
  static ncclResult_t State(ncclComm_t comm) {
    ncclResult_t state = ncclInternalError;
    EXPECT_EQ(ncclCommGetAsyncError(comm, &state), ncclSuccess);
    return state;
  }
  // Issues one to each rank, from a thread of its own.
  void AllReduceOnEach(const std::vector<ncclComm_t>& comms) const {
    OnEach(static_cast<int>(comms.size()),
           [&](int rank) { EXPECT_EQ(AllReduce(comms[rank], rank), ncclSuccess); });
  }
  [[noreturn]] static void End() { _exit(HasFailure() ? 1 : 0); }
};
using AbortDeathTest = AbortTest;

TEST_F(AbortTest, ACollectiveWithoutOneRankWaitsUntilEachRankIsAborted) {
  const auto comms = NonBlocking(3);
  for (const int rank : {0, 1}) {
    std::thread([&] { EXPECT_EQ(AllReduce(comms[rank], rank), ncclSuccess); }).join();
  }
  EXPECT_TRUE(KeepsWaiting(streams_[0]));
  EXPECT_TRUE(KeepsWaiting(streams_[1]));
  EXPECT_EQ(State(comms[0]), ncclSuccess);  // NCCL does not notice
  EXPECT_EQ(ncclCommAbort(comms[0]), ncclSuccess);
  EXPECT_TRUE(Finishes(streams_[0]));
  EXPECT_TRUE(KeepsWaiting(streams_[1]));
  // Too late for the others.
  std::thread([&] { EXPECT_EQ(AllReduce(comms[2], 2), ncclSuccess); }).join();
  EXPECT_TRUE(KeepsWaiting(streams_[2]));
  EXPECT_EQ(State(comms[1]), ncclSuccess);
  Abort({comms[1], comms[2]});
  EXPECT_TRUE(Finishes(streams_[1]));
  EXPECT_TRUE(Finishes(streams_[2]));
}

TEST_F(AbortTest, AbortDropsWhatIsStillInTheBackground) {
  const auto comms = NonBlocking(2);
  std::thread([&] {
    for (int i = 0; i < 3; ++i) AllReduce(comms[0], 0);
  }).join();
  Abort(comms);
  EXPECT_TRUE(Finishes(streams_[0]));
}

TEST_F(AbortDeathTest, WhatIsNotCompleteIsAbortedNotDestroyed) {
  const auto comms = Blocking(2);
  EXPECT_EQ(AllReduce(comms[0], 0), ncclSuccess);
  EXPECT_DEATH(ncclCommDestroy(comms[0]), "while it has operations that are not complete");
  Abort(comms);
}

TEST_F(AbortDeathTest, AnInjectedErrorStaysUntilAbort) {
  EXPECT_EXIT(
      {
        setenv("GRADSYNC_FAKE_NCCL_INJECT", "3:async=6", 1);
        const auto comms = NonBlocking(2);
        AllReduceOnEach(comms);
        for (const int rank : {0, 1}) EXPECT_TRUE(Finishes(streams_[rank]));
        EXPECT_EQ(AllReduce(comms[0], 0), ncclSuccess);
        std::thread([&] { AllReduce(comms[1], 1); }).join();
        EXPECT_TRUE(KeepsWaiting(streams_[0]));
        EXPECT_TRUE(KeepsWaiting(streams_[1]));
        EXPECT_EQ(State(comms[0]), ncclRemoteError);
        EXPECT_EQ(State(comms[1]), ncclSuccess);
        EXPECT_THAT(ncclGetLastError(comms[0]), HasSubstr("injected"));
        EXPECT_EQ(AllReduce(comms[0], 0), ncclRemoteError);
        Abort(comms);
        for (const int rank : {0, 1}) EXPECT_TRUE(Finishes(streams_[rank]));
        End();
      },
      ExitedWithCode(0), "");
}

TEST_F(AbortDeathTest, AfterAnErrorThereIsOnlyAbort) {
  EXPECT_DEATH(
      {
        setenv("GRADSYNC_FAKE_NCCL_INJECT", "1:async=6", 1);
        const auto comms = Blocking(1);
        AllReduce(comms[0], 0);
        KeepsWaiting(streams_[0]);
        ncclCommDestroy(comms[0]);
      },
      "which has had an error");
}

TEST_F(AbortDeathTest, AnInjectedStallSaysNothing) {
  EXPECT_EXIT(
      {
        setenv("GRADSYNC_FAKE_NCCL_INJECT", "1:stall", 1);
        const auto comms = NonBlocking(2);
        AllReduceOnEach(comms);
        for (const int rank : {0, 1}) {
          EXPECT_TRUE(KeepsWaiting(streams_[rank]));
          EXPECT_EQ(State(comms[rank]), ncclSuccess);
        }
        Abort(comms);
        for (const int rank : {0, 1}) EXPECT_TRUE(Finishes(streams_[rank]));
        End();
      },
      ExitedWithCode(0), "");
}

TEST_F(AbortDeathTest, AMismatchCanHangInstead) {
  EXPECT_EXIT(
      {
        setenv("GRADSYNC_FAKE_NCCL_MISMATCH", "hang", 1);
        const auto comms = Blocking(2);
        OnEach(2, [&](int rank) {
          void* p = Pointer(Allocate(rank, 64));
          EXPECT_EQ(ncclAllReduce(p, p, rank + 1, ncclInt8, ncclSum, comms[rank], streams_[rank]),
                    ncclSuccess);
        });
        for (const int rank : {0, 1}) EXPECT_TRUE(KeepsWaiting(streams_[rank]));
        Abort(comms);
        for (const int rank : {0, 1}) EXPECT_TRUE(Finishes(streams_[rank]));
        End();
      },
      ExitedWithCode(0), "");
}

}  // namespace
}  // namespace gradsync::fake_nccl
