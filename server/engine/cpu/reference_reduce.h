// For tests: what a reduction must give, by the plainest code there is, element by element.
#ifndef GRADSYNC_SERVER_ENGINE_CPU_REFERENCE_REDUCE_H_
#define GRADSYNC_SERVER_ENGINE_CPU_REFERENCE_REDUCE_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "shm/types.h"

namespace gradsync {

using Bytes = std::vector<std::byte>;

// `count` elements with random bits, among them (unless `finite`) infinities, NaNs, subnormal
// numbers and zeros of both signs; bool is 0 or 1.
Bytes RandomElements(DType dtype, size_t count, uint64_t seed, bool finite = false);

Bytes ReferenceReduce(DType dtype, ReduceOp op, const std::vector<Bytes>& inputs);

// Empty if both hold the same bits, any NaN being equal to any other; else says where they differ.
std::string Difference(DType dtype, const std::byte* actual, const Bytes& expected);

float Float16ToFloat(uint16_t bits);
uint16_t FloatToFloat16(float value);  // to nearest even
float BFloat16ToFloat(uint16_t bits);
uint16_t FloatToBFloat16(float value);  // to nearest even

}  // namespace gradsync

#endif  // GRADSYNC_SERVER_ENGINE_CPU_REFERENCE_REDUCE_H_
