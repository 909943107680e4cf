#include "tests/gpu/bench_runner.h"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <utility>
#include <vector>

#include "client/core/daemon_group.h"
#include "client/core/session.h"
#include "client/ddp/ddp.h"
#include "server/engine/cuda/kernel_arguments.h"
#include "server/engine/cuda/kernels_ptx.h"
#include "server/engine/cuda/nccl_library.h"
#include "tests/fault/rank_process.h"
#include "tests/gpu/bench_gpu.h"

// Of the engine only its kernels' text and the loader of NCCL are used here.

namespace gradsync::bench {
namespace {

using std::chrono::steady_clock;

// Buffers that take turns, so that not all of them lie in the GPU's cache.
constexpr int kBuffers = 4;

// The seconds of one of `iterations`.
Result<double> Each(Result<double> seconds, int iterations) {
  if (seconds) *seconds /= iterations;
  return seconds;
}

CUdeviceptr ToPointer(const void* address) { return reinterpret_cast<CUdeviceptr>(address); }

// A process's session and group, and its GPU.
struct Member {
  std::unique_ptr<BenchGpu> gpu;
  std::shared_ptr<Session> session;
  std::shared_ptr<DaemonGroup> group;

  static Result<Member> Join(const RankAt& at) {
    Member member;
    auto gpu = BenchGpu::Open(at.gpu);
    if (!gpu) return Unexpected(gpu.error());
    member.gpu = *std::move(gpu);
    auto session = testing::OpenSession(testing::At(at.socket), at.rank, at.size, at.job);
    if (!session) return Unexpected(session.error());
    member.session = *std::move(session);
    auto group = DaemonGroup::Create(member.session, "bench", {}, Timeout(0));
    if (!group) return Unexpected(group.error());
    member.group = *std::move(group);
    return member;
  }
};

// ---- Single operations --------------------------------------------------------------------------

class DaemonReduce : public Runner {
 public:
  DaemonReduce(Member member, std::shared_ptr<SharedBuffer> buffer, const Work& work)
      : member_(std::move(member)), buffer_(std::move(buffer)), work_(work) {}

  Result<double> Round() override {
    // One that is not timed: afterwards every rank's stream is at the same point.
    std::vector<std::unique_ptr<DeviceWork>> works;
    GRADSYNC_RETURN_IF_ERROR(Reduce(0, &works));
    GRADSYNC_RETURN_IF_ERROR(works.back()->Wait(member_.gpu->stream()));
    const Result<double> seconds = member_.gpu->Time([&]() -> Status {
      works.clear();
      for (int i = 0; i < work_.iterations; ++i) {
        GRADSYNC_RETURN_IF_ERROR(Reduce(i, &works));
        if (work_.chained) {
          GRADSYNC_RETURN_IF_ERROR(works.back()->Wait(member_.gpu->stream()));
        }
      }
      for (const auto& work : works) {
        GRADSYNC_RETURN_IF_ERROR(work->Wait(member_.gpu->stream()));
      }
      return OkStatus();
    });
    // That it was an average, and no stream that was let go.
    if (seconds) GRADSYNC_RETURN_IF_ERROR(works.back()->Synchronize());
    return Each(seconds, work_.iterations);
  }

 private:
  Status Reduce(int number, std::vector<std::unique_ptr<DeviceWork>>* works) {
    std::byte* const data = buffer_->data() + (number % kBuffers) * work_.bytes;
    Collective collective;
    collective.kind = OpKind::kAllReduce;
    collective.op = ReduceOp::kAvg;
    collective.count = work_.bytes / sizeof(float);
    collective.input = data;
    collective.output = data;
    auto work = member_.group->Enqueue(collective, member_.gpu->device(), member_.gpu->stream(),
                                       Timeout(0));
    if (!work) return work.error();
    works->push_back(*std::move(work));
    return OkStatus();
  }

  const Member member_;
  const std::shared_ptr<SharedBuffer> buffer_;
  const Work work_;
};

class NcclReduce : public Runner {
 public:
  explicit NcclReduce(const Work& work) : work_(work) {}
  ~NcclReduce() override {
    for (const Rank& rank : ranks_) static_cast<void>(rank.gpu->Synchronize());
    for (const Rank& rank : ranks_) {
      if (rank.communicator != nullptr && rank.gpu->MakeCurrent().ok()) {
        nccl_->ncclCommAbort(rank.communicator);
      }
    }
  }

  Status Prepare(int gpus) {
    const char* const named = std::getenv("GRADSYNC_NCCL");
    auto nccl = cuda::NcclLibrary::Load(named != nullptr ? named : "libnccl.so.2");
    if (!nccl) return nccl.error();
    nccl_ = *std::move(nccl);
    for (int ordinal = 0; ordinal < gpus; ++ordinal) {
      auto gpu = BenchGpu::Open(ordinal);
      if (!gpu) return gpu.error();
      const Result<CUdeviceptr> memory = (*gpu)->Allocate(kBuffers * work_.bytes);
      if (!memory) return memory.error();
      ranks_.push_back({*std::move(gpu), *memory});
    }
    ncclUniqueId id;
    GRADSYNC_RETURN_IF_ERROR(Check(nccl_->ncclGetUniqueId(&id), "ncclGetUniqueId"));
    GRADSYNC_RETURN_IF_ERROR(Check(nccl_->ncclGroupStart(), "ncclGroupStart"));
    for (size_t i = 0; i < ranks_.size(); ++i) {
      ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
      GRADSYNC_RETURN_IF_ERROR(ranks_[i].gpu->MakeCurrent());
      GRADSYNC_RETURN_IF_ERROR(
          Check(nccl_->ncclCommInitRankConfig(&ranks_[i].communicator, gpus, id,
                                              static_cast<int>(i), &config),
                "ncclCommInitRankConfig"));
    }
    return Check(nccl_->ncclGroupEnd(), "ncclGroupEnd");
  }

  Result<double> Round() override {
    GRADSYNC_RETURN_IF_ERROR(Reduce(0));
    GRADSYNC_RETURN_IF_ERROR(ranks_[0].gpu->MakeCurrent());
    const Result<double> seconds = ranks_[0].gpu->Time([&]() -> Status {
      for (int i = 0; i < work_.iterations; ++i) GRADSYNC_RETURN_IF_ERROR(Reduce(i));
      return ranks_[0].gpu->MakeCurrent();
    });
    return Each(seconds, work_.iterations);
  }

 private:
  struct Rank {
    std::unique_ptr<BenchGpu> gpu;
    CUdeviceptr memory = 0;
    ncclComm_t communicator = nullptr;
  };

  Status Check(ncclResult_t result, const char* call) const {
    if (result == ncclSuccess) return OkStatus();
    return {Code::kInternal, std::string(call) + ": " + nccl_->ncclGetErrorString(result)};
  }

  Status Reduce(int number) {
    GRADSYNC_RETURN_IF_ERROR(Check(nccl_->ncclGroupStart(), "ncclGroupStart"));
    for (const Rank& rank : ranks_) {
      GRADSYNC_RETURN_IF_ERROR(rank.gpu->MakeCurrent());
      const CUdeviceptr memory =
          rank.memory + static_cast<uint64_t>(number % kBuffers) * work_.bytes;
      auto* const data = reinterpret_cast<void*>(memory);  // NOLINT(performance-no-int-to-ptr)
      GRADSYNC_RETURN_IF_ERROR(
          Check(nccl_->ncclAllReduce(data, data, work_.bytes / sizeof(float), ncclFloat32, ncclAvg,
                                     rank.communicator, rank.gpu->stream()),
                "ncclAllReduce"));
    }
    return Check(nccl_->ncclGroupEnd(), "ncclGroupEnd");
  }

  const Work work_;
  std::unique_ptr<const cuda::NcclLibrary> nccl_;
  std::vector<Rank> ranks_;
};

class KernelReduce : public Runner {
 public:
  KernelReduce(std::unique_ptr<BenchGpu> gpu, const Work& work)
      : gpu_(std::move(gpu)), work_(work) {}
  ~KernelReduce() override {
    if (gpu_->Synchronize().ok() && module_ != nullptr) gpu_->cuda().cuModuleUnload(module_);
  }

  Status Prepare(uint32_t ranks) {
    const CudaDriver& cuda = gpu_->cuda();
    GRADSYNC_RETURN_IF_ERROR(
        cuda.Check(cuda.cuModuleLoadData(&module_, cuda::kKernelsPtx), "cuModuleLoadData"));
    GRADSYNC_RETURN_IF_ERROR(cuda.Check(
        cuda.cuModuleGetFunction(&function_, module_, "gradsync_avg_f32"), "cuModuleGetFunction"));
    for (uint32_t rank = 0; rank < ranks; ++rank) {
      const Result<CUdeviceptr> memory = gpu_->Allocate(work_.bytes);
      if (!memory) return memory.error();
      auto* const data = reinterpret_cast<void*>(*memory);  // NOLINT(performance-no-int-to-ptr)
      arguments_.inputs[rank] = data;
      arguments_.outputs[rank] = data;
    }
    arguments_.input_count = ranks;
    arguments_.output_count = ranks;
    arguments_.elements = work_.bytes / sizeof(float);
    arguments_.packs = work_.bytes / cuda::kPackBytes;
    arguments_.divisor = ranks;
    const Result<int> multiprocessors = gpu_->Multiprocessors();
    if (!multiprocessors) return multiprocessors.error();
    const uint64_t wanted = (arguments_.packs + kThreads - 1) / kThreads;
    const auto most = static_cast<uint64_t>(*multiprocessors) * 2;  // as reduce_launch.cc has it
    blocks_ = static_cast<unsigned>(std::clamp<uint64_t>(wanted, 1, most));
    return OkStatus();
  }

  Result<double> Round() override {
    const CudaDriver& cuda = gpu_->cuda();
    const Result<double> seconds = gpu_->Time([&]() -> Status {
      for (int i = 0; i < work_.iterations; ++i) {
        void* parameters[] = {&arguments_};
        GRADSYNC_RETURN_IF_ERROR(
            cuda.Check(cuda.cuLaunchKernel(function_, blocks_, 1, 1, kThreads, 1, 1, 0,
                                           gpu_->stream(), parameters, nullptr),
                       "cuLaunchKernel"));
      }
      return OkStatus();
    });
    return Each(seconds, work_.iterations);
  }

 private:
  static constexpr unsigned kThreads = 512;

  const std::unique_ptr<BenchGpu> gpu_;
  const Work work_;
  CUmodule module_ = nullptr;
  CUfunction function_ = nullptr;
  cuda::KernelArguments arguments_{};
  unsigned blocks_ = 1;
};

class CopyRunner : public Runner {
 public:
  CopyRunner(std::unique_ptr<BenchGpu> gpu, CUdeviceptr memory, const Work& work)
      : gpu_(std::move(gpu)), memory_(memory), work_(work) {}

  Result<double> Round() override {
    const Result<double> seconds = gpu_->Time([&]() -> Status {
      for (int i = 0; i < work_.iterations; ++i) {
        const auto from = static_cast<uint64_t>(i % kBuffers);
        const auto to = static_cast<uint64_t>((i + 1) % kBuffers);
        GRADSYNC_RETURN_IF_ERROR(
            gpu_->Copy(memory_ + to * work_.bytes, memory_ + from * work_.bytes, work_.bytes));
      }
      return OkStatus();
    });
    return Each(seconds, work_.iterations);
  }

 private:
  const std::unique_ptr<BenchGpu> gpu_;
  const CUdeviceptr memory_;
  const Work work_;
};

// ---- Steps --------------------------------------------------------------------------------------

// The GPU's part of a step that has nothing to do with averaging.
class Computation {
 public:
  static Result<Computation> Make(BenchGpu* gpu, const Step& step) {
    const Result<CUdeviceptr> memory = gpu->Allocate(2 * Largest(step));
    if (!memory) return Unexpected(memory.error());
    return Computation(gpu, *memory, step);
  }

  Status Compute() const {
    return gpu_->Copy(memory_ + Largest(step_), memory_, step_.computed_bytes);
  }
  Status MakeGradient(CUdeviceptr slot) const {
    return gpu_->Copy(slot, memory_, step_.gradient_bytes);
  }
  Status UseGradient(CUdeviceptr slot) const {
    return gpu_->Copy(memory_, slot, step_.gradient_bytes);
  }

 private:
  Computation(BenchGpu* gpu, CUdeviceptr memory, const Step& step)
      : gpu_(gpu), memory_(memory), step_(step) {}
  static uint64_t Largest(const Step& step) {
    return std::max(step.computed_bytes, step.gradient_bytes);
  }

  const BenchGpu* gpu_;
  CUdeviceptr memory_;
  Step step_;
};

class StepAlone : public Runner {
 public:
  StepAlone(std::unique_ptr<BenchGpu> gpu, Computation computation, CUdeviceptr gradients,
            const Step& step)
      : gpu_(std::move(gpu)), computation_(computation), gradients_(gradients), step_(step) {}

  Result<double> Round() override {
    const Result<double> seconds = gpu_->Time([&]() -> Status {
      for (int i = 0; i < step_.iterations; ++i) GRADSYNC_RETURN_IF_ERROR(Iterate());
      return OkStatus();
    });
    return Each(seconds, step_.iterations);
  }

 private:
  Status Iterate() {
    for (int layer = 0; layer < step_.layers; ++layer) {
      GRADSYNC_RETURN_IF_ERROR(computation_.Compute());
      GRADSYNC_RETURN_IF_ERROR(computation_.MakeGradient(Slot(layer)));
    }
    for (int layer = 0; layer < step_.layers; ++layer) {
      GRADSYNC_RETURN_IF_ERROR(computation_.UseGradient(Slot(layer)));
    }
    return OkStatus();
  }
  CUdeviceptr Slot(int layer) const {
    return gradients_ + static_cast<uint64_t>(layer) * step_.gradient_bytes;
  }

  const std::unique_ptr<BenchGpu> gpu_;
  const Computation computation_;
  const CUdeviceptr gradients_;
  const Step step_;
};

class StepWithDaemon : public Runner {
 public:
  StepWithDaemon(Member member, Computation computation, const Step& step, bool host_time)
      : member_(std::move(member)), computation_(computation), step_(step), host_time_(host_time) {}

  Status Prepare() {
    std::vector<ParameterSpec> parameters;
    for (int layer = 0; layer < step_.layers; ++layer) {
      ParameterSpec parameter;
      parameter.name = "layer" + std::to_string(layer);
      parameter.shape = {static_cast<int64_t>(step_.gradient_bytes / sizeof(float))};
      parameter.device = member_.gpu->device();
      parameters.push_back(std::move(parameter));
    }
    DdpOptions options;
    options.bucket_bytes = step_.gradient_bytes;
    options.fixed_plan = true;
    auto ddp = Ddp::Create(member_.group, std::move(parameters), options);
    if (!ddp) return ddp.error();
    ddp_ = *std::move(ddp);
    ddp_->UseStream(member_.gpu->stream());
    return OkStatus();
  }

  Result<double> Round() override {
    // One that is not timed: afterwards every rank's stream is at the same point.
    GRADSYNC_RETURN_IF_ERROR(Iterate());
    host_ = {};
    const Result<double> seconds = member_.gpu->Time([&]() -> Status {
      for (int i = 0; i < step_.iterations; ++i) GRADSYNC_RETURN_IF_ERROR(Iterate());
      return OkStatus();
    });
    if (!seconds || !host_time_) return Each(seconds, step_.iterations);
    return std::chrono::duration<double>(host_).count() / (step_.iterations * step_.layers);
  }

 private:
  // From the last layer to the first, as a backward goes.
  Status Iterate() {
    GRADSYNC_RETURN_IF_ERROR(ddp_->Begin());
    for (auto layer = static_cast<uint32_t>(step_.layers); layer-- > 0;) {
      GRADSYNC_RETURN_IF_ERROR(computation_.Compute());
      const Result<Slot> slot = ddp_->GetSlot(layer);
      GRADSYNC_RETURN_IF_ERROR(computation_.MakeGradient(ToPointer(slot->data)));
      const steady_clock::time_point start = steady_clock::now();
      const Result<bool> ready = ddp_->Ready(layer);
      host_ += steady_clock::now() - start;
      if (!ready) return ready.error();
    }
    for (uint32_t bucket = 0; bucket < ddp_->bucket_count(); ++bucket) {
      const steady_clock::time_point start = steady_clock::now();
      GRADSYNC_RETURN_IF_ERROR(ddp_->Wait(bucket));
      host_ += steady_clock::now() - start;
    }
    GRADSYNC_RETURN_IF_ERROR(ddp_->End());
    for (uint32_t layer = 0; layer < static_cast<uint32_t>(step_.layers); ++layer) {
      GRADSYNC_RETURN_IF_ERROR(computation_.UseGradient(ToPointer(ddp_->GetSlot(layer)->data)));
    }
    return OkStatus();
  }

  const Member member_;
  const Computation computation_;
  const Step step_;
  const bool host_time_;
  std::unique_ptr<Ddp> ddp_;
  steady_clock::duration host_{};
};

RunnerOrError MakeStepOfRank(const RankAt& at, const Step& step, bool host_time) {
  Result<Member> member = Member::Join(at);
  if (!member) return Unexpected(member.error());
  const Result<Computation> computation = Computation::Make(member->gpu.get(), step);
  if (!computation) return Unexpected(computation.error());
  auto runner = std::make_unique<StepWithDaemon>(*std::move(member), *computation, step, host_time);
  GRADSYNC_RETURN_IF_ERROR(runner->Prepare());
  return runner;
}

}  // namespace

RunnerOrError MakeDaemonReduce(const RankAt& at, const Work& work) {
  Result<Member> member = Member::Join(at);
  if (!member) return Unexpected(member.error());
  auto buffer =
      member->session->Allocate(kBuffers * work.bytes, "benchmark", member->gpu->device());
  if (!buffer) return Unexpected(buffer.error());
  return std::make_unique<DaemonReduce>(*std::move(member), *std::move(buffer), work);
}

RunnerOrError MakeNcclReduce(int gpus, const Work& work) {
  auto runner = std::make_unique<NcclReduce>(work);
  GRADSYNC_RETURN_IF_ERROR(runner->Prepare(gpus));
  return runner;
}

RunnerOrError MakeKernelReduce(uint32_t ranks, const Work& work) {
  auto gpu = BenchGpu::Open(0);
  if (!gpu) return Unexpected(gpu.error());
  auto runner = std::make_unique<KernelReduce>(*std::move(gpu), work);
  GRADSYNC_RETURN_IF_ERROR(runner->Prepare(ranks));
  return runner;
}

RunnerOrError MakeCopy(const Work& work) {
  auto gpu = BenchGpu::Open(0);
  if (!gpu) return Unexpected(gpu.error());
  const Result<CUdeviceptr> memory = (*gpu)->Allocate(kBuffers * work.bytes);
  if (!memory) return Unexpected(memory.error());
  return std::make_unique<CopyRunner>(*std::move(gpu), *memory, work);
}

RunnerOrError MakeStepAlone(int ordinal, const Step& step) {
  auto gpu = BenchGpu::Open(ordinal);
  if (!gpu) return Unexpected(gpu.error());
  const Result<Computation> computation = Computation::Make(gpu->get(), step);
  if (!computation) return Unexpected(computation.error());
  const Result<CUdeviceptr> gradients =
      (*gpu)->Allocate(static_cast<uint64_t>(step.layers) * step.gradient_bytes);
  if (!gradients) return Unexpected(gradients.error());
  return std::make_unique<StepAlone>(*std::move(gpu), *computation, *gradients, step);
}

RunnerOrError MakeStepWithDaemon(const RankAt& at, const Step& step) {
  return MakeStepOfRank(at, step, false);
}

RunnerOrError MakeHostTime(const RankAt& at, const Step& step) {
  return MakeStepOfRank(at, step, true);
}

}  // namespace gradsync::bench
