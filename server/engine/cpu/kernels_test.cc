#include "server/engine/cpu/kernels.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

// Highway's list of the instruction sets that kernels.cc is compiled for.
#include <hwy/highway.h>

#include "server/engine/cpu/reference_reduce.h"

namespace gradsync {
namespace {

constexpr size_t kMaxRanks = 9;

// Each test runs once for each instruction set that this machine has.
class KernelsTest : public testing::TestWithParam<int64_t> {
 protected:
  KernelsTest() { hwy::SetSupportedTargetsForTest(GetParam()); }
  ~KernelsTest() override {
    hwy::SetSupportedTargetsForTest(0);
    UpdateTarget();
  }
  void SetUp() override { UpdateTarget(); }

  static void UpdateTarget() { hwy::GetChosenTarget().Update(hwy::SupportedTargets()); }
};

std::string NameOf(const testing::TestParamInfo<int64_t>& info) {
  return hwy::TargetName(info.param);
}

INSTANTIATE_TEST_SUITE_P(Targets, KernelsTest,
                         testing::ValuesIn(hwy::SupportedAndGeneratedTargets()), NameOf);

// Combines `inputs` where they start `shift` elements off a cache line, and the result too. `more`:
// that many inputs are missing, which an average counts all the same.
Bytes CombineAt(size_t shift, DType dtype, ReduceOp op, const std::vector<Bytes>& inputs,
                size_t more = 0) {
  const size_t offset = shift * DTypeSize(dtype);
  std::vector<Bytes> moved;
  std::vector<const std::byte*> pointers;
  for (const Bytes& input : inputs) {
    Bytes& copy = moved.emplace_back(64 + offset + input.size());
    std::memcpy(copy.data() + offset, input.data(), input.size());
  }
  for (const Bytes& copy : moved) pointers.push_back(copy.data());
  Bytes result(offset + inputs[0].size() + 1);
  result.back() = std::byte{0x5a};
  const size_t divisor = inputs.size() + more;
  FindCombineKernel(dtype, op, inputs.size(), divisor)(
      pointers.data(), inputs.size(), divisor, offset, inputs[0].size(), result.data() + offset);
  EXPECT_EQ(result.back(), std::byte{0x5a}) << "wrote behind the result";
  result.pop_back();
  result.erase(result.begin(), result.begin() + static_cast<std::ptrdiff_t>(offset));
  return result;
}

Bytes NegativeZeros(DType dtype, size_t count) {
  Bytes zeros(count * DTypeSize(dtype));
  const bool is_complex = dtype == DType::kComplex64 || dtype == DType::kComplex128;
  const size_t width = DTypeSize(dtype) / (is_complex ? 2 : 1);
  for (size_t sign = width - 1; sign < zeros.size(); sign += width) zeros[sign] = std::byte{0x80};
  return zeros;
}

TEST_P(KernelsTest, EveryTypeAndOperationGivesTheReferencesBits) {
  uint64_t seed = 1;
  for (uint8_t d = 0; d < kDTypeCount; ++d) {
    for (uint8_t o = 0; o < kReduceOpCount; ++o) {
      const auto dtype = static_cast<DType>(d);
      const auto op = static_cast<ReduceOp>(o);
      if (!IsSupported(dtype, op)) continue;
      for (size_t ranks = 1; ranks <= kMaxRanks; ++ranks) {
        for (const size_t count : {1, 2, 3, 5, 15, 16, 17, 63, 64, 67, 129, 517}) {
          std::vector<Bytes> inputs;
          for (size_t rank = 0; rank < ranks; ++rank) {
            inputs.push_back(RandomElements(dtype, count, ++seed));
          }
          const Bytes expected = ReferenceReduce(dtype, op, inputs);
          const Bytes actual = CombineAt(seed % 5, dtype, op, inputs);
          ASSERT_EQ(Difference(dtype, actual.data(), expected), "")
              << DTypeName(dtype) << " " << ReduceOpName(op) << ", " << ranks << " ranks, " << count
              << " elements";
        }
      }
    }
  }
}

// What is missing counts as the one number that changes no sum, -0.0.
TEST_P(KernelsTest, AnAverageMayBeDividedByMoreThanItsInputs) {
  uint64_t seed = 1000;
  for (const DType dtype : {DType::kFloat32, DType::kFloat64, DType::kFloat16, DType::kBFloat16,
                            DType::kComplex64, DType::kComplex128}) {
    for (size_t ranks = 1; ranks <= kMaxRanks; ++ranks) {
      for (const size_t more : {1, 2, 5}) {
        std::vector<Bytes> inputs;
        for (size_t rank = 0; rank < ranks; ++rank) {
          inputs.push_back(RandomElements(dtype, 67, ++seed));
        }
        const Bytes actual = CombineAt(seed % 5, dtype, ReduceOp::kAvg, inputs, more);
        inputs.resize(ranks + more, NegativeZeros(dtype, 67));
        ASSERT_EQ(Difference(dtype, actual.data(), ReferenceReduce(dtype, ReduceOp::kAvg, inputs)),
                  "")
            << DTypeName(dtype) << ", " << ranks << " ranks of " << ranks + more;
      }
    }
  }
}

// float32 inputs rounded to a 16-bit type: 1 x that value + -0.0, so that only the rounding counts.
uint16_t RoundedSum(DType dtype, uint16_t a, uint16_t b) {
  const std::byte* inputs[] = {static_cast<const std::byte*>(static_cast<const void*>(&a)),
                               static_cast<const std::byte*>(static_cast<const void*>(&b))};
  uint16_t sum = 0;
  FindCombineKernel(dtype, ReduceOp::kSum, 2, 2)(inputs, 2, 2, 0, 2,
                                                 static_cast<std::byte*>(static_cast<void*>(&sum)));
  return sum;
}

TEST_P(KernelsTest, SixteenBitValuesPassThroughUnchanged) {
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
    Bytes all(2 * 65536);
    for (uint32_t i = 0; i < 65536; ++i) {
      const auto bits = static_cast<uint16_t>(i);
      std::memcpy(all.data() + 2 * i, &bits, 2);
    }
    const Bytes max = CombineAt(0, dtype, ReduceOp::kMax, {all});
    EXPECT_EQ(Difference(dtype, max.data(), all), "") << DTypeName(dtype);
  }
}

TEST_P(KernelsTest, SixteenBitSumsRoundToNearestEven) {
  // float16 has 11 bits: 2048 + 1 lies between 2048 and 2050, 2050 + 1 between 2050 and 2052.
  EXPECT_EQ(RoundedSum(DType::kFloat16, FloatToFloat16(2048), FloatToFloat16(1)),
            FloatToFloat16(2048));
  EXPECT_EQ(RoundedSum(DType::kFloat16, FloatToFloat16(2050), FloatToFloat16(1)),
            FloatToFloat16(2052));
  EXPECT_EQ(RoundedSum(DType::kFloat16, FloatToFloat16(2048), FloatToFloat16(1.001F)),
            FloatToFloat16(2050));
  // bfloat16 has 8.
  EXPECT_EQ(RoundedSum(DType::kBFloat16, FloatToBFloat16(256), FloatToBFloat16(1)),
            FloatToBFloat16(256));
  EXPECT_EQ(RoundedSum(DType::kBFloat16, FloatToBFloat16(258), FloatToBFloat16(1)),
            FloatToBFloat16(260));
}

TEST_P(KernelsTest, SixteenBitSumsOverflowToInfinityAndAveragesDoNotOverflow) {
  const uint16_t greatest = FloatToFloat16(65504);
  const std::vector<Bytes> inputs(3, [&] {
    Bytes bytes(2);
    std::memcpy(bytes.data(), &greatest, 2);
    return bytes;
  }());
  const Bytes sum = CombineAt(0, DType::kFloat16, ReduceOp::kSum, inputs);
  EXPECT_EQ(Difference(DType::kFloat16, sum.data(), Bytes{std::byte{0x00}, std::byte{0x7c}}), "");
  const Bytes average = CombineAt(0, DType::kFloat16, ReduceOp::kAvg, inputs);
  EXPECT_EQ(Difference(DType::kFloat16, average.data(), inputs[0]), "");
}

TEST_P(KernelsTest, SixteenBitRoundingMatchesTheReferenceOnRandomSums) {
  std::mt19937_64 random(7);
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
    std::vector<Bytes> inputs;
    for (int rank = 0; rank < 2; ++rank) {
      Bytes& bytes = inputs.emplace_back(2 * 40000);
      for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
    }
    for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kProduct, ReduceOp::kMin}) {
      const Bytes actual = CombineAt(0, dtype, op, inputs);
      EXPECT_EQ(Difference(dtype, actual.data(), ReferenceReduce(dtype, op, inputs)), "")
          << DTypeName(dtype) << " " << ReduceOpName(op);
    }
  }
}

TEST_P(KernelsTest, NanOfAnyRankReachesTheResult) {
  for (const ReduceOp op :
       {ReduceOp::kSum, ReduceOp::kAvg, ReduceOp::kMin, ReduceOp::kMax, ReduceOp::kProduct}) {
    for (size_t nan_rank = 0; nan_rank < 3; ++nan_rank) {
      std::vector<Bytes> inputs;
      for (size_t rank = 0; rank < 3; ++rank) {
        const float value = rank == nan_rank ? std::numeric_limits<float>::quiet_NaN() : 1.0F;
        Bytes& bytes = inputs.emplace_back(sizeof(float));
        std::memcpy(bytes.data(), &value, sizeof(value));
      }
      const Bytes result = CombineAt(0, DType::kFloat32, op, inputs);
      float value = 0;
      std::memcpy(&value, result.data(), sizeof(value));
      EXPECT_TRUE(std::isnan(value)) << ReduceOpName(op) << ", NaN in rank " << nan_rank;
    }
  }
}

TEST_P(KernelsTest, BoolTakesAnyByteButZeroForTrue) {
  const std::vector<Bytes> inputs = {{std::byte{2}, std::byte{2}, std::byte{0}},
                                     {std::byte{1}, std::byte{0}, std::byte{0}}};
  const Bytes both = CombineAt(0, DType::kBool, ReduceOp::kProduct, inputs);
  EXPECT_NE(both[0], std::byte{0});
  EXPECT_EQ(both[1], std::byte{0});
  EXPECT_EQ(both[2], std::byte{0});
  const Bytes either = CombineAt(0, DType::kBool, ReduceOp::kSum, inputs);
  EXPECT_NE(either[0], std::byte{0});
  EXPECT_NE(either[1], std::byte{0});
  EXPECT_EQ(either[2], std::byte{0});
}

TEST_P(KernelsTest, SpreadStoresExactlyTheRangeOfEveryOutput) {
  for (const size_t bytes : {1, 15, 64, 255, 256, 300, 2048}) {
    const Bytes result = RandomElements(DType::kUInt8, bytes, bytes);
    std::vector<Bytes> outputs(3, Bytes(bytes + 20, std::byte{7}));
    std::vector<std::byte*> to;
    for (Bytes& output : outputs) to.push_back(output.data());
    const std::vector<const std::byte*> inputs(to.begin(), to.end());
    FindSpreadKernel()(result.data(), to.data(), 3, 9, bytes, inputs.data(), 9);
    for (const Bytes& output : outputs) {
      EXPECT_EQ(std::memcmp(output.data() + 9, result.data(), bytes), 0);
      for (size_t i = 0; i < output.size(); ++i) {
        const bool outside = i < 9 || i >= 9 + bytes;
        ASSERT_TRUE(!outside || output[i] == std::byte{7}) << i;
      }
    }
  }
}

}  // namespace
}  // namespace gradsync
