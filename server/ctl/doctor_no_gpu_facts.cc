// In the place of doctor_gpu_facts.cc in a build without the CUDA toolkit.
#include "server/ctl/doctor_gpu_facts.h"

namespace gradsync {

GpuFacts CollectGpu(const CudaOptions&, const std::filesystem::path&) {
  GpuFacts facts;
  facts.is_built = false;
  return facts;
}

}  // namespace gradsync
