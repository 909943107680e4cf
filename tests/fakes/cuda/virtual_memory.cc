// Driver API, "Virtual Memory Management": memory, addresses, and the mapping of one to the other,
// each on its own. None of it needs a current context.
#include <fcntl.h>
#include <unistd.h>

#include <vector>

#include "tests/fakes/cuda/address_space.h"

namespace gradsync::fake_cuda {
namespace {

// Says which device memory is meant; the stand-in has no host memory of this kind.
CUresult CheckLocation(const Lock&, const CUmemLocation& location) {
  if (location.type != CU_MEM_LOCATION_TYPE_DEVICE) return CUDA_ERROR_NOT_SUPPORTED;
  const auto& contexts = Process::Get().contexts;
  if (location.id < 0 || location.id >= static_cast<int>(contexts.size())) {
    return CUDA_ERROR_INVALID_DEVICE;
  }
  return Machine::Get().Lost(contexts[location.id]->device) ? kLost : CUDA_SUCCESS;
}

// A device that is lost takes no orders about its memory either.
CUresult CheckThere(const Backing& backing) {
  return Machine::Get().Lost(backing.device) ? kLost : CUDA_SUCCESS;
}

CUresult CheckProperties(const Lock& lock, const CUmemAllocationProp& prop) {
  if (prop.type != CU_MEM_ALLOCATION_TYPE_PINNED) return CUDA_ERROR_INVALID_VALUE;
  // cuda.h, CUmemAllocationProp: "In all other cases, this field is required to be zero."
  if (prop.win32HandleMetaData != nullptr) return CUDA_ERROR_INVALID_VALUE;
  if ((prop.requestedHandleTypes & ~CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) != 0) {
    return CUDA_ERROR_NOT_SUPPORTED;
  }
  return CheckLocation(lock, prop.location);
}

int OrdinalOf(int device) {
  for (const auto& context : Process::Get().contexts) {
    if (context->device == device) return context->ordinal;
  }
  return -1;
}

CUmemGenericAllocationHandle AddHandle(const Lock&, std::shared_ptr<Backing> backing) {
  Process& process = Process::Get();
  const CUmemGenericAllocationHandle handle = 0x5fb000000000 + process.NextId();
  process.handles[handle].backing = std::move(backing);
  return handle;
}

bool Aligned(uint64_t value) { return value % kGranularity == 0; }

// The mappings that make up exactly [ptr, ptr + size) of one reservation; empty if they do not.
std::vector<CUdeviceptr> Exactly(Space& space, CUdeviceptr ptr, size_t size) {
  std::vector<CUdeviceptr> ranges;
  CUdeviceptr at = ptr;
  while (at < ptr + size) {
    const auto range = space.mapped.find(at);
    if (range == space.mapped.end()) return {};
    ranges.push_back(at);
    at += range->second.size;
  }
  if (at != ptr + size) return {};
  return ranges;
}

std::shared_ptr<Space> Reservation(const Lock& lock, CUdeviceptr ptr, size_t size) {
  std::shared_ptr<Space> space = FindSpace(lock, ptr);
  if (space == nullptr || space->kind != Space::Kind::kReservation || size == 0 ||
      size > space->size || ptr - space->base > space->size - size) {
    return nullptr;
  }
  return space;
}

}  // namespace
extern "C" {

FAKE_CUDA_API CUresult cuMemGetAllocationGranularity(size_t* granularity,
                                                     const CUmemAllocationProp* prop,
                                                     CUmemAllocationGranularity_flags option) {
  FAKE_CUDA_ENTER("cuMemGetAllocationGranularity");
  const Lock lock(Process::Get().mutex);
  if (granularity == nullptr || prop == nullptr ||
      (option != CU_MEM_ALLOC_GRANULARITY_MINIMUM &&
       option != CU_MEM_ALLOC_GRANULARITY_RECOMMENDED)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  FAKE_CUDA_CHECK(CheckProperties(lock, *prop));
  *granularity = kGranularity;
  return CUDA_SUCCESS;
}

FAKE_CUDA_API CUresult cuMemCreate(CUmemGenericAllocationHandle* handle, size_t size,
                                   const CUmemAllocationProp* prop, unsigned long long flags) {
  FAKE_CUDA_ENTER("cuMemCreate");
  Process& process = Process::Get();
  const Lock lock(process.mutex);
  if (handle == nullptr || prop == nullptr || flags != 0) return CUDA_ERROR_INVALID_VALUE;
  FAKE_CUDA_CHECK(CheckProperties(lock, *prop));
  // Driver API, cuMemCreate: "must be a multiple of ... CU_MEM_ALLOC_GRANULARITY_MINIMUM".
  if (size == 0 || !Aligned(size)) return CUDA_ERROR_INVALID_VALUE;
  auto backing = Backing::Create(process.contexts[prop->location.id]->device, size,
                                 prop->requestedHandleTypes);
  if (backing == nullptr) return CUDA_ERROR_OUT_OF_MEMORY;
  *handle = AddHandle(lock, std::move(backing));
  return CUDA_SUCCESS;
}

FAKE_CUDA_API CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
  FAKE_CUDA_ENTER("cuMemRelease");
  Process& process = Process::Get();
  const Lock lock(process.mutex);
  const auto found = process.handles.find(handle);
  if (found == process.handles.end()) {
    fakeCudaBreach("cuMemRelease of a handle that is not valid (any more)",
                   "CUDA Driver API, cuMemRelease: \"If handle is not a valid handle the behavior "
                   "is undefined\"");
  }
  FAKE_CUDA_CHECK(CheckThere(*found->second.backing));
  if (--found->second.references == 0) process.handles.erase(found);
  return CUDA_SUCCESS;
}

FAKE_CUDA_API CUresult cuMemAddressReserve(CUdeviceptr* ptr, size_t size, size_t alignment,
                                           CUdeviceptr, unsigned long long flags) {
  FAKE_CUDA_ENTER("cuMemAddressReserve");
  const Lock lock(Process::Get().mutex);
  if (ptr == nullptr || flags != 0 || size == 0 || size % 4096 != 0 ||
      (alignment & (alignment - 1)) != 0) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  // The document asks for the host's page size only; but the programming guide rounds up to what
  // memory is mapped in, and so must whoever wants to map it all.
  if (!Aligned(size)) return CUDA_ERROR_INVALID_VALUE;
  const auto space = AddSpace(lock, Space::Kind::kReservation, size, alignment);
  if (space == nullptr) return CUDA_ERROR_OUT_OF_MEMORY;
  *ptr = space->base;
  return CUDA_SUCCESS;
}

// Driver API, cuMemAddressFree: exactly what was reserved.
FAKE_CUDA_API CUresult cuMemAddressFree(CUdeviceptr ptr, size_t size) {
  FAKE_CUDA_ENTER("cuMemAddressFree");
  Lock lock(Process::Get().mutex);
  const std::shared_ptr<Space> space = Reservation(lock, ptr, size);
  if (space == nullptr || space->base != ptr || space->size != size) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  for (const auto& [base, range] : space->mapped) {
    FAKE_CUDA_CHECK(CheckThere(*range.backing));  // and so could not be unmapped
  }
  if (!space->mapped.empty()) {
    fakeCudaBreach("cuMemAddressFree of a range that still has memory mapped",
                   "CUDA C++ Programming Guide, \"Freeing Virtual Address Ranges\": only after "
                   "cuMemUnmap");
  }
  RemoveSpace(lock, space);
  return CUDA_SUCCESS;
}

FAKE_CUDA_API CUresult cuMemMap(CUdeviceptr ptr, size_t size, size_t offset,
                                CUmemGenericAllocationHandle handle, unsigned long long flags) {
  FAKE_CUDA_ENTER("cuMemMap");
  Process& process = Process::Get();
  const Lock lock(process.mutex);
  // Driver API, cuMemMap: the offset "currently must be zero"; all are multiples of the
  // granularity.
  if (flags != 0 || offset != 0 || !Aligned(ptr) || !Aligned(size)) return CUDA_ERROR_INVALID_VALUE;
  const std::shared_ptr<Space> space = Reservation(lock, ptr, size);
  const auto found = process.handles.find(handle);
  if (space == nullptr || found == process.handles.end()) return CUDA_ERROR_INVALID_VALUE;
  const std::shared_ptr<Backing> backing = found->second.backing;
  if (size > backing->size) return CUDA_ERROR_INVALID_VALUE;
  FAKE_CUDA_CHECK(CheckThere(*backing));
  // "can only create mappings on VA range reservations that are not currently mapped".
  const auto next = space->mapped.lower_bound(ptr);
  if (next != space->mapped.end() && next->first < ptr + size) return CUDA_ERROR_INVALID_VALUE;
  CUdeviceptr base = 0;
  if (FindMapped(*space, ptr, &base) != nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (!backing->MapAt(space->alias + (ptr - space->base), size)) return CUDA_ERROR_OUT_OF_MEMORY;
  space->mapped[ptr] = MappedRange{size, handle, backing, process.NextId(), {}};
  return CUDA_SUCCESS;
}

// Driver API, cuMemUnmap: whole mappings only; the range is a reservation again. Waits for running
// work that uses it ("exhibits synchronous behavior").
FAKE_CUDA_API CUresult cuMemUnmap(CUdeviceptr ptr, size_t size) {
  FAKE_CUDA_ENTER("cuMemUnmap");
  Lock lock(Process::Get().mutex);
  const std::shared_ptr<Space> space = Reservation(lock, ptr, size);
  if (space == nullptr) return CUDA_ERROR_INVALID_VALUE;
  const auto ranges = Exactly(*space, ptr, size);
  if (ranges.empty()) return CUDA_ERROR_INVALID_VALUE;
  for (const CUdeviceptr range : ranges) {
    FAKE_CUDA_CHECK(CheckThere(*space->mapped.at(range).backing));
  }
  // Not accessible from now on, but not free for another mapping before it is gone.
  for (const CUdeviceptr range : ranges) space->mapped.at(range).access.clear();
  WaitUntilUnused(lock, *space);
  for (const CUdeviceptr range : ranges) space->mapped.erase(range);
  HideAddresses(space->alias + (ptr - space->base), size);
  return CUDA_SUCCESS;
}

// Driver API, cuMemSetAccess: a fully mapped range that contains whole mappings.
FAKE_CUDA_API CUresult cuMemSetAccess(CUdeviceptr ptr, size_t size, const CUmemAccessDesc* desc,
                                      size_t count) {
  FAKE_CUDA_ENTER("cuMemSetAccess");
  const Lock lock(Process::Get().mutex);
  const std::shared_ptr<Space> space = Reservation(lock, ptr, size);
  if (space == nullptr || desc == nullptr || count == 0) return CUDA_ERROR_INVALID_VALUE;
  const auto ranges = Exactly(*space, ptr, size);
  if (ranges.empty()) return CUDA_ERROR_INVALID_VALUE;
  for (size_t i = 0; i < count; ++i) {
    FAKE_CUDA_CHECK(CheckLocation(lock, desc[i].location));
    if (desc[i].flags != CU_MEM_ACCESS_FLAGS_PROT_NONE &&
        desc[i].flags != CU_MEM_ACCESS_FLAGS_PROT_READ &&
        desc[i].flags != CU_MEM_ACCESS_FLAGS_PROT_READWRITE) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    for (const CUdeviceptr range : ranges) {
      FAKE_CUDA_CHECK(CheckThere(*space->mapped.at(range).backing));
      // CUDA C++ Programming Guide, "Virtual Memory Management": a device that has no peer access
      // to where the memory lies cannot be given any.
      const int device = Process::Get().contexts[desc[i].location.id]->device;
      const bool own = space->mapped.at(range).backing->device == device;
      if (!own && !Machine::Get().peer()) return CUDA_ERROR_INVALID_DEVICE;
      space->mapped.at(range).access[desc[i].location.id] = desc[i].flags;
    }
  }
  return CUDA_SUCCESS;
}

FAKE_CUDA_API CUresult cuMemExportToShareableHandle(void* shareable,
                                                    CUmemGenericAllocationHandle handle,
                                                    CUmemAllocationHandleType type,
                                                    unsigned long long flags) {
  FAKE_CUDA_ENTER("cuMemExportToShareableHandle");
  const Lock lock(Process::Get().mutex);
  const auto& handles = Process::Get().handles;
  const auto found = handles.find(handle);
  if (shareable == nullptr || flags != 0 || found == handles.end()) return CUDA_ERROR_INVALID_VALUE;
  // cuda.h, CUmemAllocationProp::requestedHandleTypes: only what was asked for at creation.
  if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR ||
      (found->second.backing->handle_types & type) == 0) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  FAKE_CUDA_CHECK(CheckThere(*found->second.backing));
  const int fd = fcntl(found->second.backing->fd, F_DUPFD_CLOEXEC, 0);
  if (fd < 0) return CUDA_ERROR_OUT_OF_MEMORY;
  *static_cast<int*>(shareable) = fd;
  return CUDA_SUCCESS;
}

// The descriptor stays the caller's (CUDA C++ Programming Guide, "Inter-Process Communication").
FAKE_CUDA_API CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle* handle,
                                                      void* shareable,
                                                      CUmemAllocationHandleType type) {
  FAKE_CUDA_ENTER("cuMemImportFromShareableHandle");
  const Lock lock(Process::Get().mutex);
  if (handle == nullptr || type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  const int fd = fcntl(static_cast<int>(reinterpret_cast<intptr_t>(shareable)), F_DUPFD_CLOEXEC, 0);
  if (fd < 0) return CUDA_ERROR_INVALID_VALUE;
  auto backing = Backing::Open(fd);
  if (backing == nullptr ||
      (backing->handle_types & CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) == 0) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  // "If the current process cannot support the memory": its device is hidden from this process.
  if (OrdinalOf(backing->device) < 0) return CUDA_ERROR_NOT_SUPPORTED;
  FAKE_CUDA_CHECK(CheckThere(*backing));
  *handle = AddHandle(lock, std::move(backing));
  return CUDA_SUCCESS;
}

FAKE_CUDA_API CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle* handle,
                                                   void* address) {
  FAKE_CUDA_ENTER("cuMemRetainAllocationHandle");
  Process& process = Process::Get();
  const Lock lock(process.mutex);
  const auto ptr = reinterpret_cast<CUdeviceptr>(address);
  const std::shared_ptr<Space> space = FindSpace(lock, ptr);
  if (handle == nullptr || space == nullptr || space->kind != Space::Kind::kReservation) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  CUdeviceptr base = 0;
  const MappedRange* range = FindMapped(*space, ptr, &base);
  if (range == nullptr) return CUDA_ERROR_INVALID_VALUE;
  // "guaranteed to be the same handle value used to map the memory", even if that was released.
  const auto found = process.handles.find(range->handle);
  if (found != process.handles.end()) {
    ++found->second.references;
  } else {
    process.handles[range->handle].backing = range->backing;
  }
  *handle = range->handle;
  return CUDA_SUCCESS;
}

FAKE_CUDA_API CUresult cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp* prop,
                                                              CUmemGenericAllocationHandle handle) {
  FAKE_CUDA_ENTER("cuMemGetAllocationPropertiesFromHandle");
  const Lock lock(Process::Get().mutex);
  const auto& handles = Process::Get().handles;
  const auto found = handles.find(handle);
  if (prop == nullptr || found == handles.end()) return CUDA_ERROR_INVALID_VALUE;
  const Backing& backing = *found->second.backing;
  *prop = {};
  prop->type = CU_MEM_ALLOCATION_TYPE_PINNED;
  prop->requestedHandleTypes = static_cast<CUmemAllocationHandleType>(backing.handle_types);
  prop->location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  prop->location.id = OrdinalOf(backing.device);
  return CUDA_SUCCESS;
}

}  // extern "C"

}  // namespace gradsync::fake_cuda
