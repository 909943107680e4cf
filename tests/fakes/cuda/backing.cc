#include "tests/fakes/cuda/backing.h"

#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "tests/fakes/cuda/machine.h"

namespace gradsync::fake_cuda {

Backing::~Backing() {
  if (header != nullptr) munmap(header, kHeaderSize);
  if (fd >= 0) close(fd);
  if (inode != 0) Machine::Get().Drop(inode);
}

bool Backing::MapHeader(size_t data) {
  struct stat info {};
  if (fstat(fd, &info) != 0) return false;
  size = data;
  inode = info.st_ino;
  void* mapped =
      mmap(nullptr, kHeaderSize, PROT_READ | PROT_WRITE, MAP_SHARED, fd, static_cast<off_t>(data));
  if (mapped == MAP_FAILED) return false;
  header = static_cast<BackingHeader*>(mapped);
  return true;
}

std::shared_ptr<Backing> Backing::Create(int device, size_t size, uint32_t handle_types) {
  std::shared_ptr<Backing> backing(new Backing);
  backing->fd = memfd_create("fake-cuda", MFD_CLOEXEC);
  if (backing->fd < 0 || ftruncate(backing->fd, static_cast<off_t>(size + kHeaderSize)) != 0 ||
      !backing->MapHeader(size)) {
    backing->inode = 0;
    return nullptr;
  }
  if (!Machine::Get().Hold(device, backing->inode, size)) {
    backing->inode = 0;  // nothing to give back
    return nullptr;
  }
  backing->device = device;
  backing->handle_types = handle_types;
  backing->header->magic = BackingHeader::kMagic;
  backing->header->size = size;
  backing->header->device = device;
  backing->header->handle_types = handle_types;
  return backing;
}

std::shared_ptr<Backing> Backing::Open(int fd) {
  std::shared_ptr<Backing> backing(new Backing);
  backing->fd = fd;
  struct stat info {};
  if (fstat(fd, &info) != 0 || info.st_size <= static_cast<off_t>(kHeaderSize)) return nullptr;
  const bool mapped = backing->MapHeader(static_cast<size_t>(info.st_size) - kHeaderSize);
  if (!mapped || backing->header->magic != BackingHeader::kMagic ||
      backing->header->size != backing->size) {
    backing->inode = 0;
    return nullptr;
  }
  backing->device = backing->header->device;
  backing->handle_types = backing->header->handle_types;
  Machine::Get().Share(backing->device, backing->inode, backing->size);
  return backing;
}

bool Backing::MapAt(char* address, size_t bytes) const {
  return mmap(address, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0) == address;
}

char* ReserveAddresses(size_t size, size_t alignment) {
  if (alignment < kGranularity) alignment = kGranularity;
  // Some more, so that there is a gap behind each: running over the end does not reach the next.
  const size_t taken = size + alignment + kGranularity;
  void* mapped =
      mmap(nullptr, taken, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapped == MAP_FAILED) return nullptr;
  char* start = static_cast<char*>(mapped);
  const size_t over = reinterpret_cast<uintptr_t>(start) % alignment;
  char* aligned = over == 0 ? start : start + (alignment - over);
  if (aligned != start) munmap(start, static_cast<size_t>(aligned - start));
  char* end = aligned + size + kGranularity;
  if (end != start + taken) munmap(end, static_cast<size_t>(start + taken - end));
  return aligned;
}

void FreeAddresses(char* address, size_t size) { munmap(address, size + kGranularity); }

void HideAddresses(char* address, size_t size) {
  mmap(address, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
}

}  // namespace gradsync::fake_cuda
