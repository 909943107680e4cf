#include "client/torch/ordered_worker.h"

#include <system_error>
#include <utility>

#include "client/torch/errors.h"

namespace gradsync::torch {

OrderedWorker::~OrderedWorker() {
  if (getpid() != owner_) {
    // Left behind: its lock and its thread are the parent's.
    new std::shared_ptr<State>(std::move(state_));
    return;
  }
  Finish();
}

std::exception_ptr OrderedWorker::Carry(const Task& task) {
  try {
    task.operation();
    return nullptr;
  } catch (...) {
    return std::current_exception();
  }
}

void OrderedWorker::Fail(const Task& task) {
  task.work->Complete(std::make_exception_ptr(
      Error(GRADSYNC_FAILED_PRECONDITION,
            "the process group was shut down, or this is a forked child of the process that made "
            "it; make a new one")));
}

void OrderedWorker::Run(c10::intrusive_ptr<CollectiveWork> work, Operation operation,
                        bool on_caller) {
  Task task{std::move(work), std::move(operation)};
  if (getpid() != owner_) {
    Fail(task);
    return;
  }
  State& state = *state_;
  std::unique_lock lock(state.mutex);
  if (state.closed) {
    lock.unlock();
    Fail(task);
    return;
  }
  if (on_caller && !state.busy && state.waiting.empty()) {
    state.busy = true;
    lock.unlock();
    task.work->Complete(Carry(task));
    lock.lock();
    state.busy = false;
    if (!state.waiting.empty() || state.closed) state.changed.notify_all();
    return;
  }
  state.waiting.push_back(std::move(task));
  try {
    EnsureThread(state_);
    state.changed.notify_all();
  } catch (const std::system_error&) {  // no more threads for this process
    const Task refused = std::move(state.waiting.back());
    state.waiting.pop_back();
    lock.unlock();
    refused.work->Complete(std::current_exception());
  }
}

void OrderedWorker::EnsureThread(const std::shared_ptr<State>& state) {
  if (state->available > 0 || state->waiting.empty()) return;
  state->threads.emplace_back(&OrderedWorker::Loop, state);
  ++state->available;
}

void OrderedWorker::Loop(const std::shared_ptr<State>& state) {
  pthread_setname_np(pthread_self(), "gradsync-c10d");
  while (true) {
    // Outlives the lock: dropping its tensors may take the interpreter's lock.
    Task task;
    {
      std::unique_lock lock(state->mutex);
      state->changed.wait(
          lock, [&] { return !state->busy && (!state->waiting.empty() || state->closed); });
      if (state->waiting.empty()) {
        --state->available;
        return;
      }
      task = std::move(state->waiting.front());
      state->waiting.pop_front();
      state->busy = true;
    }
    const bool has_callbacks = task.work->Finish(Carry(task));
    {
      const std::lock_guard lock(state->mutex);
      state->busy = false;
      if (has_callbacks) {
        --state->available;
        EnsureThread(state);
      }
      state->changed.notify_all();
    }
    if (!has_callbacks) continue;
    task.work->Settle();
    const std::lock_guard lock(state->mutex);
    ++state->available;
  }
}

void OrderedWorker::Finish() {
  if (getpid() != owner_) return;
  std::vector<std::thread> threads;
  {
    std::unique_lock lock(state_->mutex);
    state_->closed = true;
    state_->changed.notify_all();
    // Threads may be added as long as there is something to do, and other threads may be carrying
    // out their own operations.
    state_->changed.wait(lock, [this] { return !state_->busy && state_->waiting.empty(); });
    threads.swap(state_->threads);
  }
  for (std::thread& thread : threads) {
    if (thread.get_id() == std::this_thread::get_id()) {
      thread.detach();
    } else {
      thread.join();
    }
  }
}

void OrderedWorker::Abandon() {
  if (getpid() != owner_) return;
  std::deque<Task> waiting;
  {
    const std::lock_guard lock(state_->mutex);
    state_->closed = true;
    waiting.swap(state_->waiting);
    state_->changed.notify_all();
  }
  for (const Task& task : waiting) Fail(task);
}

}  // namespace gradsync::torch
