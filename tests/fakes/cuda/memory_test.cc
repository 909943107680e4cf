// Device memory of both kinds, host memory, copies, and what is known of an address.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <array>
#include <cstdlib>
#include <numeric>
#include <vector>

#include "tests/fakes/cuda/test_support.h"

namespace gradsync::fake_cuda {
namespace {

template <typename T>
T Attribute(CUpointer_attribute attribute, CUdeviceptr address) {
  T value{};
  EXPECT_EQ(cuPointerGetAttribute(&value, attribute, address), CUDA_SUCCESS) << attribute;
  return value;
}

class MemoryTest : public FakeCudaTest {
 protected:
  MemoryTest() { GTEST_FLAG_SET(death_test_style, "threadsafe"); }

  static size_t Free() {
    size_t free = 0;
    EXPECT_EQ(cuMemGetInfo(&free, nullptr), CUDA_SUCCESS);
    return free;
  }
};

TEST_F(MemoryTest, AllocationsAreAlignedAndShareABlock) {
  const size_t before = Free();
  CUdeviceptr one = 0;
  CUdeviceptr two = 0;
  ASSERT_EQ(cuMemAlloc(&one, 100), CUDA_SUCCESS);
  ASSERT_EQ(cuMemAlloc(&two, 1000), CUDA_SUCCESS);
  EXPECT_EQ(one % 512, 0U);
  EXPECT_EQ(two, one + 512);
  EXPECT_EQ(before - Free(), 2 * kMiB);
  CUdeviceptr base = 0;
  size_t size = 0;
  EXPECT_EQ(cuMemGetAddressRange(&base, &size, two + 999), CUDA_SUCCESS);
  EXPECT_EQ(base, two);
  EXPECT_EQ(size, 1000U);
  EXPECT_EQ(cuMemGetAddressRange(&base, &size, two + 1000), CUDA_ERROR_NOT_FOUND);
  EXPECT_EQ(cuMemFree(two + 512), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(cuMemFree(one), CUDA_SUCCESS);
  EXPECT_EQ(cuMemFree(one), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(cuMemFree(two), CUDA_SUCCESS);
  EXPECT_EQ(cuMemFree(0), CUDA_SUCCESS);
  EXPECT_EQ(Free(), before);
  EXPECT_EQ(cuMemAlloc(&one, 0), CUDA_ERROR_INVALID_VALUE);
}

TEST_F(MemoryTest, ADeviceHasOnlySoMuch) {
  CUdeviceptr most = 0;
  ASSERT_EQ(cuMemAlloc(&most, 4094 * kMiB), CUDA_SUCCESS);
  CUmemGenericAllocationHandle handle = 0;
  const CUmemAllocationProp prop = Properties(0, CU_MEM_HANDLE_TYPE_NONE);
  EXPECT_EQ(cuMemCreate(&handle, 4 * kMiB, &prop, 0), CUDA_ERROR_OUT_OF_MEMORY);
  EXPECT_EQ(cuMemCreate(&handle, 2 * kMiB, &prop, 0), CUDA_SUCCESS);
  CUdeviceptr more = 0;
  EXPECT_EQ(cuMemAlloc(&more, 1), CUDA_ERROR_OUT_OF_MEMORY);
  EXPECT_EQ(cuMemRelease(handle), CUDA_SUCCESS);
  EXPECT_EQ(cuMemFree(most), CUDA_SUCCESS);
}

TEST_F(MemoryTest, TheHostCannotTouchIt) {
  EXPECT_EXIT(
      {
        CUdeviceptr memory = 0;
        cuMemAlloc(&memory, 8);
        _exit(*reinterpret_cast<volatile int*>(memory));
      },
      [](int status) { return status != 0; }, "");
}

TEST_F(MemoryTest, CopiesGoEverywhere) {
  CUdeviceptr memory = 0;
  ASSERT_EQ(cuMemAlloc(&memory, 4 * kMiB), CUDA_SUCCESS);
  std::vector<char> from(kMiB);
  std::iota(from.begin(), from.end(), '\0');
  EXPECT_EQ(cuMemcpyHtoD(memory, from.data(), kMiB), CUDA_SUCCESS);
  EXPECT_EQ(cuMemcpyDtoD(memory + 2 * kMiB, memory, kMiB), CUDA_SUCCESS);
  EXPECT_EQ(cuMemsetD8(memory, 7, 16), CUDA_SUCCESS);
  EXPECT_EQ(cuMemsetD32Async(memory + 8, 0x01020304, 1, nullptr), CUDA_SUCCESS);
  EXPECT_EQ(cuMemsetD32Async(memory + 2, 0, 1, nullptr), CUDA_ERROR_INVALID_VALUE);
  std::vector<char> to(kMiB);
  EXPECT_EQ(cuMemcpyDtoH(to.data(), memory + 2 * kMiB, kMiB), CUDA_SUCCESS);
  EXPECT_EQ(to, from);
  EXPECT_EQ(ReadWord(memory), 0x0707070707070707U);
  EXPECT_EQ(ReadWord(memory + 8), 0x0707070701020304U);
  EXPECT_EQ(cuMemcpyHtoD(memory, nullptr, 8), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(cuMemcpyHtoD(memory, reinterpret_cast<void*>(memory), 8), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(cuMemFree(memory), CUDA_SUCCESS);
}

// Pageable memory is read before the call returns, registered memory when the copy runs.
TEST_F(MemoryTest, AnAsynchronousCopyReadsRegisteredMemoryLater) {
  CUstream stream = nullptr;
  CUdeviceptr memory = 0;
  alignas(4096) static std::array<uint64_t, 512> page;
  page.fill(0);
  uint64_t pageable = 1;
  ASSERT_EQ(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING), CUDA_SUCCESS);
  ASSERT_EQ(cuMemAlloc(&memory, 24), CUDA_SUCCESS);
  WriteWord(memory, 0);
  ASSERT_EQ(cuMemHostRegister(page.data(), sizeof(page), CU_MEMHOSTREGISTER_DEVICEMAP),
            CUDA_SUCCESS);
  ASSERT_EQ(cuStreamWaitValue64(stream, memory, 1, 0), CUDA_SUCCESS);
  ASSERT_EQ(cuMemcpyHtoDAsync(memory + 8, &pageable, 8, stream), CUDA_SUCCESS);
  ASSERT_EQ(cuMemcpyHtoDAsync(memory + 16, page.data(), 8, stream), CUDA_SUCCESS);
  ASSERT_EQ(cuMemcpyDtoHAsync(&page[1], memory + 8, 8, stream), CUDA_SUCCESS);
  pageable = 2;
  page[0] = 3;
  EXPECT_EQ(cuStreamQuery(stream), CUDA_ERROR_NOT_READY);
  WriteWord(memory, 1);
  EXPECT_EQ(cuStreamSynchronize(stream), CUDA_SUCCESS);
  EXPECT_EQ(ReadWord(memory + 8), 1U);
  EXPECT_EQ(ReadWord(memory + 16), 3U);
  EXPECT_EQ(page[1], 1U);
  EXPECT_EQ(cuMemHostUnregister(page.data()), CUDA_SUCCESS);
  EXPECT_EQ(cuMemFree(memory), CUDA_SUCCESS);
  EXPECT_EQ(cuStreamDestroy(stream), CUDA_SUCCESS);
}

TEST_F(MemoryTest, VirtualMemoryIsMadeOfThreeThings) {
  size_t granularity = 0;
  CUmemAllocationProp prop = Properties(1, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
  EXPECT_EQ(cuMemGetAllocationGranularity(&granularity, &prop, CU_MEM_ALLOC_GRANULARITY_MINIMUM),
            CUDA_SUCCESS);
  EXPECT_EQ(granularity, 2 * kMiB);
  CUmemGenericAllocationHandle handle = 0;
  EXPECT_EQ(cuMemCreate(&handle, kMiB, &prop, 0), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(cuMemCreate(&handle, 2 * kMiB, &prop, 1), CUDA_ERROR_INVALID_VALUE);
  prop.location.id = 2;
  EXPECT_EQ(cuMemCreate(&handle, 2 * kMiB, &prop, 0), CUDA_ERROR_INVALID_DEVICE);
  const Mapped mapped = MapNew(4 * kMiB, 1);
  CUmemAllocationProp found{};
  EXPECT_EQ(cuMemGetAllocationPropertiesFromHandle(&found, mapped.handle), CUDA_SUCCESS);
  EXPECT_EQ(found.location.id, 1);
  EXPECT_EQ(found.requestedHandleTypes, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
  CUmemGenericAllocationHandle retained = 0;
  EXPECT_EQ(cuMemRetainAllocationHandle(&retained, reinterpret_cast<void*>(mapped.address + 9)),
            CUDA_SUCCESS);
  EXPECT_EQ(retained, mapped.handle);
  EXPECT_EQ(cuMemRelease(retained), CUDA_SUCCESS);
  EXPECT_EQ(Live().find("reservation") != std::string::npos, true);
  EXPECT_EQ(fakeCudaLiveObjects(), 3U);
  Unmap(mapped);
}

TEST_F(MemoryTest, MappingsAreWholeAndDoNotOverlap) {
  CUdeviceptr address = 0;
  EXPECT_EQ(cuMemAddressReserve(&address, 1000, 0, 0, 0), CUDA_ERROR_INVALID_VALUE);
  ASSERT_EQ(cuMemAddressReserve(&address, 8 * kMiB, 64 * kMiB, 0, 0), CUDA_SUCCESS);
  EXPECT_EQ(address % (64 * kMiB), 0U);
  CUmemGenericAllocationHandle handle = 0;
  const CUmemAllocationProp prop = Properties(0, CU_MEM_HANDLE_TYPE_NONE);
  ASSERT_EQ(cuMemCreate(&handle, 4 * kMiB, &prop, 0), CUDA_SUCCESS);
  EXPECT_EQ(cuMemMap(address, 4 * kMiB, 2 * kMiB, handle, 0), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(cuMemMap(address + kMiB, 4 * kMiB, 0, handle, 0), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(cuMemMap(address + 6 * kMiB, 4 * kMiB, 0, handle, 0), CUDA_ERROR_INVALID_VALUE);
  ASSERT_EQ(cuMemMap(address + 2 * kMiB, 4 * kMiB, 0, handle, 0), CUDA_SUCCESS);
  EXPECT_EQ(cuMemMap(address, 4 * kMiB, 0, handle, 0), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(cuMemMap(address + 4 * kMiB, 4 * kMiB, 0, handle, 0), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(SetAccess(address, 8 * kMiB, 0), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(SetAccess(address + 2 * kMiB, 2 * kMiB, 0), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(cuMemUnmap(address + 2 * kMiB, 2 * kMiB), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(cuMemAddressFree(address, 4 * kMiB), CUDA_ERROR_INVALID_VALUE);
  // The memory outlives its handle while it is mapped.
  EXPECT_EQ(cuMemRelease(handle), CUDA_SUCCESS);
  EXPECT_EQ(SetAccess(address + 2 * kMiB, 4 * kMiB, 0), CUDA_SUCCESS);
  WriteWord(address + 2 * kMiB, 5);
  EXPECT_EQ(ReadWord(address + 2 * kMiB), 5U);
  EXPECT_EQ(cuMemUnmap(address + 2 * kMiB, 4 * kMiB), CUDA_SUCCESS);
  EXPECT_EQ(cuMemAddressFree(address, 8 * kMiB), CUDA_SUCCESS);
}

TEST_F(MemoryTest, ATensorMaySpanSeveralMappings) {
  CUdeviceptr address = 0;
  ASSERT_EQ(cuMemAddressReserve(&address, 4 * kMiB, 0, 0, 0), CUDA_SUCCESS);
  std::array<CUmemGenericAllocationHandle, 2> handles{};
  const CUmemAllocationProp prop = Properties(0, CU_MEM_HANDLE_TYPE_NONE);
  for (size_t i = 0; i < 2; ++i) {
    ASSERT_EQ(cuMemCreate(&handles[i], 2 * kMiB, &prop, 0), CUDA_SUCCESS);
    ASSERT_EQ(cuMemMap(address + i * 2 * kMiB, 2 * kMiB, 0, handles[i], 0), CUDA_SUCCESS);
  }
  EXPECT_EQ(SetAccess(address, 2 * kMiB, 0), CUDA_SUCCESS);
  EXPECT_EQ(fakeCudaKernelAddress(address, 4 * kMiB, 0), nullptr);
  EXPECT_EQ(SetAccess(address, 4 * kMiB, 0), CUDA_SUCCESS);
  EXPECT_NE(fakeCudaKernelAddress(address, 4 * kMiB, 0), nullptr);
  EXPECT_EQ(Attribute<CUdeviceptr>(CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, address + 3 * kMiB),
            address);
  EXPECT_EQ(Attribute<size_t>(CU_POINTER_ATTRIBUTE_RANGE_SIZE, address), 4 * kMiB);
  size_t size = 0;
  EXPECT_EQ(cuMemGetAddressRange(nullptr, &size, address), CUDA_SUCCESS);
  EXPECT_EQ(size, 2 * kMiB);
  EXPECT_EQ(cuMemUnmap(address, 4 * kMiB), CUDA_SUCCESS);
  EXPECT_EQ(cuMemAddressFree(address, 4 * kMiB), CUDA_SUCCESS);
  for (const auto handle : handles) EXPECT_EQ(cuMemRelease(handle), CUDA_SUCCESS);
}

TEST_F(MemoryTest, NoDeviceHasAccessUntilItIsGiven) {
  const Mapped mapped = MapNew(2 * kMiB, 0, false);
  EXPECT_EQ(fakeCudaKernelAddress(mapped.address, 8, 0), nullptr);
  EXPECT_EQ(SetAccess(mapped.address, mapped.size, 1), CUDA_SUCCESS);
  EXPECT_EQ(fakeCudaKernelAddress(mapped.address, 8, 0), nullptr);
  EXPECT_NE(fakeCudaKernelAddress(mapped.address, 8, 1), nullptr);
  EXPECT_EQ(SetAccess(mapped.address, mapped.size, 0, CU_MEM_ACCESS_FLAGS_PROT_READ), CUDA_SUCCESS);
  EXPECT_EQ(ReadWord(mapped.address), 0U);
  EXPECT_EQ(SetAccess(mapped.address, mapped.size, 2), CUDA_ERROR_INVALID_DEVICE);
  Unmap(mapped);
}

TEST_F(MemoryTest, ABadAddressIsForGood) {
  EXPECT_EXIT(
      {
        const Mapped mapped = MapNew(2 * kMiB, 0, false);
        CUdeviceptr memory = 0;
        CUstream stream = nullptr;
        bool ok = cuStreamCreate(&stream, 0) == CUDA_SUCCESS;
        ok = ok && cuMemsetD8Async(mapped.address, 0, 8, stream) == CUDA_SUCCESS;
        ok = ok && cuStreamSynchronize(stream) == CUDA_ERROR_ILLEGAL_ADDRESS;
        ok = ok && cuMemAlloc(&memory, 8) == CUDA_ERROR_ILLEGAL_ADDRESS;
        ok = ok && cuStreamQuery(nullptr) == CUDA_ERROR_ILLEGAL_ADDRESS;
        ok = ok && cuDevicePrimaryCtxRetain(&context_, 0) == CUDA_ERROR_ILLEGAL_ADDRESS;
        // Another device's context has nothing to do with it.
        ok = ok && cuDevicePrimaryCtxRetain(&context_, 1) == CUDA_SUCCESS;
        _exit(ok ? 0 : 1);
      },
      testing::ExitedWithCode(0), "");
}

TEST_F(MemoryTest, WhatIsUndefinedEndsTheProcess) {
  const Mapped mapped = MapNew(2 * kMiB);
  EXPECT_DEATH(
      {
        cuMemRelease(mapped.handle);
        cuMemRelease(mapped.handle);
      },
      "fake CUDA: breach: cuMemRelease of a handle .*CUDA Driver API, cuMemRelease");
  EXPECT_DEATH(cuMemAddressFree(mapped.address, mapped.size),
               "fake CUDA: breach: cuMemAddressFree .*still has memory mapped");
  Unmap(mapped);
}

TEST_F(MemoryTest, AHandleIsExportedOnlyAsWasAskedFor) {
  int fd = -1;
  CUmemGenericAllocationHandle handle = 0;
  CUmemAllocationProp prop = Properties(0, CU_MEM_HANDLE_TYPE_NONE);
  ASSERT_EQ(cuMemCreate(&handle, 2 * kMiB, &prop, 0), CUDA_SUCCESS);
  EXPECT_EQ(cuMemExportToShareableHandle(&fd, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0),
            CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(cuMemRelease(handle), CUDA_SUCCESS);
  prop.requestedHandleTypes = CU_MEM_HANDLE_TYPE_FABRIC;
  EXPECT_EQ(cuMemCreate(&handle, 2 * kMiB, &prop, 0), CUDA_ERROR_NOT_SUPPORTED);
  fd = open("/dev/null", O_RDWR | O_CLOEXEC);
  EXPECT_EQ(cuMemImportFromShareableHandle(&handle, reinterpret_cast<void*>(intptr_t{fd}),
                                           CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR),
            CUDA_ERROR_INVALID_VALUE);
  close(fd);
}

TEST_F(MemoryTest, HostMemoryIsRegisteredByPages) {
  constexpr unsigned kFlags = CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP;
  char* pages = static_cast<char*>(
      mmap(nullptr, 16384, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  ASSERT_EQ(cuMemHostRegister(pages + 100, 4096, kFlags), CUDA_SUCCESS);
  EXPECT_EQ(cuMemHostRegister(pages + 8000, 4096, kFlags),
            CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED);
  EXPECT_EQ(cuMemHostRegister(pages, 16384, kFlags), CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED);
  ASSERT_EQ(cuMemHostRegister(pages + 8192, 4096, 0), CUDA_SUCCESS);
  CUdeviceptr address = 0;
  EXPECT_EQ(cuMemHostGetDevicePointer(&address, pages + 200, 0), CUDA_SUCCESS);
  EXPECT_EQ(address, reinterpret_cast<CUdeviceptr>(pages + 200));
  EXPECT_EQ(cuMemHostGetDevicePointer(&address, pages + 99, 0), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(cuMemHostGetDevicePointer(&address, pages + 8192, 0), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(cuMemHostUnregister(pages + 200), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(cuMemHostUnregister(pages + 12288), CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED);
  EXPECT_EQ(cuMemHostUnregister(pages + 100), CUDA_SUCCESS);
  EXPECT_EQ(cuMemHostUnregister(pages + 8192), CUDA_SUCCESS);
  EXPECT_EQ(cuMemHostUnregister(pages + 8192), CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED);
  munmap(pages, 16384);
  EXPECT_EQ(cuMemHostRegister(pages, 4096, kFlags), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(cuMemHostRegister(nullptr, 4096, kFlags), CUDA_ERROR_INVALID_VALUE);
}

TEST_F(MemoryTest, AnAddressSaysWhatItIs) {
  CUdeviceptr first = 0;
  CUdeviceptr memory = 0;
  ASSERT_EQ(cuMemAlloc(&first, 8), CUDA_SUCCESS);
  ASSERT_EQ(cuMemAlloc(&memory, 100), CUDA_SUCCESS);
  const Mapped mapped = MapNew(2 * kMiB, 1);
  EXPECT_EQ(Attribute<unsigned>(CU_POINTER_ATTRIBUTE_MEMORY_TYPE, memory), CU_MEMORYTYPE_DEVICE);
  EXPECT_EQ(Attribute<CUcontext>(CU_POINTER_ATTRIBUTE_CONTEXT, memory), context_);
  EXPECT_EQ(Attribute<CUcontext>(CU_POINTER_ATTRIBUTE_CONTEXT, mapped.address), nullptr);
  EXPECT_EQ(Attribute<int>(CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, mapped.address), 1);
  EXPECT_EQ(Attribute<CUdeviceptr>(CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, memory + 99), memory);
  EXPECT_EQ(Attribute<size_t>(CU_POINTER_ATTRIBUTE_RANGE_SIZE, memory), 100U);
  EXPECT_EQ(Attribute<unsigned>(CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE, memory), 1U);
  EXPECT_EQ(Attribute<unsigned>(CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE, mapped.address),
            0U);
  EXPECT_EQ(Attribute<uint64_t>(CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES, mapped.address),
            uint64_t{CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR});
  EXPECT_EQ(Attribute<uint64_t>(CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES, memory), 0U);
  const auto id = Attribute<unsigned long long>(CU_POINTER_ATTRIBUTE_BUFFER_ID, memory);
  EXPECT_EQ(cuMemFree(memory), CUDA_SUCCESS);
  ASSERT_EQ(cuMemAlloc(&memory, 100), CUDA_SUCCESS);
  EXPECT_NE(Attribute<unsigned long long>(CU_POINTER_ATTRIBUTE_BUFFER_ID, memory), id);
  unsigned type = 0;
  EXPECT_EQ(cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
                                  reinterpret_cast<CUdeviceptr>(&type)),
            CUDA_ERROR_INVALID_VALUE);
  std::array<CUpointer_attribute, 2> attributes = {CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
                                                   CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL};
  int ordinal = 0;
  std::array<void*, 2> data = {&type, &ordinal};
  type = 9;
  EXPECT_EQ(cuPointerGetAttributes(2, attributes.data(), data.data(),
                                   reinterpret_cast<CUdeviceptr>(&type)),
            CUDA_SUCCESS);
  EXPECT_EQ(type, 0U);
  EXPECT_EQ(ordinal, -2);
  EXPECT_EQ(cuMemFree(first), CUDA_SUCCESS);
  EXPECT_EQ(cuMemFree(memory), CUDA_SUCCESS);
  Unmap(mapped);
}

}  // namespace
}  // namespace gradsync::fake_cuda
