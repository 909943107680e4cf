// What carries out one operation over memory that it is shown. Implementations: cpu/.
//
// An engine decides nothing: it does not know jobs, sessions or order. server/job says what to run
// and when; server/local shows it where the bytes lie.
#ifndef GRADSYNC_SERVER_ENGINE_ENGINE_H_
#define GRADSYNC_SERVER_ENGINE_ENGINE_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "shm/types.h"

namespace gradsync {

struct DeviceSide;  // device_engine.h

// One operation whose inputs are all there. Ranks are indices into `inputs` and `outputs`, in the
// group's order. `outputs[i]` may equal `inputs[i]` (in place), but for kAllToAll; other overlaps
// are not allowed.
struct Task {
  // The owner's name for it, by which it is known after a crash (cpu/recovery.h). Others may share
  // it where nothing is recovered.
  uint64_t id = 0;
  OpKind kind = OpKind::kBarrier;
  DType dtype = DType::kFloat32;
  ReduceOp reduce_op = ReduceOp::kSum;
  uint32_t root = 0;   // of a kind that has one
  uint64_t count = 0;  // elements of a block
  // Of an average: by what the sum is divided. 0: the number of inputs.
  uint32_t divisor = 0;
  // Both have one entry per rank, null where OpTraits says that the rank has none (what is there
  // all the same is ignored). Each is one block, of count x DTypeSize(dtype) bytes, or one for each
  // rank. Aligned to the element's size.
  std::vector<const std::byte*> inputs;
  std::vector<std::byte*> outputs;
  // On GPUs, for a DeviceEngine: then the addresses above are the GPUs'. Null for an Engine.
  std::shared_ptr<DeviceSide> device;
  // Keeps the memory mapped until the task is done, whatever becomes of its sessions.
  std::vector<std::shared_ptr<const void>> keep_alive;
};

class Engine {
 public:
  virtual ~Engine() = default;

  // Carries out `task`. Small tasks run on the calling thread before Run returns true. Otherwise
  // Run returns false at once, and `done` is called exactly once, on a thread of the engine, when
  // every output is written (with release: the caller need not synchronise further). One thread
  // calls Run.
  virtual bool Run(std::shared_ptr<const Task> task, std::function<void()> done) = 0;

  // Threads that work on large tasks.
  virtual int threads() const = 0;
};

}  // namespace gradsync

#endif  // GRADSYNC_SERVER_ENGINE_ENGINE_H_
