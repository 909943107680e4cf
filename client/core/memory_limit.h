// How much memory this process may still allocate, so that a shortage is an error with numbers
// before it is a signal from the kernel's out-of-memory killer.
#ifndef GRADSYNC_CLIENT_CORE_MEMORY_LIMIT_H_
#define GRADSYNC_CLIENT_CORE_MEMORY_LIMIT_H_

#include <cstdint>
#include <optional>
#include <string>

#include "shm/status.h"

namespace gradsync {

// Where the kernel's files are; tests bring their own.
struct MemoryFiles {
  std::string proc = "/proc";
  std::string cgroup = "/sys/fs/cgroup";
};

// What is left for this process.
struct MemoryRoom {
  std::optional<uint64_t> available;  // of the machine's; nullopt: it cannot be read
  std::optional<uint64_t> left;       // of the tightest limit of a cgroup; nullopt: there is none
  uint64_t limit = 0;                 // that limit
  std::string cgroup;                 // whose it is, a directory
};
MemoryRoom FindMemoryRoom(const MemoryFiles& files = {});

// kOutOfMemory if `bytes` more cannot be had: more than the machine has available, or more than
// what is left of the limit of this process's memory cgroup (v1 or v2) or of one above it. Memory
// that the kernel can take back (clean file pages) counts as available. What cannot be read does
// not limit.
Status CheckMemoryAvailable(uint64_t bytes, const MemoryFiles& files = {});

}  // namespace gradsync

#endif  // GRADSYNC_CLIENT_CORE_MEMORY_LIMIT_H_
