// The thread that launches everything that the engine does on one GPU, in the one order in which it
// is told.
#ifndef GRADSYNC_SERVER_ENGINE_CUDA_DEVICE_THREAD_H_
#define GRADSYNC_SERVER_ENGINE_CUDA_DEVICE_THREAD_H_

#include <cuda.h>

#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <thread>
#include <vector>

#include "server/engine/cuda/communicator.h"
#include "server/engine/cuda/device.h"
#include "server/engine/cuda/group.h"
#include "server/engine/cuda/nccl_library.h"
#include "server/engine/cuda/operation.h"
#include "server/engine/cuda/reduce_launch.h"
#include "server/engine/mutex.h"

namespace gradsync::cuda {

class DeviceThread {
 public:
  // Called, on this thread, with why a group cannot go on.
  using Fail = std::function<void(const std::shared_ptr<Group>& group, const Status& why)>;

  // `nccl` may be null.
  DeviceThread(Device& device, std::shared_ptr<const PrimaryContext> context,
               const NcclLibrary* nccl, Fail fail);
  DeviceThread(const DeviceThread&) = delete;
  DeviceThread& operator=(const DeviceThread&) = delete;
  // Does what it was told before, and gives back what it has on the GPU.
  ~DeviceThread();

  // The part of `operation` that is its side number `side`.
  void Launch(std::shared_ptr<Operation> operation, size_t side);
  // Ends what NCCL does for a group that has failed. Goes before what is in the queue: it needs no
  // other GPU's thread, and what else there is of the group is not launched any more.
  void Abort(uint64_t group);
  // Gives back what the group has on this GPU. Closing communicators takes all GPUs' threads, so
  // all must be told in the same order.
  void Drop(uint64_t group);

 private:
  struct Command {
    enum class Kind : uint8_t { kLaunch, kAbort, kDrop };
    Kind kind = Kind::kLaunch;
    uint64_t group = 0;
    std::shared_ptr<Operation> operation;
    size_t side = 0;
  };
  // What a group has on this GPU.
  struct Holding {
    std::shared_ptr<Group> group;
    std::shared_ptr<GroupStream> stream;
    std::map<std::vector<uint32_t>, std::unique_ptr<Communicator>> communicators;  // by devices
  };

  void Push(Command command, bool is_first);
  void Loop();
  Status LoadKernels();
  // Waits for a command. Meanwhile looks after what is under way. False at the end.
  bool Next(Command* command);
  void LookAfterStreams();
  bool HasWorkUnderWay() const;

  void LaunchNow(const std::shared_ptr<Operation>& operation, size_t side);
  void DropNow(uint64_t group);
  Result<Holding*> HoldingOf(const Operation& operation);
  Result<Communicator*> CommunicatorOf(const Operation& operation, size_t side, Holding* holding);
  Status EnqueueWaits(const Operation& operation, CUstream stream);
  Status EnqueueWork(const Operation& operation, size_t side, Holding* holding,
                     CUdeviceptr scratch);
  Status EnqueueSteps(const std::vector<Step>& steps, CUdeviceptr scratch, CUstream stream);
  Status EnqueueEnd(const Operation& operation, size_t side, bool is_done,
                    const GroupStream& stream);
  Status EnqueueWords(std::vector<CUstreamBatchMemOpParams>* words, CUstream stream) const;
  Status OnDevice(const Status& status) const;  // naming the GPU
  Result<CUdeviceptr> FlagsOf(const DevicePart& part) const;
  Result<CUdeviceptr> ScratchFor(const DevicePlan& plan, Side* side, GroupStream* stream);

  Device& device_;
  const std::shared_ptr<const PrimaryContext> context_;
  const CudaDriver& driver_;
  const NcclLibrary* const nccl_;
  const Fail fail_;

  // The thread only:
  std::map<uint64_t, Holding> holdings_;  // by group
  std::unique_ptr<ReduceKernels> kernels_;
  std::chrono::steady_clock::time_point next_look_;

  mutable Mutex mutex_;
  CondVar wake_;
  std::deque<Command> commands_ ABSL_GUARDED_BY(mutex_);
  bool is_ending_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;  // last
};

}  // namespace gradsync::cuda

#endif  // GRADSYNC_SERVER_ENGINE_CUDA_DEVICE_THREAD_H_
