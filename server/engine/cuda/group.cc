#include "server/engine/cuda/group.h"

#include <utility>

namespace gradsync::cuda {
namespace {

void Release(const Operation& operation) {
  for (const DevicePart& part : operation.task->device->parts) {
    part.flags->page()->failing.store(1, std::memory_order_seq_cst);
    ReleaseReady(part.flags->page());
  }
}

}  // namespace

bool Group::Add(std::shared_ptr<Operation> operation) {
  const MutexLock lock(&mutex_);
  operations_.push_back(std::move(operation));
  return !std::exchange(is_watched_, true);
}

std::vector<std::shared_ptr<Operation>> Group::TakeLaunchable() {
  const MutexLock lock(&mutex_);
  std::vector<std::shared_ptr<Operation>> taken;
  while (launched_ < operations_.size() && launched_ < kMaxLaunched) {
    taken.push_back(operations_[launched_++]);
  }
  return taken;
}

std::vector<std::shared_ptr<Operation>> Group::TakeEnded() {
  const MutexLock lock(&mutex_);
  std::vector<std::shared_ptr<Operation>> taken;
  while (!operations_.empty() && launched_ > 0 && operations_.front()->HasEnded()) {
    taken.push_back(std::move(operations_.front()));
    operations_.pop_front();
    --launched_;
  }
  return taken;
}

std::vector<std::shared_ptr<Operation>> Group::Pending() const {
  const MutexLock lock(&mutex_);
  return {operations_.begin(), operations_.end()};
}

bool Group::IsIdle() {
  const MutexLock lock(&mutex_);
  if (!operations_.empty()) return false;
  if (!released_.empty() && !is_forgotten_) return false;
  released_.clear();
  is_watched_ = false;
  return true;
}

bool Group::Fail(const Status& why) {
  const MutexLock lock(&mutex_);
  if (is_failed_.load(std::memory_order_relaxed)) return false;
  failure_ = why;
  failed_at_ = std::chrono::steady_clock::now();
  // Before the release: whoever sees an operation end because of it sees that it has failed too.
  is_failed_.store(true, std::memory_order_seq_cst);
  for (const std::shared_ptr<Operation>& operation : operations_) Release(*operation);
  return true;
}

Status Group::failure() const {
  const MutexLock lock(&mutex_);
  return failure_;
}

std::chrono::steady_clock::time_point Group::failed_at() const {
  const MutexLock lock(&mutex_);
  return failed_at_;
}

void Group::ReleaseDoneOf(const Operation& operation) {
  const MutexLock lock(&mutex_);
  for (const DevicePart& part : operation.task->device->parts) {
    ReleaseDone(part.flags->page());
    released_.emplace(part.flags->page(), part.flags);
  }
}

void Group::ReleaseAgain() const {
  const MutexLock lock(&mutex_);
  for (const std::shared_ptr<Operation>& operation : operations_) Release(*operation);
  if (!operations_.empty()) return;
  for (const auto& [page, flags] : released_) ReleaseDone(page);
}

bool Group::Forget() {
  const MutexLock lock(&mutex_);
  if (operations_.empty() && !is_watched_) return true;
  is_forgotten_ = true;
  return false;
}

bool Group::TakeForgotten() {
  const MutexLock lock(&mutex_);
  return operations_.empty() && std::exchange(is_forgotten_, false);
}

Result<ncclUniqueId> Group::MeetingPoint(const NcclLibrary& nccl,
                                         const std::vector<uint32_t>& devices) {
  const MutexLock lock(&meeting_mutex_);
  const auto found = meeting_points_.find(devices);
  if (found != meeting_points_.end()) return found->second;
  ncclUniqueId id{};
  const ncclResult_t result = nccl.ncclGetUniqueId(&id);
  Result<ncclUniqueId> made = id;
  if (result != ncclSuccess) {
    made = Unexpected(Code::kInternal,
                      std::string("ncclGetUniqueId: ") + nccl.ncclGetErrorString(result));
  }
  meeting_points_.emplace(devices, made);
  return made;
}

}  // namespace gradsync::cuda
