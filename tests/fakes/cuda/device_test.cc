// Devices, contexts, and how the driver is found.

#include <array>
#include <string>
#include <thread>

#include "shm/cuda/driver.h"
#include "tests/fakes/cuda/test_support.h"

namespace gradsync::fake_cuda {
namespace {

CUdriverProcAddressQueryResult Find(const char* name, int version, void** function,
                                    CUresult expected = CUDA_SUCCESS) {
  CUdriverProcAddressQueryResult status = CU_GET_PROC_ADDRESS_SUCCESS;
  EXPECT_EQ(cuGetProcAddress(name, function, version, CU_GET_PROC_ADDRESS_DEFAULT, &status),
            expected);
  return status;
}

TEST(ProcAddressTest, FindsAFunctionInTheVersionThatIsAskedFor) {
  void* function = nullptr;
  EXPECT_EQ(Find("cuMemAlloc", 12000, &function), CU_GET_PROC_ADDRESS_SUCCESS);
  EXPECT_EQ(function, reinterpret_cast<void*>(&cuMemAlloc));
  EXPECT_EQ(Find("cuNothing", 12000, &function), CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND);
  EXPECT_EQ(function, nullptr);
}

TEST(ProcAddressTest, AVersionOlderThanTheFunctionIsNotSufficient) {
  void* function = nullptr;
  EXPECT_EQ(Find("cuStreamWaitValue64", 11060, &function),
            CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT);
  EXPECT_EQ(function, nullptr);
  EXPECT_EQ(Find("cuStreamWaitValue64", 11070, &function), CU_GET_PROC_ADDRESS_SUCCESS);
}

TEST(ProcAddressTest, AVersionAboveTheDriversOwnIsRefused) {
  void* function = &function;
  EXPECT_EQ(Find("cuInit", 13010, &function, CUDA_ERROR_INVALID_VALUE),
            CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT);
  EXPECT_EQ(function, nullptr);
}

TEST(ProcAddressTest, ANameThatGotAnotherSignatureIsNotGivenForIt) {
  void* function = nullptr;
  EXPECT_EQ(Find("cuCtxGetDevice", 12000, &function), CU_GET_PROC_ADDRESS_SUCCESS);
  EXPECT_EQ(Find("cuCtxGetDevice", 13000, &function), CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND);
}

// Through the real loader: the library that is loaded already goes by the driver's name.
TEST(ProcAddressTest, TheProjectsOwnLoaderTakesItForTheDriver) {
  const auto driver = CudaDriver::Load();
  ASSERT_TRUE(driver) << driver.error().ToString();
  EXPECT_EQ((*driver)->version, 13000);
  EXPECT_EQ((*driver)->cuMemAlloc, &cuMemAlloc);
}

TEST(ErrorTest, HasItsNameAndText) {
  const char* text = nullptr;
  EXPECT_EQ(cuGetErrorName(CUDA_ERROR_OUT_OF_MEMORY, &text), CUDA_SUCCESS);
  EXPECT_STREQ(text, "CUDA_ERROR_OUT_OF_MEMORY");
  EXPECT_EQ(cuGetErrorString(CUDA_ERROR_OUT_OF_MEMORY, &text), CUDA_SUCCESS);
  EXPECT_STREQ(text, "out of memory");
  EXPECT_EQ(cuGetErrorName(static_cast<CUresult>(1000), &text), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(text, nullptr);
}

TEST(MachineTest, NeedsCuInitFirst) {
  Helper helper;
  EXPECT_EQ(helper.Do("version"), "0 13000");
  EXPECT_EQ(helper.Do("count").substr(0, 1), std::to_string(CUDA_ERROR_NOT_INITIALIZED));
  EXPECT_EQ(helper.Do({"init", "count"}), "0 2");
}

TEST(MachineTest, AForkHasNoDriver) {
  Helper helper;
  EXPECT_EQ(helper.Do({"init", "retain 0", "stream", "fork"}),
            "0 " + std::to_string(11 * CUDA_ERROR_NOT_INITIALIZED));
  EXPECT_EQ(helper.Do("sync"), "0");  // and does no harm to its parent's
}

TEST(MachineTest, HasAsManyDevicesAsItIsTold) {
  Helper none(Helper::Environment{{"GRADSYNC_FAKE_CUDA_DEVICES", "0"}});
  EXPECT_EQ(none.Do("init"), std::to_string(CUDA_ERROR_NO_DEVICE));
  Helper eight(Helper::Environment{{"GRADSYNC_FAKE_CUDA_DEVICES", "8"},
                                   {"GRADSYNC_FAKE_CUDA_VERSION", "12040"},
                                   {"GRADSYNC_FAKE_CUDA_PEER", "0"}});
  EXPECT_EQ(eight.Do({"init", "count"}), "0 8");
  EXPECT_EQ(eight.Do("version"), "0 12040");
  EXPECT_EQ(eight.Do("peer"), "0 0");
}

TEST(MachineTest, ShowsTheVisibleDevicesInTheOrderGiven) {
  const std::string devices = "GRADSYNC_FAKE_CUDA_DEVICES";
  const std::string visible = "CUDA_VISIBLE_DEVICES";
  Helper all(Helper::Environment{{devices, "4"}});
  const std::string two = all.Do({"init", "uuid 2"});
  const std::string zero = all.Do("uuid 0");
  EXPECT_NE(two, zero);
  EXPECT_EQ(all.Do("uuid 4").substr(0, 3), std::to_string(CUDA_ERROR_INVALID_DEVICE));

  Helper some(Helper::Environment{{devices, "4"}, {visible, "2,0"}});
  EXPECT_EQ(some.Do({"init", "count"}), "0 2");
  EXPECT_EQ(some.Do("uuid 0"), two);
  EXPECT_EQ(some.Do("uuid 1"), zero);

  // Only those before the first that is not there.
  Helper invalid(Helper::Environment{{devices, "4"}, {visible, "2,7,0"}});
  EXPECT_EQ(invalid.Do({"init", "count"}), "0 1");

  Helper by_uuid(Helper::Environment{{devices, "4"}, {visible, "GPU-" + two.substr(2, 6)}});
  EXPECT_EQ(by_uuid.Do({"init", "count"}), "0 1");
  EXPECT_EQ(by_uuid.Do("uuid 0"), two);

  for (const char* hides_all : {"", "-1", "1,1", "GPU-"}) {
    Helper nothing(Helper::Environment{{devices, "4"}, {visible, hides_all}});
    EXPECT_EQ(nothing.Do("init"), std::to_string(CUDA_ERROR_NO_DEVICE)) << hides_all;
  }
}

using ContextTest = FakeCudaTest;

TEST_F(ContextTest, DevicesAreWhatTheyAre) {
  CUdevice device = -1;
  EXPECT_EQ(cuDeviceGet(&device, 1), CUDA_SUCCESS);
  EXPECT_EQ(device, 1);
  EXPECT_EQ(cuDeviceGet(&device, 2), CUDA_ERROR_INVALID_DEVICE);
  std::array<char, 8> name{};
  EXPECT_EQ(cuDeviceGetName(name.data(), 8, 0), CUDA_SUCCESS);
  EXPECT_STREQ(name.data(), "Fake GP");
  size_t bytes = 0;
  EXPECT_EQ(cuDeviceTotalMem(&bytes, 0), CUDA_SUCCESS);
  EXPECT_EQ(bytes, 4096 * kMiB);
  for (const CUdevice_attribute attribute :
       {CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS, CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING,
        CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED,
        CU_DEVICE_ATTRIBUTE_IPC_EVENT_SUPPORTED}) {
    int value = 0;
    EXPECT_EQ(cuDeviceGetAttribute(&value, attribute, 0), CUDA_SUCCESS);
    EXPECT_EQ(value, 1) << attribute;
  }
  int value = 0;
  EXPECT_EQ(cuDeviceGetAttribute(&value, CU_DEVICE_ATTRIBUTE_MAX, 0), CUDA_ERROR_INVALID_VALUE);
}

TEST_F(ContextTest, CallsThatNeedOneSaySo) {
  EXPECT_EQ(cuCtxSetCurrent(nullptr), CUDA_SUCCESS);
  CUdevice device = 0;
  CUdeviceptr memory = 0;
  CUstream stream = nullptr;
  CUevent event = nullptr;
  EXPECT_EQ(cuCtxGetDevice(&device), CUDA_ERROR_INVALID_CONTEXT);
  EXPECT_EQ(cuMemAlloc(&memory, 8), CUDA_ERROR_INVALID_CONTEXT);
  EXPECT_EQ(cuStreamCreate(&stream, 0), CUDA_ERROR_INVALID_CONTEXT);
  EXPECT_EQ(cuEventCreate(&event, 0), CUDA_ERROR_INVALID_CONTEXT);
  EXPECT_EQ(cuStreamSynchronize(nullptr), CUDA_ERROR_INVALID_CONTEXT);
  EXPECT_EQ(cuCtxSynchronize(), CUDA_ERROR_INVALID_CONTEXT);
  CUcontext current = context_;
  EXPECT_EQ(cuCtxGetCurrent(&current), CUDA_SUCCESS);
  EXPECT_EQ(current, nullptr);
  EXPECT_EQ(cuCtxPopCurrent(&current), CUDA_ERROR_INVALID_CONTEXT);
  EXPECT_EQ(cuCtxSetCurrent(context_), CUDA_SUCCESS);
}

TEST_F(ContextTest, IsCurrentToOneThread) {
  std::thread([&] {
    CUdevice device = -1;
    EXPECT_EQ(cuCtxGetDevice(&device), CUDA_ERROR_INVALID_CONTEXT);
    EXPECT_EQ(cuCtxPushCurrent(context_), CUDA_SUCCESS);
    EXPECT_EQ(cuCtxGetDevice(&device), CUDA_SUCCESS);
    EXPECT_EQ(device, 0);
  }).join();
}

TEST_F(ContextTest, ContextsAreAStack) {
  CUcontext other = nullptr;
  ASSERT_EQ(cuDevicePrimaryCtxRetain(&other, 1), CUDA_SUCCESS);
  EXPECT_EQ(cuCtxPushCurrent(other), CUDA_SUCCESS);
  CUdevice device = -1;
  EXPECT_EQ(cuCtxGetDevice(&device), CUDA_SUCCESS);
  EXPECT_EQ(device, 1);
  CUcontext popped = nullptr;
  EXPECT_EQ(cuCtxPopCurrent(&popped), CUDA_SUCCESS);
  EXPECT_EQ(popped, other);
  EXPECT_EQ(cuCtxGetDevice(&device), CUDA_SUCCESS);
  EXPECT_EQ(device, 0);
  EXPECT_EQ(cuDevicePrimaryCtxRelease(1), CUDA_SUCCESS);
  EXPECT_EQ(cuCtxPushCurrent(reinterpret_cast<CUcontext>(&device)), CUDA_ERROR_INVALID_CONTEXT);
}

TEST_F(ContextTest, ThePrimaryContextIsCountedAndResetAtTheEnd) {
  CUcontext again = nullptr;
  unsigned flags = 1;
  int active = 0;
  ASSERT_EQ(cuDevicePrimaryCtxRetain(&again, 1), CUDA_SUCCESS);
  CUcontext twice = nullptr;
  ASSERT_EQ(cuDevicePrimaryCtxRetain(&twice, 1), CUDA_SUCCESS);
  EXPECT_EQ(again, twice);
  ASSERT_EQ(cuCtxPushCurrent(again), CUDA_SUCCESS);
  CUdeviceptr memory = 0;
  CUstream stream = nullptr;
  CUevent event = nullptr;
  ASSERT_EQ(cuMemAlloc(&memory, 8), CUDA_SUCCESS);
  ASSERT_EQ(cuStreamCreate(&stream, 0), CUDA_SUCCESS);
  ASSERT_EQ(cuEventCreate(&event, 0), CUDA_SUCCESS);
  EXPECT_EQ(cuDevicePrimaryCtxRelease(1), CUDA_SUCCESS);
  EXPECT_EQ(cuDevicePrimaryCtxGetState(1, &flags, &active), CUDA_SUCCESS);
  EXPECT_EQ(active, 1);
  EXPECT_EQ(fakeCudaLiveObjects(), 3U);
  EXPECT_EQ(cuDevicePrimaryCtxRelease(1), CUDA_SUCCESS);
  EXPECT_EQ(cuDevicePrimaryCtxGetState(1, &flags, &active), CUDA_SUCCESS);
  EXPECT_EQ(active, 0);
  EXPECT_EQ(fakeCudaLiveObjects(), 0U);
  EXPECT_EQ(cuDevicePrimaryCtxRelease(1), CUDA_ERROR_INVALID_CONTEXT);
  // It is still on the stack, and of no use.
  EXPECT_EQ(cuMemAlloc(&memory, 8), CUDA_ERROR_CONTEXT_IS_DESTROYED);
  EXPECT_EQ(cuCtxPopCurrent(&again), CUDA_SUCCESS);
}

TEST_F(ContextTest, AResetEndsWhatStreamsWaitFor) {
  CUcontext other = nullptr;
  ASSERT_EQ(cuDevicePrimaryCtxRetain(&other, 1), CUDA_SUCCESS);
  ASSERT_EQ(cuCtxPushCurrent(other), CUDA_SUCCESS);
  CUdeviceptr word = 0;
  CUstream stream = nullptr;
  ASSERT_EQ(cuMemAlloc(&word, 8), CUDA_SUCCESS);
  WriteWord(word, 0);
  ASSERT_EQ(cuStreamCreate(&stream, 0), CUDA_SUCCESS);
  ASSERT_EQ(cuStreamWaitValue64(stream, word, 1, 0), CUDA_SUCCESS);
  EXPECT_EQ(cuDevicePrimaryCtxReset(1), CUDA_SUCCESS);
  EXPECT_EQ(fakeCudaLiveObjects(), 0U);
  EXPECT_EQ(cuStreamQuery(stream), CUDA_ERROR_CONTEXT_IS_DESTROYED);
  EXPECT_EQ(cuCtxPopCurrent(&other), CUDA_SUCCESS);
  EXPECT_EQ(cuDevicePrimaryCtxRelease(1), CUDA_SUCCESS);
}

TEST_F(ContextTest, PeerAccessIsEnabledOnceAndInOneDirection) {
  CUcontext other = nullptr;
  ASSERT_EQ(cuDevicePrimaryCtxRetain(&other, 1), CUDA_SUCCESS);
  CUdeviceptr memory = 0;
  ASSERT_EQ(cuMemAlloc(&memory, 8), CUDA_SUCCESS);
  EXPECT_EQ(cuCtxEnablePeerAccess(context_, 0), CUDA_ERROR_INVALID_CONTEXT);
  ASSERT_EQ(cuCtxPushCurrent(other), CUDA_SUCCESS);
  EXPECT_EQ(cuCtxEnablePeerAccess(context_, 1), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(fakeCudaKernelAddress(memory, 8, 1), nullptr);
  WriteWord(memory, 4);  // a copy needs none
  EXPECT_EQ(cuCtxEnablePeerAccess(context_, 0), CUDA_SUCCESS);
  EXPECT_EQ(cuCtxEnablePeerAccess(context_, 0), CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED);
  EXPECT_NE(fakeCudaKernelAddress(memory, 8, 1), nullptr);
  CUdeviceptr far = 0;
  ASSERT_EQ(cuMemAlloc(&far, 8), CUDA_SUCCESS);
  EXPECT_EQ(fakeCudaKernelAddress(far, 8, 0), nullptr);
  EXPECT_EQ(cuMemFree(far), CUDA_SUCCESS);
  EXPECT_EQ(cuCtxPopCurrent(&other), CUDA_SUCCESS);
  EXPECT_EQ(cuMemFree(memory), CUDA_SUCCESS);
  EXPECT_EQ(cuDevicePrimaryCtxRelease(1), CUDA_SUCCESS);
}

}  // namespace
}  // namespace gradsync::fake_cuda
