// The threads that large tasks run on.
#ifndef GRADSYNC_SERVER_ENGINE_CPU_THREAD_POOL_H_
#define GRADSYNC_SERVER_ENGINE_CPU_THREAD_POOL_H_

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "server/engine/mutex.h"

namespace gradsync {

// A fixed number of threads, named gradsync-cpu-N. They take parts of all the work that is there in
// turn, so that a large piece of it does not hold up a small one. Thread-safe.
class ThreadPool {
 public:
  struct Work {
    uint64_t parts = 0;  // at least 1
    // Does one part, each exactly once, on any thread; `worker` is below threads().
    std::function<void(int worker, uint64_t part)> run;
    // Called once, on the thread that did the last part, after every part: it sees what they wrote.
    std::function<void()> done;
  };

  // A thread without work looks out for some for up to `spin` before it sleeps, if looking out has
  // paid lately.
  ThreadPool(int threads, std::chrono::nanoseconds spin);
  // Finishes what was submitted, also by `done` functions meanwhile.
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  void Submit(Work work);

  int threads() const { return static_cast<int>(threads_.size()); }

 private:
  struct Item {
    explicit Item(Work w) : work(std::move(w)), unfinished(work.parts) {}
    Work work;
    // On lines of their own: every worker writes them.
    alignas(64) std::atomic<uint64_t> next{0};
    alignas(64) std::atomic<uint64_t> unfinished;
  };

  void RunWorker(int worker);
  std::shared_ptr<Item> NextItem();
  void SpinForItem() const;
  // Does parts of `item` until it has none left or it is another's turn.
  void WorkOn(const std::shared_ptr<Item>& item, int worker);
  void Retire(const std::shared_ptr<Item>& item);

  const std::chrono::nanoseconds spin_;
  Mutex mutex_;
  CondVar wake_;
  std::vector<std::shared_ptr<Item>> items_ ABSL_GUARDED_BY(mutex_);  // with parts left to take
  size_t turn_ ABSL_GUARDED_BY(mutex_) = 0;
  bool ending_ ABSL_GUARDED_BY(mutex_) = false;
  std::atomic<size_t> item_count_{0};  // items_.size(), to look at without the lock
  std::vector<std::thread> threads_;   // written by the constructor only
};

}  // namespace gradsync

#endif  // GRADSYNC_SERVER_ENGINE_CPU_THREAD_POOL_H_
