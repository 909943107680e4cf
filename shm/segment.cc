#include "shm/segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23  // Linux 5.14; older headers lack it
#endif

namespace gradsync {
namespace {

constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
constexpr size_t kPageSize = 4096;

// For kernels before 5.14: touches each page. A shortage is then the kernel's to report.
void TouchEveryPage(std::byte* data, size_t size) {
  for (size_t offset = 0; offset < size; offset += kPageSize) {
    auto* page = reinterpret_cast<volatile std::byte*>(data + offset);
    *page = *page;
  }
}

}  // namespace

Result<UniqueFd> CreateSealedMemfd(const std::string& name, size_t size) {
  UniqueFd fd(memfd_create(name.c_str(), MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd.valid()) {
    return Unexpected(ErrnoStatus(Code::kOutOfMemory, errno, "cannot create segment " + name));
  }
  if (size == 0 || ftruncate(fd.get(), static_cast<off_t>(size)) != 0) {
    return Unexpected(
        ErrnoStatus(Code::kOutOfMemory, size == 0 ? EINVAL : errno,
                    "cannot size segment " + name + " to " + std::to_string(size) + " bytes"));
  }
  if (fcntl(fd.get(), F_ADD_SEALS, kSeals) != 0) {
    return Unexpected(ErrnoStatus(Code::kInternal, errno, "cannot seal segment " + name));
  }
  return fd;
}

Status CheckSealedMemfd(int fd, size_t size) {
  const int seals = fcntl(fd, F_GET_SEALS);
  if (seals < 0 || (seals & kSeals) != kSeals) {
    return {Code::kProtocol, "a segment is not a sealed memfd"};
  }
  struct stat info {};
  if (fstat(fd, &info) != 0 || static_cast<size_t>(info.st_size) != size) {
    return {Code::kProtocol, "a segment has " + std::to_string(info.st_size) + " bytes, not the " +
                                 std::to_string(size) + " announced"};
  }
  return OkStatus();
}

Mapping::Mapping(Mapping&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}

Mapping& Mapping::operator=(Mapping&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  return *this;
}

Mapping::~Mapping() {
  if (valid()) munmap(data_, size_);
}

Result<Mapping> Mapping::Map(int fd, size_t size) {
  void* address = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (address == MAP_FAILED) {
    return Unexpected(
        ErrnoStatus(Code::kOutOfMemory, errno,
                    "cannot map " + std::to_string(size) + " bytes of shared memory"));
  }
  Mapping mapping;
  mapping.data_ = static_cast<std::byte*>(address);
  mapping.size_ = size;
  return mapping;
}

Status Mapping::Prefault() const {
  if (madvise(data_, size_, MADV_POPULATE_WRITE) == 0) return OkStatus();
  const int error = errno;
  if (error == EINVAL) {
    TouchEveryPage(data_, size_);
    return OkStatus();
  }
  return ErrnoStatus(Code::kOutOfMemory, error,
                     "not enough memory for a segment of " + std::to_string(size_) + " bytes");
}

}  // namespace gradsync
