// What the stand-in for NCCL refuses, and what it ends the process for.
#include <atomic>
#include <thread>

#include "tests/fakes/nccl/nccl_fixture.h"

namespace gradsync::fake_nccl {
namespace {

using ::testing::HasSubstr;

class RulesTest : public NcclTest {
 protected:
  // From a thread of its own, as a daemon has one for each device.
  void AllReduceOf(ncclComm_t comm, int device, CUstream stream) const {
    std::thread([&] {
      const ncclResult_t result = AllReduce(comm, device, stream);
      EXPECT_TRUE(result == ncclSuccess || Settled(comm) == ncclSuccess);
    }).join();
  }
  void AllReduceOf(ncclComm_t comm, int device) const {
    AllReduceOf(comm, device, streams_[device]);
  }
};
using RulesDeathTest = RulesTest;

TEST_F(RulesTest, EveryThirdCallOfANonBlockingCommunicatorIsInProgress) {
  const auto comms = NonBlocking(2);
  OnEach(2, [&](int rank) {
    int in_progress = 0;
    for (int i = 0; i < 9; ++i) {
      if (AllReduce(comms[rank], rank) == ncclInProgress) ++in_progress;
      EXPECT_EQ(Settled(comms[rank]), ncclSuccess);
    }
    EXPECT_EQ(in_progress, 3);
    EXPECT_TRUE(Finishes(streams_[rank]));
    EXPECT_EQ(ncclCommDestroy(comms[rank]), ncclSuccess);
  });
}

TEST_F(RulesTest, AGroupOfNonBlockingCommunicatorsIsInProgressAsAWhole) {
  const auto comms = NonBlocking(2);
  for (int i = 1; i <= 3; ++i) {
    ASSERT_EQ(ncclGroupStart(), ncclSuccess);
    for (int rank = 0; rank < 2; ++rank) EXPECT_EQ(AllReduce(comms[rank], rank), ncclSuccess);
    EXPECT_EQ(ncclGroupEnd(), i == 3 ? ncclInProgress : ncclSuccess);
  }
  for (int rank = 0; rank < 2; ++rank) {
    EXPECT_EQ(Settled(comms[rank]), ncclSuccess);
    EXPECT_TRUE(Finishes(streams_[rank]));
  }
  Abort(comms);
}

TEST_F(RulesTest, WrongArguments) {
  const auto comms = Blocking(1);
  void* p = Pointer(Allocate(0, 64));
  const CUstream s = streams_[0];
  EXPECT_EQ(ncclAllReduce(p, p, 1, ncclNumTypes, ncclSum, comms[0], s), ncclInvalidArgument);
  EXPECT_EQ(ncclAllReduce(p, p, 1, ncclFloat8e4m3, ncclSum, comms[0], s), ncclInvalidArgument);
  EXPECT_EQ(ncclAllReduce(p, p, 1, ncclFloat8e5m2, ncclSum, comms[0], s), ncclInvalidArgument);
  EXPECT_EQ(ncclAllReduce(p, p, 1, ncclInt8, ncclNumOps, comms[0], s), ncclInvalidArgument);
  EXPECT_EQ(ncclAllReduce(nullptr, p, 1, ncclInt8, ncclSum, comms[0], s), ncclInvalidArgument);
  EXPECT_THAT(ncclGetLastError(comms[0]), HasSubstr("sendbuff argument is NULL"));
  EXPECT_EQ(ncclBroadcast(p, p, 1, ncclInt8, 1, comms[0], s), ncclInvalidArgument);
  EXPECT_EQ(ncclAllReduce(p, p, 1, ncclInt8, ncclSum, nullptr, s), ncclInvalidArgument);
  // The communicator is as good as before; nothing to do is nothing to launch.
  EXPECT_EQ(ncclAllReduce(p, p, 0, ncclInt8, ncclSum, comms[0], s), ncclSuccess);
  EXPECT_EQ(AllReduce(comms[0], 0), ncclSuccess);
  EXPECT_TRUE(Finishes(s));
  EXPECT_EQ(ncclCommDestroy(comms[0]), ncclSuccess);
}

TEST_F(RulesTest, AStreamOfAnotherDeviceIsACudaError) {
  const auto comms = Blocking(2);
  EXPECT_EQ(AllReduce(comms[0], 0, streams_[1]), ncclUnhandledCudaError);
  EXPECT_EQ(Settled(comms[0]), ncclUnhandledCudaError);
  EXPECT_EQ(AllReduce(comms[0], 0), ncclUnhandledCudaError);
  Abort(comms);
}

TEST_F(RulesTest, MemoryThatIsNotThereIsAnAsynchronousError) {
  const auto comms = Blocking(1);
  void* p = Pointer(Allocate(0, 64));
  EXPECT_EQ(ncclAllReduce(p, p, size_t{1} << 30, ncclInt8, ncclSum, comms[0], streams_[0]),
            ncclSuccess);
  EXPECT_TRUE(KeepsWaiting(streams_[0]));
  EXPECT_EQ(Settled(comms[0]), ncclUnhandledCudaError);
  EXPECT_THAT(ncclGetLastError(comms[0]), HasSubstr("an illegal address"));
  Abort(comms);
  EXPECT_TRUE(Finishes(streams_[0]));
}

TEST_F(RulesTest, TwoCommunicatorsInOneOrderOnAllDevices) {
  const auto first = NonBlocking(2);
  const auto second = NonBlocking(3);
  const CUstream others[] = {NewStream(0), NewStream(1)};
  for (int i = 0; i < 4; ++i) {
    for (const int rank : {0, 1}) {
      AllReduceOf(first[rank], rank);
      AllReduceOf(second[rank], rank, others[rank]);
    }
    AllReduceOf(second[2], 2);
  }
  for (const CUstream stream : {others[0], others[1], streams_[0], streams_[1], streams_[2]}) {
    EXPECT_TRUE(Finishes(stream));
  }
  Abort(first);
  Abort(second);
}

TEST_F(RulesDeathTest, TwoCommunicatorsInTwoOrders) {
  const auto first = Blocking(2);
  const auto second = Blocking(2);
  const CUstream others[] = {NewStream(0), NewStream(1)};
  AllReduceOf(first[0], 0);
  AllReduceOf(second[0], 0, others[0]);
  AllReduceOf(second[1], 1, others[1]);
  EXPECT_DEATH(
      AllReduceOf(first[1], 1),
      "communicator .* launches a collective after one of communicator .* in the other order");
  Abort(first);
  Abort(second);
}

TEST_F(RulesDeathTest, RanksMustAskForTheSame) {
  const auto comms = Blocking(2);
  void* p = Pointer(Allocate(0, 64));
  AllReduceOf(comms[0], 0);
  const auto second = [&](auto call) { std::thread(call).join(); };
  EXPECT_DEATH(second([&] { ncclAllReduce(p, p, 4, ncclFloat32, ncclMax, comms[1], streams_[1]); }),
               "collective 0 is ncclAllReduce of 4 ncclFloat32 ncclSum on rank 0, but "
               "ncclAllReduce of 4 ncclFloat32 ncclMax on communicator");
  EXPECT_DEATH(second([&] { ncclAllReduce(p, p, 5, ncclFloat32, ncclSum, comms[1], streams_[1]); }),
               "but ncclAllReduce of 5 ncclFloat32");
  EXPECT_DEATH(second([&] { ncclBroadcast(p, p, 4, ncclFloat32, 0, comms[1], streams_[1]); }),
               "but ncclBroadcast of 4 ncclFloat32 root 0");
  EXPECT_DEATH(second([&] {
                 ncclGroupStart();
                 AllReduce(comms[1], 1);
                 AllReduce(comms[1], 1);
                 ncclGroupEnd();
               }),
               "but ncclAllReduce .* in a group");
  Abort(comms);
}

TEST_F(RulesDeathTest, ASendAndItsReceiveMustAgree) {
  EXPECT_DEATH(
      {
        const auto comms = Blocking(2);
        OnEach(2, [&](int rank) {
          void* p = Pointer(Allocate(rank, 64));
          if (rank == 0) ncclSend(p, 2, ncclInt8, 1, comms[0], streams_[0]);
          if (rank == 1) ncclRecv(p, 3, ncclInt8, 0, comms[1], streams_[1]);
          Finishes(streams_[rank]);
        });
      },
      "ncclSend of 2 ncclInt8 .* meets ncclRecv of 3 ncclInt8");
}

TEST_F(RulesDeathTest, OneThreadMustGroupItsRanks) {
  const auto comms = Blocking(2);
  EXPECT_EQ(AllReduce(comms[0], 0), ncclSuccess);
  EXPECT_DEATH(AllReduce(comms[1], 1), "one thread issues ncclAllReduce");
  Abort(comms);
}

TEST_F(RulesDeathTest, InProgressMustBePolled) {
  const auto comms = NonBlocking(1);
  for (int i = 0; i < 2; ++i) EXPECT_EQ(AllReduce(comms[0], 0), ncclSuccess);
  EXPECT_EQ(AllReduce(comms[0], 0), ncclInProgress);
  // Not even once it must be over.
  EXPECT_TRUE(Finishes(streams_[0]));
  EXPECT_DEATH(AllReduce(comms[0], 0), "before ncclCommGetAsyncError had shown the end");
  EXPECT_DEATH(ncclCommDestroy(comms[0]), "before ncclCommGetAsyncError had shown the end");
  int count = 0;
  EXPECT_DEATH(ncclCommCount(comms[0], &count), "before ncclCommGetAsyncError had shown the end");
  Abort(comms);
}

TEST_F(RulesDeathTest, InProgressOfAnotherCommunicatorOfTheDeviceToo) {
  const auto comms = NonBlocking(1);
  const auto others = NonBlocking(1);
  for (int i = 0; i < 2; ++i) EXPECT_EQ(AllReduce(comms[0], 0), ncclSuccess);
  EXPECT_EQ(AllReduce(comms[0], 0), ncclInProgress);
  EXPECT_DEATH(AllReduce(others[0], 0), "has returned ncclInProgress, and its end was not yet");
  EXPECT_EQ(Settled(comms[0]), ncclSuccess);
  EXPECT_EQ(AllReduce(others[0], 0), ncclSuccess);
  Abort(comms);
  Abort(others);
}

TEST_F(RulesDeathTest, BuffersOverlapInPlaceOrNotAtAll) {
  const auto comms = Blocking(2);
  const CUdeviceptr base = Allocate(0, 64);
  const auto at = [base](int offset) { return Pointer(base + offset); };
  EXPECT_DEATH(ncclAllReduce(at(0), at(4), 2, ncclInt32, ncclSum, comms[0], streams_[0]),
               "buffers that overlap");
  EXPECT_DEATH(ncclAllGather(at(4), at(0), 1, ncclInt32, comms[0], streams_[0]),
               "buffers that overlap");
  EXPECT_DEATH(ncclReduceScatter(at(0), at(4), 1, ncclInt32, ncclSum, comms[0], streams_[0]),
               "buffers that overlap");
  Abort(comms);
}

TEST_F(RulesDeathTest, OneThreadAtATimeUsesACommunicator) {
  const auto comms = Blocking(1);
  EXPECT_DEATH(OnEach(2,
                      [&](int) {
                        int count = 0;
                        for (int i = 0; i < 10000000; ++i) ncclCommCount(comms[0], &count);
                      }),
               "while another thread operates it");
  EXPECT_EQ(ncclGroupStart(), ncclSuccess);
  EXPECT_EQ(AllReduce(comms[0], 0), ncclSuccess);
  EXPECT_DEATH(std::thread([&] { AllReduce(comms[0], 0); }).join(),
               "while another thread operates it");
  EXPECT_EQ(ncclGroupEnd(), ncclSuccess);
  Abort(comms);
}

TEST_F(RulesDeathTest, NothingIsInsideWhatIsAborted) {
  EXPECT_DEATH(
      {
        // Until the abort comes upon the other thread inside.
        for (int i = 0; i < 10000; ++i) {
          const auto comms = Blocking(1);
          std::atomic<bool> inside = false;
          std::thread asks([&] {
            ncclResult_t state = ncclSuccess;
            for (int j = 0; j < 1000; ++j) {
              ncclCommGetAsyncError(comms[0], &state);
              inside = true;
            }
          });
          while (!inside) std::this_thread::yield();
          ncclCommAbort(comms[0]);
          asks.join();
        }
      },
      "while another thread is inside a call on it|which was destroyed, aborted|while another "
      "thread ends it");
}

TEST_F(RulesDeathTest, OneThreadAtATimeIssuesToADevice) {
  const std::vector<ncclComm_t> comms[] = {Blocking(1), Blocking(1)};
  const CUstream streams[] = {NewStream(0), NewStream(0)};
  void* p = Pointer(Allocate(0, 64));
  EXPECT_DEATH(OnEach(2,
                      [&](int i) {
                        for (int j = 0; j < 100000; ++j) {
                          ncclAllReduce(p, p, 1, ncclInt8, ncclSum, comms[i][0], streams[i]);
                        }
                      }),
               "two threads issue to device 0 at the same time");
  Abort(comms[0]);
  Abort(comms[1]);
}

}  // namespace
}  // namespace gradsync::fake_nccl
