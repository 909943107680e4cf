// This process as one rank of a job: the connection to the daemon, and the shared memory that was
// allocated over it.
#ifndef GRADSYNC_CLIENT_CORE_SESSION_H_
#define GRADSYNC_CLIENT_CORE_SESSION_H_

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <shared_mutex>
#include <string>
#include <vector>

#include "client/core/connection.h"
#include "client/core/device.h"
#include "client/core/device_watch.h"
#include "client/core/environment.h"
#include "client/core/group.h"
#include "client/core/starter.h"
#include "shm/session_layout.h"
#include "shm/status.h"

namespace gradsync {

// Thread-safe. Groups share it; buffers do not, and outlive it.
class Session : public std::enable_shared_from_this<Session> {
 public:
  // Finds (or starts) the daemon and joins the job; does not wait for other ranks.
  static Result<std::shared_ptr<Session>> Open(const SessionRequest& request,
                                               const Environment& environment);
  // The same at a daemon that `discovery` describes.
  static Result<std::shared_ptr<Session>> Open(const SessionRequest& request,
                                               const Environment& environment,
                                               const Discovery& discovery);

  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;
  ~Session();

  // Says goodbye. Everything made from the session then answers kFailedPrecondition; buffers keep
  // their memory.
  void Close() { connection_->Close(); }

  Connection& connection() { return *connection_; }
  const Identity& identity() const { return connection_->identity(); }
  const std::string& socket() const { return connection_->path(); }

  // `timeout`, or the session's if that is zero.
  Timeout Resolve(Timeout timeout) const;

  Result<std::shared_ptr<SharedBuffer>> Allocate(uint64_t bytes, const std::string& label,
                                                 uint32_t device = kCpu);

  // A GPU of this process; opened once. kUnsupported where there is none.
  Result<std::shared_ptr<Device>> GetDevice(uint32_t device);

  // Lets the daemon use memory of a GPU where the trainer has allocated it: the whole allocation
  // that [address, address + bytes) is in, until Unregister, which waits for the GPU. The memory
  // must not be freed in between. kUnsupported, saying why, for memory that cannot be shared.
  Status Register(uint32_t device, const std::byte* address, uint64_t bytes);
  Status Unregister(const std::byte* address);

  // The streams that wait for the page's `done` are let go when the daemon is lost.
  Status Watch(FlagPage* page);
  void Unwatch(FlagPage* page);

  // Where [data, data + bytes) lies in the session's segments, if one buffer holds all of it.
  std::optional<Region> Find(const void* data, uint64_t bytes) const;

  // A staging buffer of `bytes` (one of a few sizes), for one collective; give it back afterwards.
  // There are never more of them than there were collectives at the same time, and none waits for
  // another's, since the ranks' collectives wait for each other.
  Result<std::shared_ptr<SharedBuffer>> BorrowStaging(uint64_t bytes);
  void ReturnStaging(std::shared_ptr<SharedBuffer> staging);

 private:
  class SegmentBuffer;
  class DeviceBuffer;
  struct Range {
    const std::byte* begin = nullptr;
    uint64_t size = 0;
    uint32_t segment = 0;
  };
  // Memory of the trainer's that the daemon has, by its base.
  struct Registered {
    const std::byte* base = nullptr;
    uint32_t segment = 0;
    std::shared_ptr<Device> device;
  };

  Session(std::shared_ptr<Connection> connection, Timeout timeout);

  Result<std::shared_ptr<SharedBuffer>> AllocateOn(uint32_t device, uint64_t bytes,
                                                   const std::string& label);
  void Remember(const Range& range);
  Result<std::shared_ptr<SharedBuffer>> Adopt(const SegmentAllocated& reply, UniqueFd fd,
                                              const std::string& label);
  void Forget(const std::byte* begin, uint32_t segment);
  void FreeSegmentOfDaemon(uint32_t segment);

  const std::shared_ptr<Connection> connection_;
  const Timeout timeout_;

  mutable std::shared_mutex ranges_mutex_;
  std::vector<Range> ranges_;  // sorted by begin; do not overlap

  std::mutex devices_mutex_;  // guards the three below
  std::vector<std::shared_ptr<Device>> devices_;
  std::vector<Registered> registered_;
  std::unique_ptr<DeviceWatch> watch_;

  std::mutex staging_mutex_;
  std::vector<std::shared_ptr<SharedBuffer>> idle_staging_;
};

}  // namespace gradsync

#endif  // GRADSYNC_CLIENT_CORE_SESSION_H_
