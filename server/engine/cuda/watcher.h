// The thread that sees operations end: by the words that streams write when they are through. It
// calls `done` and sees to deadlines. It calls neither the driver nor NCCL, which might keep it
// waiting.
#ifndef GRADSYNC_SERVER_ENGINE_CUDA_WATCHER_H_
#define GRADSYNC_SERVER_ENGINE_CUDA_WATCHER_H_

#include <chrono>
#include <memory>
#include <thread>
#include <vector>

#include "server/engine/cuda/device_threads.h"
#include "server/engine/cuda/group.h"
#include "server/engine/cuda/janitor.h"
#include "server/engine/mutex.h"

namespace gradsync::cuda {

class Watcher {
 public:
  // Both stay longer than this.
  Watcher(DeviceThreads& threads, Janitor& janitor);
  Watcher(const Watcher&) = delete;
  Watcher& operator=(const Watcher&) = delete;
  // Returns when no operation is left.
  ~Watcher();

  // Any thread. Of a group for which Group::Add said so.
  void Watch(std::shared_ptr<Group> group);

 private:
  using Time = std::chrono::steady_clock::time_point;

  void Loop();
  // Waits for something to watch or, if there is, for the time to look again. False at the end.
  bool Next();
  // Whether an operation ended.
  bool Look(const std::shared_ptr<Group>& group);
  void LookAfter(const std::shared_ptr<Group>& group, Time now);
  void LookAfterFailed(const Group& group, Time now);
  void Finish(const std::shared_ptr<Group>& group, std::shared_ptr<Operation> operation);

  DeviceThreads& threads_;
  Janitor& janitor_;

  // The thread only:
  std::vector<std::shared_ptr<Group>> groups_;
  std::chrono::microseconds pause_;
  Time next_check_;

  Mutex mutex_;
  CondVar wake_;
  std::vector<std::shared_ptr<Group>> added_ ABSL_GUARDED_BY(mutex_);
  bool is_ending_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;  // last
};

}  // namespace gradsync::cuda

#endif  // GRADSYNC_SERVER_ENGINE_CUDA_WATCHER_H_
