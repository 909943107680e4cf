// Between the stand-in for the driver and a library that holds kernels compiled for the host
// (kernel_shim.h): for a kernel NAME it exports fakeKernel_NAME and fakeKernelParams_NAME.
#ifndef GRADSYNC_TESTS_FAKES_CUDA_KERNEL_ABI_H_
#define GRADSYNC_TESTS_FAKES_CUDA_KERNEL_ABI_H_

#include <cstddef>

extern "C" {

// What the parameters' sizes are, for the copy that cuLaunchKernel takes of them.
struct FakeKernelParams {
  size_t count;
  const size_t* sizes;
};

struct FakeKernelLaunch {
  void* const* params;  // a copy of each
  unsigned grid[3];
  unsigned block[3];
  // Where a kernel finds what `device_address` points to, to write it as well or only to read it;
  // the context fails with CUDA_ERROR_ILLEGAL_ADDRESS, after the launch returned false, if that is
  // nothing.
  void* (*address)(void* context, const void* device_address, bool write);
  void* context;
};

// Runs the whole grid; false, without having run any of it, if an address is bad.
typedef bool (*FakeKernel)(const FakeKernelLaunch* launch);

}  // extern "C"

#endif  // GRADSYNC_TESTS_FAKES_CUDA_KERNEL_ABI_H_
