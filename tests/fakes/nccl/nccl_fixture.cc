#include "tests/fakes/nccl/nccl_fixture.h"

#include <dlfcn.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <future>
#include <thread>

namespace gradsync::fake_nccl {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

constexpr milliseconds kLong{20000};
constexpr milliseconds kAWhile{60};

bool Until(milliseconds time, const std::function<bool()>& done) {
  const auto deadline = steady_clock::now() + time;
  while (!done()) {
    if (steady_clock::now() > deadline) return false;
    std::this_thread::sleep_for(milliseconds(1));
  }
  return true;
}

const CudaDriver* Driver() {
  setenv("GRADSYNC_FAKE_CUDA_DEVICES", std::to_string(kDevices).c_str(), 0);
  // By its path, so that whoever asks for libcuda.so.1 from now on gets this one.
  if (dlopen(FAKE_CUDA_LIBRARY, RTLD_NOW) == nullptr) {
    ADD_FAILURE() << dlerror();
    std::abort();
  }
  const auto driver = CudaDriver::Load();
  if (!driver) {
    ADD_FAILURE() << driver.error().ToString();
    std::abort();
  }
  return *driver;
}

}  // namespace

NcclTest::NcclTest() : driver_(Driver()) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  for (int device = 0; device < kDevices; ++device) {
    contexts_.push_back(nullptr);
    EXPECT_EQ(driver_->cuDevicePrimaryCtxRetain(&contexts_.back(), device), CUDA_SUCCESS);
    streams_.push_back(NewStream(device));
  }
  Use(0);
}

void NcclTest::Use(int device) const {
  EXPECT_EQ(driver_->cuCtxSetCurrent(contexts_[device]), CUDA_SUCCESS);
}

CUstream NcclTest::NewStream(int device) const {
  Use(device);
  CUstream stream = nullptr;
  EXPECT_EQ(driver_->cuStreamCreateWithPriority(&stream, CU_STREAM_NON_BLOCKING, 0), CUDA_SUCCESS);
  return stream;
}

CUdeviceptr NcclTest::Allocate(int device, size_t bytes) const {
  Use(device);
  CUdeviceptr memory = 0;
  EXPECT_EQ(driver_->cuMemAlloc(&memory, bytes), CUDA_SUCCESS);
  return memory;
}

void NcclTest::Write(CUdeviceptr to, const void* from, size_t bytes, CUstream stream) const {
  EXPECT_EQ(driver_->cuMemcpyHtoDAsync(to, from, bytes, stream), CUDA_SUCCESS);
  EXPECT_TRUE(Finishes(stream));
}

void NcclTest::Read(void* to, CUdeviceptr from, size_t bytes, CUstream stream) const {
  EXPECT_EQ(driver_->cuMemcpyDtoHAsync(to, from, bytes, stream), CUDA_SUCCESS);
  EXPECT_TRUE(Finishes(stream));
}

bool NcclTest::Finishes(CUstream stream) {
  const CudaDriver* driver = Driver();
  CUresult result = CUDA_ERROR_NOT_READY;
  Until(kLong, [&] {
    result = driver->cuStreamQuery(stream);
    return result != CUDA_ERROR_NOT_READY;
  });
  EXPECT_TRUE(result == CUDA_SUCCESS || result == CUDA_ERROR_NOT_READY) << result;
  return result == CUDA_SUCCESS;
}

bool NcclTest::KeepsWaiting(CUstream stream) {
  const CudaDriver* driver = Driver();
  return !Until(kAWhile, [&] { return driver->cuStreamQuery(stream) != CUDA_ERROR_NOT_READY; });
}

ncclResult_t NcclTest::Settled(ncclComm_t comm) {
  ncclResult_t state = ncclInProgress;
  Until(kLong, [&] {
    return ncclCommGetAsyncError(comm, &state) != ncclSuccess || state != ncclInProgress;
  });
  return state;
}

std::vector<ncclComm_t> NcclTest::Blocking(int ranks) {
  std::vector<ncclComm_t> comms(ranks);
  EXPECT_EQ(ncclCommInitAll(comms.data(), ranks, nullptr), ncclSuccess);
  return comms;
}

std::vector<ncclComm_t> NcclTest::NonBlocking(int ranks) const {
  ncclUniqueId id;
  EXPECT_EQ(ncclGetUniqueId(&id), ncclSuccess);
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;
  std::vector<ncclComm_t> comms(ranks);
  EXPECT_EQ(ncclGroupStart(), ncclSuccess);
  for (int rank = 0; rank < ranks; ++rank) {
    Use(rank);
    EXPECT_EQ(ncclCommInitRankConfig(&comms[rank], ranks, id, rank, &config), ncclSuccess);
  }
  EXPECT_EQ(ncclGroupEnd(), ncclInProgress);
  for (ncclComm_t comm : comms) EXPECT_EQ(Settled(comm), ncclSuccess);
  return comms;
}

void NcclTest::Abort(const std::vector<ncclComm_t>& comms) {
  for (ncclComm_t comm : comms) EXPECT_EQ(ncclCommAbort(comm), ncclSuccess);
}

ncclResult_t NcclTest::AllReduce(ncclComm_t comm, int device, CUstream stream) const {
  void* memory = Pointer(Allocate(device, 4 * sizeof(float)));
  return ncclAllReduce(memory, memory, 4, ncclFloat32, ncclSum, comm, stream);
}

void NcclTest::OnEach(int ranks, const std::function<void(int rank)>& run) const {
  std::vector<std::future<void>> threads;
  threads.reserve(ranks);
  for (int rank = 0; rank < ranks; ++rank) {
    threads.push_back(std::async(std::launch::async, [this, &run, rank] {
      Use(rank);
      run(rank);
    }));
  }
  for (const auto& thread : threads) {
    if (thread.wait_for(kLong) == std::future_status::ready) continue;
    std::fprintf(stderr, "a rank's thread does not end\n");
    std::abort();
  }
}

}  // namespace gradsync::fake_nccl
