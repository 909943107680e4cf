#include "tests/fakes/cuda/machine.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <mutex>
#include <set>

namespace gradsync::fake_cuda {
namespace {

constexpr size_t kMaxHeld = 16384;

long Number(const char* variable, long otherwise) {
  const char* text = std::getenv(variable);
  return text == nullptr || *text == '\0' ? otherwise : std::strtol(text, nullptr, 0);
}

[[noreturn]] void Fail(const char* what) {
  std::perror(what);
  std::abort();
}

std::string UuidText(int device) {
  const CUuuid uuid = Machine::Uuid(device);
  std::string text = "GPU-";
  for (size_t i = 0; i < sizeof(uuid.bytes); ++i) {
    std::array<char, 3> hex{};
    std::snprintf(hex.data(), hex.size(), "%02x", static_cast<unsigned char>(uuid.bytes[i]));
    if (i == 4 || i == 6 || i == 8 || i == 10) text += '-';
    text += hex.data();
  }
  return text;
}

// The device that one item of CUDA_VISIBLE_DEVICES names; -1 if none, or more than one.
int Named(const std::string& item, int devices) {
  if (item.rfind("GPU-", 0) == 0) {
    int found = -1;
    for (int device = 0; device < devices; ++device) {
      if (UuidText(device).rfind(item, 0) != 0) continue;
      if (found >= 0) return -1;
      found = device;
    }
    return found;
  }
  char* end = nullptr;
  const long number = std::strtol(item.c_str(), &end, 10);
  if (item.empty() || *end != '\0' || number < 0 || number >= devices) return -1;
  return static_cast<int>(number);
}

// CUDA C++ Programming Guide, "CUDA Environment Variables": a sequence of indices or of prefixes of
// UUIDs; only the devices before the first invalid one are visible.
std::vector<int> Visible(int devices) {
  std::vector<int> visible;
  const char* list = std::getenv("CUDA_VISIBLE_DEVICES");
  if (list == nullptr) {
    for (int device = 0; device < devices; ++device) visible.push_back(device);
    return visible;
  }
  std::string rest = list;
  while (!rest.empty()) {
    const size_t comma = rest.find(',');
    const int device = Named(rest.substr(0, comma), devices);
    if (device < 0) break;
    // A device listed twice hides all of them.
    if (std::count(visible.begin(), visible.end(), device) != 0) return {};
    visible.push_back(device);
    rest = comma == std::string::npos ? "" : rest.substr(comma + 1);
  }
  return visible;
}

}  // namespace

uint64_t ProcessStart(int pid) {
  std::ifstream stat("/proc/" + std::to_string(pid) + "/stat");
  std::string text;
  std::getline(stat, text);
  const size_t name_end = text.rfind(')');
  if (name_end == std::string::npos) return 0;
  // Field 3, the state, follows the name; field 22 is the start.
  size_t at = name_end + 2;
  if (at < text.size() && (text[at] == 'Z' || text[at] == 'X'))
    return 0;  // dead, not yet waited for
  // Field 9, the kernel's flags: one that is on its way out has let go of its GPU, or is about to.
  constexpr uint64_t kExiting = 4;  // PF_EXITING
  for (int field = 3; field < 22 && at != std::string::npos; ++field) {
    if (field == 9 && (std::strtoull(text.c_str() + at, nullptr, 10) & kExiting) != 0) return 0;
    at = text.find(' ', at) + 1;
  }
  return std::strtoull(text.c_str() + at, nullptr, 10);
}

struct Machine::Shared {
  struct Held {
    uint64_t inode;
    uint64_t size;
    uint64_t start;
    int32_t pid;  // 0: a free entry
    int32_t device;
  };

  std::array<std::atomic<uint32_t>, kMaxDevices> lost;
  std::array<Held, kMaxHeld> held;  // under the file's lock
};

// Excludes other processes, and threads of this one, from the shared file.
class Machine::Lock {
 public:
  explicit Lock(int file) : file_(file) {
    mutex_->lock();
    while (file_ >= 0 && flock(file_, LOCK_EX) != 0) {
      if (errno != EINTR) Fail("fake CUDA: flock");
    }
  }
  Lock(const Lock&) = delete;
  Lock& operator=(const Lock&) = delete;
  ~Lock() {
    if (file_ >= 0) flock(file_, LOCK_UN);
    mutex_->unlock();
  }

 private:
  static inline std::mutex* const mutex_ = new std::mutex;  // never destroyed: threads outlive exit
  int file_;
};

Machine& Machine::Get() {
  static Machine& machine = *new Machine;
  return machine;
}

Machine::Machine() {
  devices_ = static_cast<int>(
      std::clamp(Number("GRADSYNC_FAKE_CUDA_DEVICES", devices_), 0L, long{kMaxDevices}));
  memory_ = static_cast<size_t>(Number("GRADSYNC_FAKE_CUDA_MEMORY", static_cast<long>(memory_)));
  version_ = static_cast<int>(Number("GRADSYNC_FAKE_CUDA_VERSION", version_));
  peer_ = Number("GRADSYNC_FAKE_CUDA_PEER", 1) != 0;
  visible_ = Visible(devices_);
  int flags = MAP_PRIVATE | MAP_ANONYMOUS;
  if (const char* directory = std::getenv("GRADSYNC_FAKE_CUDA_DIR"); directory != nullptr) {
    directory_ = directory;
    file_ = open((directory_ + "/machine").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (file_ < 0 || ftruncate(file_, sizeof(Shared)) != 0) Fail("fake CUDA: its machine file");
    flags = MAP_SHARED;
  }
  void* mapped = mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, flags, file_, 0);
  if (mapped == MAP_FAILED) Fail("fake CUDA: its machine file");
  shared_ = static_cast<Shared*>(mapped);  // all zero at first: nothing lost, nothing held
}

CUuuid Machine::Uuid(int device) {
  CUuuid uuid{};
  for (size_t i = 0; i < sizeof(uuid.bytes); ++i) {
    uuid.bytes[i] = static_cast<char>((device + 1) * 0x35 + static_cast<int>(i) * 0x17);
  }
  return uuid;
}

bool Machine::Lost(int device) const {
  return shared_->lost.at(device).load(std::memory_order_acquire) != 0;
}

void Machine::Lose(int device) { shared_->lost.at(device).store(1, std::memory_order_release); }

void Machine::SweepLocked() {
  std::set<std::pair<int, uint64_t>> living;
  std::set<std::pair<int, uint64_t>> dead;
  for (Shared::Held& held : shared_->held) {
    if (held.pid == 0) continue;
    const std::pair<int, uint64_t> owner(held.pid, held.start);
    if (living.count(owner) != 0) continue;
    if (dead.count(owner) == 0 && ProcessStart(held.pid) == held.start) {
      living.insert(owner);
      continue;
    }
    dead.insert(owner);
    held.pid = 0;
  }
}

size_t Machine::UsedLocked(int device) {
  SweepLocked();
  std::set<uint64_t> seen;  // memory that several processes hold counts once
  size_t used = 0;
  for (const Shared::Held& held : shared_->held) {
    if (held.pid != 0 && held.device == device && seen.insert(held.inode).second) used += held.size;
  }
  return used;
}

bool Machine::Insert(int device, uint64_t inode, size_t size, bool check) {
  const Lock lock(file_);
  if (check && (size > memory_ || UsedLocked(device) > memory_ - size)) return false;
  for (Shared::Held& held : shared_->held) {
    if (held.pid != 0) continue;
    const int pid = getpid();
    held = {inode, size, ProcessStart(pid), pid, device};
    return true;
  }
  return false;
}

bool Machine::Hold(int device, uint64_t inode, size_t size) {
  return Insert(device, inode, size, true);
}

void Machine::Share(int device, uint64_t inode, size_t size) { Insert(device, inode, size, false); }

void Machine::Drop(uint64_t inode) {
  const Lock lock(file_);
  const int pid = getpid();
  for (Shared::Held& held : shared_->held) {
    if (held.pid != pid || held.inode != inode) continue;
    held.pid = 0;
    return;
  }
}

size_t Machine::Used(int device) {
  const Lock lock(file_);
  return UsedLocked(device);
}

void Machine::Append(const std::string& file, const std::string& line) const {
  if (directory_.empty()) return;
  const int fd =
      open((directory_ + "/" + file).c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
  if (fd < 0) return;
  const std::string text = line + "\n";
  if (write(fd, text.data(), text.size()) < 0) std::perror("fake CUDA: writing a report");
  close(fd);
}

}  // namespace gradsync::fake_cuda
