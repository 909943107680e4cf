// Words of the machine's memory that streams wait for and write: the trainers' flag pages, and the
// engine's own, by which it sees how far its streams are.
#ifndef GRADSYNC_SERVER_ENGINE_CUDA_FLAGS_H_
#define GRADSYNC_SERVER_ENGINE_CUDA_FLAGS_H_

#include <cuda.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "server/engine/cuda/device.h"
#include "server/engine/device_engine.h"
#include "server/engine/mutex.h"
#include "shm/cuda/device_memory.h"
#include "shm/segment.h"
#include "shm/status.h"

namespace gradsync::cuda {

// A trainer's page. Pinned in the first context that asks for its address, and so for all: which
// GPUs will, it cannot know before. Any thread.
class PinnedFlags : public DeviceFlags {
 public:
  // `devices` as many as the engine has. kInvalidArgument if there is no page in `mapping`.
  static Result<std::shared_ptr<DeviceFlags>> Create(std::shared_ptr<const Mapping> mapping,
                                                     size_t devices);

  FlagPage* page() const override;
  // The page for streams of `device`, whose context is `context`.
  Result<CUdeviceptr> AddressOn(const Device& device,
                                const std::shared_ptr<const PrimaryContext>& context);

 private:
  PinnedFlags(std::shared_ptr<const Mapping> mapping, size_t devices)
      : mapping_(std::move(mapping)), addresses_(devices) {}

  const std::shared_ptr<const Mapping> mapping_;
  Mutex mutex_;
  PinnedMemory pinned_ ABSL_GUARDED_BY(mutex_);                 // before the mapping goes
  std::vector<CUdeviceptr> addresses_ ABSL_GUARDED_BY(mutex_);  // by device; 0: not asked yet
};

// A word in memory that no trainer can write, which starts at 0.
class CompletionWord {
 public:
  static Result<std::unique_ptr<CompletionWord>> Create(
      std::shared_ptr<const PrimaryContext> context);
  CompletionWord(const CompletionWord&) = delete;
  CompletionWord& operator=(const CompletionWord&) = delete;
  ~CompletionWord();

  CUdeviceptr address() const { return address_; }
  uint64_t value() const { return word_->load(std::memory_order_acquire); }

 private:
  CompletionWord() = default;

  std::atomic<uint64_t>* word_ = nullptr;  // a page of its own
  PinnedMemory pinned_;
  CUdeviceptr address_ = 0;
};

}  // namespace gradsync::cuda

#endif  // GRADSYNC_SERVER_ENGINE_CUDA_FLAGS_H_
