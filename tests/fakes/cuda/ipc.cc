// cuIpc*MemHandle: memory of cuMemAlloc in other processes.
#include "tests/fakes/cuda/ipc.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstring>
#include <string>

namespace gradsync::fake_cuda {
namespace {

constexpr int kPidShift = 40;

uint64_t ImportMark(uint64_t id) { return uint64_t(getpid()) << kPidShift | id; }

bool Mark(std::array<std::atomic<uint64_t>, BackingHeader::kSlots>& slots, uint64_t mark) {
  for (auto& slot : slots) {
    uint64_t free = 0;
    if (slot.compare_exchange_strong(free, mark)) return true;
  }
  return false;
}

bool Marked(const std::array<std::atomic<uint64_t>, BackingHeader::kSlots>& slots, uint64_t mark) {
  for (const auto& slot : slots) {
    if (slot == mark) return true;
  }
  return false;
}

void Unmark(std::array<std::atomic<uint64_t>, BackingHeader::kSlots>& slots, uint64_t mark) {
  for (auto& slot : slots) {
    uint64_t expected = mark;
    if (slot.compare_exchange_strong(expected, 0)) return;
  }
}

std::shared_ptr<Space> FindImport(const Lock&, const Context* context,
                                  const CUipcMemHandle& handle) {
  for (const auto& [base, space] : Process::Get().spaces) {
    if (space->kind == Space::Kind::kImport && space->context == context &&
        std::memcmp(space->ipc_handle.data(), handle.reserved, CU_IPC_HANDLE_SIZE) == 0) {
      return space;
    }
  }
  return nullptr;
}

CUresult OpenBacking(const IpcHandle& handle, const Context& context,
                     std::shared_ptr<Backing>* backing) {
  const int fd = OpenIpcDescriptor(handle);
  if (fd < 0) return CUDA_ERROR_INVALID_HANDLE;
  *backing = Backing::Open(fd);
  if (*backing == nullptr || (*backing)->inode != handle.inode) return CUDA_ERROR_INVALID_HANDLE;
  // Memory that was freed since, even if something else lies there now ("a unique handle for the
  // new memory").
  if (!Marked((*backing)->header->exported, handle.id)) return CUDA_ERROR_INVALID_HANDLE;
  // "cuDeviceCanAccessPeer can determine if a mapping is possible."
  if ((*backing)->device != context.device && !Machine::Get().peer()) return CUDA_ERROR_MAP_FAILED;
  return CUDA_SUCCESS;
}

}  // namespace

int OpenIpcDescriptor(const IpcHandle& handle) {
  if (ProcessStart(handle.pid) != handle.start) return -1;
  const std::string path =
      "/proc/" + std::to_string(handle.pid) + "/fd/" + std::to_string(handle.fd);
  const int fd = open(path.c_str(), O_RDWR | O_CLOEXEC);
  struct stat info {};
  if (fd < 0) return -1;
  if (fstat(fd, &info) == 0 && info.st_ino == handle.inode) return fd;
  close(fd);
  return -1;
}

void RefuseToFreeImported(const Lock&, Space& block, CUdeviceptr base) {
  const Allocation& allocation = block.allocation.at(base);
  if (!allocation.exported) return;
  BackingHeader& header = *block.backing->header;
  Unmark(header.exported, allocation.id);
  for (auto& slot : header.imported) {
    const uint64_t mark = slot;
    if (mark == 0 || (mark & ((uint64_t{1} << kPidShift) - 1)) != allocation.id) continue;
    const int pid = static_cast<int>(mark >> kPidShift);
    if (ProcessStart(pid) != 0) {
      fakeCudaBreach(
          ("memory is freed that process " + std::to_string(pid) + " still has open").c_str(),
          "CUDA Driver API, cuIpcOpenMemHandle: \"Calling cuMemFree on an exported "
          "memory region before calling cuIpcCloseMemHandle in the importing context "
          "will result in undefined behavior\"");
    }
    slot = 0;  // it died with the memory open
  }
}

void CloseImport(const Lock&, Space& import) {
  Unmark(import.backing->header->imported, ImportMark(import.exporter_id));
}

extern "C" {

// Driver API, cuIpcGetMemHandle: "the base of an existing device memory allocation created with
// cuMemAlloc"; any number of times.
FAKE_CUDA_API CUresult cuIpcGetMemHandle(CUipcMemHandle* handle, CUdeviceptr ptr) {
  FAKE_CUDA_ENTER("cuIpcGetMemHandle");
  const Lock lock(Process::Get().mutex);
  Context* context = nullptr;
  FAKE_CUDA_CHECK(Current(lock, &context));
  const std::shared_ptr<Space> space = FindSpace(lock, ptr);
  if (handle == nullptr || space == nullptr || space->kind != Space::Kind::kBlock) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  FAKE_CUDA_CHECK(Usable(lock, space->context));
  const auto found = space->allocation.find(ptr);
  if (found == space->allocation.end()) return CUDA_ERROR_INVALID_VALUE;
  auto& allocation = found->second;
  const Backing& backing = *space->backing;
  if (!allocation.exported && !Mark(backing.header->exported, allocation.id)) {
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  allocation.exported = true;
  IpcHandle content{};
  content.kind = IpcHandle::kMemory;
  content.pid = getpid();
  content.start = ProcessStart(content.pid);
  content.fd = backing.fd;
  content.inode = backing.inode;
  content.id = allocation.id;
  content.offset = ptr - space->base;
  content.size = allocation.size;
  *handle = {};
  std::memcpy(handle->reserved, &content, sizeof(content));
  return CUDA_SUCCESS;
}

FAKE_CUDA_API CUresult cuIpcOpenMemHandle(CUdeviceptr* ptr, CUipcMemHandle handle, unsigned flags) {
  FAKE_CUDA_ENTER("cuIpcOpenMemHandle");
  const Lock lock(Process::Get().mutex);
  Context* context = nullptr;
  FAKE_CUDA_CHECK(Current(lock, &context));
  // "Must be specified as CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS".
  if (ptr == nullptr || flags != CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS)
    return CUDA_ERROR_INVALID_VALUE;
  IpcHandle content{};
  std::memcpy(&content, handle.reserved, sizeof(content));
  if (content.kind != IpcHandle::kMemory) return CUDA_ERROR_INVALID_HANDLE;
  // "exported from another process": the exporter itself gets the first of the documented errors,
  // as from the real driver.
  if (content.pid == getpid()) return CUDA_ERROR_INVALID_CONTEXT;
  // "If the memory handle has already been opened by the current context, the reference count on
  // the handle is incremented by 1 and the existing device pointer is returned."
  if (const auto known = FindImport(lock, context, handle); known != nullptr) {
    ++known->references;
    *ptr = known->address;
    return CUDA_SUCCESS;
  }
  std::shared_ptr<Backing> backing;
  FAKE_CUDA_CHECK(OpenBacking(content, *context, &backing));
  // The whole block is mapped, as the real driver does.
  const auto space = AddSpace(lock, Space::Kind::kImport, backing->size, 0);
  if (space == nullptr) return CUDA_ERROR_MAP_FAILED;
  if (!backing->MapAt(space->alias, backing->size) ||
      !Mark(backing->header->imported, ImportMark(content.id))) {
    Process::Get().spaces.erase(space->base);
    return CUDA_ERROR_MAP_FAILED;
  }
  space->context = context;
  space->backing = std::move(backing);
  space->address = space->base + content.offset;
  space->bytes = content.size;
  space->references = 1;
  space->exporter_id = content.id;
  std::memcpy(space->ipc_handle.data(), handle.reserved, CU_IPC_HANDLE_SIZE);
  *ptr = space->address;
  return CUDA_SUCCESS;
}

FAKE_CUDA_API CUresult cuIpcCloseMemHandle(CUdeviceptr ptr) {
  FAKE_CUDA_ENTER("cuIpcCloseMemHandle");
  Lock lock(Process::Get().mutex);
  Context* context = nullptr;
  FAKE_CUDA_CHECK(Current(lock, &context));
  const std::shared_ptr<Space> space = FindSpace(lock, ptr);
  if (space == nullptr || space->kind != Space::Kind::kImport || space->address != ptr) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  if (--space->references != 0) return CUDA_SUCCESS;
  RemoveSpace(lock, space);
  CloseImport(lock, *space);
  return CUDA_SUCCESS;
}

}  // extern "C"

}  // namespace gradsync::fake_cuda
