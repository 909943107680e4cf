// What averaging on GPUs costs, beside what it is compared with.
//
//   gpu_bench [--quick] [MEASURE...]    some of: all_reduce latency sharing host step
//
// Prints a line of JSON for each measurement: the seconds of each contender, round by round and
// their medians; `ratio`, how many times as fast as its contender the daemon is; `added`, the
// seconds that it takes more. All contenders of a line take turns. It judges nothing;
// scripts/gpu-check does.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "shm/cuda/driver.h"
#include "tests/fault/rank_process.h"
#include "tests/gpu/bench_runner.h"
#include "tests/integration/daemon_fixture.h"

namespace gradsync::bench {
namespace {

using testing::Channel;
using testing::RankProcess;

// How much is measured.
struct Plan {
  uint64_t bucket = 25 << 20;
  uint64_t large = 100 << 20;
  uint64_t small = 32 << 10;
  int rounds = 7;
  int iterations = 20;
  int small_iterations = 200;
  int layers = 8;
  uint64_t computed = 256 << 20;
};

constexpr Plan kQuick = {1 << 20, 2 << 20, 32 << 10, 2, 3, 5, 2, 1 << 20};

double Median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

// ---- Contenders ---------------------------------------------------------------------------------

using MakeRunner = std::function<RunnerOrError()>;

// Processes that run a round whenever they are told to.
class Contender {
 public:
  Contender(std::string name, const std::vector<MakeRunner>& runners) : name_(std::move(name)) {
    for (const MakeRunner& make : runners) {
      processes_.emplace_back([&make](const Channel& channel) { Serve(channel, make); });
    }
  }

  Contender(Contender&&) = default;
  // In an orderly way, so that the daemon is free for the next.
  ~Contender() {
    for (const RankProcess& process : processes_) process.Say("end");
    for (const RankProcess& process : processes_) static_cast<void>(process.Hear());
  }

  const std::string& name() const { return name_; }

  // Why it cannot run.
  std::optional<std::string> AwaitReady() const {
    for (const RankProcess& process : processes_) {
      const std::string answer = process.Hear();
      if (answer != "ready") return Explain(answer);
    }
    return std::nullopt;
  }

  // The slowest process's seconds.
  Result<double> Round() const {
    for (const RankProcess& process : processes_) process.Say("go");
    double slowest = 0;
    for (const RankProcess& process : processes_) {
      const std::string answer = process.Hear();
      char* end = nullptr;
      slowest = std::max(slowest, std::strtod(answer.c_str(), &end));
      if (answer.empty() || *end != '\0') return Unexpected(Code::kInternal, Explain(answer));
    }
    return slowest;
  }

 private:
  static void Serve(const Channel& channel, const MakeRunner& make) {
    Status status;
    {
      const RunnerOrError runner = make();
      if (!runner) return channel.Say(runner.error());
      channel.Say("ready");
      while (status.ok() && channel.Hear() == "go") {
        const Result<double> seconds = (*runner)->Round();
        if (seconds) {
          channel.Say(std::to_string(1e9 * *seconds));
        } else {
          status = seconds.error();
        }
      }
    }
    channel.Say(status);
  }

  std::string Explain(const std::string& answer) const {
    return name_ + ": " + (answer.empty() ? "a process ended, or hangs" : answer);
  }

  std::string name_;
  std::vector<RankProcess> processes_;
};

// ---- Lines --------------------------------------------------------------------------------------

std::string Quoted(const std::string& text) {
  std::string quoted = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') quoted += '\\';
    quoted += static_cast<unsigned char>(c) < ' ' ? ' ' : c;
  }
  return quoted + "\"";
}

std::string Number(double value) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.6g", value);
  return text;
}

// A JSON object that is put together field by field.
class Line {
 public:
  explicit Line(const std::string& measure) { Add("measure", Quoted(measure)); }
  Line& Add(const std::string& name, const std::string& json) {
    text_ += (text_.empty() ? "" : ", ") + Quoted(name) + ": " + json;
    return *this;
  }
  Line& Add(const std::string& name, uint64_t value) { return Add(name, std::to_string(value)); }
  void Print() const {
    std::printf("{%s}\n", text_.c_str());
    std::fflush(stdout);
  }

 private:
  std::string text_;
};

std::string List(const std::vector<double>& values) {
  std::string text;
  for (const double value : values) text += (text.empty() ? "" : ", ") + Number(value);
  return "[" + text + "]";
}

// ---- Measurements -------------------------------------------------------------------------------

class Bench {
 public:
  Bench(const Plan& plan, std::string socket, int gpus)
      : plan_(plan), socket_(std::move(socket)), gpus_(gpus) {}

  bool failed() const { return failed_; }

  void AllReduce() {
    for (const uint64_t bytes : {plan_.bucket, plan_.large}) {
      Line line("all_reduce");
      line.Add("bytes", bytes).Add("ranks", Gpus()).Add("gpus", Gpus());
      const Work work = {bytes, plan_.iterations};
      AgainstNccl(line, work);
    }
  }

  void Latency() {
    const Work work = {plan_.small, plan_.small_iterations, /*chained=*/true};
    Line line("latency");
    line.Add("bytes", plan_.small).Add("ranks", Gpus()).Add("gpus", Gpus());
    AgainstNccl(line, work);

    Line shared("latency");
    shared.Add("bytes", plan_.small).Add("ranks", 2).Add("gpus", 1);
    Compare(shared, {{"daemon", Ranks(2, 1, work)},
                     {"kernel in process", {[work] { return MakeKernelReduce(2, work); }}}});
  }

  void Sharing() {
    for (const auto& [ranks, bytes] :
         {std::pair<uint32_t, uint64_t>{2, plan_.bucket}, {4, plan_.bucket}, {2, plan_.large}}) {
      Line line("sharing");
      line.Add("bytes", bytes).Add("ranks", ranks).Add("gpus", 1);
      // A reduction reads and writes each rank's bytes once; a copy reads and writes what it
      // copies.
      const Work copy = {ranks * bytes, plan_.iterations};
      Compare(line, {{"daemon", Ranks(ranks, 1, {bytes, plan_.iterations})},
                     {"device copy", {[copy] { return MakeCopy(copy); }}}});
    }
  }

  void Host() {
    Line line("host");
    line.Add("bytes", plan_.bucket).Add("ranks", 2).Add("gpus", 1);
    const Step step = {plan_.layers, plan_.bucket, plan_.bucket, 4};
    Compare(line, {{"daemon", Steps(step, MakeHostTime)}});
  }

  void Steps() {
    Line line("step");
    line.Add("bytes", plan_.bucket * static_cast<uint64_t>(plan_.layers));
    line.Add("ranks", 2).Add("gpus", 1);
    const Step step = {plan_.layers, plan_.bucket, plan_.computed, plan_.iterations};
    const MakeRunner alone = [step] { return MakeStepAlone(0, step); };
    Compare(line, {{"daemon", Steps(step, MakeStepWithDaemon)}, {"alone", {alone, alone}}});
  }

 private:
  using Contenders = std::vector<std::pair<std::string, std::vector<MakeRunner>>>;

  // How many NCCL is compared over: where there are not so many, that is said.
  uint64_t Gpus() const { return static_cast<uint64_t>(std::max(gpus_, 2)); }

  RankAt At(uint32_t rank, uint32_t size, int gpu) const {
    return {socket_, "bench" + std::to_string(jobs_), rank, size, gpu};
  }

  // On as many GPUs, in turn.
  std::vector<MakeRunner> Ranks(uint32_t ranks, int gpus, const Work& work) {
    ++jobs_;
    std::vector<MakeRunner> makers;
    for (uint32_t rank = 0; rank < ranks; ++rank) {
      const RankAt at = At(rank, ranks, static_cast<int>(rank) % gpus);
      makers.emplace_back([at, work] { return MakeDaemonReduce(at, work); });
    }
    return makers;
  }

  std::vector<MakeRunner> Steps(const Step& step,
                                RunnerOrError (*make)(const RankAt&, const Step&)) {
    ++jobs_;
    std::vector<MakeRunner> makers;
    for (uint32_t rank = 0; rank < 2; ++rank) {
      const RankAt at = At(rank, 2, 0);
      makers.emplace_back([at, step, make] { return make(at, step); });
    }
    return makers;
  }

  void AgainstNccl(Line& line, const Work& work) {
    if (gpus_ < 2) return line.Add("skipped", Quoted("needs two GPUs")).Print();
    const int gpus = gpus_;
    Compare(line, {{"daemon", Ranks(static_cast<uint32_t>(gpus), gpus, work)},
                   {"NCCL in process", {[gpus, work] { return MakeNcclReduce(gpus, work); }}}});
  }

  // The first contender is the daemon; the second, if any, what it is compared with.
  void Compare(Line& line, const Contenders& contenders) {
    const auto failure = Measure(line, contenders);
    if (failure) {
      failed_ = true;
      line.Add("failed", Quoted(*failure));
    }
    line.Print();
  }

  std::optional<std::string> Measure(Line& line, const Contenders& contenders) const {
    std::vector<Contender> running;
    running.reserve(contenders.size());
    for (const auto& [name, makers] : contenders) running.emplace_back(name, makers);
    for (const Contender& contender : running) {
      if (auto why = contender.AwaitReady()) return why;
    }
    std::vector<std::vector<double>> seconds(running.size());
    for (int round = -1; round < plan_.rounds; ++round) {
      for (size_t i = 0; i < running.size(); ++i) {
        const Result<double> nanoseconds = running[i].Round();
        if (!nanoseconds) return nanoseconds.error().message();
        if (round >= 0) seconds[i].push_back(1e-9 * *nanoseconds);  // the first is to warm up
      }
    }
    std::string medians;
    std::string rounds;
    for (size_t i = 0; i < running.size(); ++i) {
      const std::string start = (i == 0 ? "" : ", ") + Quoted(running[i].name()) + ": ";
      medians += start + Number(Median(seconds[i]));
      rounds += start + List(seconds[i]);
    }
    line.Add("seconds", "{" + medians + "}").Add("rounds", "{" + rounds + "}");
    if (running.size() > 1) {
      std::vector<double> ratios;
      std::vector<double> added;
      for (size_t round = 0; round < seconds[0].size(); ++round) {
        ratios.push_back(seconds[1][round] / seconds[0][round]);
        added.push_back(seconds[0][round] - seconds[1][round]);
      }
      line.Add("against", Quoted(running[1].name()));
      line.Add("ratio", Number(Median(ratios))).Add("added", Number(Median(added)));
    }
    return std::nullopt;
  }

  const Plan plan_;
  const std::string socket_;
  const int gpus_;
  int jobs_ = 0;
  bool failed_ = false;
};

// How many GPUs there are. Asked by a process of its own: one that has the driver cannot fork
// ranks.
Result<int> CountGpus() {
  const RankProcess asker([](const Channel& channel) {
    const auto driver = CudaDriver::Load();
    if (!driver) return channel.Say(driver.error());
    int count = 0;
    (*driver)->cuDeviceGetCount(&count);
    channel.Say(std::to_string(count));
  });
  const std::string answer = asker.Hear();
  const int count = std::atoi(answer.c_str());
  if (count > 0) return count;
  return Unexpected(Code::kUnsupported, answer.empty() ? "the driver cannot be loaded" : answer);
}

const std::map<std::string, void (Bench::*)()> kMeasures = {
    {"all_reduce", &Bench::AllReduce}, {"latency", &Bench::Latency},
    {"sharing", &Bench::Sharing},      {"host", &Bench::Host},
    {"step", &Bench::Steps},
};

int Main(int argc, char** argv) {
  Plan plan;
  std::set<std::string> chosen;
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "--quick") == 0) {
      plan = kQuick;
    } else if (kMeasures.contains(argv[i])) {
      chosen.insert(argv[i]);
    } else {
      std::fprintf(stderr,
                   "usage: gpu_bench [--quick] [all_reduce] [latency] [sharing] [host] [step]\n");
      return 2;
    }
  }
  const Result<int> gpus = CountGpus();
  if (!gpus) {
    std::fprintf(stderr, "gpu_bench: %s\n", gpus.error().message().c_str());
    return 2;
  }
  const testing::TemporaryDirectory directory;
  testing::DaemonProcess daemon({"--socket=" + directory.File("s")});
  if (!daemon.WaitUntilReady()) {
    std::fprintf(stderr, "gpu_bench: gradsyncd does not start:\n%s\n", daemon.Output().c_str());
    return 1;
  }
  Bench bench(plan, directory.File("s"), *gpus);
  for (const auto& [name, measure] : kMeasures) {
    if (chosen.empty() || chosen.contains(name)) (bench.*measure)();
  }
  return bench.failed() ? 1 : 0;
}

}  // namespace
}  // namespace gradsync::bench

int main(int argc, char** argv) { return gradsync::bench::Main(argc, argv); }
