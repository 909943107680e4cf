// Shared-memory segments: sealed memfds, and mappings of them.
//
// The daemon creates every segment and seals its size, so that no trainer can shrink one under the
// daemon's feet (a SIGBUS). It passes the descriptor to one trainer, which maps it too.
#ifndef GRADSYNC_SHM_SEGMENT_H_
#define GRADSYNC_SHM_SEGMENT_H_

#include <cstddef>
#include <cstdint>
#include <string>

#include "shm/status.h"
#include "shm/unique_fd.h"

namespace gradsync {

// A memfd of exactly `size` zero bytes (size > 0), close-on-exec, sealed against shrinking, growing
// and further seals. `name` shows in /proc/PID/maps. No page is allocated yet.
Result<UniqueFd> CreateSealedMemfd(const std::string& name, size_t size);

// Whether `fd` is a memfd of exactly `size` bytes that carries those seals.
Status CheckSealedMemfd(int fd, size_t size);

// A read-write shared mapping of a whole segment; unmapped by the destructor. Movable; not tied to
// the descriptor's life.
class Mapping {
 public:
  Mapping() = default;
  Mapping(Mapping&& other) noexcept;
  Mapping& operator=(Mapping&& other) noexcept;
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  ~Mapping();

  static Result<Mapping> Map(int fd, size_t size);

  std::byte* data() const { return data_; }
  size_t size() const { return size_; }
  bool valid() const { return data_ != nullptr; }

  // Whether the `length` bytes from `offset` lie inside; false on overflow.
  bool Contains(uint64_t offset, uint64_t length) const {
    return length <= size_ && offset <= size_ - length;
  }

  // Allocates every page now, charged to the caller's memory cgroup, so that a shortage is an error
  // here and not a signal later. kOutOfMemory if the memory is not there.
  Status Prefault() const;

 private:
  std::byte* data_ = nullptr;
  size_t size_ = 0;
};

}  // namespace gradsync

#endif  // GRADSYNC_SHM_SEGMENT_H_
