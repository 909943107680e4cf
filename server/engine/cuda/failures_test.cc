// What becomes of operations when NCCL or a call of the driver's fails. Each in a process of its
// own, since what is to go wrong is said before the stand-ins are loaded.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "server/engine/cuda/engine_fixture.h"

namespace gradsync::cuda {
namespace {

using testing::AllOf;
using testing::ExitedWithCode;
using testing::HasSubstr;

class FailuresDeathTest : public testing::Test {
 protected:
  FailuresDeathTest() { GTEST_FLAG_SET(death_test_style, "threadsafe"); }
};

// The rest of a test in the process of its own; says what the operations ended with.
class Scenario : public CudaEngineTest {
 public:
  Scenario() = default;

  // `operations` sums over these GPUs, all of whose ranks come to them.
  void Sum(const std::vector<uint32_t>& devices, size_t operations, milliseconds timeout) {
    const std::vector<TestRank> ranks = MakeRanks(devices);
    if (ranks.empty()) std::exit(0);  // it was a call before all that
    Answers answers;
    for (uint64_t sequence = 0; sequence < operations; ++sequence) {
      for (const TestRank& rank : ranks) rank.ComeTo(sequence);
      engine().Run(MakeTask(ranks, OpKind::kAllReduce, sequence, 4), timeout, answers.Next());
    }
    for (const Status& status : answers.Wait(operations)) {
      std::fprintf(stderr, "%s\n", status.ToString().c_str());
    }
  }

 private:
  void TestBody() override {}
};

// Sums in a new process, with one variable of the stand-ins' set; ends with 0 unless an expectation
// failed there.
[[noreturn]] void SumWith(const char* variable, const char* value,
                          const std::vector<uint32_t>& devices, size_t operations,
                          milliseconds timeout) {
  setenv(variable, value, 1);
  { Scenario().Sum(devices, operations, timeout); }
  std::exit(testing::Test::HasFailure() ? 1 : 0);
}

TEST_F(FailuresDeathTest, NcclThatStallsIsAbortedAtTheDeadline) {
  EXPECT_EXIT(SumWith("GRADSYNC_FAKE_NCCL_INJECT", "3:stall", {0, 1}, 3, milliseconds(500)),
              ExitedWithCode(0),
              // The third call is of the second operation, or of the third if a GPU is ahead.
              "^OK\n.*DEADLINE_EXCEEDED: every rank's GPU stream has come, but GPU 0 .*, GPU 1 .* "
              "with NCCL did not finish operation [12] .all_reduce of 4 float32. within 500 ms\n");
}

TEST_F(FailuresDeathTest, AnErrorOfNcclsEndsTheGroup) {
  EXPECT_EXIT(SumWith("GRADSYNC_FAKE_NCCL_INJECT", "1:async=6", {0, 1}, 2, seconds(15)),
              ExitedWithCode(0), "^INTERNAL: GPU [01] .*: .*nccl.*\nINTERNAL: GPU [01] ");
}

// Whatever call fails, on whichever thread, while operations are launched and under way: each is
// answered, and nothing is left.
TEST_F(FailuresDeathTest, AnyCallMayFail) {
  for (int call = 150; call < 250; call += 4) {
    const std::string injection = std::to_string(call) + ":error=2";
    EXPECT_EXIT(SumWith("GRADSYNC_FAKE_CUDA_INJECT", injection.c_str(), {0, 1, 0}, 3, seconds(15)),
                ExitedWithCode(0), "")
        << injection;
  }
}

}  // namespace
}  // namespace gradsync::cuda
