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
  kBucketReduce = 4,   // an all-reduce of one bucket of a registered plan
  kReduce = 5,         // an all-reduce whose result only the root gets
  kGather = 6,         // an all-gather whose result only the root gets
  kScatter = 7,        // rank r gets block r of the root's input
  kReduceScatter = 8,  // rank r gets block r of what an all-reduce of the inputs would give
  kAllToAll = 9,       // block r of a rank's output is that rank's block of rank r's input
  kShare = 10,         // a broadcast from the last member that takes part in it
};
inline constexpr uint8_t kOpKindCount = 11;

// Who has an input, or an output, of an operation.
enum class Who : uint8_t { kNobody, kRoot, kEverybody };

// How an operation uses memory, in blocks of as many elements as its count says.
struct OpTraits {
  bool reduces;   // its ReduceOp means something
  bool has_root;  // its root means something
  Who gives;
  Who takes;
  bool input_per_rank;  // an input is one block for each rank, not one block
  bool output_per_rank;
};

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
  kBitAnd = 5,  // the bitwise ones for integer types and bool only
  kBitOr = 6,
  kBitXor = 7,
};
inline constexpr uint8_t kReduceOpCount = 8;

// What becomes of operations of a group of which a member stands aside: it submits nothing, and has
// no part in any result, until every member stands aside.
enum class AsidePolicy : uint8_t {
  kAverageOverAll = 0,      // an average is divided by the size of the group, as if it gave zeros
  kAverageOverPresent = 1,  // an average is one of the members that take part
  kForbid = 2,              // the group fails with the first operation that lacks it
};
inline constexpr uint8_t kAsidePolicyCount = 3;

// Bytes of one element. The value must be a valid DType.
size_t DTypeSize(DType dtype);

// Lower-case names as in messages: "float32", "all_reduce", "avg". "unknown" for other values.
const char* DTypeName(DType dtype);
const char* OpKindName(OpKind kind);
const char* ReduceOpName(ReduceOp op);

// The value must be a valid OpKind.
const OpTraits& TraitsOf(OpKind kind);

// Whether values of `dtype` can be combined by `op`.
bool IsSupported(DType dtype, ReduceOp op);

}  // namespace gradsync

#endif  // GRADSYNC_SHM_TYPES_H_
