// A thread that lets go of things whose end may take its time: closing memory of another process,
// or unpinning a page, may wait for what runs on the GPU.
#ifndef GRADSYNC_SERVER_ENGINE_CUDA_JANITOR_H_
#define GRADSYNC_SERVER_ENGINE_CUDA_JANITOR_H_

#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "server/engine/mutex.h"

namespace gradsync::cuda {

// Any thread.
class Janitor {
 public:
  Janitor() : thread_([this] { Loop(); }) {}
  Janitor(const Janitor&) = delete;
  Janitor& operator=(const Janitor&) = delete;
  // Returns when all is let go of.
  ~Janitor() {
    {
      const MutexLock lock(&mutex_);
      is_ending_ = true;
    }
    wake_.SignalOne();
    thread_.join();
  }

  void LetGo(std::shared_ptr<const void> thing) {
    const MutexLock lock(&mutex_);
    things_.push_back(std::move(thing));
    wake_.SignalOne();
  }

 private:
  void Loop() {
    while (true) {
      std::vector<std::shared_ptr<const void>> things;
      const MutexLock lock(&mutex_);
      while (things_.empty() && !is_ending_) wake_.Wait(&mutex_);
      if (things_.empty()) return;
      things.swap(things_);
      mutex_.Unlock();
      things.clear();
      mutex_.Lock();
    }
  }

  Mutex mutex_;
  CondVar wake_;
  std::vector<std::shared_ptr<const void>> things_ ABSL_GUARDED_BY(mutex_);
  bool is_ending_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;  // last
};

}  // namespace gradsync::cuda

#endif  // GRADSYNC_SERVER_ENGINE_CUDA_JANITOR_H_
