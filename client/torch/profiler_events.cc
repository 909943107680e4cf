#include "client/torch/profiler_events.h"

#include <ATen/ThreadLocalState.h>

#include <memory>
#include <optional>
#include <utility>
#include <vector>

namespace gradsync::torch {

void BucketEvents::Begin(uint32_t bucket, const at::Tensor& buffer) {
  std::optional<at::StepCallbacks> callbacks =
      at::getStepCallbacksUnlessEmpty(at::RecordScope::USER_SCOPE);
  if (!callbacks) return;
  const auto event = std::make_shared<at::RecordFunction>(*std::move(callbacks));
  event->_setAsync();
  const std::vector<c10::IValue> inputs = {buffer};
  event->before(title_, &inputs);
  // The end may come on another thread, which the profiler does not know.
  ends_.insert_or_assign(bucket, at::wrapPropagateTLSState([event] { event->end(); }));
}

void BucketEvents::End(uint32_t bucket) {
  const auto found = ends_.find(bucket);
  if (found == ends_.end()) return;
  found->second();
  ends_.erase(found);
}

// The profiler that saw them begin may be gone, and with it the memory that their end is written
// to: they are left behind without one. That is rare, and an event is small.
void BucketEvents::Reset() {
  if (ends_.empty()) return;
  static_cast<void>(std::make_unique<Ends>(std::exchange(ends_, {})).release());
}

}  // namespace gradsync::torch
