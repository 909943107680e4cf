// Who goes next, with a deadline. Not std::timed_mutex: ThreadSanitizer does not see GCC's timed
// locks, and reports their unlocking.
#ifndef GRADSYNC_CLIENT_CORE_TURNS_H_
#define GRADSYNC_CLIENT_CORE_TURNS_H_

#include <chrono>
#include <condition_variable>
#include <mutex>

namespace gradsync {

// One thread at a time. Thread-safe.
class Turns {
 public:
  // A turn, or at the deadline none. Over when it is destroyed.
  class Turn {
   public:
    Turn(Turns* turns, std::chrono::steady_clock::time_point deadline) : turns_(turns) {
      std::unique_lock lock(turns_->mutex_);
      taken_ = turns_->free_.wait_until(lock, deadline, [this] { return !turns_->taken_; });
      if (taken_) turns_->taken_ = true;
    }
    Turn(const Turn&) = delete;
    Turn& operator=(const Turn&) = delete;
    ~Turn() {
      if (!taken_) return;
      const std::lock_guard lock(turns_->mutex_);
      turns_->taken_ = false;
      turns_->free_.notify_one();
    }

    bool taken() const { return taken_; }

   private:
    Turns* const turns_;
    bool taken_ = false;
  };

 private:
  std::mutex mutex_;
  std::condition_variable free_;
  bool taken_ = false;
};

}  // namespace gradsync

#endif  // GRADSYNC_CLIENT_CORE_TURNS_H_
