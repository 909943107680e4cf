// Events of one process.
#include "tests/fakes/cuda/test_support.h"

namespace gradsync::fake_cuda {
namespace {

// A word of device memory that stream one_ waits for.
class EventTest : public FakeCudaTest {
 protected:
  void SetUp() override {
    FakeCudaTest::SetUp();
    ASSERT_EQ(cuStreamCreate(&one_, CU_STREAM_NON_BLOCKING), CUDA_SUCCESS);
    ASSERT_EQ(cuStreamCreate(&two_, CU_STREAM_NON_BLOCKING), CUDA_SUCCESS);
    ASSERT_EQ(cuEventCreate(&event_, CU_EVENT_DEFAULT), CUDA_SUCCESS);
    ASSERT_EQ(cuMemAlloc(&word_, 64), CUDA_SUCCESS);
    ASSERT_EQ(cuMemsetD8(word_, 0, 64), CUDA_SUCCESS);
    ASSERT_EQ(cuCtxSynchronize(), CUDA_SUCCESS);
  }
  void TearDown() override {
    EXPECT_EQ(cuMemFree(word_), CUDA_SUCCESS);
    EXPECT_EQ(cuEventDestroy(event_), CUDA_SUCCESS);
    EXPECT_EQ(cuStreamDestroy(one_), CUDA_SUCCESS);
    EXPECT_EQ(cuStreamDestroy(two_), CUDA_SUCCESS);
    FakeCudaTest::TearDown();
  }

  CUstream one_ = nullptr;
  CUstream two_ = nullptr;
  CUevent event_ = nullptr;
  CUdeviceptr word_ = 0;
};

TEST_F(EventTest, OneThatWasNeverRecordedIsNothingToWaitFor) {
  EXPECT_EQ(cuEventQuery(event_), CUDA_SUCCESS);
  EXPECT_EQ(cuEventSynchronize(event_), CUDA_SUCCESS);
  EXPECT_EQ(cuStreamWaitEvent(one_, event_, 0), CUDA_SUCCESS);
  EXPECT_EQ(cuStreamSynchronize(one_), CUDA_SUCCESS);
}

TEST_F(EventTest, OrdersTwoStreams) {
  ASSERT_EQ(cuStreamWaitValue64(one_, word_, 1, 0), CUDA_SUCCESS);
  ASSERT_EQ(cuEventRecord(event_, one_), CUDA_SUCCESS);
  ASSERT_EQ(cuStreamWaitEvent(two_, event_, 0), CUDA_SUCCESS);
  EXPECT_EQ(cuEventQuery(event_), CUDA_ERROR_NOT_READY);
  EXPECT_EQ(cuStreamQuery(two_), CUDA_ERROR_NOT_READY);
  WriteWord(word_, 1);
  EXPECT_EQ(cuStreamSynchronize(two_), CUDA_SUCCESS);
  EXPECT_EQ(cuEventQuery(event_), CUDA_SUCCESS);
}

TEST_F(EventTest, AWaitTakesTheLatestRecordAtTheTimeOfItsCall) {
  ASSERT_EQ(cuEventRecord(event_, one_), CUDA_SUCCESS);
  ASSERT_EQ(cuStreamWaitEvent(two_, event_, 0), CUDA_SUCCESS);
  ASSERT_EQ(cuStreamWaitValue64(one_, word_, 1, 0), CUDA_SUCCESS);
  ASSERT_EQ(cuEventRecord(event_, one_), CUDA_SUCCESS);
  EXPECT_EQ(cuStreamSynchronize(two_), CUDA_SUCCESS);  // not the second record
  EXPECT_EQ(cuEventQuery(event_), CUDA_ERROR_NOT_READY);
  WriteWord(word_, 1);
  EXPECT_EQ(cuEventSynchronize(event_), CUDA_SUCCESS);
}

TEST_F(EventTest, DestroyedWhileItIsWaitedForItStillIs) {
  CUevent event = nullptr;
  ASSERT_EQ(cuEventCreate(&event, CU_EVENT_DISABLE_TIMING), CUDA_SUCCESS);
  ASSERT_EQ(cuStreamWaitValue64(one_, word_, 1, 0), CUDA_SUCCESS);
  ASSERT_EQ(cuEventRecord(event, one_), CUDA_SUCCESS);
  ASSERT_EQ(cuStreamWaitEvent(two_, event, 0), CUDA_SUCCESS);
  EXPECT_EQ(cuEventDestroy(event), CUDA_SUCCESS);
  EXPECT_EQ(cuEventQuery(event), CUDA_ERROR_INVALID_HANDLE);
  EXPECT_EQ(cuStreamQuery(two_), CUDA_ERROR_NOT_READY);
  WriteWord(word_, 1);
  EXPECT_EQ(cuStreamSynchronize(two_), CUDA_SUCCESS);
}

TEST_F(EventTest, TimeIsMeasuredByEventsThatHaveIt) {
  CUevent untimed = nullptr;
  CUevent later = nullptr;
  float milliseconds = -1;
  ASSERT_EQ(cuEventCreate(&untimed, CU_EVENT_DISABLE_TIMING), CUDA_SUCCESS);
  ASSERT_EQ(cuEventCreate(&later, CU_EVENT_BLOCKING_SYNC), CUDA_SUCCESS);
  ASSERT_EQ(cuEventRecord(untimed, one_), CUDA_SUCCESS);
  ASSERT_EQ(cuEventRecord(event_, one_), CUDA_SUCCESS);
  EXPECT_EQ(cuEventElapsedTime(&milliseconds, event_, later), CUDA_ERROR_INVALID_HANDLE);
  EXPECT_EQ(cuEventElapsedTime(&milliseconds, untimed, event_), CUDA_ERROR_INVALID_HANDLE);
  ASSERT_EQ(cuStreamWaitValue64(one_, word_, 1, 0), CUDA_SUCCESS);
  ASSERT_EQ(cuEventRecord(later, one_), CUDA_SUCCESS);
  EXPECT_EQ(cuEventElapsedTime(&milliseconds, event_, later), CUDA_ERROR_NOT_READY);
  WriteWord(word_, 1);
  EXPECT_EQ(cuEventSynchronize(later), CUDA_SUCCESS);
  EXPECT_EQ(cuEventElapsedTime(&milliseconds, event_, later), CUDA_SUCCESS);
  EXPECT_GE(milliseconds, 0);
  EXPECT_EQ(cuEventDestroy(untimed), CUDA_SUCCESS);
  EXPECT_EQ(cuEventDestroy(later), CUDA_SUCCESS);
}

TEST_F(EventTest, RefusesWhatIsNotAllowed) {
  CUevent event = nullptr;
  EXPECT_EQ(cuEventCreate(&event, CU_EVENT_INTERPROCESS), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(cuEventCreate(&event, 16), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(cuStreamWaitEvent(one_, event_, CU_EVENT_WAIT_EXTERNAL), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(cuStreamWaitEvent(one_, nullptr, 0), CUDA_ERROR_INVALID_HANDLE);
  CUipcEventHandle handle;
  EXPECT_EQ(cuIpcGetEventHandle(&handle, event_), CUDA_ERROR_INVALID_HANDLE);
}

TEST_F(EventTest, IsRecordedInItsOwnContextAndWaitedForInAny) {
  CUcontext other = nullptr;
  CUstream far = nullptr;
  ASSERT_EQ(cuDevicePrimaryCtxRetain(&other, 1), CUDA_SUCCESS);
  ASSERT_EQ(cuCtxPushCurrent(other), CUDA_SUCCESS);
  ASSERT_EQ(cuStreamCreate(&far, CU_STREAM_NON_BLOCKING), CUDA_SUCCESS);
  EXPECT_EQ(cuEventRecord(event_, far), CUDA_ERROR_INVALID_HANDLE);
  EXPECT_EQ(cuEventRecord(event_, one_), CUDA_SUCCESS);
  EXPECT_EQ(cuStreamWaitEvent(far, event_, 0), CUDA_SUCCESS);
  EXPECT_EQ(cuStreamSynchronize(far), CUDA_SUCCESS);
  EXPECT_EQ(cuStreamDestroy(far), CUDA_SUCCESS);
  EXPECT_EQ(cuCtxPopCurrent(&other), CUDA_SUCCESS);
  EXPECT_EQ(cuDevicePrimaryCtxRelease(1), CUDA_SUCCESS);
}

}  // namespace
}  // namespace gradsync::fake_cuda
