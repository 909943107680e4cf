#include "shm/types.h"

#include <gtest/gtest.h>

#include <string>

namespace gradsync {
namespace {

TEST(TypesTest, EveryDTypeHasASizeAndANameOfItsOwn) {
  std::string seen;
  for (uint8_t i = 0; i < kDTypeCount; ++i) {
    const auto dtype = static_cast<DType>(i);
    const std::string name = std::string("<") + DTypeName(dtype) + ">";
    EXPECT_EQ(seen.find(name), std::string::npos) << name;
    seen += name;
    EXPECT_TRUE(DTypeSize(dtype) >= 1 && DTypeSize(dtype) <= 16);
  }
  EXPECT_STREQ(DTypeName(DType::kBFloat16), "bfloat16");
  EXPECT_EQ(DTypeSize(DType::kBFloat16), 2U);
  EXPECT_EQ(DTypeSize(DType::kComplex128), 16U);
}

TEST(TypesTest, ValuesFromOutsideTheEnumsAreNamedUnknown) {
  EXPECT_STREQ(DTypeName(static_cast<DType>(kDTypeCount)), "unknown");
  EXPECT_STREQ(OpKindName(static_cast<OpKind>(200)), "unknown");
  EXPECT_STREQ(ReduceOpName(static_cast<ReduceOp>(kReduceOpCount)), "unknown");
}

TEST(TypesTest, OnlyMeaningfulCombinationsAreSupported) {
  EXPECT_TRUE(IsSupported(DType::kFloat16, ReduceOp::kAvg));
  EXPECT_TRUE(IsSupported(DType::kComplex64, ReduceOp::kAvg));
  EXPECT_FALSE(IsSupported(DType::kInt32, ReduceOp::kAvg));
  EXPECT_FALSE(IsSupported(DType::kBool, ReduceOp::kAvg));
  EXPECT_TRUE(IsSupported(DType::kBool, ReduceOp::kSum));
  EXPECT_FALSE(IsSupported(DType::kComplex128, ReduceOp::kMax));
  EXPECT_TRUE(IsSupported(DType::kUInt8, ReduceOp::kBitXor));
  EXPECT_TRUE(IsSupported(DType::kBool, ReduceOp::kBitAnd));
  EXPECT_FALSE(IsSupported(DType::kFloat32, ReduceOp::kBitOr));
  EXPECT_FALSE(IsSupported(DType::kComplex64, ReduceOp::kBitOr));
  EXPECT_FALSE(IsSupported(DType::kFloat32, static_cast<ReduceOp>(kReduceOpCount)));
}

TEST(TypesTest, EveryOperationHasANameOfItsOwnAndARootIfOnlyTheRootHasASide) {
  std::string seen;
  for (uint8_t i = 0; i < kOpKindCount; ++i) {
    const auto kind = static_cast<OpKind>(i);
    const std::string name = std::string("<") + OpKindName(kind) + ">";
    EXPECT_EQ(seen.find(name), std::string::npos) << name;
    seen += name;
    const OpTraits& traits = TraitsOf(kind);
    EXPECT_EQ(traits.has_root, traits.gives == Who::kRoot || traits.takes == Who::kRoot) << name;
  }
  EXPECT_STREQ(OpKindName(OpKind::kAllToAll), "all_to_all");
  EXPECT_TRUE(TraitsOf(OpKind::kReduceScatter).reduces);
  EXPECT_TRUE(TraitsOf(OpKind::kReduceScatter).input_per_rank);
  EXPECT_TRUE(TraitsOf(OpKind::kGather).output_per_rank);
}

}  // namespace
}  // namespace gradsync
