// One GPU as the engine has it: which it is, its context from the first use on, and whether it
// still works. Any thread.
#ifndef GRADSYNC_SERVER_ENGINE_CUDA_DEVICE_H_
#define GRADSYNC_SERVER_ENGINE_CUDA_DEVICE_H_

#include <cuda.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "server/engine/device_engine.h"
#include "server/engine/mutex.h"
#include "shm/cuda/device_memory.h"
#include "shm/cuda/driver.h"
#include "shm/status.h"

namespace gradsync::cuda {

class Device {
 public:
  static Result<std::unique_ptr<Device>> Create(const CudaDriver& driver, uint32_t index);

  uint32_t index() const { return index_; }
  const DeviceInfo& info() const { return info_; }
  const CudaDriver& driver() const { return driver_; }
  // "GPU 0 (NVIDIA H200, GPU-8f2b...)", for texts.
  const std::string& text() const { return text_; }
  int multiprocessors() const { return multiprocessors_; }

  // The context, retained by the first call: a GPU that nobody uses has none of ours. An error if
  // it cannot be had, if the GPU lacks what the engine needs, or if it is lost.
  Result<std::shared_ptr<const PrimaryContext>> Use();

  // After an error of a kernel the driver lets nothing more be done in the context.
  bool is_lost() const { return is_lost_.load(std::memory_order_acquire); }
  Status lost() const;  // the sentence; OK if it is not
  // The first reason stays.
  void MarkLost(const std::string& why);
  // Whether the device is lost, as far as `stream` tells; then it is marked so.
  bool IsLostFor(CUstream stream);

 private:
  Device(const CudaDriver& driver, uint32_t index, CUdevice device)
      : driver_(driver), index_(index), device_(device) {}
  Status Describe();

  const CudaDriver& driver_;
  const uint32_t index_;
  const CUdevice device_;
  DeviceInfo info_;
  std::string text_;
  int multiprocessors_ = 0;
  std::atomic<bool> is_lost_{false};
  mutable Mutex mutex_;
  std::shared_ptr<const PrimaryContext> context_ ABSL_GUARDED_BY(mutex_);
  Status lost_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace gradsync::cuda

#endif  // GRADSYNC_SERVER_ENGINE_CUDA_DEVICE_H_
