// How near the engine comes to the bare kernel, and what its parts cost.
//
// The machine may be shared and its speed drift: what is compared runs in turn within one
// benchmark, which reports medians and their ratio.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <barrier>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <ctime>
#include <functional>
#include <memory>
#include <semaphore>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "server/engine/cpu/bare_kernel.h"
#include "server/engine/cpu/cpu_engine.h"
#include "server/engine/cpu/kernels.h"
#include "shm/segment.h"

namespace gradsync {
namespace {

using Clock = std::chrono::steady_clock;
constexpr size_t kMiB = size_t{1} << 20;

// Each rank's buffer as in life: a memfd of its own, mapped shared, its pages there.
class Buffers {
 public:
  Buffers(size_t ranks, size_t bytes) {
    for (size_t rank = 0; rank < ranks; ++rank) {
      const UniqueFd fd = CreateSealedMemfd("gradsync-bench", bytes).value();
      mappings_.push_back(Mapping::Map(fd.get(), bytes).value());
      std::memset(mappings_.back().data(), static_cast<int>(rank + 1), bytes);
    }
  }
  std::byte* at(size_t rank) const { return mappings_[rank].data(); }
  std::vector<float*> floats() const {
    std::vector<float*> pointers;
    for (const Mapping& mapping : mappings_) {
      pointers.push_back(static_cast<float*>(static_cast<void*>(mapping.data())));
    }
    return pointers;
  }
  size_t ranks() const { return mappings_.size(); }

 private:
  std::vector<Mapping> mappings_;
};

// Threads that do one thing at once, again and again.
class Crew {
 public:
  explicit Crew(size_t threads) : barrier_(static_cast<std::ptrdiff_t>(threads + 1)) {
    for (size_t i = 0; i < threads; ++i) {
      threads_.emplace_back([this, i] {
        for (;;) {
          barrier_.arrive_and_wait();
          if (!work_) return;
          work_(i);
          barrier_.arrive_and_wait();
        }
      });
    }
  }
  ~Crew() {
    work_ = nullptr;
    barrier_.arrive_and_wait();
    for (std::thread& thread : threads_) thread.join();
  }
  Crew(const Crew&) = delete;
  Crew& operator=(const Crew&) = delete;

  void Run(std::function<void(size_t thread)> work) {
    work_ = std::move(work);
    barrier_.arrive_and_wait();
    barrier_.arrive_and_wait();
  }

 private:
  std::function<void(size_t)> work_;
  std::barrier<> barrier_;
  std::vector<std::thread> threads_;
};

std::shared_ptr<Task> MakeTask(const Buffers& inputs, const Buffers& outputs, DType dtype,
                               uint64_t count, OpKind kind = OpKind::kBucketReduce) {
  auto task = std::make_shared<Task>();
  task->kind = kind;
  task->dtype = dtype;
  task->reduce_op = ReduceOp::kAvg;
  task->count = count;
  for (size_t rank = 0; rank < inputs.ranks(); ++rank) {
    task->inputs.push_back(inputs.at(rank));
    task->outputs.push_back(outputs.at(rank));
  }
  return task;
}

std::unique_ptr<CpuEngine> MakeEngine(int threads) {
  CpuEngineOptions options;
  options.threads = threads;
  return CpuEngine::Create(options).value();
}

void RunToEnd(CpuEngine& engine, const std::shared_ptr<const Task>& task) {
  std::binary_semaphore done(0);
  if (!engine.Run(task, [&done] { done.release(); })) done.acquire();
}

double Milliseconds(Clock::duration duration) {
  return std::chrono::duration<double, std::milli>(duration).count();
}

// CPU time of all threads of this process: tells the work from the waiting for a busy machine.
double CpuMilliseconds() {
  timespec now{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) * 1e3 + static_cast<double>(now.tv_nsec) / 1e6;
}

double Median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

// The bare kernel and the engine in turn over the same 25 MiB of each rank, with as many threads.
void BM_BucketAgainstBareKernel(benchmark::State& state) {
  const auto ranks = static_cast<size_t>(state.range(0));
  const auto threads = static_cast<size_t>(state.range(1));
  const size_t bytes = 25 * kMiB;
  const Buffers buffers(ranks, bytes);
  const std::vector<float*> floats = buffers.floats();
  const size_t count = bytes / sizeof(float);
  const std::unique_ptr<CpuEngine> engine = MakeEngine(static_cast<int>(threads));
  const auto task = MakeTask(buffers, buffers, DType::kFloat32, count);
  Crew crew(threads);
  std::vector<double> bare;
  std::vector<double> ours;
  std::vector<double> bare_cpu;
  std::vector<double> our_cpu;
  for (auto _ : state) {
    const double start_cpu = CpuMilliseconds();
    const Clock::time_point start = Clock::now();
    crew.Run([&](size_t thread) {
      BareAverage(floats.data(), ranks, count * thread / threads, count * (thread + 1) / threads);
    });
    const Clock::time_point middle = Clock::now();
    const double middle_cpu = CpuMilliseconds();
    RunToEnd(*engine, task);
    const double end_cpu = CpuMilliseconds();
    const Clock::time_point end = Clock::now();
    bare_cpu.push_back(middle_cpu - start_cpu);
    our_cpu.push_back(end_cpu - middle_cpu);
    bare.push_back(Milliseconds(middle - start));
    ours.push_back(Milliseconds(end - middle));
    state.SetIterationTime(ours.back() / 1e3);
  }
  state.counters["bare_ms"] = Median(bare);
  state.counters["engine_ms"] = Median(ours);
  state.counters["engine/bare"] = Median(ours) / Median(bare);
  state.counters["engine/bare_cpu"] = Median(our_cpu) / Median(bare_cpu);
}
BENCHMARK(BM_BucketAgainstBareKernel)
    ->ArgNames({"ranks", "threads"})
    ->ArgsProduct({{2, 4}, {1, 2}})
    ->UseManualTime()
    ->Unit(benchmark::kMillisecond);

// As above, out of place and the copying operations: no bare kernel, bytes moved per second.
void BM_Engine(benchmark::State& state, OpKind kind, DType dtype, bool in_place) {
  const auto ranks = static_cast<size_t>(state.range(0));
  const auto bytes = static_cast<size_t>(state.range(1));
  const size_t gathered = kind == OpKind::kAllGather ? ranks * bytes : bytes;
  const Buffers inputs(ranks, bytes);
  const Buffers outputs(ranks, gathered);
  const std::unique_ptr<CpuEngine> engine = MakeEngine(2);
  const auto task =
      MakeTask(inputs, in_place ? inputs : outputs, dtype, bytes / DTypeSize(dtype), kind);
  for (auto _ : state) RunToEnd(*engine, task);
  state.SetBytesProcessed(static_cast<int64_t>(state.iterations() * ranks * bytes));
}
BENCHMARK_CAPTURE(BM_Engine, bucket_float32, OpKind::kBucketReduce, DType::kFloat32, true)
    ->ArgNames({"ranks", "bytes"})
    ->ArgsProduct({{2, 4}, {4, 1024, 16 << 10, 64 << 10, 128 << 10, 256 << 10, 1 << 20}})
    ->UseRealTime();
BENCHMARK_CAPTURE(BM_Engine, bucket_bfloat16, OpKind::kBucketReduce, DType::kBFloat16, true)
    ->ArgNames({"ranks", "bytes"})
    ->ArgsProduct({{2, 4}, {25 << 20}})
    ->UseRealTime();
BENCHMARK_CAPTURE(BM_Engine, out_of_place, OpKind::kAllReduce, DType::kFloat32, false)
    ->ArgNames({"ranks", "bytes"})
    ->ArgsProduct({{2, 4}, {25 << 20}})
    ->UseRealTime();
BENCHMARK_CAPTURE(BM_Engine, broadcast, OpKind::kBroadcast, DType::kFloat32, false)
    ->ArgNames({"ranks", "bytes"})
    ->ArgsProduct({{2, 4}, {25 << 20}})
    ->UseRealTime();
BENCHMARK_CAPTURE(BM_Engine, all_gather, OpKind::kAllGather, DType::kFloat32, false)
    ->ArgNames({"ranks", "bytes"})
    ->ArgsProduct({{2, 4}, {25 << 20}})
    ->UseRealTime();

// One tile in the first-level cache: the arithmetic alone.
void BM_CombineTile(benchmark::State& state, DType dtype, ReduceOp op) {
  const auto ranks = static_cast<size_t>(state.range(0));
  const Buffers buffers(ranks, 4096);
  std::vector<const std::byte*> inputs;
  for (size_t rank = 0; rank < ranks; ++rank) inputs.push_back(buffers.at(rank));
  alignas(64) std::byte result[kTileBytes];
  const CombineKernel combine = FindCombineKernel(dtype, op, ranks, ranks);
  for (auto _ : state) {
    combine(inputs.data(), ranks, ranks, 0, kTileBytes, result);
    benchmark::DoNotOptimize(result[0]);
  }
  state.SetBytesProcessed(static_cast<int64_t>(state.iterations() * ranks * kTileBytes));
}

void RegisterCombineTile() {
  for (uint8_t dtype = 0; dtype < kDTypeCount; ++dtype) {
    for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kAvg, ReduceOp::kMax, ReduceOp::kProduct}) {
      const auto type = static_cast<DType>(dtype);
      if (!IsSupported(type, op)) continue;
      const std::string name =
          std::string("BM_CombineTile/") + DTypeName(type) + "_" + ReduceOpName(op);
      benchmark::RegisterBenchmark(name.c_str(), BM_CombineTile, type, op)
          ->ArgName("ranks")
          ->DenseRange(2, 4);
    }
  }
}
const bool kRegistered = (RegisterCombineTile(), true);

}  // namespace
}  // namespace gradsync
