// The engine's own kernels on one GPU: which there is for what, and its launch.
#ifndef GRADSYNC_SERVER_ENGINE_CUDA_REDUCE_LAUNCH_H_
#define GRADSYNC_SERVER_ENGINE_CUDA_REDUCE_LAUNCH_H_

#include <cuda.h>

#include <map>
#include <memory>
#include <string>

#include "server/engine/cuda/plan.h"
#include "shm/cuda/device_memory.h"
#include "shm/status.h"

namespace gradsync::cuda {

// Of one GPU; one thread. That thread has the GPU's context current in every call and in the
// destructor, by when what was launched has ended.
class ReduceKernels {
 public:
  // Has the driver compile the kernels, unless it finds them in its cache.
  static Result<std::unique_ptr<ReduceKernels>> Load(std::shared_ptr<const PrimaryContext> context,
                                                     int multiprocessors);
  ReduceKernels(const ReduceKernels&) = delete;
  ReduceKernels& operator=(const ReduceKernels&) = delete;
  ~ReduceKernels();

  // Enqueues `step`, of which places in scratch are counted from `scratch`.
  Status Launch(const ReduceStep& step, CUdeviceptr scratch, CUstream stream);

 private:
  ReduceKernels(std::shared_ptr<const PrimaryContext> context, int multiprocessors)
      : context_(std::move(context)), multiprocessors_(multiprocessors) {}
  Result<CUfunction> Find(const std::string& name);

  const std::shared_ptr<const PrimaryContext> context_;
  const int multiprocessors_;
  CUmodule module_ = nullptr;
  std::map<std::string, CUfunction> functions_;  // that have been used
};

}  // namespace gradsync::cuda

#endif  // GRADSYNC_SERVER_ENGINE_CUDA_REDUCE_LAUNCH_H_
