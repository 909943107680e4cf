// Every address that a device of this process may know: reservations with what is mapped into them,
// blocks of cuMemAlloc, imported blocks, registered host memory.
#ifndef GRADSYNC_TESTS_FAKES_CUDA_ADDRESS_SPACE_H_
#define GRADSYNC_TESTS_FAKES_CUDA_ADDRESS_SPACE_H_

#include <cuda.h>

#include <array>
#include <map>
#include <memory>

#include "tests/fakes/cuda/backing.h"
#include "tests/fakes/cuda/process.h"

namespace gradsync::fake_cuda {

// cuMemMap's. Starts at the beginning of its memory: the documents allow no other offset.
struct MappedRange {
  size_t size = 0;
  CUmemGenericAllocationHandle handle = 0;
  std::shared_ptr<Backing> backing;
  unsigned long long id = 0;
  std::map<int, CUmemAccess_flags> access;  // by ordinal
};

// cuMemAlloc's.
struct Allocation {
  size_t size = 0;
  unsigned long long id = 0;
  bool exported = false;
};

// One range of addresses. What the program sees at it must not be touched by the host; kernels use
// the same offset from `alias`.
struct Space {
  enum class Kind { kReservation, kBlock, kImport, kHost };

  Space(Kind space_kind, size_t space_size) : kind(space_kind), size(space_size) {}
  Space(const Space&) = delete;
  Space& operator=(const Space&) = delete;
  ~Space();

  const Kind kind;
  const size_t size;
  CUdeviceptr base = 0;
  char* alias = nullptr;
  int users = 0;  // running work that has looked it up
  unsigned long long id = 0;

  std::map<CUdeviceptr, MappedRange> mapped;  // kReservation
  size_t asked = 0;                           // kReservation: what cuMemAddressReserve was given

  Context* context = nullptr;                    // all but kReservation
  std::shared_ptr<Backing> backing;              // kBlock, kImport
  std::map<CUdeviceptr, Allocation> allocation;  // kBlock

  CUdeviceptr address = 0;   // kImport: the allocation in the block; kHost: what was registered
  size_t bytes = 0;          // of that
  unsigned references = 0;   // kImport
  uint64_t exporter_id = 0;  // kImport: the allocation's id in its process
  std::array<char, CU_IPC_HANDLE_SIZE> ipc_handle{};  // kImport
  unsigned flags = 0;                                 // kHost
};

// A range that is reserved twice, for the program and for kernels, and known. Null if there is
// none.
std::shared_ptr<Space> AddSpace(const Lock& lock, Space::Kind kind, size_t size, size_t alignment);
// The one that holds `address`; null if none does.
std::shared_ptr<Space> FindSpace(const Lock& lock, CUdeviceptr address);
// Takes it from the process, when no running work uses it any more. CUDA C++ Programming Guide,
// "Implicit Synchronization": memory goes only when the device is done with it.
void RemoveSpace(Lock& lock, const std::shared_ptr<Space>& space);
void WaitUntilUnused(Lock& lock, const Space& space);

enum class Use { kKernelRead, kKernelWrite, kCopyRead, kCopyWrite };

// Where a device reads or writes `bytes` at `address`; null, as it would fault, if they are not all
// there or not accessible. Good for as long as the lock is held.
char* Peek(const Lock& lock, CUdeviceptr address, size_t bytes, int ordinal, Use use);
// The same; on a stream's thread they stay there until the running work ends.
char* LookUp(const Lock& lock, CUdeviceptr address, size_t bytes, int ordinal, Use use);

// The mapped range of a reservation that holds the address; null if none does.
MappedRange* FindMapped(Space& space, CUdeviceptr address, CUdeviceptr* base);
// The allocation of a block; null if none holds the address.
Allocation* FindAllocation(Space& space, CUdeviceptr address, CUdeviceptr* base);

}  // namespace gradsync::fake_cuda

#endif  // GRADSYNC_TESTS_FAKES_CUDA_ADDRESS_SPACE_H_
