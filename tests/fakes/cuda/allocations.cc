// cuMemAlloc and what belongs to it.
#include <vector>

#include "tests/fakes/cuda/address_space.h"
#include "tests/fakes/cuda/ipc.h"
#include "tests/fakes/cuda/machine.h"
#include "tests/fakes/cuda/streams.h"

namespace gradsync::fake_cuda {
namespace {

// CUDA C++ Programming Guide, "Device Memory Accesses": aligned to at least 256 bytes; the real
// driver takes 512.
constexpr size_t kAlignment = 512;

size_t RoundUp(size_t value, size_t to) { return (value + to - 1) / to * to; }

// The first gap of a block that `size` bytes fit into; 0 if there is none.
CUdeviceptr Gap(const Space& block, size_t size) {
  CUdeviceptr at = block.base;
  for (const auto& [base, allocation] : block.allocation) {
    if (base - at >= size) return at;
    at = RoundUp(base + allocation.size, kAlignment);
  }
  return block.base + block.size >= at + size ? at : 0;
}

// As the real driver: small allocations share a block, so the base of a block and of an allocation
// are different things.
CUdeviceptr Share(const Lock&, const Context* context, size_t size, std::shared_ptr<Space>* block) {
  for (const auto& [base, space] : Process::Get().spaces) {
    if (space->kind != Space::Kind::kBlock || space->context != context ||
        space->size != kGranularity) {
      continue;
    }
    if (const CUdeviceptr gap = Gap(*space, size); gap != 0) {
      *block = space;
      return gap;
    }
  }
  return 0;
}

std::shared_ptr<Space> NewBlock(const Lock& lock, Context* context, size_t size) {
  auto backing = Backing::Create(context->device, size, CU_MEM_HANDLE_TYPE_NONE);
  if (backing == nullptr) return nullptr;
  const auto space = AddSpace(lock, Space::Kind::kBlock, size, 0);
  if (space == nullptr) return nullptr;
  if (!backing->MapAt(space->alias, size)) {
    Process::Get().spaces.erase(space->base);
    return nullptr;
  }
  space->context = context;
  space->backing = std::move(backing);
  return space;
}

void FreeBlock(Lock& lock, const std::shared_ptr<Space>& block) {
  // What is on a GPU that is lost nobody can open or close any more.
  const bool is_lost =
      block->context->error != CUDA_SUCCESS || Machine::Get().Lost(block->context->device);
  for (const auto& [base, allocation] : block->allocation) {
    if (!is_lost) RefuseToFreeImported(lock, *block, base);
  }
  block->allocation.clear();
  RemoveSpace(lock, block);
}

}  // namespace

void DestroyMemoryOf(Lock& lock, Context* context) {
  std::vector<std::shared_ptr<Space>> going;
  for (const auto& [base, space] : Process::Get().spaces) {
    if (space->context == context) going.push_back(space);
  }
  for (const auto& space : going) {
    if (space->kind == Space::Kind::kBlock) {
      FreeBlock(lock, space);
      continue;
    }
    RemoveSpace(lock, space);
    if (space->kind == Space::Kind::kImport) CloseImport(lock, *space);
  }
}

extern "C" {

FAKE_CUDA_API CUresult cuMemGetInfo(size_t* free, size_t* total) {
  FAKE_CUDA_ENTER("cuMemGetInfo");
  const Lock lock(Process::Get().mutex);
  Context* context = nullptr;
  FAKE_CUDA_CHECK(Current(lock, &context));
  Machine& machine = Machine::Get();
  const size_t used = machine.Used(context->device);
  if (free != nullptr) *free = used < machine.memory() ? machine.memory() - used : 0;
  if (total != nullptr) *total = machine.memory();
  return CUDA_SUCCESS;
}

FAKE_CUDA_API CUresult cuMemAlloc(CUdeviceptr* ptr, size_t size) {
  FAKE_CUDA_ENTER("cuMemAlloc");
  Process& process = Process::Get();
  const Lock lock(process.mutex);
  Context* context = nullptr;
  FAKE_CUDA_CHECK(Current(lock, &context));
  // Driver API, cuMemAlloc: "If bytesize is 0, cuMemAlloc() returns CUDA_ERROR_INVALID_VALUE."
  if (ptr == nullptr || size == 0) return CUDA_ERROR_INVALID_VALUE;
  if (size > Machine::Get().memory()) return CUDA_ERROR_OUT_OF_MEMORY;
  std::shared_ptr<Space> block;
  CUdeviceptr base = 0;
  if (size < kGranularity) base = Share(lock, context, size, &block);
  if (base == 0) {
    block = NewBlock(lock, context, RoundUp(size, kGranularity));
    if (block == nullptr) return CUDA_ERROR_OUT_OF_MEMORY;
    base = block->base;
  }
  block->allocation[base] = {size, process.NextId(), false};
  *ptr = base;
  return CUDA_SUCCESS;
}

// "this API may perform implicit synchronization": it does, so that a caller that cannot bear it
// (because a stream waits for what the caller would do next) is found out.
FAKE_CUDA_API CUresult cuMemFree(CUdeviceptr ptr) {
  FAKE_CUDA_ENTER("cuMemFree");
  Lock lock(Process::Get().mutex);
  Context* context = nullptr;
  FAKE_CUDA_CHECK(Current(lock, &context));
  if (ptr == 0) return CUDA_SUCCESS;
  const std::shared_ptr<Space> block = FindSpace(lock, ptr);
  if (block == nullptr || block->kind != Space::Kind::kBlock || block->allocation.count(ptr) == 0) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  FAKE_CUDA_CHECK(SynchronizeContext(lock, block->context));
  if (block->allocation.count(ptr) == 0) return CUDA_ERROR_INVALID_VALUE;
  RefuseToFreeImported(lock, *block, ptr);
  block->allocation.erase(ptr);
  if (block->allocation.empty()) RemoveSpace(lock, block);
  return CUDA_SUCCESS;
}

// For memory of cuMemMap: the mapped region (cuPointerGetAttribute,
// CU_POINTER_ATTRIBUTE_RANGE_SIZE, says so).
FAKE_CUDA_API CUresult cuMemGetAddressRange(CUdeviceptr* base, size_t* size, CUdeviceptr ptr) {
  FAKE_CUDA_ENTER("cuMemGetAddressRange");
  const Lock lock(Process::Get().mutex);
  Context* context = nullptr;
  FAKE_CUDA_CHECK(Current(lock, &context));
  const std::shared_ptr<Space> space = FindSpace(lock, ptr);
  if (space == nullptr) return CUDA_ERROR_NOT_FOUND;
  CUdeviceptr found_base = 0;
  size_t found_size = 0;
  if (space->kind == Space::Kind::kBlock) {
    const auto* allocation = FindAllocation(*space, ptr, &found_base);
    if (allocation != nullptr) found_size = allocation->size;
  } else if (space->kind == Space::Kind::kReservation) {
    const auto* range = FindMapped(*space, ptr, &found_base);
    if (range != nullptr) found_size = range->size;
  } else if (ptr >= space->address && ptr - space->address < space->bytes) {
    found_base = space->address;
    found_size = space->bytes;
  }
  if (found_size == 0) return CUDA_ERROR_NOT_FOUND;
  if (base != nullptr) *base = found_base;
  if (size != nullptr) *size = found_size;
  return CUDA_SUCCESS;
}

}  // extern "C"

}  // namespace gradsync::fake_cuda
