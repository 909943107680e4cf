// The GPU engine's module: a shared object of its own, so that a machine without GPUs needs neither
// driver nor NCCL, and a build without the CUDA toolkit is a whole daemon.
#ifndef GRADSYNC_SERVER_ENGINE_CUDA_MODULE_H_
#define GRADSYNC_SERVER_ENGINE_CUDA_MODULE_H_

#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "server/engine/device_engine.h"
#include "shm/status.h"

namespace gradsync {

struct CudaOptions {
  std::string module;                 // a file; empty: beside the program, or in ../lib/gradsync
  std::string nccl = "libnccl.so.2";  // as for dlopen
};

// Where LoadCudaEngine looks for the module in a daemon whose program is `program` (its real path),
// the likeliest first; `module` as above.
std::vector<std::string> CudaModuleCandidates(const std::string& module,
                                              const std::filesystem::path& program);

// Loads the module, the driver and NCCL. kUnsupported, with what is missing, where there is no such
// module, driver or GPU. Without NCCL the engine works within each GPU, and says so when asked for
// more. The module is never unloaded.
Result<std::unique_ptr<DeviceEngine>> LoadCudaEngine(const CudaOptions& options);

// What the module exports, by this name. Fills in exactly one of the two; the caller owns it.
inline constexpr char kCudaModuleEntry[] = "gradsync_make_cuda_engine";
using MakeCudaEngine = void (*)(const CudaOptions& options, std::unique_ptr<DeviceEngine>* engine,
                                Status* error);

}  // namespace gradsync

#endif  // GRADSYNC_SERVER_ENGINE_CUDA_MODULE_H_
