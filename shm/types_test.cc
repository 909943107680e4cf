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
  EXPECT_FALSE(IsSupported(DType::kFloat32, static_cast<ReduceOp>(kReduceOpCount)));
}

}  // namespace
}  // namespace gradsync
