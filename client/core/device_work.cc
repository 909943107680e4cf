#include "client/core/device_work.h"

#include <utility>

#include "client/core/daemon_group.h"

namespace gradsync {

DeviceWork::DeviceWork(std::shared_ptr<DaemonGroup> group, std::shared_ptr<Device> device,
                       DeviceEvent event, uint64_t last, Timeout timeout)
    : group_(std::move(group)),
      device_(std::move(device)),
      event_(event),
      last_(last),
      timeout_(timeout) {}

DeviceWork::~DeviceWork() {
  if (!group_->session()->connection().in_child()) device_->DestroyEvent(event_);
}

Status DeviceWork::Wait(Stream stream) const {
  GRADSYNC_RETURN_IF_ERROR(group_->CheckUsable());
  return device_->WaitForEvent(stream, event_);
}

Result<bool> DeviceWork::IsDone() const {
  const Result<bool> over = device_->IsOver(event_);
  if (!over || !*over) return over;
  GRADSYNC_RETURN_IF_ERROR(group_->CheckCompleted(last_));
  return true;
}

Status DeviceWork::Synchronize() const {
  GRADSYNC_RETURN_IF_ERROR(group_->AwaitEvent(*device_, event_, timeout_));
  return group_->CheckCompleted(last_);
}

}  // namespace gradsync
