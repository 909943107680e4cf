// Streams, their order, and memory operations in them.
#include <sys/mman.h>

#include <array>
#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

#include "tests/fakes/cuda/test_support.h"

namespace gradsync::fake_cuda {
namespace {

// A word that streams wait for, in registered host memory.
class StreamTest : public FakeCudaTest {
 protected:
  void SetUp() override {
    FakeCudaTest::SetUp();
    page_ = mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    ASSERT_NE(page_, MAP_FAILED);
    ASSERT_EQ(
        cuMemHostRegister(page_, 4096, CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP),
        CUDA_SUCCESS);
    ASSERT_EQ(cuMemHostGetDevicePointer(&device_page_, page_, 0), CUDA_SUCCESS);
    ASSERT_EQ(cuStreamCreate(&one_, CU_STREAM_NON_BLOCKING), CUDA_SUCCESS);
    ASSERT_EQ(cuStreamCreate(&two_, CU_STREAM_NON_BLOCKING), CUDA_SUCCESS);
  }
  void TearDown() override {
    EXPECT_EQ(cuStreamDestroy(one_), CUDA_SUCCESS);
    EXPECT_EQ(cuStreamDestroy(two_), CUDA_SUCCESS);
    EXPECT_EQ(cuMemHostUnregister(page_), CUDA_SUCCESS);
    munmap(page_, 4096);
    FakeCudaTest::TearDown();
  }

  void Set(int word, uint64_t value) { Word(word).store(value, std::memory_order_release); }
  uint64_t Get(int word) { return Word(word).load(std::memory_order_acquire); }
  CUdeviceptr At(int word) const { return device_page_ + 8 * static_cast<unsigned>(word); }

  CUstream one_ = nullptr;
  CUstream two_ = nullptr;
  void* page_ = nullptr;
  CUdeviceptr device_page_ = 0;

 private:
  std::atomic_ref<uint64_t> Word(int word) {
    return std::atomic_ref<uint64_t>(static_cast<uint64_t*>(page_)[word]);
  }
};

TEST_F(StreamTest, RegisteredMemoryHasItsOwnAddress) {
  EXPECT_EQ(device_page_, reinterpret_cast<CUdeviceptr>(page_));
}

TEST_F(StreamTest, WaitsForAWordOfTheHostsAndThenWritesOne) {
  ASSERT_EQ(cuStreamWaitValue64(one_, At(0), 5, CU_STREAM_WAIT_VALUE_GEQ), CUDA_SUCCESS);
  ASSERT_EQ(cuStreamWriteValue64(one_, At(1), 77, CU_STREAM_WRITE_VALUE_DEFAULT), CUDA_SUCCESS);
  EXPECT_EQ(cuStreamQuery(one_), CUDA_ERROR_NOT_READY);
  Set(0, 4);
  EXPECT_EQ(cuStreamQuery(one_), CUDA_ERROR_NOT_READY);
  EXPECT_EQ(Get(1), 0U);
  Set(0, 6);
  EXPECT_EQ(cuStreamSynchronize(one_), CUDA_SUCCESS);
  EXPECT_EQ(cuStreamQuery(one_), CUDA_SUCCESS);
  EXPECT_EQ(Get(1), 77U);
}

TEST_F(StreamTest, GreaterOrEqualIsCyclic) {
  Set(0, 3);  // later than 2^64 - 2
  ASSERT_EQ(cuStreamWaitValue64(one_, At(0), ~uint64_t{0} - 1, CU_STREAM_WAIT_VALUE_GEQ),
            CUDA_SUCCESS);
  EXPECT_EQ(cuStreamSynchronize(one_), CUDA_SUCCESS);
}

TEST_F(StreamTest, EveryConditionWaitsForWhatItSays) {
  struct Case {
    unsigned condition;
    uint64_t value, not_yet, enough;
  };
  constexpr uint64_t kAll = ~uint64_t{0};
  for (const Case& c :
       {Case{CU_STREAM_WAIT_VALUE_EQ, 5, 6, 5}, Case{CU_STREAM_WAIT_VALUE_AND, 6, 9, 4},
        Case{CU_STREAM_WAIT_VALUE_NOR, kAll << 1, kAll, 8}}) {
    Set(0, c.not_yet);
    ASSERT_EQ(cuStreamWaitValue64(one_, At(0), c.value, c.condition), CUDA_SUCCESS);
    std::this_thread::sleep_for(std::chrono::milliseconds(3));
    EXPECT_EQ(cuStreamQuery(one_), CUDA_ERROR_NOT_READY) << c.condition;
    Set(0, c.enough);
    EXPECT_EQ(cuStreamSynchronize(one_), CUDA_SUCCESS);
  }
}

TEST_F(StreamTest, MemoryOperationsWantAnAlignedAddressThatTheDeviceKnows) {
  uint64_t unknown = 0;
  EXPECT_EQ(cuStreamWaitValue64(one_, At(0) + 4, 0, 0), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(cuStreamWriteValue64(one_, At(0) + 4, 0, 0), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(cuStreamWriteValue64(one_, reinterpret_cast<CUdeviceptr>(&unknown), 0, 0),
            CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(cuStreamWriteValue64(one_, At(512), 0, 0), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(cuStreamWaitValue64(one_, At(0), 0, CU_STREAM_WAIT_VALUE_FLUSH),
            CUDA_ERROR_NOT_SUPPORTED);
  EXPECT_EQ(cuStreamWriteValue64(one_, At(0), 0, 2), CUDA_ERROR_INVALID_VALUE);
}

TEST_F(StreamTest, MemoryOperationsReachDeviceMemoryToo) {
  CUdeviceptr word = 0;
  ASSERT_EQ(cuMemAlloc(&word, 8), CUDA_SUCCESS);
  WriteWord(word, 0);
  ASSERT_EQ(cuStreamWaitValue64(one_, word, 9, CU_STREAM_WAIT_VALUE_EQ), CUDA_SUCCESS);
  ASSERT_EQ(cuStreamWriteValue64(two_, word, 9, 0), CUDA_SUCCESS);
  EXPECT_EQ(cuStreamSynchronize(one_), CUDA_SUCCESS);
  EXPECT_EQ(ReadWord(word), 9U);
  EXPECT_EQ(cuMemFree(word), CUDA_SUCCESS);
}

TEST_F(StreamTest, ABatchRunsInItsOrderAndHasFewerThan256) {
  std::vector<CUstreamBatchMemOpParams> operations(255);
  for (size_t i = 0; i < operations.size(); ++i) {
    auto& write = operations[i].writeValue;
    write.operation = CU_STREAM_MEM_OP_WRITE_VALUE_64;
    write.address = At(static_cast<int>(1 + i));
    write.value64 = i + 1;
    write.flags = 0;
  }
  auto& wait = operations[0].waitValue;
  wait.operation = CU_STREAM_MEM_OP_WAIT_VALUE_64;
  wait.address = At(0);
  wait.value64 = 1;
  wait.flags = CU_STREAM_WAIT_VALUE_GEQ;
  EXPECT_EQ(cuStreamBatchMemOp(one_, 255, operations.data(), 1), CUDA_ERROR_INVALID_VALUE);
  ASSERT_EQ(cuStreamBatchMemOp(one_, 255, operations.data(), 0), CUDA_SUCCESS);
  EXPECT_EQ(Get(255), 0U);
  Set(0, 1);
  EXPECT_EQ(cuStreamSynchronize(one_), CUDA_SUCCESS);
  EXPECT_EQ(Get(2), 2U);
  EXPECT_EQ(Get(255), 255U);
  operations.push_back(operations.back());
  EXPECT_EQ(cuStreamBatchMemOp(one_, 256, operations.data(), 0), CUDA_ERROR_INVALID_VALUE);
}

TEST_F(StreamTest, StreamsDoNotWaitForEachOther) {
  ASSERT_EQ(cuStreamWaitValue64(one_, At(0), 1, 0), CUDA_SUCCESS);
  ASSERT_EQ(cuStreamWriteValue64(two_, At(1), 1, 0), CUDA_SUCCESS);
  EXPECT_EQ(cuStreamSynchronize(two_), CUDA_SUCCESS);
  EXPECT_EQ(cuStreamQuery(one_), CUDA_ERROR_NOT_READY);
  Set(0, 1);
  EXPECT_EQ(cuCtxSynchronize(), CUDA_SUCCESS);
  EXPECT_EQ(cuStreamQuery(one_), CUDA_SUCCESS);
}

TEST_F(StreamTest, TheNullStreamIsOrderedWithBlockingStreamsOnly) {
  CUstream blocking = nullptr;
  ASSERT_EQ(cuStreamCreate(&blocking, CU_STREAM_DEFAULT), CUDA_SUCCESS);
  ASSERT_EQ(cuStreamWaitValue64(blocking, At(0), 1, 0), CUDA_SUCCESS);
  ASSERT_EQ(cuStreamWriteValue64(nullptr, At(1), 1, 0), CUDA_SUCCESS);
  ASSERT_EQ(cuStreamWriteValue64(blocking, At(2), 1, 0), CUDA_SUCCESS);
  // One that does not block goes on.
  ASSERT_EQ(cuStreamWriteValue64(one_, At(3), 1, 0), CUDA_SUCCESS);
  EXPECT_EQ(cuStreamSynchronize(one_), CUDA_SUCCESS);
  EXPECT_EQ(Get(3), 1U);
  EXPECT_EQ(Get(1), 0U);
  EXPECT_EQ(cuStreamQuery(nullptr), CUDA_ERROR_NOT_READY);
  Set(0, 1);
  EXPECT_EQ(cuStreamSynchronize(CU_STREAM_LEGACY), CUDA_SUCCESS);
  EXPECT_EQ(Get(1), 1U);
  EXPECT_EQ(cuStreamSynchronize(blocking), CUDA_SUCCESS);
  // And the other way round: a blocking stream waits for the NULL stream.
  ASSERT_EQ(cuStreamWaitValue64(nullptr, At(4), 1, 0), CUDA_SUCCESS);
  ASSERT_EQ(cuStreamWriteValue64(blocking, At(5), 1, 0), CUDA_SUCCESS);
  std::this_thread::sleep_for(std::chrono::milliseconds(3));
  EXPECT_EQ(Get(5), 0U);
  Set(4, 1);
  EXPECT_EQ(cuStreamSynchronize(blocking), CUDA_SUCCESS);
  EXPECT_EQ(Get(5), 1U);
  EXPECT_EQ(cuStreamDestroy(blocking), CUDA_SUCCESS);
}

TEST_F(StreamTest, ADestroyedStreamFinishesItsWork) {
  CUstream stream = nullptr;
  ASSERT_EQ(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING), CUDA_SUCCESS);
  ASSERT_EQ(cuStreamWaitValue64(stream, At(0), 1, 0), CUDA_SUCCESS);
  ASSERT_EQ(cuStreamWriteValue64(stream, At(1), 1, 0), CUDA_SUCCESS);
  EXPECT_EQ(cuStreamDestroy(stream), CUDA_SUCCESS);
  EXPECT_EQ(cuStreamQuery(stream), CUDA_ERROR_INVALID_HANDLE);
  EXPECT_EQ(cuStreamDestroy(stream), CUDA_ERROR_INVALID_HANDLE);
  EXPECT_EQ(Get(1), 0U);
  Set(0, 1);
  EXPECT_TRUE(Eventually([&] { return Get(1) == 1; }));
}

TEST_F(StreamTest, PrioritiesAreClamped) {
  int least = 1;
  int greatest = 1;
  ASSERT_EQ(cuCtxGetStreamPriorityRange(&least, &greatest), CUDA_SUCCESS);
  EXPECT_EQ(least, 0);
  EXPECT_LT(greatest, 0);
  for (const int priority : {least, greatest, greatest - 10, least + 10}) {
    CUstream stream = nullptr;
    ASSERT_EQ(cuStreamCreateWithPriority(&stream, CU_STREAM_NON_BLOCKING, priority), CUDA_SUCCESS);
    EXPECT_EQ(cuStreamDestroy(stream), CUDA_SUCCESS);
  }
  CUstream stream = nullptr;
  EXPECT_EQ(cuStreamCreateWithPriority(&stream, 8, 0), CUDA_ERROR_INVALID_VALUE);
}

TEST_F(StreamTest, KnowsItsContextAndIsNeverCapturing) {
  CUcontext context = nullptr;
  EXPECT_EQ(cuStreamGetCtx(one_, &context), CUDA_SUCCESS);
  EXPECT_EQ(context, context_);
  CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_ACTIVE;
  EXPECT_EQ(cuStreamIsCapturing(one_, &status), CUDA_SUCCESS);
  EXPECT_EQ(status, CU_STREAM_CAPTURE_STATUS_NONE);
  EXPECT_EQ(fakeCudaStreamDevice(one_), 0);
  EXPECT_EQ(fakeCudaStreamDevice(reinterpret_cast<CUstream>(0x1230)), -1);
}

TEST_F(StreamTest, AHostFunctionRunsInOrderAndMayNotCallTheDriver) {
  struct Seen {
    std::atomic<CUresult> result{CUDA_SUCCESS};
    std::atomic<bool> ran{false};
  } seen;
  ASSERT_EQ(cuStreamWaitValue64(one_, At(0), 1, 0), CUDA_SUCCESS);
  ASSERT_EQ(cuLaunchHostFunc(
                one_,
                [](void* data) {
                  auto* out = static_cast<Seen*>(data);
                  int count = 0;
                  out->result = cuDeviceGetCount(&count);
                  out->ran = true;
                },
                &seen),
            CUDA_SUCCESS);
  EXPECT_FALSE(seen.ran);
  Set(0, 1);
  EXPECT_EQ(cuStreamSynchronize(one_), CUDA_SUCCESS);
  EXPECT_TRUE(seen.ran);
  EXPECT_EQ(seen.result, CUDA_ERROR_NOT_PERMITTED);
}

TEST_F(StreamTest, AnotherLibraryRunsInAStream) {
  CUdeviceptr memory = 0;
  ASSERT_EQ(cuMemAlloc(&memory, 64), CUDA_SUCCESS);
  ASSERT_EQ(cuStreamWaitValue64(one_, At(0), 1, 0), CUDA_SUCCESS);
  const auto run = [](void* argument, const volatile int* abandoned) {
    EXPECT_FALSE(fakeCudaIsAbandoned(abandoned));
    void* place = fakeCudaKernelAddress(*static_cast<CUdeviceptr*>(argument), 64, 0);
    ASSERT_NE(place, nullptr);
    *static_cast<uint64_t*>(place) = 31;
  };
  ASSERT_EQ(fakeCudaLaunch(one_, run, &memory), CUDA_SUCCESS);
  EXPECT_EQ(cuStreamQuery(one_), CUDA_ERROR_NOT_READY);
  Set(0, 1);
  EXPECT_EQ(cuStreamSynchronize(one_), CUDA_SUCCESS);
  EXPECT_EQ(ReadWord(memory), 31U);
  EXPECT_EQ(fakeCudaKernelAddress(memory, 65, 0), nullptr);
  EXPECT_EQ(fakeCudaKernelAddress(memory, 64, 1), nullptr);  // no peer access
  EXPECT_EQ(cuMemFree(memory), CUDA_SUCCESS);
  EXPECT_EQ(fakeCudaKernelAddress(memory, 64, 0), nullptr);
}

// For the sanitizers: everything at once, from several threads.
TEST_F(StreamTest, SeveralThreadsUseItAtOnce) {
  const auto work = [&] {
    ASSERT_EQ(cuCtxSetCurrent(context_), CUDA_SUCCESS);
    CUstream stream = nullptr;
    CUevent event = nullptr;
    ASSERT_EQ(cuStreamCreate(&stream, CU_STREAM_DEFAULT), CUDA_SUCCESS);
    ASSERT_EQ(cuEventCreate(&event, 0), CUDA_SUCCESS);
    for (int round = 0; round < 20; ++round) {
      CUdeviceptr memory = 0;
      uint64_t read = 0;
      ASSERT_EQ(cuMemAlloc(&memory, 1024), CUDA_SUCCESS);
      const Mapped mapped = MapNew(2 * kMiB);
      EXPECT_EQ(cuMemsetD8Async(memory, 1, 1024, stream), CUDA_SUCCESS);
      EXPECT_EQ(cuMemcpyDtoDAsync(mapped.address, memory, 1024, stream), CUDA_SUCCESS);
      EXPECT_EQ(cuEventRecord(event, stream), CUDA_SUCCESS);
      EXPECT_EQ(cuStreamWaitEvent(one_, event, 0), CUDA_SUCCESS);
      EXPECT_EQ(cuMemcpyDtoHAsync(&read, mapped.address, 8, one_), CUDA_SUCCESS);
      EXPECT_EQ(read, 0x0101010101010101U);
      EXPECT_EQ(cuMemFree(memory), CUDA_SUCCESS);
      Unmap(mapped);
    }
    EXPECT_EQ(cuEventDestroy(event), CUDA_SUCCESS);
    EXPECT_EQ(cuStreamDestroy(stream), CUDA_SUCCESS);
  };
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) threads.emplace_back(work);
  for (std::thread& thread : threads) thread.join();
}

TEST_F(StreamTest, WhatRunsIsToldWhenItsContextGoes) {
  CUcontext other = nullptr;
  CUstream far = nullptr;
  std::atomic<int> state{0};
  ASSERT_EQ(cuDevicePrimaryCtxRetain(&other, 1), CUDA_SUCCESS);
  ASSERT_EQ(cuCtxPushCurrent(other), CUDA_SUCCESS);
  ASSERT_EQ(cuStreamCreate(&far, CU_STREAM_NON_BLOCKING), CUDA_SUCCESS);
  const auto run = [](void* argument, const volatile int* abandoned) {
    auto* seen = static_cast<std::atomic<int>*>(argument);
    *seen = 1;
    while (*abandoned == 0) std::this_thread::yield();
    *seen = 2;
  };
  ASSERT_EQ(fakeCudaLaunch(far, run, &state), CUDA_SUCCESS);
  EXPECT_TRUE(Eventually([&] { return state == 1; }));
  EXPECT_EQ(cuDevicePrimaryCtxRelease(1), CUDA_SUCCESS);
  EXPECT_EQ(state, 2);
  EXPECT_EQ(cuCtxPopCurrent(&other), CUDA_SUCCESS);
}

TEST_F(StreamTest, FreeingMemoryWaitsForTheDevice) {
  CUdeviceptr memory = 0;
  ASSERT_EQ(cuMemAlloc(&memory, 64), CUDA_SUCCESS);
  ASSERT_EQ(cuStreamWaitValue64(one_, At(0), 1, 0), CUDA_SUCCESS);
  std::atomic<bool> freed{false};
  std::thread other([&] {
    EXPECT_EQ(cuCtxSetCurrent(context_), CUDA_SUCCESS);
    EXPECT_EQ(cuMemFree(memory), CUDA_SUCCESS);
    freed = true;
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(10));
  EXPECT_FALSE(freed);
  Set(0, 1);
  other.join();
}

}  // namespace
}  // namespace gradsync::fake_cuda
