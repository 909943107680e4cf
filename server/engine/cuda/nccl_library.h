// NCCL, loaded at run time: within one GPU the engine does without.
#ifndef GRADSYNC_SERVER_ENGINE_CUDA_NCCL_LIBRARY_H_
#define GRADSYNC_SERVER_ENGINE_CUDA_NCCL_LIBRARY_H_

#include <nccl.h>

#include <memory>
#include <string>

#include "shm/status.h"

namespace gradsync::cuda {

// clang-format off
#define GRADSYNC_NCCL_FUNCTIONS(X) \
  X(ncclGetVersion) X(ncclGetErrorString) X(ncclGetLastError) X(ncclGetUniqueId) \
  X(ncclCommInitRankConfig) X(ncclCommFinalize) X(ncclCommDestroy) X(ncclCommAbort) \
  X(ncclCommGetAsyncError) X(ncclRedOpCreatePreMulSum) X(ncclRedOpDestroy) \
  X(ncclAllReduce) X(ncclAllGather) X(ncclReduceScatter) X(ncclBroadcast) \
  X(ncclGroupStart) X(ncclGroupEnd)
// clang-format on

// The library's functions. Immutable once loaded; any thread.
struct NcclLibrary {
#define GRADSYNC_NCCL_MEMBER(name) decltype(&::name) name = nullptr;
  GRADSYNC_NCCL_FUNCTIONS(GRADSYNC_NCCL_MEMBER)
#undef GRADSYNC_NCCL_MEMBER
  int version = 0;  // 22809 for 2.28.9

  // `file` as for dlopen. Stays loaded. kUnsupported, in a sentence of what is missing.
  static Result<std::unique_ptr<const NcclLibrary>> Load(const std::string& file);

  std::string VersionText() const;  // "2.28.9"
};

}  // namespace gradsync::cuda

#endif  // GRADSYNC_SERVER_ENGINE_CUDA_NCCL_LIBRARY_H_
