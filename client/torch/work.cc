#include "client/torch/work.h"

#include <utility>

namespace gradsync::torch {

CollectiveWork::CollectiveWork(int rank, c10d::OpType type, const char* title,
                               std::vector<at::Tensor> outputs, uint64_t sequence,
                               std::chrono::milliseconds timeout)
    : Work(rank, type, title, outputs),
      outputs_(std::move(outputs)),
      sequence_(sequence),
      timeout_(timeout) {}

void CollectiveWork::Complete(const std::exception_ptr& exception) {
  if (Finish(exception)) Settle();
}

bool CollectiveWork::Finish(const std::exception_ptr& exception) {
  finish(exception);
  const std::lock_guard lock(mutex_);
  if (!future_ || settled_) return false;
  settled_ = true;
  return true;
}

bool CollectiveWork::wait(std::chrono::milliseconds timeout) {
  const bool done = Work::wait(timeout);
  c10::intrusive_ptr<c10::ivalue::Future> future;
  {
    const std::lock_guard lock(mutex_);
    future = future_;
  }
  // Not for its callbacks: it has its value before they run, and they may come to wait here.
  if (future) future->wait();
  return done;
}

void CollectiveWork::Settle() { SetValueOf(*future_); }

c10::intrusive_ptr<c10::ivalue::Future> CollectiveWork::getFuture() {
  const std::lock_guard lock(mutex_);
  if (!future_) {
    future_ =
        c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
    if (completed_) {
      settled_ = true;
      SetValueOf(*future_);
    }
  }
  return future_;
}

void CollectiveWork::SetValueOf(c10::ivalue::Future& future) {
  if (exception_) {
    future.setError(exception_);
  } else {
    future.markCompleted(c10::IValue(outputs_));
  }
}

}  // namespace gradsync::torch
