// What carries out operations on GPUs. The implementation is cuda/, a module of its own that the
// daemon loads where there is a driver (cuda_module.h); nothing here knows CUDA.
//
// An operation on GPUs is started when every rank has submitted it, which says nothing of whether
// its data is there: that the trainers' streams say to the engine's, through flag pages
// (shm/device.h). So several operations of a group may be in the engine, which finishes them in
// order.
#ifndef GRADSYNC_SERVER_ENGINE_DEVICE_ENGINE_H_
#define GRADSYNC_SERVER_ENGINE_DEVICE_ENGINE_H_

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "server/engine/engine.h"
#include "shm/device.h"
#include "shm/segment.h"
#include "shm/status.h"
#include "shm/types.h"
#include "shm/unique_fd.h"

namespace gradsync {

struct DeviceInfo {
  DeviceUuid uuid{};
  std::string name;
  uint64_t memory_bytes = 0;
};

// Memory of a GPU that the engine can reach. Given back to the GPU with the last reference, on any
// thread.
class DeviceMemory {
 public:
  virtual ~DeviceMemory() = default;
  virtual uint32_t device() const = 0;     // index into DeviceEngine::devices()
  virtual std::byte* address() const = 0;  // in the GPU's space: never touched by the processor
  virtual uint64_t size() const = 0;
  virtual HandOver hand_over() const = 0;
};

// A flag page that GPUs can wait for and write.
class DeviceFlags {
 public:
  virtual ~DeviceFlags() = default;
  virtual FlagPage* page() const = 0;
};

// A rank's side of a Task on GPUs.
struct DevicePart {
  uint32_t device = 0;
  uint32_t rank = 0;  // in the job, for texts
  std::shared_ptr<DeviceFlags> flags;
};

// What a Task on GPUs has besides. In order: by group, and in a group by sequence.
struct DeviceSide {
  uint64_t group = 0;
  uint64_t sequence = 0;
  std::vector<DevicePart> parts;  // one per rank of the task
};

class DeviceEngine {
 public:
  // Waits until nothing is in the engine any more: abandon what may never end.
  virtual ~DeviceEngine() = default;

  virtual const std::vector<DeviceInfo>& devices() const = 0;
  // "CUDA driver 13.0, NCCL 2.28.3": for people.
  virtual std::string Describe() const = 0;

  struct Exported {
    std::shared_ptr<const DeviceMemory> memory;
    UniqueFd fd;  // for cuMemImportFromShareableHandle
  };
  // `bytes`, rounded up to what the GPU allocates in, zeroed. kOutOfMemory says how much is free.
  virtual Result<Exported> Allocate(uint32_t device, uint64_t bytes) = 0;
  // Memory of a trainer. It must stay allocated until the reference is gone.
  virtual Result<std::shared_ptr<const DeviceMemory>> ImportExported(uint32_t device, UniqueFd fd,
                                                                     uint64_t bytes) = 0;
  virtual Result<std::shared_ptr<const DeviceMemory>> ImportLegacy(uint32_t device,
                                                                   const LegacyHandle& handle,
                                                                   uint64_t bytes) = 0;
  // The first kFlagPageBytes of a page-aligned mapping, which is kept.
  virtual Result<std::shared_ptr<DeviceFlags>> PinFlags(std::shared_ptr<const Mapping> mapping) = 0;

  // Whether the engine can carry out such an operation over these devices (one entry per rank), and
  // if not why, in a sentence that follows "operation 3, ...: ".
  virtual Status CheckSupported(OpKind kind, DType dtype, ReduceOp op,
                                const std::vector<uint32_t>& devices) const = 0;

  // Carries out `task`, which has a DeviceSide, behind all earlier tasks of its
  // group. Returns at once. `done` is called once, on a thread of the engine: with OK when every
  // output is written and every rank's `done` word too; with why not when the group cannot go on.
  // `timeout` is how long it may take from now: kDeadlineExceeded names the ranks whose streams
  // have not come to it. One thread calls Run and the calls below, in one order.
  using Done = std::function<void(const Status&)>;
  virtual void Run(std::shared_ptr<const Task> task, std::chrono::nanoseconds timeout,
                   Done done) = 0;

  // Before any stream is let go because a task cannot be done, the flag pages of the group's tasks
  // say so (FlagPage::failing).
  //
  // The group has failed: what is in the engine of it ends soon, without waiting for any trainer's
  // stream, and whatever it leaves in the outputs.
  virtual void Abandon(uint64_t group) = 0;

  // There will be no more tasks of the group.
  virtual void Forget(uint64_t group) = 0;
};

// Makes the engine, or says why there is none.
using DeviceEngineFactory = std::function<Result<std::unique_ptr<DeviceEngine>>()>;

}  // namespace gradsync

#endif  // GRADSYNC_SERVER_ENGINE_DEVICE_ENGINE_H_
