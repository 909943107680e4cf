#include "server/engine/cuda/cuda_engine.h"

#include <algorithm>
#include <cstdlib>
#include <utility>

#include "server/engine/cuda/device_memory.h"
#include "server/engine/cuda/flags.h"
#include "server/engine/cuda/operation.h"
#include "server/engine/cuda/plan.h"

namespace gradsync::cuda {
namespace {

// As far ahead as the clock can be counted on.
constexpr std::chrono::nanoseconds kForEver = std::chrono::hours(24 * 365);

std::vector<uint32_t> DevicesOf(const Task& task) {
  std::vector<uint32_t> devices;
  for (const DevicePart& part : task.device->parts) devices.push_back(part.device);
  return devices;
}

}  // namespace

Result<std::unique_ptr<DeviceEngine>> CudaEngine::Create(const CudaOptions& options) {
  // Streams that share a connection wait for each other. And a kernel that is loaded only when it
  // is launched may have that launch wait for all streams, some of which wait for trainers.
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0);
  setenv("CUDA_MODULE_LOADING", "EAGER", 0);
  const Result<const CudaDriver*> loaded = CudaDriver::Load();
  if (!loaded) return Unexpected(loaded.error());
  const CudaDriver& driver = **loaded;
  int count = 0;
  GRADSYNC_RETURN_IF_ERROR(driver.Check(driver.cuDeviceGetCount(&count), "cuDeviceGetCount"));
  if (count == 0) return Unexpected(Code::kUnsupported, "the CUDA driver finds no device");
  std::vector<std::unique_ptr<Device>> devices;
  for (int i = 0; i < count; ++i) {
    Result<std::unique_ptr<Device>> device = Device::Create(driver, static_cast<uint32_t>(i));
    if (!device) return Unexpected(std::move(device.error()));
    devices.push_back(std::move(*device));
  }
  return std::unique_ptr<DeviceEngine>(
      new CudaEngine(driver, std::move(devices), NcclLibrary::Load(options.nccl)));
}

CudaEngine::CudaEngine(const CudaDriver& driver, std::vector<std::unique_ptr<Device>> devices,
                       Result<std::unique_ptr<const NcclLibrary>> nccl)
    : driver_(driver),
      devices_(std::move(devices)),
      nccl_(std::move(nccl)),
      threads_(devices_, nccl_ ? nccl_->get() : nullptr),
      watcher_(threads_, janitor_) {
  for (const std::unique_ptr<Device>& device : devices_) infos_.push_back(device->info());
}

CudaEngine::~CudaEngine() {
  while (!groups_.empty()) Forget(groups_.begin()->first);
}

std::string CudaEngine::Describe() const {
  const std::string driver = "CUDA driver " + std::to_string(driver_.version / 1000) + "." +
                             std::to_string(driver_.version % 1000 / 10);
  return driver + (nccl_ ? ", NCCL " + (*nccl_)->VersionText() : ", no NCCL");
}

Result<Device*> CudaEngine::DeviceAt(uint32_t index) const {
  if (index < devices_.size()) return devices_[index].get();
  return Unexpected(Code::kInvalidArgument, "there is no GPU " + std::to_string(index));
}

Result<DeviceEngine::Exported> CudaEngine::Allocate(uint32_t device, uint64_t bytes) {
  const Result<Device*> found = DeviceAt(device);
  if (!found) return Unexpected(found.error());
  return AllocateOn(**found, bytes);
}

Result<std::shared_ptr<const DeviceMemory>> CudaEngine::ImportExported(uint32_t device, UniqueFd fd,
                                                                       uint64_t bytes) {
  const Result<Device*> found = DeviceAt(device);
  if (!found) return Unexpected(found.error());
  return ImportExportedOn(**found, std::move(fd), bytes);
}

Result<std::shared_ptr<const DeviceMemory>> CudaEngine::ImportLegacy(uint32_t device,
                                                                     const LegacyHandle& handle,
                                                                     uint64_t bytes) {
  const Result<Device*> found = DeviceAt(device);
  if (!found) return Unexpected(found.error());
  return ImportLegacyOn(**found, handle, bytes);
}

Result<std::shared_ptr<DeviceFlags>> CudaEngine::PinFlags(std::shared_ptr<const Mapping> mapping) {
  return PinnedFlags::Create(std::move(mapping), devices_.size());
}

Status CudaEngine::CheckSupported(OpKind kind, DType dtype, ReduceOp op,
                                  const std::vector<uint32_t>& devices) const {
  for (uint32_t index : devices) {
    const Result<Device*> device = DeviceAt(index);
    if (!device) return device.error();
    if ((*device)->is_lost()) return (*device)->lost();
  }
  GRADSYNC_RETURN_IF_ERROR(CheckPlan(kind, dtype, op, devices));
  if (nccl_ || !NeedsNccl(kind, devices)) return OkStatus();
  return {Code::kUnsupported, std::string(OpKindName(kind)) +
                                  " over several GPUs takes NCCL, but " + nccl_.error().message()};
}

// So that it can be planned, and that its GPUs have threads.
Status CudaEngine::CheckTask(const Task& task) {
  const std::vector<uint32_t> devices = DevicesOf(task);
  GRADSYNC_RETURN_IF_ERROR(CheckSupported(task.kind, task.dtype, task.reduce_op, devices));
  for (uint32_t device : devices) GRADSYNC_RETURN_IF_ERROR(threads_.Start(device));
  return OkStatus();
}

void CudaEngine::Run(std::shared_ptr<const Task> task, std::chrono::nanoseconds timeout,
                     Done done) {
  std::shared_ptr<Group>& group = groups_[task->device->group];
  if (group == nullptr) group = std::make_shared<Group>(task->device->group);
  const Status status = CheckTask(*task);
  Plan plan = status.ok() ? MakePlan(*task) : Plan{};
  auto operation = std::make_shared<Operation>(group, std::move(task), std::move(plan));
  operation->timeout = timeout;
  operation->deadline = std::chrono::steady_clock::now() + std::min(timeout, kForEver);
  operation->done = std::move(done);
  for (size_t i = 0; i < operation->sides.size(); ++i) {
    operation->sides[i].device = devices_[operation->plan.devices[i].device].get();
  }
  const bool is_first = group->Add(std::move(operation));
  // An operation without sides ends at once, behind the others, and with this.
  if (!status.ok()) threads_.Fail(group, status);
  threads_.Launch(*group);
  if (is_first) watcher_.Watch(group);
}

void CudaEngine::Abandon(uint64_t group) {
  const auto found = groups_.find(group);
  if (found == groups_.end()) return;
  threads_.Fail(found->second,
                {Code::kFailedPrecondition, "the operation was abandoned: its group has failed"});
}

void CudaEngine::Forget(uint64_t group) {
  const auto found = groups_.find(group);
  if (found == groups_.end()) return;
  if (found->second->Forget()) threads_.Drop(*found->second);
  groups_.erase(found);
}

}  // namespace gradsync::cuda
