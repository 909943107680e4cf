#include "server/engine/cuda/watcher.h"

#include <algorithm>
#include <utility>

#include "shm/device.h"

namespace gradsync::cuda {
namespace {

using std::chrono::microseconds;
using std::chrono::steady_clock;

// Between looks at the words while something is under way: the trainers' streams do not wait for
// this, only their processors and what is to be launched next.
constexpr microseconds kShortestPause{20};
constexpr microseconds kLongestPause{500};

// How often deadlines, lost GPUs and groups that have failed are looked after.
constexpr std::chrono::milliseconds kCheckEvery{10};

// For NCCL to end after it was aborted. Then the GPU cannot be relied on any more.
constexpr std::chrono::seconds kAbortGrace{60};

}  // namespace

Watcher::Watcher(DeviceThreads& threads, Janitor& janitor)
    : threads_(threads),
      janitor_(janitor),
      pause_(kShortestPause),
      next_check_(steady_clock::now()),
      thread_([this] { Loop(); }) {}

Watcher::~Watcher() {
  {
    const MutexLock lock(&mutex_);
    is_ending_ = true;
  }
  wake_.SignalOne();
  thread_.join();
}

void Watcher::Watch(std::shared_ptr<Group> group) {
  const MutexLock lock(&mutex_);
  added_.push_back(std::move(group));
  wake_.SignalOne();
}

void Watcher::Loop() {
  while (Next()) {
    const Time now = steady_clock::now();
    bool any_ended = false;
    for (const std::shared_ptr<Group>& group : groups_) any_ended |= Look(group);
    pause_ = any_ended ? kShortestPause : std::min(2 * pause_, kLongestPause);
    if (now >= next_check_) {
      for (const std::shared_ptr<Group>& group : groups_) LookAfter(group, now);
      next_check_ = now + kCheckEvery;
    }
    std::erase_if(groups_, [&](const std::shared_ptr<Group>& group) {
      if (!group->IsIdle()) return false;
      if (group->TakeForgotten()) threads_.Drop(*group);
      return true;
    });
  }
}

bool Watcher::Next() {
  const MutexLock lock(&mutex_);
  const Time until = steady_clock::now() + pause_;
  bool is_time = false;
  while (added_.empty() && !is_time) {
    if (groups_.empty()) {
      if (is_ending_) return false;
      wake_.Wait(&mutex_);
    } else {
      is_time = !wake_.WaitUntil(&mutex_, until);
    }
  }
  if (!added_.empty()) pause_ = kShortestPause;
  std::move(added_.begin(), added_.end(), std::back_inserter(groups_));
  added_.clear();
  return true;
}

bool Watcher::Look(const std::shared_ptr<Group>& group) {
  std::vector<std::shared_ptr<Operation>> ended = group->TakeEnded();
  if (ended.empty()) return false;
  for (std::shared_ptr<Operation>& operation : ended) Finish(group, std::move(operation));
  threads_.Launch(*group);
  return true;
}

void Watcher::Finish(const std::shared_ptr<Group>& group, std::shared_ptr<Operation> operation) {
  for (const Side& side : operation->sides) {
    if (side.device->is_lost()) threads_.Fail(group, side.device->lost());
  }
  // Asked after the words were read: an operation that a release has let through is not done.
  const Status status = group->IsFailed() ? group->failure() : OkStatus();
  // Its stream has written `done` as if nothing were amiss, maybe over what the owner released.
  if (!status.ok()) group->ReleaseDoneOf(*operation);
  const DeviceEngine::Done done = std::move(operation->done);
  janitor_.LetGo(std::move(operation));
  done(status);
}

void Watcher::LookAfter(const std::shared_ptr<Group>& group, Time now) {
  if (group->IsFailed()) return LookAfterFailed(*group, now);
  for (const std::shared_ptr<Operation>& operation : group->Pending()) {
    for (const Side& side : operation->sides) {
      if (side.device->is_lost()) return threads_.Fail(group, side.device->lost());
    }
    if (now >= operation->deadline && !operation->HasEnded()) {
      return threads_.Fail(group, Overdue(*operation));
    }
  }
}

void Watcher::LookAfterFailed(const Group& group, Time now) {
  group.ReleaseAgain();
  const std::vector<std::shared_ptr<Operation>> pending = group.Pending();
  if (pending.empty() || !pending.front()->plan.uses_nccl()) return;
  if (now - group.failed_at() < kAbortGrace) return;
  for (Side& side : pending.front()->sides) {
    if (side.HasEnded()) continue;
    side.device->MarkLost(TextOf(*pending.front()) + " did not end after it was aborted");
  }
}

}  // namespace gradsync::cuda
