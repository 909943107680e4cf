// The stand-in for libcuda.so.1 that this process has loaded.
#ifndef GRADSYNC_TESTS_FAKES_NCCL_CUDA_LINK_H_
#define GRADSYNC_TESTS_FAKES_NCCL_CUDA_LINK_H_

#include <cuda.h>

#include <string>

#include "tests/fakes/cuda/fake_cuda.h"

namespace gradsync::fake_nccl {

// What is called of it: of the driver's API, and of what the stand-in adds (fake_cuda.h).
struct CudaLink {
  decltype(&::cuCtxGetDevice) cuCtxGetDevice = nullptr;
  decltype(&::cuDeviceGetCount) cuDeviceGetCount = nullptr;
  decltype(&::cuMemAlloc) cuMemAlloc = nullptr;
  decltype(&::cuMemFree) cuMemFree = nullptr;
  decltype(&::fakeCudaEnter) enter = nullptr;
  decltype(&::fakeCudaLaunch) launch = nullptr;
  decltype(&::fakeCudaKernelAddress) kernel_address = nullptr;
  decltype(&::fakeCudaStreamDevice) stream_device = nullptr;
  decltype(&::fakeCudaBreach) breach = nullptr;
};

// Loaded at the first call; ends the process if libcuda.so.1 is not the stand-in.
const CudaLink& Cuda();

// A rule was broken that NCCL documents, but does not check: it would hang or be wrong.
[[noreturn]] void Breach(const std::string& rule, const char* source);

}  // namespace gradsync::fake_nccl

#endif  // GRADSYNC_TESTS_FAKES_NCCL_CUDA_LINK_H_
