// test_kernels.cu, compiled for the host.
#include "tests/fakes/cuda/kernel_shim.h"
// The kernels come after the words they are written in.
#include "tests/fakes/cuda/test_kernels.cu"

template <>
struct FakeKernelArgument<Pair> {
  static bool Make(const FakeKernelLaunch& launch, Pair* pair) {
    return FakeKernelArgument<const float*>::Make(launch, &pair->in) &&
           FakeKernelArgument<float*>::Make(launch, &pair->out);
  }
};

FAKE_KERNEL(AddScaled, float*, const float*, float, unsigned);
FAKE_KERNEL(ToBfloat16, __nv_bfloat16*, const float*, unsigned);
FAKE_KERNEL(CopyPair, Pair, unsigned long long);
