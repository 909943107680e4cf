// How communicators of the stand-in for NCCL come and go.
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <thread>

#include "tests/fakes/nccl/nccl_fixture.h"

namespace gradsync::fake_nccl {
namespace {

using ::testing::HasSubstr;
using ::testing::MatchesRegex;

class LifeTest : public NcclTest {
 protected:
  static ncclUniqueId NewId() {
    ncclUniqueId id;
    EXPECT_EQ(ncclGetUniqueId(&id), ncclSuccess);
    return id;
  }
  static ncclConfig_t Config(int blocking) {
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = blocking;
    return config;
  }
};
using LifeDeathTest = LifeTest;

TEST_F(LifeTest, TheVersionIsTheHeaders) {
  int version = 0;
  EXPECT_EQ(ncclGetVersion(&version), ncclSuccess);
  EXPECT_EQ(version, NCCL_VERSION_CODE);
  EXPECT_EQ(ncclGetVersion(nullptr), ncclInvalidArgument);
  EXPECT_THAT(ncclGetLastError(nullptr), HasSubstr("version argument is NULL"));
  EXPECT_STREQ(ncclGetErrorString(ncclInProgress), "NCCL operation in progress");
  EXPECT_STREQ(ncclGetErrorString(ncclNumResults), "unknown result code");
}

TEST_F(LifeTest, BlockingRanksWaitForEachOther) {
  const ncclUniqueId id = NewId();
  ncclComm_t comms[2] = {};
  std::atomic<bool> called = false;
  OnEach(2, [&](int rank) {
    if (rank == 1) std::this_thread::sleep_for(std::chrono::milliseconds(50));
    called = called || rank == 1;
    Use(rank + 1);
    EXPECT_EQ(ncclCommInitRank(&comms[rank], 2, id, rank), ncclSuccess);
    EXPECT_TRUE(called);
  });
  for (int rank = 0; rank < 2; ++rank) {
    int value = -1;
    EXPECT_EQ(ncclCommCount(comms[rank], &value), ncclSuccess);
    EXPECT_EQ(value, 2);
    EXPECT_EQ(ncclCommUserRank(comms[rank], &value), ncclSuccess);
    EXPECT_EQ(value, rank);
    EXPECT_EQ(ncclCommCuDevice(comms[rank], &value), ncclSuccess);
    EXPECT_EQ(value, rank + 1);
    EXPECT_EQ(ncclCommDestroy(comms[rank]), ncclSuccess);
  }
}

TEST_F(LifeTest, NonBlockingRanksAreInProgressUntilAllHaveCalled) {
  const ncclUniqueId id = NewId();
  ncclConfig_t config = Config(0);
  ncclComm_t comms[2] = {};
  Use(0);
  EXPECT_EQ(ncclCommInitRankConfig(&comms[0], 2, id, 0, &config), ncclInProgress);
  std::this_thread::sleep_for(std::chrono::milliseconds(30));
  ncclResult_t state = ncclSuccess;
  EXPECT_EQ(ncclCommGetAsyncError(comms[0], &state), ncclSuccess);
  EXPECT_EQ(state, ncclInProgress);
  std::thread([&] {
    Use(1);
    EXPECT_EQ(ncclCommInitRankConfig(&comms[1], 2, id, 1, &config), ncclInProgress);
    EXPECT_EQ(Settled(comms[1]), ncclSuccess);
  }).join();
  EXPECT_EQ(Settled(comms[0]), ncclSuccess);
  for (ncclComm_t comm : comms) {
    EXPECT_EQ(ncclCommFinalize(comm), ncclInProgress);
    EXPECT_EQ(ncclCommGetAsyncError(comm, &state), ncclSuccess);
    // The second is the last.
    EXPECT_TRUE(state == ncclInProgress || comm == comms[1]);
  }
  for (ncclComm_t comm : comms) EXPECT_EQ(Settled(comm), ncclSuccess);
  EXPECT_EQ(ncclCommFinalize(comms[0]), ncclInvalidArgument);
  EXPECT_EQ(AllReduce(comms[0], 0), ncclInvalidUsage);
  for (ncclComm_t comm : comms) EXPECT_EQ(ncclCommDestroy(comm), ncclSuccess);
}

TEST_F(LifeTest, OneThreadEndsAGroupOfBlockingRanks) {
  const auto comms = Blocking(2);
  EXPECT_EQ(ncclGroupStart(), ncclSuccess);
  for (ncclComm_t comm : comms) EXPECT_EQ(ncclCommFinalize(comm), ncclSuccess);
  ncclResult_t state = ncclSuccess;
  EXPECT_EQ(ncclCommGetAsyncError(comms[0], &state), ncclInvalidUsage);
  EXPECT_EQ(ncclGroupEnd(), ncclSuccess);
  for (ncclComm_t comm : comms) EXPECT_EQ(ncclCommDestroy(comm), ncclSuccess);
}

TEST_F(LifeTest, TwoRanksOnOneDeviceAreRefused) {
  const ncclUniqueId id = NewId();
  ncclConfig_t config = Config(0);
  ncclComm_t comms[2] = {};
  ASSERT_EQ(ncclGroupStart(), ncclSuccess);
  Use(1);
  for (int rank = 0; rank < 2; ++rank) ncclCommInitRankConfig(&comms[rank], 2, id, rank, &config);
  EXPECT_EQ(ncclGroupEnd(), ncclInProgress);
  for (ncclComm_t comm : comms) {
    EXPECT_EQ(Settled(comm), ncclInvalidUsage);
    EXPECT_THAT(ncclGetLastError(comm), HasSubstr("Duplicate GPU detected : rank 0 and rank 1"));
  }
  int count = 0;
  EXPECT_EQ(ncclCommCount(comms[0], &count), ncclInvalidUsage);
  Abort({comms[0], comms[1]});
  const int devices[] = {1, 1};
  EXPECT_EQ(ncclCommInitAll(comms, 2, devices), ncclInvalidUsage);

  const ncclUniqueId second = NewId();
  OnEach(2, [&](int rank) {
    Use(1);
    EXPECT_EQ(ncclCommInitRank(&comms[rank], 2, second, rank), ncclInvalidUsage);
    EXPECT_EQ(comms[rank], nullptr);
  });
}

TEST_F(LifeTest, WrongArgumentsOfInit) {
  ncclUniqueId id = NewId();
  ncclComm_t comm = nullptr;
  Use(0);
  EXPECT_EQ(ncclCommInitRank(nullptr, 1, id, 0), ncclInvalidArgument);
  EXPECT_EQ(ncclCommInitRank(&comm, 0, id, 0), ncclInvalidArgument);
  EXPECT_EQ(ncclCommInitRank(&comm, 2, id, 2), ncclInvalidArgument);
  ncclConfig_t config = {};
  EXPECT_EQ(ncclCommInitRankConfig(&comm, 1, id, 0, &config), ncclInvalidArgument);
  EXPECT_THAT(ncclGetLastError(nullptr), HasSubstr("NCCL_CONFIG_INITIALIZER"));
  config = Config(2);
  EXPECT_EQ(ncclCommInitRankConfig(&comm, 1, id, 0, &config), ncclInvalidArgument);
  const int devices[] = {kDevices};
  EXPECT_EQ(ncclCommInitAll(&comm, 1, devices), ncclInvalidArgument);
  EXPECT_EQ(ncclCommInitRank(&comm, 1, ncclUniqueId{}, 0), ncclInvalidArgument);
  EXPECT_EQ(ncclCommDestroy(nullptr), ncclSuccess);
  EXPECT_EQ(ncclCommAbort(nullptr), ncclSuccess);
  EXPECT_EQ(ncclCommCount(nullptr, nullptr), ncclInvalidArgument);
}

TEST_F(LifeTest, AnIdOfAnotherProcessIsRefused) {
  ncclUniqueId id = NewId();
  const pid_t process = getpid();
  void* place = memmem(id.internal, sizeof(id.internal), &process, sizeof(process));
  ASSERT_NE(place, nullptr);
  const pid_t other = process + 1;
  std::memcpy(place, &other, sizeof(other));
  ncclComm_t comm = nullptr;
  Use(0);
  EXPECT_EQ(ncclCommInitRank(&comm, 1, id, 0), ncclSystemError);
  EXPECT_THAT(ncclGetLastError(nullptr), HasSubstr("all ranks in one process"));
}

TEST_F(LifeTest, GroupsThatAreNotAllowed) {
  EXPECT_EQ(ncclGroupEnd(), ncclInvalidUsage);
  const auto comms = Blocking(1);
  const ncclUniqueId id = NewId();
  ncclComm_t comm = nullptr;
  // Init after an operation, and the other way around.
  ASSERT_EQ(ncclGroupStart(), ncclSuccess);
  EXPECT_EQ(AllReduce(comms[0], 0), ncclSuccess);
  EXPECT_EQ(ncclCommInitRank(&comm, 1, id, 0), ncclInvalidUsage);
  EXPECT_EQ(ncclGroupEnd(), ncclInvalidUsage);
  Abort(comms);
  const auto others = Blocking(1);
  ASSERT_EQ(ncclGroupStart(), ncclSuccess);
  EXPECT_EQ(ncclCommInitRank(&comm, 1, id, 0), ncclSuccess);
  EXPECT_EQ(AllReduce(others[0], 0), ncclInvalidUsage);
  EXPECT_EQ(ncclGroupEnd(), ncclInvalidUsage);
  EXPECT_EQ(comm, nullptr);
  // Blocking and non-blocking.
  const auto non_blocking = NonBlocking(1);
  ASSERT_EQ(ncclGroupStart(), ncclSuccess);
  EXPECT_EQ(AllReduce(others[0], 0), ncclSuccess);
  EXPECT_EQ(AllReduce(non_blocking[0], 0), ncclInvalidArgument);
  // To end or to ask about what has operations in this group.
  ncclResult_t state = ncclSuccess;
  EXPECT_EQ(ncclCommDestroy(others[0]), ncclInvalidUsage);
  EXPECT_EQ(ncclCommAbort(others[0]), ncclInvalidUsage);
  EXPECT_EQ(ncclCommGetAsyncError(others[0], &state), ncclInvalidUsage);
  EXPECT_EQ(ncclGroupEnd(), ncclInvalidUsage);
  Abort(others);
  Abort(non_blocking);
}

TEST_F(LifeTest, InitCanBeAborted) {
  const ncclUniqueId id = NewId();
  ncclConfig_t config = Config(0);
  ncclComm_t comms[2] = {};
  Use(0);
  EXPECT_EQ(ncclCommInitRankConfig(&comms[0], 2, id, 0, &config), ncclInProgress);
  EXPECT_EQ(ncclCommAbort(comms[0]), ncclSuccess);
  std::thread([&] {
    Use(1);
    EXPECT_EQ(ncclCommInitRankConfig(&comms[1], 2, id, 1, &config), ncclInProgress);
    std::this_thread::sleep_for(std::chrono::milliseconds(30));
    ncclResult_t state = ncclSuccess;
    EXPECT_EQ(ncclCommGetAsyncError(comms[1], &state), ncclSuccess);
    EXPECT_EQ(state, ncclInProgress);
    EXPECT_EQ(ncclCommAbort(comms[1]), ncclSuccess);
  }).join();
}

TEST_F(LifeDeathTest, ABlockingInitWithoutItsOtherRanksHangs) {
  EXPECT_DEATH(
      {
        setenv("GRADSYNC_FAKE_NCCL_PATIENCE_MS", "100", 1);
        ncclComm_t comm = nullptr;
        Use(0);
        ncclCommInitRank(&comm, 2, NewId(), 0);
      },
      "a blocking initialisation of communicator .* hangs: 1 ranks have called");
}

TEST_F(LifeDeathTest, OneThreadMustGroupItsInits) {
  EXPECT_DEATH(
      {
        const ncclUniqueId id = NewId();
        ncclConfig_t config = Config(0);
        ncclComm_t comms[2] = {};
        for (int rank = 0; rank < 2; ++rank) {
          Use(rank);
          ncclCommInitRankConfig(&comms[rank], 2, id, rank, &config);
        }
      },
      "one thread initialises .* and, outside that group, another rank");
}

TEST_F(LifeDeathTest, ARankOfAnIdIsInitialisedOnce) {
  EXPECT_DEATH(
      {
        const ncclUniqueId id = NewId();
        ncclConfig_t config = Config(0);
        ncclComm_t comm = nullptr;
        Use(0);
        ncclCommInitRankConfig(&comm, 2, id, 0, &config);
        ncclCommInitRankConfig(&comm, 2, id, 0, &config);
      },
      "a second ncclCommInitRank for rank 0 of one unique id");
}

TEST_F(LifeDeathTest, InitNeedsADevice) {
  EXPECT_DEATH(
      {
        driver_->cuCtxSetCurrent(nullptr);
        ncclComm_t comm = nullptr;
        ncclCommInitRank(&comm, 1, NewId(), 0);
      },
      "a thread without a current context");
}

TEST_F(LifeDeathTest, WhatWasDestroyedIsNotUsed) {
  const auto comms = Blocking(1);
  EXPECT_EQ(ncclCommDestroy(comms[0]), ncclSuccess);
  EXPECT_DEATH(ncclCommDestroy(comms[0]), "ncclCommDestroy of communicator .* which was destroyed");
  const auto others = Blocking(1);
  EXPECT_EQ(ncclCommAbort(others[0]), ncclSuccess);
  ncclResult_t state = ncclSuccess;
  EXPECT_DEATH(ncclCommGetAsyncError(others[0], &state), "which was destroyed, aborted");
}

TEST_F(LifeDeathTest, WhatIsLeftAtExitIsALeak) {
  // The child begins at the top again: the name must not depend on the process.
  const std::string directory = ::testing::TempDir() + "fake-nccl-leaks";
  std::filesystem::create_directory(directory);
  EXPECT_EXIT(
      {
        setenv("GRADSYNC_FAKE_CUDA_DIR", directory.c_str(), 1);
        const auto comms = Blocking(2);
        ncclCommDestroy(comms[0]);
        exit(0);
      },
      ::testing::ExitedWithCode(0), "");
  std::string leaks;
  for (const auto& file : std::filesystem::directory_iterator(directory)) {
    if (!file.path().filename().string().starts_with("leaks.")) continue;
    std::getline(std::ifstream(file.path()), leaks, '\0');
  }
  std::filesystem::remove_all(directory);
  EXPECT_THAT(leaks, MatchesRegex("ncclComm: communicator [0-9]+ \\(rank 1 of 2, device 1\\)\n"));
}

}  // namespace
}  // namespace gradsync::fake_nccl
