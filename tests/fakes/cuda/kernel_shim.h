// Compiles a .cu file as C++ for the host: include this, then the .cu file, then say for each
// kernel
//
//   FAKE_KERNEL(NAME, argument types...)
//
// and link a shared library of it; GRADSYNC_FAKE_CUDA_KERNELS names that library. For kernels that
// are element-wise: threads run one after another, so there is no shared memory and no
// __syncthreads(). Parameters that are pointers are device addresses, and are replaced by where the
// memory really lies; one that is not NULL must point to memory that the device may touch. A
// structure that holds pointers specialises FakeKernelArgument.
#ifndef GRADSYNC_TESTS_FAKES_CUDA_KERNEL_SHIM_H_
#define GRADSYNC_TESTS_FAKES_CUDA_KERNEL_SHIM_H_

// CUDA's own headers define the words below as well: theirs first, and then not again.
#include <vector_types.h>

#include <array>
#include <cstring>
#include <tuple>
#include <type_traits>
#include <utility>

#include "tests/fakes/cuda/kernel_abi.h"

#undef __global__
#undef __device__
#undef __host__
#undef __constant__
#undef __forceinline__
#undef __noinline__
#undef __launch_bounds__
#define __global__
#define __device__
#define __host__
#define __constant__ const
#define __forceinline__ inline
#define __noinline__
#define __launch_bounds__(...)

struct FakeDim {
  unsigned x = 1;
  unsigned y = 1;
  unsigned z = 1;
};

inline thread_local FakeDim gridDim;
inline thread_local FakeDim blockDim;
inline thread_local FakeDim blockIdx;
inline thread_local FakeDim threadIdx;

// A parameter as the kernel gets it. Make() returns false if it holds a bad address.
template <typename T>
struct FakeKernelArgument {
  static bool Make(const FakeKernelLaunch&, T*) { return true; }
};

template <typename T>
struct FakeKernelArgument<T*> {
  static bool Make(const FakeKernelLaunch& launch, T** argument) {
    if (*argument == nullptr) return true;
    // A pointer to what is not const may be written through.
    void* place = launch.address(launch.context, *argument, !std::is_const_v<T>);
    *argument = static_cast<T*>(place);
    return place != nullptr;
  }
};

template <typename Run>
void FakeForEachThread(const FakeKernelLaunch& launch, const Run& run) {
  gridDim = {launch.grid[0], launch.grid[1], launch.grid[2]};
  blockDim = {launch.block[0], launch.block[1], launch.block[2]};
  const auto each = [](FakeDim* index, const FakeDim& dim, const auto& inner) {
    for (index->z = 0; index->z < dim.z; ++index->z) {
      for (index->y = 0; index->y < dim.y; ++index->y) {
        for (index->x = 0; index->x < dim.x; ++index->x) inner();
      }
    }
  };
  each(&blockIdx, gridDim, [&] { each(&threadIdx, blockDim, run); });
}

template <typename... Arguments>
struct FakeKernelOf {
  static constexpr std::array<size_t, sizeof...(Arguments)> kSizes{sizeof(Arguments)...};

  template <typename Kernel>
  static bool Run(const FakeKernelLaunch& launch, Kernel kernel) {
    return Run(launch, kernel, std::index_sequence_for<Arguments...>());
  }

 private:
  template <typename Kernel, size_t... I>
  static bool Run(const FakeKernelLaunch& launch, Kernel kernel, std::index_sequence<I...>) {
    std::tuple<Arguments...> arguments;
    (std::memcpy(&std::get<I>(arguments), launch.params[I], sizeof(Arguments)), ...);
    if (!(FakeKernelArgument<Arguments>::Make(launch, &std::get<I>(arguments)) && ...))
      return false;
    FakeForEachThread(launch, [&] { kernel(std::get<I>(arguments)...); });
    return true;
  }
};

#define FAKE_KERNEL_EXPORT extern "C" __attribute__((visibility("default")))

#define FAKE_KERNEL(NAME, ...)                                                                     \
  FAKE_KERNEL_EXPORT const FakeKernelParams fakeKernelParams_##NAME = {                            \
      FakeKernelOf<__VA_ARGS__>::kSizes.size(), FakeKernelOf<__VA_ARGS__>::kSizes.data()};         \
  FAKE_KERNEL_EXPORT bool fakeKernel_##NAME(const FakeKernelLaunch* launch) {                      \
    return FakeKernelOf<__VA_ARGS__>::Run(*launch, [](auto... arguments) { NAME(arguments...); }); \
  }                                                                                                \
  static_assert(true)

#endif  // GRADSYNC_TESTS_FAKES_CUDA_KERNEL_SHIM_H_
