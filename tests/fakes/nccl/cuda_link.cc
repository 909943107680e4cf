#include "tests/fakes/nccl/cuda_link.h"

#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>

namespace gradsync::fake_nccl {
namespace {

template <typename Function>
void Find(void* library, const char* name, Function* function) {
  *function = reinterpret_cast<Function>(dlsym(library, name));
  if (*function != nullptr) return;
  std::fprintf(stderr, "the stand-in for NCCL needs the one for libcuda.so.1 (%s): %s\n", name,
               dlerror());
  std::abort();
}

CudaLink Load() {
  // A process that has none yet gets the one on LD_LIBRARY_PATH.
  void* library = dlopen("libcuda.so.1", RTLD_NOW);
  CudaLink link;
  Find(library, "cuCtxGetDevice", &link.cuCtxGetDevice);
  Find(library, "cuDeviceGetCount", &link.cuDeviceGetCount);
  Find(library, "cuMemAlloc_v2", &link.cuMemAlloc);
  Find(library, "cuMemFree_v2", &link.cuMemFree);
  Find(library, "fakeCudaEnter", &link.enter);
  Find(library, "fakeCudaLaunch", &link.launch);
  Find(library, "fakeCudaKernelAddress", &link.kernel_address);
  Find(library, "fakeCudaStreamDevice", &link.stream_device);
  Find(library, "fakeCudaBreach", &link.breach);
  return link;
}

}  // namespace

const CudaLink& Cuda() {
  static const CudaLink link = Load();
  return link;
}

void Breach(const std::string& rule, const char* source) {
  Cuda().breach(rule.c_str(), source);
  std::abort();
}

}  // namespace gradsync::fake_nccl
