#include "shm/types.h"

#include <array>

namespace gradsync {
namespace {

struct DTypeFacts {
  const char* name;
  size_t size;
  bool is_floating;
  bool is_complex;
};

constexpr std::array<DTypeFacts, kDTypeCount> kDTypes = {{
    {"float32", 4, true, false},
    {"float64", 8, true, false},
    {"float16", 2, true, false},
    {"bfloat16", 2, true, false},
    {"int8", 1, false, false},
    {"uint8", 1, false, false},
    {"int16", 2, false, false},
    {"int32", 4, false, false},
    {"int64", 8, false, false},
    {"bool", 1, false, false},
    {"complex64", 8, false, true},
    {"complex128", 16, false, true},
}};

constexpr std::array<const char*, kOpKindCount> kOpKinds = {
    "all_reduce", "broadcast", "all_gather",     "barrier",    "bucket_reduce", "reduce",
    "gather",     "scatter",   "reduce_scatter", "all_to_all", "share"};
constexpr std::array<const char*, kReduceOpCount> kReduceOps = {
    "sum", "avg", "min", "max", "product", "bit_and", "bit_or", "bit_xor"};

constexpr std::array<OpTraits, kOpKindCount> kTraits = {{
    {true, false, Who::kEverybody, Who::kEverybody, false, false},   // all_reduce
    {false, true, Who::kRoot, Who::kEverybody, false, false},        // broadcast
    {false, false, Who::kEverybody, Who::kEverybody, false, true},   // all_gather
    {false, false, Who::kNobody, Who::kNobody, false, false},        // barrier
    {true, false, Who::kEverybody, Who::kEverybody, false, false},   // bucket_reduce
    {true, true, Who::kEverybody, Who::kRoot, false, false},         // reduce
    {false, true, Who::kEverybody, Who::kRoot, false, true},         // gather
    {false, true, Who::kRoot, Who::kEverybody, true, false},         // scatter
    {true, false, Who::kEverybody, Who::kEverybody, true, false},    // reduce_scatter
    {false, false, Who::kEverybody, Who::kEverybody, true, true},    // all_to_all
    {false, false, Who::kEverybody, Who::kEverybody, false, false},  // share
}};

template <typename Table, typename Enum>
const char* NameIn(const Table& table, Enum value) {
  const auto index = static_cast<size_t>(value);
  return index < table.size() ? table[index] : "unknown";
}

}  // namespace

size_t DTypeSize(DType dtype) { return kDTypes[static_cast<size_t>(dtype)].size; }

const char* DTypeName(DType dtype) {
  const auto index = static_cast<size_t>(dtype);
  return index < kDTypes.size() ? kDTypes[index].name : "unknown";
}

const char* OpKindName(OpKind kind) { return NameIn(kOpKinds, kind); }

const char* ReduceOpName(ReduceOp op) { return NameIn(kReduceOps, op); }

const OpTraits& TraitsOf(OpKind kind) { return kTraits[static_cast<size_t>(kind)]; }

bool IsSupported(DType dtype, ReduceOp op) {
  const DTypeFacts& facts = kDTypes[static_cast<size_t>(dtype)];
  switch (op) {
    case ReduceOp::kAvg:
      return facts.is_floating || facts.is_complex;
    case ReduceOp::kMin:
    case ReduceOp::kMax:
      return !facts.is_complex;
    case ReduceOp::kSum:
    case ReduceOp::kProduct:
      return true;
    case ReduceOp::kBitAnd:
    case ReduceOp::kBitOr:
    case ReduceOp::kBitXor:
      return !facts.is_floating && !facts.is_complex;
  }
  return false;
}

}  // namespace gradsync
