// The handle of one collective or message.
#ifndef GRADSYNC_CLIENT_TORCH_WORK_H_
#define GRADSYNC_CLIENT_TORCH_WORK_H_

#include <atomic>
#include <chrono>
#include <cstdint>
#include <exception>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

#include "client/torch/torch_version.h"

namespace gradsync::torch {

// Completed once, from any thread; awaited from any number of them.
class CollectiveWork : public c10d::Work {
 public:
  // `title` names it to the profiler. `outputs` is what the future holds.
  CollectiveWork(int rank, c10d::OpType type, const char* title, std::vector<at::Tensor> outputs,
                 uint64_t sequence, std::chrono::milliseconds timeout);

  // With null: it has succeeded. Runs the future's callbacks.
  void Complete(const std::exception_ptr& exception);

  // The same in two steps, for a thread that others wait for: callbacks may wait for anything.
  // Returns whether there is a future, on which Settle must be called, once.
  [[nodiscard]] bool Finish(const std::exception_ptr& exception);
  void Settle();
  // When it returns, a future of this work has its value.
  bool wait(std::chrono::milliseconds timeout) override;

  // Of a receive, before it completes.
  void SetSource(int rank) { source_ = rank; }

  int sourceRank() const override { return source_; }

  std::vector<at::Tensor> result() override { return outputs_; }
  // The outputs, as a list of tensors. Made on demand: most works are only waited for.
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  uint64_t getSequencenumber() const override { return sequence_; }
#if GRADSYNC_TORCH_SINCE_2(15)
  std::chrono::milliseconds getTimeout() const override { return timeout_; }
#endif

 private:
  void SetValueOf(c10::ivalue::Future& future);

  const std::vector<at::Tensor> outputs_;
  const uint64_t sequence_;
  const std::chrono::milliseconds timeout_;
  std::atomic<int> source_{-1};
  c10::intrusive_ptr<c10::ivalue::Future> future_;  // under mutex_
  bool settled_ = false;                            // under mutex_: the future has its value
};

}  // namespace gradsync::torch

#endif  // GRADSYNC_CLIENT_TORCH_WORK_H_
