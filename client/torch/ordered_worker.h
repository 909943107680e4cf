// Carries out a process group's operations one at a time, in the order in which they were asked
// for.
#ifndef GRADSYNC_CLIENT_TORCH_ORDERED_WORKER_H_
#define GRADSYNC_CLIENT_TORCH_ORDERED_WORKER_H_

#include <c10/util/intrusive_ptr.h>
#include <unistd.h>

#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "client/torch/work.h"

namespace gradsync::torch {

// Thread-safe. Its thread is started by the first operation that needs one; there are more when
// callbacks of futures, which run there, wait for further operations.
class OrderedWorker {
 public:
  using Operation = std::function<void()>;  // blocks; throws when it fails

  OrderedWorker() = default;
  // Finish().
  ~OrderedWorker();
  OrderedWorker(const OrderedWorker&) = delete;
  OrderedWorker& operator=(const OrderedWorker&) = delete;

  // Carries out `operation` and completes `work` with its outcome: before it returns if `on_caller`
  // and nothing else is going on, else on the worker's thread. After Finish or Abandon, and in a
  // forked child, `work` fails.
  void Run(c10::intrusive_ptr<CollectiveWork> work, Operation operation, bool on_caller);

  // Returns when everything that was asked for is done; takes nothing more.
  void Finish();

  // Everything that has not begun fails; takes nothing more. Does not wait.
  void Abandon();

 private:
  struct Task {
    c10::intrusive_ptr<CollectiveWork> work;
    Operation operation;
  };
  // Shared with the thread: the last reference to the worker may be dropped by a callback of an
  // operation, on the thread itself.
  struct State {
    std::mutex mutex;
    std::condition_variable changed;
    std::deque<Task> waiting;
    bool busy = false;  // with an operation
    bool closed = false;
    size_t available = 0;  // threads that are not in a callback
    std::vector<std::thread> threads;
  };

  static std::exception_ptr Carry(const Task& task);
  // With the lock: has a thread take what waits, if none will come to it by itself.
  static void EnsureThread(const std::shared_ptr<State>& state);
  static void Fail(const Task& task);
  static void Loop(const std::shared_ptr<State>& state);

  const pid_t owner_ = getpid();
  std::shared_ptr<State> state_ = std::make_shared<State>();
};

}  // namespace gradsync::torch

#endif  // GRADSYNC_CLIENT_TORCH_ORDERED_WORKER_H_
