// kernels.cu compiled for the host, for the stand-in for the driver (GRADSYNC_FAKE_CUDA_KERNELS).
#include "tests/fakes/cuda/kernel_shim.h"
// After the shim, which clang-format would sort behind it.
#include "server/engine/cuda/kernels.cu"

template <>
struct FakeKernelArgument<gradsync::cuda::KernelArguments> {
  static bool Make(const FakeKernelLaunch& launch, gradsync::cuda::KernelArguments* arguments) {
    for (unsigned i = 0; i < arguments->input_count; ++i) {
      if (!FakeKernelArgument<const void*>::Make(launch, &arguments->inputs[i])) return false;
    }
    for (unsigned i = 0; i < arguments->output_count; ++i) {
      if (!FakeKernelArgument<void*>::Make(launch, &arguments->outputs[i])) return false;
    }
    return true;
  }
};

#define GRADSYNC_HOST_KERNEL(name, element, operation) \
  FAKE_KERNEL(gradsync_##name, gradsync::cuda::KernelArguments);
GRADSYNC_KERNELS(GRADSYNC_HOST_KERNEL)
