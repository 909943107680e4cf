// The inner loops: combining the ranks' inputs, and storing a result to every rank.
//
// A result has the same bits whatever instruction set the machine has, however the data is aligned
// and cut: each element is r0 op r1 op r2 ... in rank order, from left to right, nothing fused.
// (Only the payload bits of a NaN are left open.)
#ifndef GRADSYNC_SERVER_ENGINE_CPU_KERNELS_H_
#define GRADSYNC_SERVER_ENGINE_CPU_KERNELS_H_

#include <cstddef>
#include <cstdint>

#include "shm/types.h"

namespace gradsync {

// Combines `bytes` bytes (whole elements) that start `offset` bytes into each of the `ranks`
// inputs, and writes the result to `result`, which overlaps none of them. An average is divided by
// `divisor`.
//
//   sum, product  integers wrap; float16 and bfloat16 are computed in float32 and rounded once, to
//                 nearest even.
//   avg           float32, float16, bfloat16: the sum in float32, divided once, rounded once.
//                 float64, complex: the sum of x * (1 / divisor), so that no sum overflows.
//   min, max      NaN if any rank has one.
//   bool          sum and max are "or", product and min are "and"; any byte but 0 is true.
//   bit_and, bit_or, bit_xor  of integers bit by bit; of bool "and", "or", and bit by bit.
using CombineKernel = void (*)(const std::byte* const* inputs, size_t ranks, size_t divisor,
                               size_t offset, size_t bytes, std::byte* result);

// The kernel for the machine at hand. `dtype` and `op` must satisfy IsSupported.
CombineKernel FindCombineKernel(DType dtype, ReduceOp op, size_t ranks, size_t divisor);

// Stores `bytes` bytes from `result` at `offset` bytes into each output. Meanwhile has the same
// number of bytes from `ahead` bytes into each input brought to the cache: what is combined next.
using SpreadKernel = void (*)(const std::byte* result, std::byte* const* outputs, size_t ranks,
                              size_t offset, size_t bytes, const std::byte* const* inputs,
                              size_t ahead);

SpreadKernel FindSpreadKernel();

}  // namespace gradsync

#endif  // GRADSYNC_SERVER_ENGINE_CPU_KERNELS_H_
