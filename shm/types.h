// What an operation is made of: kinds, element types, reductions. The values cross the local
// boundary and the C ABI (gradsync/gradsync.h): append only.
#ifndef GRADSYNC_SHM_TYPES_H_
#define GRADSYNC_SHM_TYPES_H_

#include <cstddef>
#include <cstdint>

namespace gradsync {

enum class OpKind : uint8_t {
  kAllReduce = 0,
  kBroadcast = 1,
  kAllGather = 2,
  kBarrier = 3,
  kBucketReduce = 4,  // an all-reduce of one bucket of a registered plan
};
inline constexpr uint8_t kOpKindCount = 5;

enum class DType : uint8_t {
  kFloat32 = 0,
  kFloat64 = 1,
  kFloat16 = 2,
  kBFloat16 = 3,
  kInt8 = 4,
  kUInt8 = 5,
  kInt16 = 6,
  kInt32 = 7,
  kInt64 = 8,
  kBool = 9,  // one byte, 0 or 1; sum and max are "or", product and min are "and"
  kComplex64 = 10,
  kComplex128 = 11,
};
inline constexpr uint8_t kDTypeCount = 12;

enum class ReduceOp : uint8_t {
  kSum = 0,
  kAvg = 1,  // floating-point and complex types only
  kMin = 2,  // not for complex types
  kMax = 3,  // not for complex types
  kProduct = 4,
};
inline constexpr uint8_t kReduceOpCount = 5;

// Bytes of one element. The value must be a valid DType.
size_t DTypeSize(DType dtype);

// Lower-case names as in messages: "float32", "all_reduce", "avg". "unknown" for other values.
const char* DTypeName(DType dtype);
const char* OpKindName(OpKind kind);
const char* ReduceOpName(ReduceOp op);

// Whether values of `dtype` can be combined by `op`.
bool IsSupported(DType dtype, ReduceOp op);

}  // namespace gradsync

#endif  // GRADSYNC_SHM_TYPES_H_
