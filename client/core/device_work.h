// A collective on a GPU that has been enqueued, and how its end is waited for.
#ifndef GRADSYNC_CLIENT_CORE_DEVICE_WORK_H_
#define GRADSYNC_CLIENT_CORE_DEVICE_WORK_H_

#include <cstdint>
#include <memory>

#include "client/core/device.h"
#include "client/core/group.h"
#include "shm/status.h"

namespace gradsync {

class DaemonGroup;

// Thread-safe. The group it is of stays as long as it does.
class DeviceWork {
 public:
  // `event` is recorded behind the last of it, operation `last`; the work destroys it.
  DeviceWork(std::shared_ptr<DaemonGroup> group, std::shared_ptr<Device> device, DeviceEvent event,
             uint64_t last, Timeout timeout);
  DeviceWork(const DeviceWork&) = delete;
  DeviceWork& operator=(const DeviceWork&) = delete;
  ~DeviceWork();

  // Makes `stream` wait for the result, and returns at once. An error if the group is known to have
  // failed; a failure that comes later lets the stream go, with an undefined result.
  Status Wait(Stream stream) const;
  // Whether the result is there; an error if it will never be.
  Result<bool> IsDone() const;
  // Blocks until the result is there.
  Status Synchronize() const;

 private:
  const std::shared_ptr<DaemonGroup> group_;
  const std::shared_ptr<Device> device_;
  const DeviceEvent event_;
  const uint64_t last_;
  const Timeout timeout_;
};

}  // namespace gradsync

#endif  // GRADSYNC_CLIENT_CORE_DEVICE_WORK_H_
