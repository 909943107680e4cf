#include "client/torch/comm_hook.h"

#include <ATen/core/grad_mode.h>

#include <exception>
#include <memory>
#include <string>
#include <utility>

#include "client/torch/future_wait.h"

namespace gradsync::torch {
namespace {

using c10::ivalue::Future;

class HalfPrecisionHook : public c10d::CommHookInterface {
 public:
  explicit HalfPrecisionHook(c10::intrusive_ptr<c10d::ProcessGroup> group)
      : group_(std::move(group)) {}

  c10::intrusive_ptr<Future> runHook(c10d::GradBucket& bucket) override {
    const at::NoGradGuard no_grad;
    const at::Tensor& buffer = bucket.getBuffer();
    // Divided before it is added up, so that the sum stays in range.
    std::vector<at::Tensor> halves = {buffer.to(at::kHalf).div_(group_->getSize())};
    return group_->allreduce(halves)->getFuture()->then(
        [buffer, half = halves.front()](Future& reduced) -> c10::IValue {
          if (reduced.hasError()) std::rethrow_exception(reduced.exception_ptr());
          const at::NoGradGuard no_grad_either;
          return at::Tensor(buffer).copy_(half);
        },
        c10::TensorType::get());
  }

  at::Tensor parseHookResult(const c10::IValue& result) override {
    return c10d::detail::parseCppCommHookResult(result);
  }

 private:
  const c10::intrusive_ptr<c10d::ProcessGroup> group_;
};

}  // namespace

std::unique_ptr<c10d::CommHookInterface> MakeHalfPrecisionHook(
    c10::intrusive_ptr<c10d::ProcessGroup> group) {
  return std::make_unique<HalfPrecisionHook>(std::move(group));
}

void HookedBuckets::Give(const at::Tensor& buffer, const std::vector<at::Tensor>& parameters,
                         size_t bucket_count) {
  std::vector<size_t> offsets;
  std::vector<size_t> lengths;
  std::vector<c10::IntArrayRef> sizes;
  if (!buffer.is_sparse()) {
    size_t offset = 0;
    for (const at::Tensor& parameter : parameters) {
      offsets.push_back(offset);
      lengths.push_back(static_cast<size_t>(parameter.numel()));
      sizes.push_back(parameter.sizes());
      offset += lengths.back();
    }
  }
  c10d::GradBucket bucket(given(), bucket_count, buffer, std::move(offsets), std::move(lengths),
                          std::move(sizes), parameters, std::nullopt);
  futures_.push_back(hook_->runHook(bucket));
}

at::Tensor HookedBuckets::Take(size_t bucket, const at::Tensor& buffer, Timeout timeout) {
  if (!futures_[bucket]) return buffer;
  Future& future = *futures_[bucket];
  WaitFor(future, "the communication hook's future for bucket " + std::to_string(bucket), timeout);
  at::Tensor result = hook_->parseHookResult(future.value());
  TORCH_CHECK(result.defined(), "gradsync: the communication hook's future for bucket ", bucket,
              " holds no tensor");
  TORCH_CHECK(result.layout() == buffer.layout() && result.sizes() == buffer.sizes(),
              "gradsync: the communication hook must return a future that holds a tensor with the "
              "same shape as the bucket's buffer, ",
              buffer.sizes(), ", but for bucket ", bucket, " it holds one of shape ",
              result.sizes());
  return result;
}

}  // namespace gradsync::torch
