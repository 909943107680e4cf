#include "client/torch/device_work.h"

#include <c10/core/StreamGuard.h>

#include <thread>
#include <utility>

#include "client/torch/device.h"
#include "client/torch/errors.h"
#include "client/torch/interpreter.h"
#include "client/torch/tensors.h"

namespace gradsync::torch {
namespace {

constexpr std::chrono::microseconds kPause{50};

}  // namespace

DeviceWork::DeviceWork(int rank, c10d::OpType type, const char* title,
                       std::vector<at::Tensor> outputs, uint64_t sequence,
                       std::chrono::milliseconds timeout)
    : Work(rank, type, title, outputs),
      title_(title),
      outputs_(std::move(outputs)),
      sequence_(sequence),
      timeout_(timeout) {}

void DeviceWork::Enqueue(std::shared_ptr<const Enqueued> last, const c10::Stream& stream) {
  last_ = std::move(last);
  stream_ = stream;
  end_.record(stream);
  finish();  // for profilers, to which it is what the host does
}

template <typename Function>
void DeviceWork::Watch(Function function) {
  try {
    function();
  } catch (const Error& error) {
    const std::exception_ptr exception =
        std::make_exception_ptr(WithTorchsWords(error, title_, timeout_));
    {
      const std::lock_guard lock(mutex_);
      exception_ = exception;
    }
    std::rethrow_exception(exception);
  }
}

bool DeviceWork::isCompleted() {
  bool done = true;
  try {
    Watch([&] { done = (last_ == nullptr || last_->IsDone()) && end_.query(); });
  } catch (const Error&) {  // completed, without success
    return true;
  }
  return done;
}

void DeviceWork::synchronize() {
  const c10::Stream current = CurrentStream(stream_->device());
  Watch([&] {
    if (last_ != nullptr) last_->Wait(current);
  });
  end_.block(current);
  for (const at::Tensor& output : outputs_) KeepForCurrentStream(output);
}

bool DeviceWork::wait(std::chrono::milliseconds timeout) {
  synchronize();
  const WithoutInterpreter released;
  if (timeout != kNoTimeout) {
    AwaitOnHost(timeout);
  } else if (opType_ == c10d::OpType::BARRIER && last_ != nullptr) {
    Watch([&] { last_->Synchronize(); });
  }
  return true;
}

void DeviceWork::AwaitOnHost(std::chrono::milliseconds timeout) {
  const auto deadline = std::chrono::steady_clock::now() + timeout;
  while (!isCompleted()) {
    if (std::chrono::steady_clock::now() >= deadline) {
      const Error late(GRADSYNC_DEADLINE_EXCEEDED, "the GPU has not come to the result yet");
      throw WithTorchsWords(late, title_, timeout);
    }
    std::this_thread::sleep_for(kPause);
  }
  if (!isSuccess()) std::rethrow_exception(exception());
}

c10::intrusive_ptr<c10::ivalue::Future> DeviceWork::getFuture() {
  const std::lock_guard lock(mutex_);
  if (future_) return future_;
  auto future = c10::make_intrusive<c10::ivalue::Future>(
      c10::ListType::create(c10::TensorType::get()), std::vector<c10::Device>{stream_->device()});
  if (exception_) {
    future->setError(exception_);
  } else {
    // It takes what the current stream has by now for what the value waits for.
    const c10::StreamGuard guard(PoolStream(stream_->device()));
    end_.block(CurrentStream(stream_->device()));
    future->markCompleted(c10::IValue(outputs_));
  }
  future_ = std::move(future);
  return future_;
}

}  // namespace gradsync::torch
