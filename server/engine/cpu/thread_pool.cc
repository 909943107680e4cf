#include "server/engine/cpu/thread_pool.h"

#include <pthread.h>

#include <algorithm>
#include <string>
#include <utility>

#include "shm/spin.h"

namespace gradsync {
namespace {

using Clock = std::chrono::steady_clock;

// Parts that a worker does of one item before it looks whether another has its turn.
constexpr int kPartsPerTurn = 2;

}  // namespace

ThreadPool::ThreadPool(int threads, std::chrono::nanoseconds spin) : spin_(spin) {
  threads_.reserve(static_cast<size_t>(threads));
  for (int worker = 0; worker < threads; ++worker) {
    threads_.emplace_back([this, worker] { RunWorker(worker); });
  }
}

ThreadPool::~ThreadPool() {
  {
    const MutexLock lock(&mutex_);
    ending_ = true;
  }
  wake_.SignalAll();
  for (std::thread& thread : threads_) thread.join();
}

void ThreadPool::Submit(Work work) {
  const uint64_t parts = work.parts;
  auto item = std::make_shared<Item>(std::move(work));
  {
    const MutexLock lock(&mutex_);
    items_.push_back(std::move(item));
    item_count_.store(items_.size(), std::memory_order_relaxed);
  }
  if (parts == 1) {
    wake_.SignalOne();
  } else {
    wake_.SignalAll();
  }
}

void ThreadPool::RunWorker(int worker) {
  const std::string name = "gradsync-cpu-" + std::to_string(worker);
  pthread_setname_np(pthread_self(), name.c_str());
  bool spins = true;
  for (;;) {
    const Clock::time_point idle_since = Clock::now();
    if (spins) SpinForItem();
    const std::shared_ptr<Item> item = NextItem();
    if (item == nullptr) return;
    spins = Clock::now() - idle_since < spin_;
    WorkOn(item, worker);
  }
}

void ThreadPool::SpinForItem() const {
  const Clock::time_point end = Clock::now() + spin_;
  while (item_count_.load(std::memory_order_relaxed) == 0 && Clock::now() < end) SpinPause();
}

std::shared_ptr<ThreadPool::Item> ThreadPool::NextItem() {
  const MutexLock lock(&mutex_);
  while (items_.empty()) {
    if (ending_) return nullptr;
    wake_.Wait(&mutex_);
  }
  return items_[turn_++ % items_.size()];
}

void ThreadPool::WorkOn(const std::shared_ptr<Item>& item, int worker) {
  const uint64_t parts = item->work.parts;
  for (int taken = 0; taken < kPartsPerTurn || item_count_.load(std::memory_order_relaxed) == 1;
       ++taken) {
    const uint64_t part = item->next.fetch_add(1, std::memory_order_relaxed);
    if (part >= parts) return;
    // The last part is taken: nobody else need look here.
    if (part == parts - 1) Retire(item);
    item->work.run(worker, part);
    if (item->unfinished.fetch_sub(1, std::memory_order_acq_rel) == 1) item->work.done();
  }
}

void ThreadPool::Retire(const std::shared_ptr<Item>& item) {
  const MutexLock lock(&mutex_);
  items_.erase(std::find(items_.begin(), items_.end(), item));
  item_count_.store(items_.size(), std::memory_order_relaxed);
}

}  // namespace gradsync
