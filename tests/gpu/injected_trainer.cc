#include "tests/gpu/injected_trainer.h"

#include <cuda.h>
#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <memory>
#include <vector>

#include "client/core/daemon_group.h"
#include "client/core/session.h"
#include "client/ddp/ddp.h"
#include "shm/cuda/device_memory.h"
#include "shm/cuda/driver.h"
#include "tests/fault/rank_process.h"

namespace gradsync::testing {
namespace {

// Every wait of the training, so that nothing lasts for long.
constexpr Timeout kTimeout{3000};
constexpr uint64_t kCount = 3000;

CUdeviceptr ToPointer(const void* address) { return reinterpret_cast<CUdeviceptr>(address); }

// The sums and averages of what the ranks give are exact.
float Given(uint32_t rank, uint32_t round) { return static_cast<float>(round * 8 + rank * 4); }

class BriefTraining {
 public:
  BriefTraining(std::shared_ptr<Session> session, uint32_t rank, uint32_t world_size)
      : session_(std::move(session)), rank_(rank), world_size_(world_size) {}
  BriefTraining(const BriefTraining&) = delete;
  BriefTraining& operator=(const BriefTraining&) = delete;
  ~BriefTraining();

  Status Run();
  const std::string& wrong() const { return wrong_; }

 private:
  Status Prepare();
  Status TrainDdp();
  Status Iterate(Ddp* ddp, uint32_t round);
  Status ReduceOrdinary();
  Status ReduceRegistered();
  Status AllReduce(void* data);
  Status Check(CUresult result, const char* call) const { return cuda_->Check(result, call); }
  Status Fill(void* to, uint32_t round);
  Status Compare(const void* from, float expected, const char* what);
  float Sum(uint32_t round) const {
    float sum = 0;
    for (uint32_t rank = 0; rank < world_size_; ++rank) sum += Given(rank, round);
    return sum;
  }

  const std::shared_ptr<Session> session_;
  const uint32_t rank_;
  const uint32_t world_size_;
  const CudaDriver* cuda_ = nullptr;
  uint32_t device_ = 0;
  std::shared_ptr<const PrimaryContext> context_;
  CUstream stream_ = nullptr;
  CUdeviceptr memory_ = 0;
  std::shared_ptr<DaemonGroup> group_;
  std::vector<float> host_ = std::vector<float>(kCount);
  std::string wrong_;
};

BriefTraining::~BriefTraining() {
  group_ = nullptr;
  if (memory_ != 0) cuda_->cuMemFree(memory_);
  if (stream_ != nullptr) {
    cuda_->cuStreamSynchronize(stream_);
    cuda_->cuStreamDestroy(stream_);
  }
}

Status BriefTraining::Prepare() {
  const Result<const CudaDriver*> driver = CudaDriver::Load();
  if (!driver) return driver.error();
  cuda_ = *driver;
  int count = 0;
  GRADSYNC_RETURN_IF_ERROR(Check(cuda_->cuDeviceGetCount(&count), "cuDeviceGetCount"));
  const int ordinal = static_cast<int>(rank_) % count;
  device_ = static_cast<uint32_t>(ordinal) + 1;
  CUdevice device = 0;
  GRADSYNC_RETURN_IF_ERROR(Check(cuda_->cuDeviceGet(&device, ordinal), "cuDeviceGet"));
  Result<std::shared_ptr<const PrimaryContext>> context = PrimaryContext::Retain(*cuda_, device);
  if (!context) return context.error();
  context_ = *std::move(context);
  GRADSYNC_RETURN_IF_ERROR(Check(cuda_->cuCtxSetCurrent(context_->get()), "cuCtxSetCurrent"));
  GRADSYNC_RETURN_IF_ERROR(
      Check(cuda_->cuStreamCreateWithPriority(&stream_, CU_STREAM_NON_BLOCKING, 0), "stream"));
  Result<std::shared_ptr<DaemonGroup>> group = DaemonGroup::Create(session_, "all", {}, kTimeout);
  if (!group) return group.error();
  group_ = *std::move(group);
  return OkStatus();
}

Status BriefTraining::Run() {
  GRADSYNC_RETURN_IF_ERROR(Prepare());
  GRADSYNC_RETURN_IF_ERROR(TrainDdp());
  GRADSYNC_RETURN_IF_ERROR(
      Check(cuda_->cuMemAlloc(&memory_, kCount * sizeof(float)), "cuMemAlloc"));
  GRADSYNC_RETURN_IF_ERROR(ReduceOrdinary());
  GRADSYNC_RETURN_IF_ERROR(ReduceRegistered());
  return Check(cuda_->cuStreamSynchronize(stream_), "cuStreamSynchronize");
}

Status BriefTraining::Fill(void* to, uint32_t round) {
  std::fill(host_.begin(), host_.end(), Given(rank_, round));
  GRADSYNC_RETURN_IF_ERROR(
      Check(cuda_->cuMemcpyHtoDAsync(ToPointer(to), host_.data(), kCount * sizeof(float), stream_),
            "cuMemcpyHtoDAsync"));
  // So that the processor's memory may be used again.
  return Check(cuda_->cuStreamSynchronize(stream_), "cuStreamSynchronize");
}

Status BriefTraining::Compare(const void* from, float expected, const char* what) {
  GRADSYNC_RETURN_IF_ERROR(Check(
      cuda_->cuMemcpyDtoHAsync(host_.data(), ToPointer(from), kCount * sizeof(float), stream_),
      "cuMemcpyDtoHAsync"));
  GRADSYNC_RETURN_IF_ERROR(Check(cuda_->cuStreamSynchronize(stream_), "cuStreamSynchronize"));
  // The stream may have been let go by a failure; only then may the numbers be wrong.
  GRADSYNC_RETURN_IF_ERROR(group_->CheckUsable());
  for (const float value : host_) {
    if (value == expected) continue;
    wrong_ = std::string(what) + ": " + std::to_string(value) + ", not " + std::to_string(expected);
    break;
  }
  return OkStatus();
}

Status BriefTraining::TrainDdp() {
  std::vector<ParameterSpec> parameters(3);
  for (size_t i = 0; i < parameters.size(); ++i) {
    parameters[i].name = "p" + std::to_string(i);
    parameters[i].shape = {static_cast<int64_t>(kCount)};
    parameters[i].device = device_;
  }
  DdpOptions options;
  options.bucket_bytes = options.first_bucket_bytes = kCount * sizeof(float);
  options.timeout = kTimeout;
  Result<std::unique_ptr<Ddp>> ddp = Ddp::Create(group_, parameters, options);
  if (!ddp) return ddp.error();
  (*ddp)->UseStream(stream_);
  for (uint32_t round = 0; round < 2; ++round) {
    GRADSYNC_RETURN_IF_ERROR(Iterate(ddp->get(), round));
    const Result<bool> replanned = (*ddp)->Replan();
    if (!replanned) return replanned.error();
  }
  return OkStatus();
}

Status BriefTraining::Iterate(Ddp* ddp, uint32_t round) {
  GRADSYNC_RETURN_IF_ERROR(ddp->Begin());
  for (uint32_t parameter = 0; parameter < ddp->parameter_count(); ++parameter) {
    GRADSYNC_RETURN_IF_ERROR(Fill(ddp->GetSlot(parameter)->data, round));
    const Result<bool> ready = ddp->Ready(parameter);
    if (!ready) return ready.error();
  }
  for (uint32_t bucket = 0; bucket < ddp->bucket_count(); ++bucket) {
    GRADSYNC_RETURN_IF_ERROR(ddp->Wait(bucket));
  }
  GRADSYNC_RETURN_IF_ERROR(ddp->End());
  for (uint32_t parameter = 0; parameter < ddp->parameter_count(); ++parameter) {
    GRADSYNC_RETURN_IF_ERROR(Compare(ddp->GetSlot(parameter)->data,
                                     Sum(round) / static_cast<float>(world_size_), "average"));
  }
  return OkStatus();
}

Status BriefTraining::AllReduce(void* data) {
  Collective collective;
  collective.kind = OpKind::kAllReduce;
  collective.count = kCount;
  collective.input = static_cast<const std::byte*>(data);
  collective.output = static_cast<std::byte*>(data);
  const auto work = group_->Enqueue(collective, device_, stream_, kTimeout);
  if (!work) return work.error();
  GRADSYNC_RETURN_IF_ERROR((*work)->Wait(stream_));
  return (*work)->Synchronize();
}

Status BriefTraining::ReduceOrdinary() {
  void* const data = reinterpret_cast<void*>(memory_);  // NOLINT(performance-no-int-to-ptr)
  GRADSYNC_RETURN_IF_ERROR(Fill(data, 3));
  GRADSYNC_RETURN_IF_ERROR(AllReduce(data));
  return Compare(data, Sum(3), "staged sum");
}

Status BriefTraining::ReduceRegistered() {
  auto* const data = reinterpret_cast<std::byte*>(memory_);  // NOLINT(performance-no-int-to-ptr)
  GRADSYNC_RETURN_IF_ERROR(session_->Register(device_, data, kCount * sizeof(float)));
  Status status = Fill(data, 4);
  if (status.ok()) status = AllReduce(data);
  if (status.ok()) status = Compare(data, Sum(4), "registered sum");
  const Status unregistered = session_->Unregister(data);
  return status.ok() ? unregistered : status;
}

}  // namespace

std::string LiveObjects() {
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
  if (library == nullptr) return "";
  using Describe = size_t (*)(char*, size_t);
  const auto describe = reinterpret_cast<Describe>(dlsym(library, "fakeCudaDescribeLive"));
  if (describe == nullptr) return "";
  std::array<char, 8192> text{};
  describe(text.data(), text.size());
  return text.data();
}

std::string TrainBriefly(const std::string& socket, const std::string& job, uint32_t rank,
                         uint32_t world_size) {
  auto session = OpenSession(At(socket), rank, world_size, job);
  if (!session) return "error: " + session.error().ToString();
  BriefTraining training(*std::move(session), rank, world_size);
  const Status status = training.Run();
  if (!training.wrong().empty()) return "wrong: " + training.wrong();
  return status.ok() ? "right" : "error: " + status.ToString();
}

}  // namespace gradsync::testing
