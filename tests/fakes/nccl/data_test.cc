// What the stand-in for NCCL computes.
#include <thread>

#include "tests/fakes/nccl/nccl_fixture.h"

namespace gradsync::fake_nccl {
namespace {

using ::testing::ElementsAre;

class DataTest : public NcclTest {
 protected:
  // Calls `call` for each rank in one group, and waits for all streams.
  void Grouped(int ranks, const std::function<ncclResult_t(int rank)>& call) const {
    ASSERT_EQ(ncclGroupStart(), ncclSuccess);
    for (int rank = 0; rank < ranks; ++rank) EXPECT_EQ(call(rank), ncclSuccess);
    ASSERT_EQ(ncclGroupEnd(), ncclSuccess);
    for (int rank = 0; rank < ranks; ++rank) EXPECT_TRUE(Finishes(streams_[rank]));
  }

  // Ranks hold 1, 2 and 6 in all elements: what does the reduction give?
  template <typename T>
  void Reduces(ncclDataType_t type, ncclRedOp_t op, T expected) const {
    constexpr size_t kCount = 5000;  // chunks of more and of less than a block
    const auto comms = Blocking(3);
    std::vector<CUdeviceptr> memory;
    for (const float value : {1.F, 2.F, 6.F}) {
      memory.push_back(
          Upload(static_cast<int>(memory.size()), std::vector<T>(kCount, static_cast<T>(value))));
    }
    Grouped(3, [&](int rank) {
      return ncclAllReduce(Pointer(memory[rank]), Pointer(memory[rank]), kCount, type, op,
                           comms[rank], streams_[rank]);
    });
    for (int rank = 0; rank < 3; ++rank) {
      for (const T& value : Download<T>(rank, memory[rank], kCount)) {
        ASSERT_EQ(static_cast<float>(value), static_cast<float>(expected)) << "type " << type;
      }
    }
    Abort(comms);
  }

  template <typename T>
  void ReducesByEveryOp(ncclDataType_t type) const {
    Reduces<T>(type, ncclSum, static_cast<T>(9.F));
    Reduces<T>(type, ncclProd, static_cast<T>(12.F));
    Reduces<T>(type, ncclMax, static_cast<T>(6.F));
    Reduces<T>(type, ncclMin, static_cast<T>(1.F));
    Reduces<T>(type, ncclAvg, static_cast<T>(3.F));
  }
};

TEST_F(DataTest, AllReduceOfEveryTypeByEveryOp) {
  ReducesByEveryOp<int8_t>(ncclInt8);
  ReducesByEveryOp<uint8_t>(ncclUint8);
  ReducesByEveryOp<int32_t>(ncclInt32);
  ReducesByEveryOp<uint32_t>(ncclUint32);
  ReducesByEveryOp<int64_t>(ncclInt64);
  ReducesByEveryOp<uint64_t>(ncclUint64);
  ReducesByEveryOp<__half>(ncclFloat16);
  ReducesByEveryOp<float>(ncclFloat32);
  ReducesByEveryOp<double>(ncclFloat64);
  ReducesByEveryOp<__nv_bfloat16>(ncclBfloat16);
}

TEST_F(DataTest, HalfIsRoundedAfterEachAdditionInAnOrderThatTurnsWithTheChunk) {
  const auto comms = Blocking(3);
  std::vector<CUdeviceptr> memory;
  for (const float value : {2048.F, 1.F, 1.F}) {
    memory.push_back(
        Upload(static_cast<int>(memory.size()), std::vector<__half>(3, __float2half(value))));
  }
  Grouped(3, [&](int rank) {
    return ncclAllReduce(Pointer(memory[rank]), Pointer(memory[rank]), 3, ncclFloat16, ncclSum,
                         comms[rank], streams_[rank]);
  });
  std::vector<float> sums;
  for (const __half sum : Download<__half>(1, memory[1], 3)) sums.push_back(__half2float(sum));
  // 2048 + 1 is 2048 in half; 1 + 1 first is not lost.
  EXPECT_THAT(sums, ElementsAre(2048.F, 2050.F, 2048.F));
  Abort(comms);
}

TEST_F(DataTest, ReduceLeavesTheResultOnTheRootOnly) {
  const auto comms = Blocking(2);
  const CUdeviceptr receive = Upload<int>(1, {0, 0});
  const CUdeviceptr send[] = {Upload<int>(0, {1, 2}), Upload<int>(1, {10, 20})};
  Grouped(2, [&](int rank) {
    return ncclReduce(Pointer(send[rank]), rank == 1 ? Pointer(receive) : nullptr, 2, ncclInt32,
                      ncclSum, 1, comms[rank], streams_[rank]);
  });
  EXPECT_THAT(Download<int>(1, receive, 2), ElementsAre(11, 22));
  EXPECT_THAT(Download<int>(0, send[0], 2), ElementsAre(1, 2));
  Abort(comms);
}

TEST_F(DataTest, BroadcastReadsTheRootOnly) {
  const auto comms = Blocking(2);
  const CUdeviceptr send = Upload<int>(1, {7, 8});
  const CUdeviceptr receive[] = {Upload<int>(0, {0, 0}), Upload<int>(1, {0, 0})};
  Grouped(2, [&](int rank) {
    return ncclBroadcast(rank == 1 ? Pointer(send) : nullptr, Pointer(receive[rank]), 2, ncclInt32,
                         1, comms[rank], streams_[rank]);
  });
  EXPECT_THAT(Download<int>(0, receive[0], 2), ElementsAre(7, 8));
  EXPECT_THAT(Download<int>(1, receive[1], 2), ElementsAre(7, 8));
  Abort(comms);
}

TEST_F(DataTest, AllGatherAndReduceScatterInPlace) {
  const auto comms = Blocking(2);
  const CUdeviceptr all[] = {Upload<int>(0, {1, 2, 0, 0}), Upload<int>(1, {0, 0, 3, 4})};
  constexpr size_t kBlock = 2 * sizeof(int);
  Grouped(2, [&](int rank) {
    return ncclAllGather(Pointer(all[rank] + rank * kBlock), Pointer(all[rank]), 2, ncclInt32,
                         comms[rank], streams_[rank]);
  });
  EXPECT_THAT(Download<int>(0, all[0], 4), ElementsAre(1, 2, 3, 4));
  EXPECT_THAT(Download<int>(1, all[1], 4), ElementsAre(1, 2, 3, 4));
  Grouped(2, [&](int rank) {
    return ncclReduceScatter(Pointer(all[rank]), Pointer(all[rank] + rank * kBlock), 2, ncclInt32,
                             ncclSum, comms[rank], streams_[rank]);
  });
  EXPECT_THAT(Download<int>(0, all[0], 4), ElementsAre(2, 4, 3, 4));
  EXPECT_THAT(Download<int>(1, all[1], 4), ElementsAre(1, 2, 6, 8));
  Abort(comms);
}

TEST_F(DataTest, PreMulSumMultipliesEachRanksInputFirst) {
  const auto comms = Blocking(2);
  ncclRedOp_t ops[2];
  float scalar = 0.5F;
  ASSERT_EQ(
      ncclRedOpCreatePreMulSum(&ops[0], &scalar, ncclFloat32, ncclScalarHostImmediate, comms[0]),
      ncclSuccess);
  const CUdeviceptr on_device = Upload<float>(1, {3.F});
  ASSERT_EQ(ncclRedOpCreatePreMulSum(&ops[1], Pointer(on_device), ncclFloat32, ncclScalarDevice,
                                     comms[1]),
            ncclSuccess);
  EXPECT_NE(ops[0], ops[1]);
  const CUdeviceptr memory[] = {Upload<float>(0, {8.F}), Upload<float>(1, {1.F})};
  Grouped(2, [&](int rank) {
    return ncclAllReduce(Pointer(memory[rank]), Pointer(memory[rank]), 1, ncclFloat32, ops[rank],
                         comms[rank], streams_[rank]);
  });
  EXPECT_THAT(Download<float>(0, memory[0], 1), ElementsAre(7.F));
  // Of another type, of another communicator, destroyed twice, built in.
  void* p = Pointer(memory[0]);
  EXPECT_EQ(ncclAllReduce(p, p, 1, ncclInt32, ops[0], comms[0], streams_[0]), ncclInvalidArgument);
  EXPECT_EQ(ncclAllReduce(p, p, 1, ncclFloat32, ops[1], comms[0], streams_[0]),
            ncclInvalidArgument);
  EXPECT_EQ(ncclRedOpDestroy(ops[0], comms[0]), ncclSuccess);
  EXPECT_EQ(ncclRedOpDestroy(ops[0], comms[0]), ncclInvalidArgument);
  EXPECT_EQ(ncclRedOpDestroy(ncclSum, comms[0]), ncclInvalidArgument);
  Abort(comms);
}

TEST_F(DataTest, SendsAndReceivesOfAGroupProgressTogether) {
  const auto comms = Blocking(3);
  std::vector<CUdeviceptr> from;
  std::vector<CUdeviceptr> to;
  for (int rank = 0; rank < 3; ++rank) {
    from.push_back(Upload<int>(rank, {rank}));
    to.push_back(Upload<int>(rank, {-1}));
  }
  OnEach(3, [&](int rank) {
    EXPECT_EQ(ncclGroupStart(), ncclSuccess);
    EXPECT_EQ(
        ncclSend(Pointer(from[rank]), 1, ncclInt32, (rank + 1) % 3, comms[rank], streams_[rank]),
        ncclSuccess);
    EXPECT_EQ(
        ncclRecv(Pointer(to[rank]), 1, ncclInt32, (rank + 2) % 3, comms[rank], streams_[rank]),
        ncclSuccess);
    EXPECT_EQ(ncclGroupEnd(), ncclSuccess);
    EXPECT_TRUE(Finishes(streams_[rank]));
    EXPECT_THAT(Download<int>(rank, to[rank], 1), ElementsAre((rank + 2) % 3));
  });
  Abort(comms);
}

TEST_F(DataTest, AllStreamsOfAGroupWaitForItsKernel) {
  const auto comms = Blocking(2);
  const CUstream second = NewStream(0);
  const CUdeviceptr sums[] = {Upload<int>(0, {1, 2}), Upload<int>(1, {10, 20})};
  const auto issue = [&](int rank, CUstream other) {
    EXPECT_EQ(ncclGroupStart(), ncclSuccess);
    for (const size_t i : {0, 1}) {
      void* element = Pointer(sums[rank] + i * sizeof(int));
      EXPECT_EQ(ncclAllReduce(element, element, 1, ncclInt32, ncclSum, comms[rank],
                              i == 0 ? streams_[rank] : other),
                ncclSuccess);
    }
    EXPECT_EQ(ncclGroupEnd(), ncclSuccess);
  };
  std::thread([&] { issue(0, second); }).join();
  EXPECT_TRUE(KeepsWaiting(second));
  EXPECT_TRUE(KeepsWaiting(streams_[0]));
  issue(1, streams_[1]);
  EXPECT_TRUE(Finishes(second));
  EXPECT_TRUE(Finishes(streams_[0]));
  EXPECT_THAT(Download<int>(0, sums[0], 2), ElementsAre(11, 22));
  Abort(comms);
}

TEST_F(DataTest, MemoryOfNcclAndRegistration) {
  const auto comms = Blocking(1);
  Use(0);
  void* memory = nullptr;
  ASSERT_EQ(ncclMemAlloc(&memory, 4096), ncclSuccess);
  void* handle = nullptr;
  EXPECT_EQ(ncclCommRegister(comms[0], memory, 4096, &handle), ncclSuccess);
  EXPECT_EQ(ncclCommRegister(comms[0], memory, size_t{1} << 40, &handle), ncclInvalidArgument);
  EXPECT_EQ(ncclCommDeregister(comms[0], handle), ncclSuccess);
  EXPECT_EQ(ncclCommDeregister(comms[0], handle), ncclInvalidArgument);
  EXPECT_EQ(ncclMemFree(memory), ncclSuccess);
  EXPECT_EQ(ncclCommDestroy(comms[0]), ncclSuccess);
}

}  // namespace
}  // namespace gradsync::fake_nccl
