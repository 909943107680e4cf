// The engine for gradients on GPUs.
//
// Threads: one for each GPU in use launches (device_thread.h), one sees what has ended (watcher.h),
// one lets go of memory (janitor.h). A group has a stream of its own on each of its GPUs, so that
// groups do not wait for each other, as long as there are fewer than the driver's connections to a
// GPU (CUDA_DEVICE_MAX_CONNECTIONS, which is set to 32, the most there can be, unless it is set).
#ifndef GRADSYNC_SERVER_ENGINE_CUDA_CUDA_ENGINE_H_
#define GRADSYNC_SERVER_ENGINE_CUDA_CUDA_ENGINE_H_

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "server/engine/cuda/device.h"
#include "server/engine/cuda/device_threads.h"
#include "server/engine/cuda/group.h"
#include "server/engine/cuda/janitor.h"
#include "server/engine/cuda/nccl_library.h"
#include "server/engine/cuda/watcher.h"
#include "server/engine/cuda_module.h"
#include "server/engine/device_engine.h"

namespace gradsync::cuda {

// Operations are carried out as device_engine.h says, and:
// - on one GPU the bits of a result are those of the CPU engine. Over several, NCCL decides the
//   order, and what min and max make of NaN;
// - an operation starts on a GPU when all of its ranks are ready on every GPU;
// - after a failure the engine writes kReleased to `ready` of the operations that it has, and to
//   `done` of each when its stream is through with it. Ranks that wait for operations which the
//   engine does not have are the caller's to release;
// - a GPU of which a stream failed is out of use until the process ends: whatever is asked of it
//   says so. The others go on;
// - the first operation of a group over several GPUs makes a communicator. That takes seconds, in
//   which these GPUs launch nothing else.
class CudaEngine : public DeviceEngine {
 public:
  // As LoadCudaEngine, which calls it in the module.
  static Result<std::unique_ptr<DeviceEngine>> Create(const CudaOptions& options);

  ~CudaEngine() override;

  const std::vector<DeviceInfo>& devices() const override { return infos_; }
  std::string Describe() const override;

  Result<Exported> Allocate(uint32_t device, uint64_t bytes) override;
  Result<std::shared_ptr<const DeviceMemory>> ImportExported(uint32_t device, UniqueFd fd,
                                                             uint64_t bytes) override;
  Result<std::shared_ptr<const DeviceMemory>> ImportLegacy(uint32_t device,
                                                           const LegacyHandle& handle,
                                                           uint64_t bytes) override;
  Result<std::shared_ptr<DeviceFlags>> PinFlags(std::shared_ptr<const Mapping> mapping) override;

  Status CheckSupported(OpKind kind, DType dtype, ReduceOp op,
                        const std::vector<uint32_t>& devices) const override;
  void Run(std::shared_ptr<const Task> task, std::chrono::nanoseconds timeout, Done done) override;
  void Abandon(uint64_t group) override;
  void Forget(uint64_t group) override;

 private:
  CudaEngine(const CudaDriver& driver, std::vector<std::unique_ptr<Device>> devices,
             Result<std::unique_ptr<const NcclLibrary>> nccl);

  Result<Device*> DeviceAt(uint32_t index) const;
  Status CheckTask(const Task& task);

  const CudaDriver& driver_;
  const std::vector<std::unique_ptr<Device>> devices_;
  const Result<std::unique_ptr<const NcclLibrary>> nccl_;  // or why there is none
  std::vector<DeviceInfo> infos_;
  std::map<uint64_t, std::shared_ptr<Group>> groups_;  // of Run's thread
  // In the order in which they need each other: the watcher goes first.
  Janitor janitor_;
  DeviceThreads threads_;
  Watcher watcher_;
};

}  // namespace gradsync::cuda

#endif  // GRADSYNC_SERVER_ENGINE_CUDA_CUDA_ENGINE_H_
