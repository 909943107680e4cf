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

constexpr std::array<const char*, kOpKindCount> kOpKinds = {"all_reduce", "broadcast", "all_gather",
                                                            "barrier", "bucket_reduce"};
constexpr std::array<const char*, kReduceOpCount> kReduceOps = {"sum", "avg", "min", "max",
                                                                "product"};

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
  }
  return false;
}

}  // namespace gradsync
