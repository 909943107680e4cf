// What the kernels of kernels.cu take, as both sides see it.
#ifndef GRADSYNC_SERVER_ENGINE_CUDA_KERNEL_ARGUMENTS_H_
#define GRADSYNC_SERVER_ENGINE_CUDA_KERNEL_ARGUMENTS_H_

namespace gradsync::cuda {

inline constexpr unsigned kMaxKernelPointers = 128;
inline constexpr unsigned kPackBytes = 16;  // what a thread loads and stores at once

struct KernelArguments {
  const void* inputs[kMaxKernelPointers];
  void* outputs[kMaxKernelPointers];
  unsigned input_count;
  unsigned output_count;
  unsigned long long elements;
  unsigned long long packs;  // the first elements, by kPackBytes: 0 if a pointer is not so aligned
  double divisor;
};
// What a launch had room for before CUDA 12.1.
static_assert(sizeof(KernelArguments) <= 4096);

}  // namespace gradsync::cuda

#endif  // GRADSYNC_SERVER_ENGINE_CUDA_KERNEL_ARGUMENTS_H_
