// What the ranks of a group do together with whole tensors, wherever these lie: the host waits for
// what the CPU's memory is used for; with a GPU's, only a stream does.
#ifndef GRADSYNC_CLIENT_TORCH_GROUP_COLLECTIVES_H_
#define GRADSYNC_CLIENT_TORCH_GROUP_COLLECTIVES_H_

#include <ATen/ATen.h>
#include <c10/core/StreamGuard.h>

#include <cstdint>
#include <memory>
#include <optional>

#include "client/torch/session.h"

namespace gradsync::torch {

// Over plain tensors (tensors.h) that lie where the collectives do. Every call is behind the last
// one, and what comes next on this thread, or on its current stream, finds the result. One thread
// at a time.
class Collectives {
 public:
  virtual ~Collectives() = default;
  virtual uint32_t rank() const = 0;
  virtual uint32_t size() const = 0;

  virtual void AllReduce(const at::Tensor& data, gradsync_reduce_op op, Timeout timeout) = 0;
  virtual void Broadcast(const at::Tensor& data, uint32_t root, Timeout timeout) = 0;
  virtual void AllGather(const at::Tensor& input, const at::Tensor& output, Timeout timeout) = 0;
  // What the root's `data` becomes; the others' stays as it is. Not on a GPU.
  virtual void Reduce(const at::Tensor& data, gradsync_reduce_op op, uint32_t root,
                      Timeout timeout) = 0;
  virtual void ReduceScatter(const at::Tensor& input, const at::Tensor& output,
                             gradsync_reduce_op op, Timeout timeout) = 0;
  virtual void Share(const at::Tensor& data, Timeout timeout) = 0;
  virtual void Barrier(Timeout timeout) = 0;
};

// In the CPU's memory. Each call blocks.
class HostCollectives : public Collectives {
 public:
  explicit HostCollectives(const Group& group) : group_(group) {}
  uint32_t rank() const override { return group_.rank(); }
  uint32_t size() const override { return group_.size(); }
  void AllReduce(const at::Tensor& data, gradsync_reduce_op op, Timeout timeout) override;
  void Broadcast(const at::Tensor& data, uint32_t root, Timeout timeout) override;
  void AllGather(const at::Tensor& input, const at::Tensor& output, Timeout timeout) override;
  void Reduce(const at::Tensor& data, gradsync_reduce_op op, uint32_t root,
              Timeout timeout) override;
  void ReduceScatter(const at::Tensor& input, const at::Tensor& output, gradsync_reduce_op op,
                     Timeout timeout) override;
  void Share(const at::Tensor& data, Timeout timeout) override;
  void Barrier(Timeout timeout) override { group_.Barrier(timeout); }

 private:
  const Group& group_;
};

// A collective that was enqueued on a GPU. Thread-safe.
class Enqueued {
 public:
  explicit Enqueued(gradsync_work* work) : work_(work) {}
  // Makes `stream` wait for the result. Throws Error if the group has failed.
  void Wait(const c10::Stream& stream) const;
  // Whether the result is there. Throws Error if it will never be.
  bool IsDone() const;
  // Blocks until it is.
  void Synchronize() const;

 private:
  struct Free {
    void operator()(gradsync_work* work) const { gradsync_work_free(work); }
  };
  const std::unique_ptr<gradsync_work, Free> work_;
};

// In the memory of one GPU. No call waits for it: each is behind what the current stream has been
// given, and makes a stream wait for the result. That is the current stream, or else `aside`, which
// takes its place with the first call and until the destructor: what this thread does next then
// happens behind the results, but what it did before goes on beside them.
class DeviceCollectives : public Collectives {
 public:
  DeviceCollectives(const Group& group, c10::Device device,
                    std::optional<c10::Stream> aside = std::nullopt)
      : group_(group), device_(device), aside_(aside) {}
  uint32_t rank() const override { return group_.rank(); }
  uint32_t size() const override { return group_.size(); }
  void AllReduce(const at::Tensor& data, gradsync_reduce_op op, Timeout timeout) override;
  void Broadcast(const at::Tensor& data, uint32_t root, Timeout timeout) override;
  void AllGather(const at::Tensor& input, const at::Tensor& output, Timeout timeout) override;
  void Reduce(const at::Tensor& data, gradsync_reduce_op op, uint32_t root,
              Timeout timeout) override;
  void ReduceScatter(const at::Tensor& input, const at::Tensor& output, gradsync_reduce_op op,
                     Timeout timeout) override;
  void Share(const at::Tensor& data, Timeout timeout) override;
  void Barrier(Timeout timeout) override;

  // The last collective, with which all of them are done; null before the first.
  const std::shared_ptr<const Enqueued>& last() const { return last_; }

 private:
  // Of `input`, if there is one, to `output`, if there is one.
  void Enqueue(gradsync_collective what, const at::Tensor& input, const at::Tensor& output,
               Timeout timeout);

  const Group& group_;
  const c10::Device device_;
  const std::optional<c10::Stream> aside_;
  c10::OptionalStreamGuard guard_;  // on aside_, from the first call on
  std::shared_ptr<const Enqueued> last_;
};

// Those of `group`, which must outlive them, over tensors on `device`.
std::unique_ptr<Collectives> CollectivesOn(c10::Device device, const Group& group);

}  // namespace gradsync::torch

#endif  // GRADSYNC_CLIENT_TORCH_GROUP_COLLECTIVES_H_
