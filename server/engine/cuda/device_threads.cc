#include "server/engine/cuda/device_threads.h"

#include <utility>

namespace gradsync::cuda {

DeviceThreads::DeviceThreads(const std::vector<std::unique_ptr<Device>>& devices,
                             const NcclLibrary* nccl)
    : devices_(devices), nccl_(nccl), threads_(devices.size()) {}

// While they end they may still call Fail, which must not come upon one that is gone.
DeviceThreads::~DeviceThreads() {
  std::vector<std::unique_ptr<DeviceThread>> ending;
  {
    const MutexLock lock(&mutex_);
    ending.swap(threads_);
  }
}

Status DeviceThreads::Start(uint32_t device) {
  {
    const MutexLock lock(&mutex_);
    if (threads_[device] != nullptr) return devices_[device]->lost();
  }
  // Without the lock: a context takes its time, and others want to launch and to fail meanwhile.
  Result<std::shared_ptr<const PrimaryContext>> context = devices_[device]->Use();
  if (!context) return context.error();
  const MutexLock lock(&mutex_);
  threads_[device] = std::make_unique<DeviceThread>(
      *devices_[device], std::move(*context), nccl_,
      [this](const std::shared_ptr<Group>& group, const Status& why) { Fail(group, why); });
  return OkStatus();
}

void DeviceThreads::Launch(Group& group) {
  const MutexLock lock(&mutex_);
  for (const std::shared_ptr<Operation>& operation : group.TakeLaunchable()) {
    for (size_t side = 0; side < operation->sides.size(); ++side) {
      threads_[operation->plan.devices[side].device]->Launch(operation, side);
    }
  }
}

void DeviceThreads::Fail(const std::shared_ptr<Group>& group, const Status& why) {
  if (!group->Fail(why)) return;
  const MutexLock lock(&mutex_);
  for (const std::unique_ptr<DeviceThread>& thread : threads_) {
    if (thread != nullptr) thread->Abort(group->id());
  }
}

void DeviceThreads::Drop(const Group& group) {
  const MutexLock lock(&mutex_);
  for (const std::unique_ptr<DeviceThread>& thread : threads_) {
    if (thread != nullptr) thread->Drop(group.id());
  }
}

}  // namespace gradsync::cuda
