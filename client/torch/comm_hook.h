// Buckets that a communication hook reduces instead of the daemon.
#ifndef GRADSYNC_CLIENT_TORCH_COMM_HOOK_H_
#define GRADSYNC_CLIENT_TORCH_COMM_HOOK_H_

#include <ATen/ATen.h>
#include <ATen/core/ivalue.h>

#include <memory>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/comm.hpp>
#include <vector>

#include "client/torch/session.h"

namespace gradsync::torch {

// Averages in float16: half the bytes, at the price of precision.
std::unique_ptr<c10d::CommHookInterface> MakeHalfPrecisionHook(
    c10::intrusive_ptr<c10d::ProcessGroup> group);

// One hook, and the buckets of one iteration that it was given.
class HookedBuckets {
 public:
  explicit HookedBuckets(std::unique_ptr<c10d::CommHookInterface> hook) : hook_(std::move(hook)) {}

  // Forgets the iteration.
  void Reset() { futures_.clear(); }

  // How many the hook was given: the next bucket's index.
  size_t given() const { return futures_.size(); }

  // Gives the hook the next bucket, of `bucket_count`, with the gradients of `parameters` one after
  // another in `buffer`. Throws what the hook throws.
  void Give(const at::Tensor& buffer, const std::vector<at::Tensor>& parameters,
            size_t bucket_count);

  // The next bucket is empty, and not for the hook.
  void PassOver() { futures_.emplace_back(); }

  // Waits for what the hook made of a bucket, and takes it: `buffer`, where it was passed over.
  // Throws if that is not a tensor of `buffer`'s sizes, or is not there within `timeout`.
  at::Tensor Take(size_t bucket, const at::Tensor& buffer, Timeout timeout);

 private:
  const std::unique_ptr<c10d::CommHookInterface> hook_;
  std::vector<c10::intrusive_ptr<c10::ivalue::Future>> futures_;  // by bucket
};

}  // namespace gradsync::torch

#endif  // GRADSYNC_CLIENT_TORCH_COMM_HOOK_H_
