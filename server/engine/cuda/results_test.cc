// What comes out of every kind, type and reduction: on one GPU bit for bit what the plainest code
// gives, over several within what another order of the same sums gives.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "server/engine/cuda/engine_fixture.h"

namespace gradsync::cuda {
namespace {

constexpr size_t kCount = 1003;  // whole packs of 16 bytes and a rest

std::string Name(DType dtype, ReduceOp op, const std::vector<uint32_t>& devices) {
  std::string name = std::string(DTypeName(dtype)) + " " + ReduceOpName(op) + " on GPUs";
  for (uint32_t device : devices) name += " " + std::to_string(device);
  return name;
}

template <typename Run>
void ForEveryReduction(const Run& run) {
  for (uint8_t dtype = 0; dtype < kDTypeCount; ++dtype) {
    for (uint8_t op = 0; op < kReduceOpCount; ++op) {
      if (IsSupported(DType{dtype}, ReduceOp{op})) run(DType{dtype}, ReduceOp{op});
    }
  }
}

// The element's real numbers, as far as it is made of such.
std::vector<double> Numbers(DType dtype, const Bytes& bytes) {
  std::vector<double> numbers;
  const auto add = [&](auto zero, auto convert) {
    for (size_t at = 0; at < bytes.size(); at += sizeof(zero)) {
      std::memcpy(&zero, bytes.data() + at, sizeof(zero));
      numbers.push_back(convert(zero));
    }
  };
  const auto same = [](auto value) { return static_cast<double>(value); };
  switch (dtype) {
    case DType::kFloat32:
    case DType::kComplex64:
      add(0.0F, same);
      break;
    case DType::kFloat64:
    case DType::kComplex128:
      add(0.0, same);
      break;
    case DType::kFloat16:
      add(uint16_t{0}, [](uint16_t bits) { return Float16ToFloat(bits); });
      break;
    case DType::kBFloat16:
      add(uint16_t{0}, [](uint16_t bits) { return BFloat16ToFloat(bits); });
      break;
    default:
      break;
  }
  return numbers;
}

double ToleranceOf(DType dtype) {
  switch (dtype) {
    case DType::kFloat16:
      return 1e-2;
    case DType::kBFloat16:
      return 8e-2;
    case DType::kFloat64:
    case DType::kComplex128:
      return 1e-14;
    default:
      return 1e-5;
  }
}

// Exactly the same bits, or, of numbers that round, nearly the same.
std::string NearlyDifference(DType dtype, const Bytes& actual, const Bytes& expected) {
  const std::vector<double> got = Numbers(dtype, actual);
  if (got.empty()) return Difference(dtype, actual.data(), expected);
  const std::vector<double> wanted = Numbers(dtype, expected);
  for (size_t i = 0; i < got.size(); ++i) {
    const double allowed = ToleranceOf(dtype) * (1 + std::abs(wanted[i]));
    if (!(std::abs(got[i] - wanted[i]) <= allowed)) {
      return std::to_string(got[i]) + " instead of " + std::to_string(wanted[i]);
    }
  }
  return "";
}

class ResultsTest : public CudaEngineTest {
 protected:
  // Writes a random input of `blocks` blocks to each rank, where the task reads it.
  std::vector<Bytes> Fill(const std::vector<TestRank>& ranks, const Task& task, size_t blocks,
                          bool finite) {
    std::vector<Bytes> inputs;
    for (const TestRank& rank : ranks) {
      const size_t i = inputs.size();
      inputs.push_back(RandomElements(task.dtype, task.count * blocks, ++seed_, finite));
      const std::byte* const at = task.inputs[i];
      const bool in_output = at >= rank.output->address() && at < rank.output->address() + kRoom;
      const DeviceMemory& memory = in_output ? *rank.output : *rank.input;
      Write(memory, inputs.back(), static_cast<uint64_t>(at - memory.address()));
    }
    return inputs;
  }

  Bytes Result(const TestRank& rank, const Task& task, size_t index, uint64_t bytes) {
    return Read(*rank.output, bytes,
                static_cast<uint64_t>(task.outputs[index] - rank.output->address()));
  }

  // An average divided by another number than there are inputs: as if there were more, all zero.
  static Bytes Expected(const Task& task, std::vector<Bytes> inputs) {
    while (task.reduce_op == ReduceOp::kAvg && inputs.size() < task.divisor) {
      inputs.emplace_back(inputs[0].size());
    }
    return ReferenceReduce(task.dtype, task.reduce_op, inputs);
  }

  uint64_t Next() { return sequence_++; }

  uint64_t seed_ = 0;
  uint64_t sequence_ = 0;
};

TEST_F(ResultsTest, ReductionsOnOneGpuAreTheReferenceBitForBit) {
  std::vector<TestRank> ranks;
  for (uint32_t count = 1; count <= 4; ++count) {
    ranks.push_back(MakeRanks({0})[0]);
    ForEveryReduction([&](DType dtype, ReduceOp op) {
      SCOPED_TRACE(Name(dtype, op, std::vector<uint32_t>(count, 0)));
      const auto task = MakeTask(ranks, OpKind::kAllReduce, Next(), kCount);
      task->dtype = dtype;
      task->reduce_op = op;
      if (seed_ % 2 == 0) MakeInPlace(*task);
      if (seed_ % 3 == 0) task->inputs[0] += DTypeSize(dtype);  // not aligned to a pack
      if (seed_ % 3 == 0 && seed_ % 2 == 0) task->outputs[0] += DTypeSize(dtype);
      const std::vector<Bytes> inputs = Fill(ranks, *task, 1, false);
      ASSERT_TRUE(Finish(ranks, task).ok());
      const Bytes expected = Expected(*task, inputs);
      for (size_t i = 0; i < ranks.size(); ++i) {
        const Bytes actual = Result(ranks[i], *task, i, expected.size());
        ASSERT_EQ(Difference(dtype, actual.data(), expected), "") << i;
      }
    });
  }
}

TEST_F(ResultsTest, AverageOnOneGpuIsDividedByTheDivisor) {
  const std::vector<TestRank> ranks = MakeRanks({1, 1});
  ForEveryReduction([&](DType dtype, ReduceOp op) {
    if (op != ReduceOp::kAvg) return;
    const auto task = MakeTask(ranks, OpKind::kBucketReduce, Next(), kCount);
    task->dtype = dtype;
    task->reduce_op = op;
    task->divisor = 5;
    const std::vector<Bytes> inputs = Fill(ranks, *task, 1, true);
    ASSERT_TRUE(Finish(ranks, task).ok());
    const Bytes expected = Expected(*task, inputs);
    EXPECT_EQ(Difference(dtype, Result(ranks[1], *task, 1, expected.size()).data(), expected), "")
        << DTypeName(dtype);
  });
}

class AcrossTest : public ResultsTest, public testing::WithParamInterface<std::vector<uint32_t>> {};

INSTANTIATE_TEST_SUITE_P(
    Devices, AcrossTest,
    testing::Values(std::vector<uint32_t>{0, 1}, std::vector<uint32_t>{2, 0, 1},
                    std::vector<uint32_t>{0, 0, 1, 1}, std::vector<uint32_t>{1, 0, 1, 0},
                    std::vector<uint32_t>{0, 1, 1}, std::vector<uint32_t>{2, 2, 2}));

TEST_P(AcrossTest, Reductions) {
  const std::vector<TestRank> ranks = MakeRanks(GetParam());
  for (const uint32_t divisor : {0U, 7U}) {
    ForEveryReduction([&](DType dtype, ReduceOp op) {
      SCOPED_TRACE(Name(dtype, op, GetParam()));
      if (!engine().CheckSupported(OpKind::kAllReduce, dtype, op, GetParam()).ok()) return;
      const auto task = MakeTask(ranks, OpKind::kAllReduce, Next(), kCount);
      task->dtype = dtype;
      task->reduce_op = op;
      task->divisor = divisor;
      if (seed_ % 2 == 0) MakeInPlace(*task);
      const std::vector<Bytes> inputs = Fill(ranks, *task, 1, true);
      const Status status = Finish(ranks, task);
      ASSERT_TRUE(status.ok()) << status.ToString();
      const Bytes expected = Expected(*task, inputs);
      for (size_t i = 0; i < ranks.size(); ++i) {
        ASSERT_EQ(NearlyDifference(dtype, Result(ranks[i], *task, i, expected.size()), expected),
                  "");
      }
    });
  }
}

TEST_P(AcrossTest, ReduceScatter) {
  const std::vector<TestRank> ranks = MakeRanks(GetParam());
  for (const bool in_place : {false, true}) {
    ForEveryReduction([&](DType dtype, ReduceOp op) {
      SCOPED_TRACE(Name(dtype, op, GetParam()));
      if (!engine().CheckSupported(OpKind::kReduceScatter, dtype, op, GetParam()).ok()) return;
      const auto task = MakeTask(ranks, OpKind::kReduceScatter, Next(), kCount);
      task->dtype = dtype;
      task->reduce_op = op;
      if (in_place) MakeInPlace(*task);
      const std::vector<Bytes> inputs = Fill(ranks, *task, ranks.size(), true);
      const Status status = Finish(ranks, task);
      ASSERT_TRUE(status.ok()) << status.ToString();
      const Bytes all = Expected(*task, inputs);
      const size_t bytes = all.size() / ranks.size();
      for (size_t i = 0; i < ranks.size(); ++i) {
        const Bytes expected(all.begin() + static_cast<std::ptrdiff_t>(i * bytes),
                             all.begin() + static_cast<std::ptrdiff_t>((i + 1) * bytes));
        ASSERT_EQ(NearlyDifference(dtype, Result(ranks[i], *task, i, bytes), expected), "");
      }
    });
  }
}

TEST_P(AcrossTest, AllGather) {
  const std::vector<TestRank> ranks = MakeRanks(GetParam());
  enum class Where { kApart, kAtTheStart, kInItsBlock };
  for (const Where where : {Where::kApart, Where::kAtTheStart, Where::kInItsBlock}) {
    const auto task = MakeTask(ranks, OpKind::kAllGather, Next(), kCount);
    task->dtype = DType::kInt16;
    if (where != Where::kApart) MakeInPlace(*task);
    for (size_t i = 0; i < ranks.size() && where == Where::kInItsBlock; ++i) {
      task->inputs[i] += i * kCount * 2;
    }
    const std::vector<Bytes> inputs = Fill(ranks, *task, 1, true);
    const Status status = Finish(ranks, task);
    ASSERT_TRUE(status.ok()) << status.ToString();
    Bytes expected;
    for (const Bytes& input : inputs) expected.insert(expected.end(), input.begin(), input.end());
    for (const TestRank& rank : ranks) EXPECT_EQ(Read(*rank.output, expected.size()), expected);
  }
}

TEST_P(AcrossTest, BroadcastAndShare) {
  const std::vector<TestRank> ranks = MakeRanks(GetParam());
  for (uint32_t root = 0; root <= ranks.size(); ++root) {
    const bool is_share = root == ranks.size();
    const size_t from = is_share ? root - 1 : root;
    const auto task =
        MakeTask(ranks, is_share ? OpKind::kShare : OpKind::kBroadcast, Next(), kCount);
    task->dtype = DType::kComplex128;
    task->root = is_share ? 0 : root;
    if (root % 2 == 0) MakeInPlace(*task);
    const std::vector<Bytes> inputs = Fill(ranks, *task, 1, true);
    for (size_t i = 0; i < ranks.size() && !is_share; ++i) {
      if (i != root) task->inputs[i] = nullptr;
    }
    const Status status = Finish(ranks, task);
    ASSERT_TRUE(status.ok()) << status.ToString();
    for (const TestRank& rank : ranks) {
      EXPECT_EQ(Read(*rank.output, inputs[from].size()), inputs[from]);
    }
  }
}

TEST_P(AcrossTest, NothingToDoIsDone) {
  const std::vector<TestRank> ranks = MakeRanks(GetParam());
  for (const OpKind kind : {OpKind::kAllReduce, OpKind::kAllGather, OpKind::kBroadcast}) {
    EXPECT_TRUE(Finish(ranks, MakeTask(ranks, kind, Next(), 0)).ok());
  }
}

}  // namespace
}  // namespace gradsync::cuda
