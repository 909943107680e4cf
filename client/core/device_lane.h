// The way of one rank's operations of one group through one GPU: the flag page, through which the
// trainer's streams and the daemon's meet.
#ifndef GRADSYNC_CLIENT_CORE_DEVICE_LANE_H_
#define GRADSYNC_CLIENT_CORE_DEVICE_LANE_H_

#include <cstdint>
#include <memory>
#include <string>

#include "client/core/device.h"
#include "client/core/session.h"
#include "shm/device.h"
#include "shm/frame_socket.h"
#include "shm/status.h"

namespace gradsync {

// Thread-safe, but for the staging, which is of whoever has the group's turn.
class DeviceLane {
 public:
  // Tells the daemon (UseDevice). `group` is the session's number of the group.
  static Result<std::unique_ptr<DeviceLane>> Open(const std::shared_ptr<Session>& session,
                                                  uint32_t group, uint32_t device);
  DeviceLane(const DeviceLane&) = delete;
  DeviceLane& operator=(const DeviceLane&) = delete;
  // Waits for this process's streams on the GPU, so the group's words must be written by then, or
  // sure to be: after DestroyGroup, or with the connection lost.
  ~DeviceLane();

  Device& device() const { return *device_; }

  // All that the stream has been given so far comes before operation `sequence`, which the caller
  // submits next. Waits until the slot that it takes is free, while kFlagSlots are under way.
  Status MarkReady(uint64_t sequence, Stream stream, Deadline deadline);
  // What the stream is given from now on comes after operation `sequence`, as far as it is on this
  // GPU.
  Status EnqueueWait(uint64_t sequence, Stream stream);

  // Whether streams are let go because the group cannot go on, though it may not have said why yet.
  bool IsFailing() const { return page()->failing.load(std::memory_order_acquire) != 0; }

  // A stream of the lane's own, and memory for collectives on memory that the daemon does not see:
  // at least `bytes`, used only by that stream, in its order.
  Stream own_stream() const { return own_stream_; }
  Result<std::shared_ptr<SharedBuffer>> Staging(uint64_t bytes);

 private:
  DeviceLane(std::shared_ptr<Session> session, std::shared_ptr<Device> device);

  FlagPage* page() const { return reinterpret_cast<FlagPage*>(flags_->data()); }

  const std::shared_ptr<Session> session_;
  const std::shared_ptr<Device> device_;
  std::shared_ptr<SharedBuffer> flags_;
  std::unique_ptr<PinnedFlags> pinned_;
  bool is_watched_ = false;
  Stream own_stream_ = nullptr;
  std::shared_ptr<SharedBuffer> staging_;
};

}  // namespace gradsync

#endif  // GRADSYNC_CLIENT_CORE_DEVICE_LANE_H_
