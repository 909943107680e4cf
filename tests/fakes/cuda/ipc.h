// What the 64 bytes of an interprocess handle hold: where another process finds the descriptor.
#ifndef GRADSYNC_TESTS_FAKES_CUDA_IPC_H_
#define GRADSYNC_TESTS_FAKES_CUDA_IPC_H_

#include <cuda.h>

#include <cstdint>

#include "tests/fakes/cuda/address_space.h"

namespace gradsync::fake_cuda {

struct IpcHandle {
  static constexpr uint32_t kMemory = 0x6d656d31;
  static constexpr uint32_t kEvent = 0x65767431;

  uint32_t kind;
  int32_t pid;
  uint64_t start;  // of that process
  int32_t fd;      // in it
  int32_t unused;
  uint64_t inode;
  uint64_t id;  // of the allocation; 0 for an event
  uint64_t offset;
  uint64_t size;
};
static_assert(sizeof(IpcHandle) <= CU_IPC_HANDLE_SIZE);

// The descriptor that the handle means, opened in this process; -1 if it is there no more.
int OpenIpcDescriptor(const IpcHandle& handle);

// Ends the process if another one still has the allocation open.
void RefuseToFreeImported(const Lock& lock, Space& block, CUdeviceptr base);
// This process has it open no more.
void CloseImport(const Lock& lock, Space& import);

}  // namespace gradsync::fake_cuda

#endif  // GRADSYNC_TESTS_FAKES_CUDA_IPC_H_
