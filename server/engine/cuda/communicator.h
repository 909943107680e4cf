// One GPU's rank in a communicator of NCCL's: non-blocking, so that nothing is waited for longer
// than the caller's patience lasts.
#ifndef GRADSYNC_SERVER_ENGINE_CUDA_COMMUNICATOR_H_
#define GRADSYNC_SERVER_ENGINE_CUDA_COMMUNICATOR_H_

#include <cuda.h>
#include <nccl.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <vector>

#include "server/engine/cuda/nccl_library.h"
#include "server/engine/cuda/plan.h"
#include "shm/status.h"

namespace gradsync::cuda {

// How long to wait for NCCL and the other GPUs' threads.
struct Patience {
  std::chrono::steady_clock::time_point deadline;
  const std::atomic<bool>* stop = nullptr;  // may be null

  bool IsOver() const {
    return (stop != nullptr && stop->load(std::memory_order_acquire)) ||
           std::chrono::steady_clock::now() >= deadline;
  }
};

// Used by the GPU's thread alone, which has the GPU's context current. Any error is the end of it:
// then it must be aborted, and so must be the others' ranks.
class Communicator {
 public:
  // Returns when all `size` ranks have come to `meeting_point`.
  static Result<std::unique_ptr<Communicator>> Join(const NcclLibrary& nccl,
                                                    const ncclUniqueId& meeting_point, int size,
                                                    int rank, const Patience& patience);
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;
  // Aborts it, unless it is closed: kernels of it end, whatever the others do.
  ~Communicator();

  // Enqueues the calls as one group. Places in scratch are counted from `scratch`. Returns when
  // they are in the stream, which the first time takes all ranks.
  Status Enqueue(const std::vector<Collective>& calls, CUdeviceptr scratch, CUstream stream,
                 const Patience& patience);

  // OK, also while something is under way, until NCCL has come upon an error.
  Status Check() const;

  // In good order, with the other ranks; nothing of it is in a stream any more.
  void Close(const Patience& patience);

 private:
  explicit Communicator(const NcclLibrary& nccl) : nccl_(nccl) {}

  // Whether `result` of `call` will do, now or once what it began is through.
  Status Await(ncclResult_t result, const char* call, const Patience& patience) const;
  Status Error(ncclResult_t result, const char* call) const;
  Result<ncclRedOp_t> OpOf(const Collective& call, ncclRedOp_t* made) const;
  ncclResult_t Call(const Collective& call, ncclRedOp_t op, CUdeviceptr scratch,
                    CUstream stream) const;

  const NcclLibrary& nccl_;
  ncclComm_t handle_ = nullptr;
};

}  // namespace gradsync::cuda

#endif  // GRADSYNC_SERVER_ENGINE_CUDA_COMMUNICATOR_H_
