// The handle of a collective on a GPU, with the meaning that c10d gives to it there.
#ifndef GRADSYNC_CLIENT_TORCH_DEVICE_WORK_H_
#define GRADSYNC_CLIENT_TORCH_DEVICE_WORK_H_

#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <chrono>
#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

#include "client/torch/group_collectives.h"
#include "client/torch/torch_version.h"

namespace gradsync::torch {

// Waiting for it makes the current stream wait, and blocks the host only if it is given a timeout,
// or the operation is a barrier. A failure is told by the first call that comes after it. It keeps
// no memory: streams do (KeepForCurrentStream).
class DeviceWork : public c10d::Work {
 public:
  // As of CollectiveWork.
  DeviceWork(int rank, c10d::OpType type, const char* title, std::vector<at::Tensor> outputs,
             uint64_t sequence, std::chrono::milliseconds timeout);

  // Once, on the thread that enqueues, before anybody else has the work: everything is on `stream`
  // by now. `last` of its collectives; null if there were none.
  void Enqueue(std::shared_ptr<const Enqueued> last, const c10::Stream& stream);
  // Instead: it could not be.
  void Fail(const std::exception_ptr& exception) { finish(exception); }

  bool isCompleted() override;
  bool wait(std::chrono::milliseconds timeout) override;
  void synchronize() override;
  void blockCurrentStream() override { synchronize(); }

  std::vector<at::Tensor> result() override { return outputs_; }
  // The outputs, as a list of tensors. Completed at once, as a GPU's futures are: with the stream.
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  uint64_t getSequencenumber() const override { return sequence_; }
#if GRADSYNC_TORCH_SINCE_2(15)
  std::chrono::milliseconds getTimeout() const override { return timeout_; }
#endif

 private:
  // Calls `function`, and remembers what it throws before it goes on.
  template <typename Function>
  void Watch(Function function);
  void AwaitOnHost(std::chrono::milliseconds timeout);

  const char* const title_;
  const std::vector<at::Tensor> outputs_;
  const uint64_t sequence_;
  const std::chrono::milliseconds timeout_;
  std::shared_ptr<const Enqueued> last_;
  std::optional<c10::Stream> stream_;
  c10::Event end_{c10::DeviceType::CUDA};           // on stream_
  c10::intrusive_ptr<c10::ivalue::Future> future_;  // under mutex_
};

}  // namespace gradsync::torch

#endif  // GRADSYNC_CLIENT_TORCH_DEVICE_WORK_H_
