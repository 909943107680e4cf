// Kernels for the tests of the stand-in.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

struct Pair {
  const float* in;
  float* out;
};

__device__ __forceinline__ unsigned Index() { return blockIdx.x * blockDim.x + threadIdx.x; }

extern "C" __global__ void __launch_bounds__(256)
    AddScaled(float* __restrict__ out, const float* __restrict__ in, float scale, unsigned count) {
  const unsigned i = Index();
  if (i < count) out[i] += scale * in[i];
}

extern "C" __global__ void ToBfloat16(__nv_bfloat16* out, const float* in, unsigned count) {
  const unsigned i = Index();
  if (i < count) out[i] = __float2bfloat16(in[i]);
}

extern "C" __global__ void CopyPair(Pair pair, unsigned long long count) {
  for (unsigned long long i = Index(); i < count; i += gridDim.x * blockDim.x) {
    pair.out[i] = pair.in[i];
  }
}
