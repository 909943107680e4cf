// What every process of the stand-in's machine sees: which devices are lost, and who holds how much
// of their memory. A file in GRADSYNC_FAKE_CUDA_DIR; without that variable, the process's own.
#ifndef GRADSYNC_TESTS_FAKES_CUDA_MACHINE_H_
#define GRADSYNC_TESTS_FAKES_CUDA_MACHINE_H_

#include <cuda.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace gradsync::fake_cuda {

inline constexpr int kMaxDevices = 64;

// When a process was started, in the kernel's ticks: tells a process from a later one of the same
// number. 0 if there is none.
uint64_t ProcessStart(int pid);

class Machine {
 public:
  // Reads the environment; stays for the life of the process.
  static Machine& Get();

  int devices() const { return devices_; }
  size_t memory() const { return memory_; }
  int version() const { return version_; }
  bool peer() const { return peer_; }
  const std::string& directory() const { return directory_; }
  // The devices that CUDA_VISIBLE_DEVICES leaves, in its order: numbers on the machine.
  const std::vector<int>& visible() const { return visible_; }
  static CUuuid Uuid(int device);

  bool Lost(int device) const;
  void Lose(int device);

  // Counts `size` bytes of `device` as held by this process in the file numbered `inode`. False if
  // that much is not free. One process may hold the same memory once.
  bool Hold(int device, uint64_t inode, size_t size);
  // The same, for memory that exists already: never refused.
  void Share(int device, uint64_t inode, size_t size);
  void Drop(uint64_t inode);
  size_t Used(int device);

  // Appends a line to a file of the directory, if there is one.
  void Append(const std::string& file, const std::string& line) const;

 private:
  struct Shared;
  class Lock;

  Machine();
  bool Insert(int device, uint64_t inode, size_t size, bool check);
  size_t UsedLocked(int device);
  void SweepLocked();

  int devices_ = 2;
  size_t memory_ = size_t{4} << 30;
  int version_ = 13000;
  bool peer_ = true;
  std::string directory_;
  std::vector<int> visible_;
  int file_ = -1;
  Shared* shared_ = nullptr;
};

}  // namespace gradsync::fake_cuda

#endif  // GRADSYNC_TESTS_FAKES_CUDA_MACHINE_H_
