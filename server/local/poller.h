// epoll(7), with what each descriptor is for.
#ifndef GRADSYNC_SERVER_LOCAL_POLLER_H_
#define GRADSYNC_SERVER_LOCAL_POLLER_H_

#include <sys/epoll.h>

#include <array>
#include <chrono>
#include <cstdint>
#include <span>

#include "server/job/actions.h"
#include "shm/status.h"
#include "shm/unique_fd.h"

namespace gradsync {

enum class EventSource : uint8_t {
  kListener,  // somebody connects
  kInbox,     // see Inbox
  kSocket,    // a session's frames, or its hang-up
  kDoorbell,  // a session's ring has entries
  kProcess,   // a session's trainer has ended
};

struct PollEvent {
  EventSource source = EventSource::kInbox;
  SessionId session = 0;
};

// One thread.
class Poller {
 public:
  static Result<Poller> Create();

  // Reports `fd` while it is readable or hung up. `edge`: only when it becomes so; then a counter
  // need not be read, and a trainer that shares it cannot make the daemon wait for it.
  Status Add(int fd, PollEvent event, bool edge = false);

  // Whether `fd`, which is watched, is reported while it is writable as well.
  Status WatchWrites(int fd, PollEvent event, bool on);

  // Must come before the descriptor is closed: a trainer may hold the same open file, and epoll
  // would go on reporting it.
  void Remove(int fd);

  // What happened, waiting for at most `timeout` (not at all if it is not positive). Valid until
  // the next call.
  std::span<const PollEvent> Wait(std::chrono::nanoseconds timeout);

 private:
  static constexpr size_t kMaxEvents = 64;

  explicit Poller(UniqueFd epoll) : epoll_(std::move(epoll)) {}

  UniqueFd epoll_;
  std::array<PollEvent, kMaxEvents> events_;
};

}  // namespace gradsync

#endif  // GRADSYNC_SERVER_LOCAL_POLLER_H_
