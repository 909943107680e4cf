// A group's operations in the engine, in order, and whether it can go on. Any thread.
#ifndef GRADSYNC_SERVER_ENGINE_CUDA_GROUP_H_
#define GRADSYNC_SERVER_ENGINE_CUDA_GROUP_H_

#include <nccl.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <vector>

#include "server/engine/cuda/nccl_library.h"
#include "server/engine/cuda/operation.h"
#include "server/engine/mutex.h"
#include "shm/status.h"

namespace gradsync::cuda {

class Group {
 public:
  explicit Group(uint64_t id) : id_(id) {}

  uint64_t id() const { return id_; }

  // Behind all others. True if there was none: then the group has to be watched from now on.
  bool Add(std::shared_ptr<Operation> operation);

  // What is to be launched now, in order; each operation once. So many of a group are launched and
  // not ended at most, that no launch has to wait for room in the stream.
  std::vector<std::shared_ptr<Operation>> TakeLaunchable();

  // The operations that have ended, in order; each once. Then IsFailed says whether they are done.
  std::vector<std::shared_ptr<Operation>> TakeEnded();

  // Those that have not been taken as ended.
  std::vector<std::shared_ptr<Operation>> Pending() const;

  // Whether there is none, and nothing to be released again; then the group need not be watched
  // until Add says so.
  bool IsIdle();

  // The group cannot go on: no stream waits for its trainers any more, and what has not been
  // launched will not be. The first reason stays; true if this is it.
  bool Fail(const Status& why);
  bool IsFailed() const { return is_failed_.load(std::memory_order_acquire); }
  const std::atomic<bool>& failed_word() const { return is_failed_; }
  Status failure() const;
  std::chrono::steady_clock::time_point failed_at() const;
  // The operation has ended in failure: nobody waits for it to be done any more.
  void ReleaseDoneOf(const Operation& operation);
  // Once more, in case that a trainer, or a stream that was given up for lost, has written over it.
  // Of a group that has failed, until it is forgotten.
  void ReleaseAgain() const;

  // There will be no more operations. True if the group is idle now; else TakeForgotten says so,
  // once, when it is.
  bool Forget();
  bool TakeForgotten();

  // By which the ranks of its communicator over `devices` find each other; made by the first call.
  Result<ncclUniqueId> MeetingPoint(const NcclLibrary& nccl, const std::vector<uint32_t>& devices);

 private:
  static constexpr size_t kMaxLaunched = 32;

  const uint64_t id_;
  std::atomic<bool> is_failed_{false};
  mutable Mutex mutex_;
  std::deque<std::shared_ptr<Operation>> operations_ ABSL_GUARDED_BY(mutex_);
  // By page, of the operations that ended in failure.
  std::map<FlagPage*, std::shared_ptr<DeviceFlags>> released_ ABSL_GUARDED_BY(mutex_);
  size_t launched_ ABSL_GUARDED_BY(mutex_) = 0;  // of these, the first
  bool is_watched_ ABSL_GUARDED_BY(mutex_) = false;
  bool is_forgotten_ ABSL_GUARDED_BY(mutex_) = false;
  Status failure_ ABSL_GUARDED_BY(mutex_);
  std::chrono::steady_clock::time_point failed_at_ ABSL_GUARDED_BY(mutex_);
  Mutex meeting_mutex_;  // NCCL takes its time
  std::map<std::vector<uint32_t>, Result<ncclUniqueId>> meeting_points_
      ABSL_GUARDED_BY(meeting_mutex_);
};

}  // namespace gradsync::cuda

#endif  // GRADSYNC_SERVER_ENGINE_CUDA_GROUP_H_
