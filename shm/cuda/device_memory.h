// What is held of a GPU, each given back by its destructor, on any thread: a context, memory that
// crosses processes as a file descriptor, and pages of the machine's memory that GPUs reach.
//
// Whatever streams still do with memory when it is given back must have ended: nothing here waits.
#ifndef GRADSYNC_SHM_CUDA_DEVICE_MEMORY_H_
#define GRADSYNC_SHM_CUDA_DEVICE_MEMORY_H_

#include <cuda.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

#include "shm/cuda/driver.h"
#include "shm/status.h"
#include "shm/unique_fd.h"

namespace gradsync {

// A reference to a device's primary context, the one that frameworks use too. The driver makes the
// context with the first reference (some hundred MiB of the GPU, some hundred milliseconds) and
// destroys it with the last.
class PrimaryContext {
 public:
  // `driver` is not owned: CudaDriver::Load() gives one that stays.
  static Result<std::shared_ptr<const PrimaryContext>> Retain(const CudaDriver& driver,
                                                              CUdevice device);
  PrimaryContext(const PrimaryContext&) = delete;
  PrimaryContext& operator=(const PrimaryContext&) = delete;
  ~PrimaryContext();

  const CudaDriver& driver() const { return driver_; }
  CUdevice device() const { return device_; }
  CUcontext get() const { return context_; }

 private:
  PrimaryContext(const CudaDriver& driver, CUdevice device, CUcontext context)
      : driver_(driver), device_(device), context_(context) {}

  const CudaDriver& driver_;
  const CUdevice device_;
  const CUcontext context_;
};

// Memory of a GPU that has a file descriptor (cuMemCreate), mapped for kernels of that GPU alone.
// The GPU has it back when every process that created or imported it has let go.
class MappedDeviceMemory {
 public:
  MappedDeviceMemory() = default;
  MappedDeviceMemory(MappedDeviceMemory&& other) noexcept { *this = std::move(other); }
  MappedDeviceMemory& operator=(MappedDeviceMemory&& other) noexcept;
  MappedDeviceMemory(const MappedDeviceMemory&) = delete;
  MappedDeviceMemory& operator=(const MappedDeviceMemory&) = delete;
  ~MappedDeviceMemory() { Reset(); }

  // At least `bytes` (> 0), rounded up to what the GPU allocates in; what is in it is undefined.
  // kOutOfMemory says how much was asked for and how much is free.
  static Result<MappedDeviceMemory> Create(std::shared_ptr<const PrimaryContext> context,
                                           uint64_t bytes);
  // What Export gave in another process; `bytes` is the exporter's size(). An error for any other
  // descriptor, or with more than there is. The descriptor may be closed afterwards.
  static Result<MappedDeviceMemory> Import(std::shared_ptr<const PrimaryContext> context, int fd,
                                           uint64_t bytes);

  Result<UniqueFd> Export() const;
  bool valid() const { return context_ != nullptr; }
  CUdeviceptr address() const { return address_; }
  uint64_t size() const { return size_; }

 private:
  Status Map(uint64_t bytes);
  void Reset();

  std::shared_ptr<const PrimaryContext> context_;
  uint64_t size_ = 0;
  CUmemGenericAllocationHandle handle_ = 0;
  bool has_handle_ = false;
  CUdeviceptr address_ = 0;  // reserved
  bool is_mapped_ = false;
};

// Pages of this process that streams and kernels of every GPU read and write. They must stay mapped
// until it is gone.
class PinnedMemory {
 public:
  PinnedMemory() = default;
  PinnedMemory(PinnedMemory&& other) noexcept { *this = std::move(other); }
  PinnedMemory& operator=(PinnedMemory&& other) noexcept;
  PinnedMemory(const PinnedMemory&) = delete;
  PinnedMemory& operator=(const PinnedMemory&) = delete;
  ~PinnedMemory() { Reset(); }

  // Whole pages. `context` is kept; the memory is pinned for all others too.
  static Result<PinnedMemory> Pin(std::shared_ptr<const PrimaryContext> context, void* memory,
                                  size_t bytes);

  bool valid() const { return memory_ != nullptr; }
  // Where the memory starts for streams of `context`.
  Result<CUdeviceptr> AddressIn(const PrimaryContext& context) const;

 private:
  void Reset();

  std::shared_ptr<const PrimaryContext> context_;
  void* memory_ = nullptr;
};

}  // namespace gradsync

#endif  // GRADSYNC_SHM_CUDA_DEVICE_MEMORY_H_
