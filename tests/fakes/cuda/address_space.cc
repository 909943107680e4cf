#include "tests/fakes/cuda/address_space.h"

#include "tests/fakes/cuda/streams.h"

namespace gradsync::fake_cuda {
namespace {

// Driver API, "Peer Context Memory Access" and cuCtxEnablePeerAccess: a kernel touches memory of
// another device's context only after its own enabled that. Copies need no such thing ("Unified
// Addressing": the driver finds out where memory lies, and stages).
bool MayTouch(const Lock&, const Context& owner, int ordinal, Use use) {
  if (owner.ordinal == ordinal || use == Use::kCopyRead || use == Use::kCopyWrite) return true;
  return Process::Get().contexts.at(ordinal)->peers.count(&owner) != 0;
}

// Driver API, cuMemSetAccess and cuMemMap: all mappings start with no access, for every device.
bool MayTouchMapped(Space& space, CUdeviceptr address, size_t bytes, int ordinal, Use use) {
  const bool write = use == Use::kKernelWrite || use == Use::kCopyWrite;
  const CUdeviceptr end = address + bytes;
  while (address < end) {
    CUdeviceptr base = 0;
    const MappedRange* range = FindMapped(space, address, &base);
    if (range == nullptr) return false;
    const auto access = range->access.find(ordinal);
    if (access == range->access.end() || access->second == CU_MEM_ACCESS_FLAGS_PROT_NONE) {
      return false;
    }
    if (write && access->second != CU_MEM_ACCESS_FLAGS_PROT_READWRITE) return false;
    address = base + range->size;
  }
  return true;
}

bool Within(CUdeviceptr address, size_t bytes, CUdeviceptr base, size_t size) {
  return address >= base && bytes <= size && address - base <= size - bytes;
}

bool Touchable(const Lock& lock, Space& space, CUdeviceptr address, size_t bytes, int ordinal,
               Use use) {
  switch (space.kind) {
    case Space::Kind::kReservation:
      return MayTouchMapped(space, address, bytes, ordinal, use);
    case Space::Kind::kBlock: {
      CUdeviceptr base = 0;
      const Allocation* allocation = FindAllocation(space, address, &base);
      return allocation != nullptr && Within(address, bytes, base, allocation->size) &&
             MayTouch(lock, *space.context, ordinal, use);
    }
    case Space::Kind::kImport:
      // It was opened in one context, and that is where it is mapped.
      return Within(address, bytes, space.address, space.bytes) &&
             MayTouch(lock, *space.context, ordinal, use);
    case Space::Kind::kHost:
      // Driver API, cuMemHostRegister: CU_MEMHOSTREGISTER_DEVICEMAP maps it for devices,
      // CU_MEMHOSTREGISTER_PORTABLE for other contexts than the one that registered it.
      return Within(address, bytes, space.address, space.bytes) &&
             (space.flags & CU_MEMHOSTREGISTER_DEVICEMAP) != 0 &&
             (space.context->ordinal == ordinal ||
              (space.flags & CU_MEMHOSTREGISTER_PORTABLE) != 0);
  }
  return false;
}

template <typename Map>
auto Holding(Map& map, CUdeviceptr address) {
  auto next = map.upper_bound(address);
  return next == map.begin() ? map.end() : --next;
}

}  // namespace

Space::~Space() {
  if (kind == Kind::kHost || alias == nullptr) return;
  FreeAddresses(reinterpret_cast<char*>(base), size);
  FreeAddresses(alias, size);
}

std::shared_ptr<Space> AddSpace(const Lock&, Space::Kind kind, size_t size, size_t alignment) {
  Process& process = Process::Get();
  auto space = std::make_shared<Space>(kind, size);
  char* seen = ReserveAddresses(size, alignment);
  if (seen == nullptr) return nullptr;
  space->alias = ReserveAddresses(size, alignment);
  if (space->alias == nullptr) {
    FreeAddresses(seen, size);
    return nullptr;
  }
  space->base = reinterpret_cast<CUdeviceptr>(seen);
  // Host memory that was unmapped while registered: something else lies there now.
  std::erase_if(process.spaces, [&](const auto& item) {
    return item.first < space->base + size && space->base < item.first + item.second->size;
  });
  space->id = process.NextId();
  process.spaces[space->base] = space;
  return space;
}

std::shared_ptr<Space> FindSpace(const Lock&, CUdeviceptr address) {
  auto& spaces = Process::Get().spaces;
  const auto found = Holding(spaces, address);
  if (found == spaces.end() || address - found->first >= found->second->size) return nullptr;
  return found->second;
}

void WaitUntilUnused(Lock& lock, const Space& space) {
  Process::Get().progress.wait(lock, [&] { return space.users == 0; });
}

void RemoveSpace(Lock& lock, const std::shared_ptr<Space>& space) {
  auto& spaces = Process::Get().spaces;
  const auto found = spaces.find(space->base);
  if (found == spaces.end() || found->second != space) return;
  const std::shared_ptr<Space> kept = space;  // addresses are not reused while it is waited for
  spaces.erase(found);
  WaitUntilUnused(lock, *kept);
}

MappedRange* FindMapped(Space& space, CUdeviceptr address, CUdeviceptr* base) {
  const auto found = Holding(space.mapped, address);
  if (found == space.mapped.end() || address - found->first >= found->second.size) return nullptr;
  *base = found->first;
  return &found->second;
}

Allocation* FindAllocation(Space& space, CUdeviceptr address, CUdeviceptr* base) {
  const auto found = Holding(space.allocation, address);
  if (found == space.allocation.end() || address - found->first >= found->second.size) {
    return nullptr;
  }
  *base = found->first;
  return &found->second;
}

char* Peek(const Lock& lock, CUdeviceptr address, size_t bytes, int ordinal, Use use) {
  const std::shared_ptr<Space> space = FindSpace(lock, address);
  if (space == nullptr || !Within(address, bytes, space->base, space->size) ||
      !Touchable(lock, *space, address, bytes, ordinal, use)) {
    return nullptr;
  }
  return space->alias + (address - space->base);
}

char* LookUp(const Lock& lock, CUdeviceptr address, size_t bytes, int ordinal, Use use) {
  char* place = Peek(lock, address, bytes, ordinal, use);
  if (place != nullptr) KeepWhileRunning(lock, FindSpace(lock, address));
  return place;
}

}  // namespace gradsync::fake_cuda
