// A task on GPUs on its way through the engine, and the stream that a group has on a GPU.
#ifndef GRADSYNC_SERVER_ENGINE_CUDA_OPERATION_H_
#define GRADSYNC_SERVER_ENGINE_CUDA_OPERATION_H_

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "server/engine/cuda/device.h"
#include "server/engine/cuda/flags.h"
#include "server/engine/cuda/plan.h"
#include "server/engine/cuda/stream.h"
#include "server/engine/device_engine.h"
#include "shm/cuda/device_memory.h"

namespace gradsync::cuda {

class Group;

// Given back by whoever lets go of it last, when what was launched on it has ended.
struct GroupStream {
  // How many of the group's operations have ended on this GPU; the stream writes it.
  std::unique_ptr<CompletionWord> ended;
  Stream stream;
  // The GPU's thread only:
  uint64_t launched = 0;
  std::shared_ptr<const MappedDeviceMemory> scratch;  // the largest so far
};

// What one GPU does of an operation, and how far it is.
struct Side {
  enum class State : uint8_t {
    kWaiting,   // for the GPU's thread
    kLaunched,  // ended when the stream has ended `number` operations
    kEnded,     // nothing of it is, or will be, on the GPU
  };

  Device* device = nullptr;
  std::atomic<State> state{State::kWaiting};
  // Written before kLaunched, by the GPU's thread.
  std::shared_ptr<GroupStream> stream;
  uint64_t number = 0;
  std::shared_ptr<const MappedDeviceMemory> scratch;

  // Whether the GPU will not touch the operation's memory any more.
  bool HasEnded() const {
    if (device->is_lost()) return true;
    const State now = state.load(std::memory_order_acquire);
    return now == State::kEnded || (now == State::kLaunched && stream->ended->value() >= number);
  }
};

struct Operation {
  Operation(std::shared_ptr<Group> its_group, std::shared_ptr<const Task> its_task, Plan its_plan)
      : group(std::move(its_group)),
        task(std::move(its_task)),
        plan(std::move(its_plan)),
        sides(plan.devices.size()) {}

  const std::shared_ptr<Group> group;
  const std::shared_ptr<const Task> task;
  const Plan plan;
  std::chrono::nanoseconds timeout{0};
  std::chrono::steady_clock::time_point deadline;
  DeviceEngine::Done done;
  std::vector<Side> sides;  // as plan.devices

  bool HasEnded() const {
    for (const Side& side : sides) {
      if (!side.HasEnded()) return false;
    }
    return true;
  }
};

// "operation 7 (all_reduce of 1024 float32)".
std::string TextOf(const Operation& operation);

// Why `operation` is not done in time: the ranks whose streams have not come to it, or, if all
// have, the GPUs that have not finished it.
Status Overdue(const Operation& operation);

}  // namespace gradsync::cuda

#endif  // GRADSYNC_SERVER_ENGINE_CUDA_OPERATION_H_
