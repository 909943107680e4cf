// cuMemHostRegister: host memory that devices reach, at the address it has.
#include <sys/mman.h>

#include <vector>

#include "tests/fakes/cuda/address_space.h"

namespace gradsync::fake_cuda {
namespace {

constexpr CUdeviceptr kPage = 4096;

// Whether the process has memory at all of these pages.
bool IsThere(CUdeviceptr begin, CUdeviceptr end) {
  std::vector<unsigned char> pages((end - begin) / kPage);
  return mincore(reinterpret_cast<void*>(begin), end - begin, pages.data()) == 0;
}

// What is known of the pages already: CUDA_SUCCESS if nothing.
CUresult CheckFree(const Lock&, CUdeviceptr begin, CUdeviceptr end) {
  for (const auto& [base, space] : Process::Get().spaces) {
    if (base >= end || base + space->size <= begin) continue;
    return space->kind == Space::Kind::kHost ? CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED
                                             : CUDA_ERROR_INVALID_VALUE;
  }
  return CUDA_SUCCESS;
}

}  // namespace
extern "C" {

// Page-locks whole pages, and so two registrations cannot share one.
FAKE_CUDA_API CUresult cuMemHostRegister(void* host, size_t size, unsigned flags) {
  FAKE_CUDA_ENTER("cuMemHostRegister");
  Process& process = Process::Get();
  const Lock lock(process.mutex);
  Context* context = nullptr;
  FAKE_CUDA_CHECK(Current(lock, &context));
  constexpr unsigned kKnown = CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP |
                              CU_MEMHOSTREGISTER_IOMEMORY | CU_MEMHOSTREGISTER_READ_ONLY;
  if (host == nullptr || size == 0 || (flags & ~kKnown) != 0) return CUDA_ERROR_INVALID_VALUE;
  // CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED is not set.
  if ((flags & (CU_MEMHOSTREGISTER_IOMEMORY | CU_MEMHOSTREGISTER_READ_ONLY)) != 0) {
    return CUDA_ERROR_NOT_SUPPORTED;
  }
  const auto address = reinterpret_cast<CUdeviceptr>(host);
  const CUdeviceptr begin = address / kPage * kPage;
  const CUdeviceptr end = (address + size + kPage - 1) / kPage * kPage;
  FAKE_CUDA_CHECK(CheckFree(lock, begin, end));
  if (!IsThere(begin, end)) return CUDA_ERROR_INVALID_VALUE;
  auto space = std::make_shared<Space>(Space::Kind::kHost, end - begin);
  space->base = begin;
  space->alias = reinterpret_cast<char*>(begin);
  space->id = process.NextId();
  space->context = context;
  space->address = address;
  space->bytes = size;
  space->flags = flags;
  process.spaces[begin] = std::move(space);
  return CUDA_SUCCESS;
}

// Driver API, cuMemHostUnregister: "The base address must be the same one specified to
// cuMemHostRegister()".
FAKE_CUDA_API CUresult cuMemHostUnregister(void* host) {
  FAKE_CUDA_ENTER("cuMemHostUnregister");
  Lock lock(Process::Get().mutex);
  Context* context = nullptr;
  FAKE_CUDA_CHECK(Current(lock, &context));
  const auto address = reinterpret_cast<CUdeviceptr>(host);
  const std::shared_ptr<Space> space = FindSpace(lock, address);
  if (space == nullptr || space->kind != Space::Kind::kHost) {
    return CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
  }
  if (space->address != address) return CUDA_ERROR_INVALID_VALUE;
  RemoveSpace(lock, space);
  return CUDA_SUCCESS;
}

// CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM is set: the same address.
FAKE_CUDA_API CUresult cuMemHostGetDevicePointer(CUdeviceptr* ptr, void* host, unsigned flags) {
  FAKE_CUDA_ENTER("cuMemHostGetDevicePointer");
  const Lock lock(Process::Get().mutex);
  Context* context = nullptr;
  FAKE_CUDA_CHECK(Current(lock, &context));
  const auto address = reinterpret_cast<CUdeviceptr>(host);
  const std::shared_ptr<Space> space = FindSpace(lock, address);
  if (ptr == nullptr || flags != 0 || space == nullptr || space->kind != Space::Kind::kHost ||
      (space->flags & CU_MEMHOSTREGISTER_DEVICEMAP) == 0 || address < space->address ||
      address - space->address >= space->bytes) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  if (space->context != context && (space->flags & CU_MEMHOSTREGISTER_PORTABLE) == 0) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  *ptr = address;
  return CUDA_SUCCESS;
}

}  // extern "C"

}  // namespace gradsync::fake_cuda
