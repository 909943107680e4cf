// What the benchmark times, each in a process of its own: a rank whose gradients the daemon
// averages, and what that is compared with.
#ifndef GRADSYNC_TESTS_GPU_BENCH_RUNNER_H_
#define GRADSYNC_TESTS_GPU_BENCH_RUNNER_H_

#include <cstdint>
#include <memory>
#include <string>

#include "shm/status.h"

namespace gradsync::bench {

// Made and run in a process that has not loaded the driver before.
class Runner {
 public:
  virtual ~Runner() = default;
  // One round: the seconds of one iteration.
  virtual Result<double> Round() = 0;
};
using RunnerOrError = Result<std::unique_ptr<Runner>>;

// A process as a rank of the daemon.
struct RankAt {
  std::string socket;
  std::string job;
  uint32_t rank = 0;
  uint32_t size = 1;
  int gpu = 0;  // its ordinal
};

struct Work {
  uint64_t bytes = 0;
  int iterations = 1;
  // Each operation begins when the one before has ended; else as in a backward, whose buckets do
  // not wait for each other.
  bool chained = false;
};

// The daemon's average of buffers, in place.
RunnerOrError MakeDaemonReduce(const RankAt& at, const Work& work);
// NCCL's, of one process that drives this many GPUs.
RunnerOrError MakeNcclReduce(int gpus, const Work& work);
// The daemon's kernel, over the buffers of `ranks` that are all of this process.
RunnerOrError MakeKernelReduce(uint32_t ranks, const Work& work);
// The device's own copy of as many bytes.
RunnerOrError MakeCopy(const Work& work);

// A synthetic training step: for each layer copies as its computation, then its gradient.
struct Step {
  int layers = 1;
  uint64_t gradient_bytes = 0;  // of a layer, which has a bucket of its own
  uint64_t computed_bytes = 0;  // that a layer's computation copies
  int iterations = 1;
};
RunnerOrError MakeStepWithDaemon(const RankAt& at, const Step& step);
RunnerOrError MakeStepAlone(int gpu, const Step& step);
// Not the step's time, but that of the trainer's own thread for one bucket: ready and wait.
RunnerOrError MakeHostTime(const RankAt& at, const Step& step);

}  // namespace gradsync::bench

#endif  // GRADSYNC_TESTS_GPU_BENCH_RUNNER_H_
