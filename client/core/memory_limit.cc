#include "client/core/memory_limit.h"

#include <algorithm>
#include <charconv>
#include <fstream>
#include <limits>
#include <optional>
#include <sstream>
#include <string_view>
#include <utility>

namespace gradsync {
namespace {

constexpr uint64_t kUnlimited = std::numeric_limits<uint64_t>::max();

// "max" (v2) is no number, so no limit.
std::optional<uint64_t> ReadNumber(const std::string& path) {
  std::ifstream file(path);
  uint64_t value = 0;
  if (file >> value) return value;
  return std::nullopt;
}

// The number after `key` in a file of lines "key number ...".
std::optional<uint64_t> ReadField(const std::string& path, std::string_view key) {
  std::ifstream file(path);
  std::string line;
  while (std::getline(file, line)) {
    std::istringstream words(line);
    std::string name;
    uint64_t value = 0;
    if (words >> name >> value && name == key) return value;
  }
  return std::nullopt;
}

// The names of one version's files.
struct CgroupNames {
  const char* mount;
  const char* limit;
  const char* usage;
  const char* reclaimable;
};
constexpr CgroupNames kV2 = {"", "memory.max", "memory.current", "inactive_file"};
constexpr CgroupNames kV1 = {"/memory", "memory.limit_in_bytes", "memory.usage_in_bytes",
                             "total_inactive_file"};

struct Room {
  uint64_t bytes = kUnlimited;
  uint64_t limit = kUnlimited;
  std::string cgroup;
};

Room RoomIn(const std::string& directory, const CgroupNames& names) {
  const auto limit = ReadNumber(directory + "/" + names.limit);
  const auto usage = ReadNumber(directory + "/" + names.usage);
  if (!limit || !usage) return {};
  const uint64_t reclaimable = ReadField(directory + "/memory.stat", names.reclaimable).value_or(0);
  const uint64_t used = *usage - std::min(*usage, reclaimable);
  return {*limit - std::min(*limit, used), *limit, directory};
}

// The tightest of the cgroup `path` and those above it. A container may see its own cgroup as the
// root of the mount and yet read the host's path: what does not exist there does not limit.
Room TightestRoom(const std::string& mount, std::string path, const CgroupNames& names) {
  const std::string top = mount + names.mount;
  Room tightest;
  for (;;) {
    const Room room = RoomIn(std::string(top).append(path), names);
    if (room.bytes < tightest.bytes) tightest = room;
    if (path.empty()) return tightest;
    path.erase(path.rfind('/'));
  }
}

// Whether a comma-separated list holds "memory".
bool HasMemory(std::string_view controllers) {
  while (!controllers.empty()) {
    const size_t comma = controllers.find(',');
    if (controllers.substr(0, comma) == "memory") return true;
    if (comma == std::string_view::npos) break;
    controllers.remove_prefix(comma + 1);
  }
  return false;
}

Room CgroupRoom(const MemoryFiles& files) {
  std::ifstream file(files.proc + "/self/cgroup");
  Room tightest;
  std::string line;  // "0::/path" (v2) or "4:memory:/path" (v1)
  while (std::getline(file, line)) {
    const size_t first = line.find(':');
    const size_t second = first == std::string::npos ? first : line.find(':', first + 1);
    if (second == std::string::npos || line.size() <= second + 1 || line[second + 1] != '/') {
      continue;
    }
    const std::string controllers = line.substr(first + 1, second - first - 1);
    if (!controllers.empty() && !HasMemory(controllers)) continue;
    std::string path = line.substr(second + 1);
    if (path == "/") path.clear();
    const Room room = TightestRoom(files.cgroup, path, controllers.empty() ? kV2 : kV1);
    if (room.bytes < tightest.bytes) tightest = room;
  }
  return tightest;
}

}  // namespace

MemoryRoom FindMemoryRoom(const MemoryFiles& files) {
  MemoryRoom found;
  const auto available_kib = ReadField(files.proc + "/meminfo", "MemAvailable:");
  if (available_kib) found.available = *available_kib * 1024;
  Room room = CgroupRoom(files);
  if (room.cgroup.empty()) return found;
  found.left = room.bytes;
  found.limit = room.limit;
  found.cgroup = std::move(room.cgroup);
  return found;
}

Status CheckMemoryAvailable(uint64_t bytes, const MemoryFiles& files) {
  const MemoryRoom room = FindMemoryRoom(files);
  const std::string wanted = std::to_string(bytes) + " bytes of shared memory are not to be had: ";
  if (room.available && bytes > *room.available) {
    return {Code::kOutOfMemory,
            wanted + "this machine has " + std::to_string(*room.available) + " bytes available"};
  }
  if (room.left && bytes > *room.left) {
    return {Code::kOutOfMemory, wanted + std::to_string(*room.left) + " bytes are left of the " +
                                    std::to_string(room.limit) + " that the memory cgroup " +
                                    room.cgroup + " allows; raise its limit"};
  }
  return OkStatus();
}

}  // namespace gradsync
