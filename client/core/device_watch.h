// Lets no stream of this process wait for a daemon that is gone: a thread that watches the
// connection and, when it is lost, writes the words that streams wait for. The trainer's own thread
// may be waiting for its GPU then, and can do nothing.
#ifndef GRADSYNC_CLIENT_CORE_DEVICE_WATCH_H_
#define GRADSYNC_CLIENT_CORE_DEVICE_WATCH_H_

#include <sys/types.h>

#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "shm/device.h"
#include "shm/status.h"
#include "shm/unique_fd.h"

namespace gradsync {

// Thread-safe. Destroyed in a forked child, it leaves the parent's thread alone.
class DeviceWatch {
 public:
  // Watches `socket`, which must stay open as long as the watch, for its hang-up, and calls
  // `on_lost` on its own thread before it lets the streams go: what they find then is not to be
  // trusted.
  static Result<std::unique_ptr<DeviceWatch>> Start(int socket, std::function<void()> on_lost);
  DeviceWatch(const DeviceWatch&) = delete;
  DeviceWatch& operator=(const DeviceWatch&) = delete;
  ~DeviceWatch();

  // From now on until Remove, or at once if the connection is lost already.
  void Add(FlagPage* page);
  void Remove(FlagPage* page);

 private:
  DeviceWatch(int socket, std::function<void()> on_lost, UniqueFd stop);
  void Run();

  const int socket_;
  const std::function<void()> on_lost_;
  const UniqueFd stop_;
  const pid_t owner_;
  std::mutex mutex_;  // guards what follows
  std::vector<FlagPage*> pages_;
  bool lost_ = false;
  std::thread thread_;
};

}  // namespace gradsync

#endif  // GRADSYNC_CLIENT_CORE_DEVICE_WATCH_H_
