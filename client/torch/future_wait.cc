#include "client/torch/future_wait.h"

#include <condition_variable>
#include <exception>
#include <memory>
#include <mutex>

#include "client/torch/errors.h"

namespace gradsync::torch {

namespace {

// ivalue::Future::wait() has no deadline.
void AwaitCompletion(c10::ivalue::Future& future, const std::string& what, Timeout timeout) {
  struct Signal {
    std::mutex mutex;
    std::condition_variable changed;
    bool completed = false;
  };
  const auto signal = std::make_shared<Signal>();  // the future may be completed much later
  future.addCallback([signal](c10::ivalue::Future& /*future*/) {
    const std::lock_guard lock(signal->mutex);
    signal->completed = true;
    signal->changed.notify_all();
  });
  std::unique_lock lock(signal->mutex);
  if (!signal->changed.wait_for(lock, timeout, [&] { return signal->completed; })) {
    throw Error(GRADSYNC_DEADLINE_EXCEEDED,
                what + " was not completed within " + std::to_string(timeout.count()) + " ms");
  }
}

}  // namespace

void WaitFor(c10::ivalue::Future& future, const std::string& what, Timeout timeout) {
  // Of what is on a GPU, a future is completed before its value is there.
  if (!future.completed()) AwaitCompletion(future, what, timeout);
  future.wait();
  if (future.hasError()) std::rethrow_exception(future.exception_ptr());
}

}  // namespace gradsync::torch
