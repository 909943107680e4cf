#include "client/ddp/parameter.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace gradsync {
namespace {

using ::testing::HasSubstr;

Status CheckOne(DType dtype, std::vector<int64_t> shape) {
  const std::vector<ParameterSpec> parameters = {
      {.name = "good", .shape = {2}},
      {.name = "layer.weight", .dtype = dtype, .shape = std::move(shape)}};
  return CheckParameters(parameters);
}

TEST(ParameterTest, ScalarHasOneElementAndAZeroDimensionMakesNone) {
  EXPECT_EQ(ElementCount({.shape = {}}), 1U);
  EXPECT_EQ(ElementCount({.shape = {3, 0, 5}}), 0U);
  EXPECT_EQ(GradientBytes({.dtype = DType::kComplex128, .shape = {3, 5}}), 240U);
}

TEST(ParameterTest, AcceptsEveryTypeThatHasAnAverage) {
  for (const DType dtype : {DType::kFloat32, DType::kFloat64, DType::kFloat16, DType::kBFloat16,
                            DType::kComplex64, DType::kComplex128}) {
    EXPECT_TRUE(CheckOne(dtype, {2, 0, 3}).ok()) << DTypeName(dtype);
  }
}

TEST(ParameterTest, RefusesWhatMakesNoSenseAndNamesTheParameter) {
  const std::vector<std::pair<DType, std::vector<int64_t>>> senseless = {
      {DType::kInt64, {2}},
      {static_cast<DType>(200), {2}},
      {DType::kFloat32, {2, -1}},
      {DType::kFloat32, {1, 1, 1, 1, 1, 1, 1, 1, 1}},
      {DType::kFloat32, {int64_t{1} << 51}},
      {DType::kFloat32, {int64_t{1} << 40, int64_t{1} << 40}},
      {DType::kFloat64, {int64_t{1} << 49}},  // alone it would fit, but not with the other
  };
  for (const auto& [dtype, shape] : senseless) {
    const Status status = CheckOne(dtype, shape);
    EXPECT_EQ(status.code(), Code::kInvalidArgument) << DescribeType(dtype, shape);
    EXPECT_THAT(status.message(), HasSubstr("parameter 1 (layer.weight"));
  }
}

TEST(ParameterTest, RefusesAModelWithoutParameters) {
  EXPECT_EQ(CheckParameters({}).code(), Code::kInvalidArgument);
}

TEST(ParameterTest, DescribesTypesAsInMessages) {
  EXPECT_EQ(DescribeType(DType::kBFloat16, std::vector<int64_t>{4, 2}), "bfloat16 [4, 2]");
  EXPECT_EQ(DescribeType(DType::kFloat32, {}), "float32 []");
}

TEST(ParameterTest, ShortensANameAtItsBeginning) {
  EXPECT_EQ(ShortName("layer.weight", 12), "layer.weight");
  EXPECT_EQ(ShortName("layer.weight", 9), "...weight");
}

}  // namespace
}  // namespace gradsync
