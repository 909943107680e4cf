// The threads of all GPUs in use, told what to do in the same order: launches of NCCL, joining a
// communicator and closing it take all of its GPUs' threads, which must not wait for each other
// crosswise.
#ifndef GRADSYNC_SERVER_ENGINE_CUDA_DEVICE_THREADS_H_
#define GRADSYNC_SERVER_ENGINE_CUDA_DEVICE_THREADS_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "server/engine/cuda/device.h"
#include "server/engine/cuda/device_thread.h"
#include "server/engine/cuda/group.h"
#include "server/engine/cuda/nccl_library.h"
#include "server/engine/mutex.h"
#include "shm/status.h"

namespace gradsync::cuda {

// Any thread, but for Start.
class DeviceThreads {
 public:
  // `nccl` may be null. Both stay longer than this.
  DeviceThreads(const std::vector<std::unique_ptr<Device>>& devices, const NcclLibrary* nccl);
  // Does what is in the queues.
  ~DeviceThreads();

  // Starts the thread of a GPU unless there is one: an error if the GPU cannot be used.
  // One thread calls it.
  Status Start(uint32_t device);

  // Passes on what the group may launch now. Its GPUs' threads must have been started.
  void Launch(Group& group);

  // Fails the group, and ends what NCCL does for it. The first reason stays.
  void Fail(const std::shared_ptr<Group>& group, const Status& why);

  // Gives back what the group has on the GPUs; it is idle, and stays so.
  void Drop(const Group& group);

 private:
  const std::vector<std::unique_ptr<Device>>& devices_;
  const NcclLibrary* const nccl_;
  Mutex mutex_;                                                                 // the one order
  std::vector<std::unique_ptr<DeviceThread>> threads_ ABSL_GUARDED_BY(mutex_);  // null: not in use
};

}  // namespace gradsync::cuda

#endif  // GRADSYNC_SERVER_ENGINE_CUDA_DEVICE_THREADS_H_
