// Looks at the GPUs, the driver and what goes with them for gradsyncctl doctor. Loads the driver
// and NCCL into this process, and makes no context: the GPUs' memory stays as it is.
#ifndef GRADSYNC_SERVER_CTL_DOCTOR_GPU_FACTS_H_
#define GRADSYNC_SERVER_CTL_DOCTOR_GPU_FACTS_H_

#include <filesystem>
#include <string>

#include "server/ctl/doctor_gpu.h"
#include "server/engine/cuda_module.h"

namespace gradsync {

// `options`: of the daemon whose program is `program`, if that is known.
GpuFacts CollectGpu(const CudaOptions& options, const std::filesystem::path& program);

// Processes are looked for in `proc`.
MpsFacts LookForMps(const std::string& pipe_directory, const std::string& proc = "/proc");

}  // namespace gradsync

#endif  // GRADSYNC_SERVER_CTL_DOCTOR_GPU_FACTS_H_
