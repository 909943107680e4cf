// A call of the driver or of NCCL that fails, kills its process, or finds its GPU gone: at every
// call of a short training in turn, in a trainer and in the daemon. Every rank comes to the right
// result or to an error in time, nothing is left behind, and the daemon serves the next job.
//
// Only over the stand-ins, which can be told to fail.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <regex>
#include <string>
#include <tuple>
#include <vector>

#include "tests/gpu/gpu_rank.h"
#include "tests/gpu/injected_trainer.h"
#include "tests/integration/raw_client.h"

namespace gradsync::testing {
namespace {

using ::testing::AnyOf;
using ::testing::Eq;
using ::testing::StartsWith;

enum class Victim { kTrainer, kDaemon };

// How the calls are shared out over tests, so that they run at the same time.
constexpr int kShares = 4;

// One machine, one daemon, one job of two ranks.
class Attempt {
 public:
  // `injection` is for the victim; empty: none.
  Attempt(Victim victim, int devices, const std::string& injection) : victim_(victim) {
    std::filesystem::create_directory(machine());
    setenv("GRADSYNC_FAKE_CUDA_DIR", machine().c_str(), 1);
    setenv("GRADSYNC_FAKE_CUDA_DEVICES", std::to_string(devices).c_str(), 1);
    setenv("GRADSYNC_FAKE_CUDA_TRACE", (machine() + "/trace.%p").c_str(), 1);
    if (victim == Victim::kDaemon) Inject(injection);
    daemon_ = std::make_unique<DaemonProcess>(
        std::vector<std::string>{"--socket=" + directory_.File("s"), "--drain-timeout=5s"});
    EXPECT_TRUE(daemon_->WaitUntilReady());
    unsetenv("GRADSYNC_FAKE_CUDA_INJECT");
    ranks_ = Start("job", victim == Victim::kTrainer ? injection : "");
  }

  // What the ranks say, in order; empty for one that was killed.
  std::vector<std::string> Results() {
    std::vector<std::string> results;
    for (RankProcess& rank : ranks_) {
      std::string text = rank.Hear();
      const int end = rank.WaitForEnd();
      if (end == -SIGKILL) text = "killed";
      if (end != 0 && end != -SIGKILL) text = "crashed: " + std::to_string(end);
      results.push_back(std::move(text));
    }
    return results;
  }

  // How another job fares, with the same daemon.
  std::vector<std::string> NextJob() {
    ranks_ = Start("next", "");
    return Results();
  }

  // The victim's calls of the driver and of NCCL so far, in order.
  std::vector<std::string> Calls() const {
    const pid_t pid = victim_ == Victim::kDaemon ? daemon_->pid() : victim_pid_;
    std::ifstream file(machine() + "/trace." + std::to_string(pid));
    std::vector<std::string> names;
    for (std::string line; std::getline(file, line);) {
      names.push_back(line.substr(line.find(' ') + 1));
    }
    return names;
  }

  // The daemon's exit status; then what of the machine is not as it was.
  int End() {
    daemon_->Signal(SIGTERM);
    return daemon_->WaitForEnd();
  }
  std::string Complaints(bool may_leak) const {
    std::string text;
    for (const auto& entry : std::filesystem::directory_iterator(machine())) {
      const std::string name = entry.path().filename();
      if (name != "breaches" && (may_leak || !name.starts_with("leaks."))) continue;
      std::ifstream file(entry.path());
      text += name + ": " + std::string(std::istreambuf_iterator<char>(file), {});
    }
    return text;
  }
  std::string DaemonOutput() const { return daemon_->Output(); }

 private:
  std::string machine() const { return directory_.File("machine"); }
  static void Inject(const std::string& injection) {
    if (!injection.empty()) setenv("GRADSYNC_FAKE_CUDA_INJECT", injection.c_str(), 1);
  }

  std::vector<RankProcess> Start(const std::string& job, const std::string& injection) {
    std::vector<RankProcess> ranks;
    for (uint32_t rank = 0; rank < 2; ++rank) {
      ranks.emplace_back([&, rank](const Channel& channel) {
        channel.Say(std::to_string(getpid()));
        if (rank == 1) Inject(injection);
        std::string result = TrainBriefly(directory_.File("s"), job, rank, 2);
        const std::string left = LiveObjects();
        if (!left.empty() && result == "right") result = "right, but left " + left;
        channel.Say(result);
      });
      const std::string pid = ranks.back().Hear();
      if (rank == 1) victim_pid_ = std::stoi(pid);
    }
    return ranks;
  }

  const Victim victim_;
  TemporaryDirectory directory_;
  std::unique_ptr<DaemonProcess> daemon_;
  std::vector<RankProcess> ranks_;
  pid_t victim_pid_ = 0;
};

// What such a call would have given back is still there when it fails.
bool GivesBack(const std::string& call) {
  static const std::regex kPattern(
      "Destroy|Free|Release|Unmap|Unregister|Close|Unload|Abort|Finalize");
  return std::regex_search(call, kPattern);
}

class InjectionTest : public ::testing::TestWithParam<std::tuple<Victim, int, const char*, int>> {
 protected:
  Victim victim() const { return std::get<0>(GetParam()); }
  int devices() const { return std::get<1>(GetParam()); }
  std::string action() const { return std::get<2>(GetParam()); }
  int share() const { return std::get<3>(GetParam()); }

  void CheckResults(const std::vector<std::string>& results, const std::string& call,
                    bool may_leak) const {
    for (size_t rank = 0; rank < results.size(); ++rank) {
      const bool may_die = action() == "kill" && victim() == Victim::kTrainer && rank == 1;
      if (may_leak && results[rank].starts_with("right, but left")) continue;
      if (call == "cuIpcCloseMemHandle" && results[rank].starts_with("crashed")) continue;
      EXPECT_THAT(results[rank], AnyOf(Eq("right"), StartsWith("error: "),
                                       may_die ? StartsWith("killed") : StartsWith("error: ")))
          << "rank " << rank;
    }
  }

  void CheckNextJob(Attempt* attempt, const std::string& call) const {
    if (victim() == Victim::kDaemon && action() == "kill") return;
    // What the daemon could not give back may be in its way.
    if (victim() == Victim::kDaemon && GivesBack(call)) return;
    const bool same_gpu = action().starts_with("lose");
    for (const std::string& result : attempt->NextJob()) {
      if (same_gpu && result.starts_with("error: ")) continue;
      // After an error that a stream keeps, the engine does not trust the GPU any more, and says
      // so.
      if (result.find("must be restarted") != std::string::npos) continue;
      // NCCL is loaded once.
      if (result.find("NCCL") != std::string::npos && result.starts_with("error: ")) continue;
      EXPECT_EQ(result, "right");
    }
  }

  void Try(size_t number) {
    const std::string injection = std::to_string(number) + ":" + action();
    Attempt attempt(victim(), devices(), injection);
    const std::vector<std::string> results = attempt.Results();
    const std::vector<std::string> calls = attempt.Calls();
    // Not reached: no two runs make quite as many calls, for some only look how far a stream is.
    if (number > calls.size()) return;
    const std::string call = calls[number - 1];
    SCOPED_TRACE(injection + " at " + call);
    const bool may_leak = GivesBack(call) || action() == "kill" || action().starts_with("lose");
    CheckResults(results, call, may_leak);
    CheckNextJob(&attempt, call);
    const bool daemon_dies = victim() == Victim::kDaemon && action() == "kill";
    const int end = attempt.End();
    EXPECT_TRUE(end == 0 || (daemon_dies && end == -SIGKILL)) << end << attempt.DaemonOutput();
    // Memory that the daemon could not close is freed under it.
    if (call != "cuIpcCloseMemHandle") {
      EXPECT_EQ(attempt.Complaints(may_leak), "");
    }
  }
};

std::string NameOf(const ::testing::TestParamInfo<InjectionTest::ParamType>& info) {
  const auto& [victim, devices, action, share] = info.param;
  std::string text = victim == Victim::kDaemon ? "Daemon" : "Trainer";
  text += std::to_string(devices) + "Gpu_" + action + "_" + std::to_string(share);
  return std::regex_replace(text, std::regex("[^A-Za-z0-9_]"), "_");
}

// 999 is CUDA_ERROR_UNKNOWN, 2 CUDA_ERROR_OUT_OF_MEMORY.
INSTANTIATE_TEST_SUITE_P(
    Trainer, InjectionTest,
    ::testing::Combine(::testing::Values(Victim::kTrainer), ::testing::Values(1),
                       ::testing::Values("error=999", "error=2", "delay=20", "lose=0", "kill"),
                       ::testing::Range(0, kShares)),
    NameOf);
INSTANTIATE_TEST_SUITE_P(
    Daemon, InjectionTest,
    ::testing::Combine(::testing::Values(Victim::kDaemon), ::testing::Values(1, 2),
                       ::testing::Values("error=999", "delay=20", "lose=0", "kill"),
                       ::testing::Range(0, kShares)),
    NameOf);

TEST_P(InjectionTest, EndsWellOrWithAnErrorAndLeavesNothingBehind) {
  if (!IsStandIn()) GTEST_SKIP() << "only the stand-in for the driver can be told to fail";
  size_t count = 0;
  {
    Attempt undisturbed(victim(), devices(), "");
    for (const std::string& result : undisturbed.Results()) ASSERT_EQ(result, "right");
    EXPECT_EQ(undisturbed.End(), 0) << undisturbed.DaemonOutput();
    EXPECT_EQ(undisturbed.Complaints(false), "");
    count = undisturbed.Calls().size();
    ASSERT_GT(count, 20u);
  }
  // Where a call is only slow, every third says enough.
  const size_t step = action().starts_with("delay") ? 3 * kShares : kShares;
  for (size_t number = 1 + share(); number <= count; number += step) {
    Try(number);
    if (HasFailure()) break;  // one says enough
  }
}

}  // namespace
}  // namespace gradsync::testing
