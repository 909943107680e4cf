// Device memory: a memfd, with one more page group behind it that says what it is and who has
// imported it, so that any process that gets the descriptor knows.
#ifndef GRADSYNC_TESTS_FAKES_CUDA_BACKING_H_
#define GRADSYNC_TESTS_FAKES_CUDA_BACKING_H_

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>

namespace gradsync::fake_cuda {

// What cuMemCreate wants sizes to be a multiple of, and what cuMemAlloc takes from the device.
inline constexpr size_t kGranularity = size_t{2} << 20;

struct BackingHeader {
  static constexpr uint64_t kMagic = 0x6772616473796e63;
  static constexpr size_t kSlots = 1024;

  uint64_t magic;
  uint64_t size;
  int32_t device;  // its number on the machine
  uint32_t handle_types;
  // Allocations of cuMemAlloc in it that cuIpcGetMemHandle gave handles for, by their id. 0: free.
  std::array<std::atomic<uint64_t>, kSlots> exported;
  // Who has them open: the process in the upper 24 bits, the id of the allocation in the others.
  std::array<std::atomic<uint64_t>, kSlots> imported;
};

inline constexpr size_t kHeaderSize = 20480;
static_assert(sizeof(BackingHeader) <= kHeaderSize);

struct Backing {
  Backing(const Backing&) = delete;
  Backing& operator=(const Backing&) = delete;
  ~Backing();

  // New memory of a device; null if it does not have that much left.
  static std::shared_ptr<Backing> Create(int device, size_t size, uint32_t handle_types);
  // Memory that another process (or this one) created; takes the descriptor. Null if it is none.
  static std::shared_ptr<Backing> Open(int fd);

  // Replaces `address`, which is reserved, by the beginning of the memory: what kernels of this
  // process touch.
  bool MapAt(char* address, size_t bytes) const;

  int fd = -1;
  size_t size = 0;
  int device = 0;
  uint32_t handle_types = 0;
  uint64_t inode = 0;
  BackingHeader* header = nullptr;

 private:
  Backing() = default;
  bool MapHeader(size_t data);
};

// A range of addresses that nobody may touch, a multiple of the granularity, aligned to
// `alignment`. Null if there is none.
char* ReserveAddresses(size_t size, size_t alignment);
void FreeAddresses(char* address, size_t size);
// Makes part of one untouchable again.
void HideAddresses(char* address, size_t size);

}  // namespace gradsync::fake_cuda

#endif  // GRADSYNC_TESTS_FAKES_CUDA_BACKING_H_
