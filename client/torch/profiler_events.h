// What a profiler sees of the operations that the daemon carries out for DistributedDataParallel:
// events as of the process group's own backend, so that what looks for those finds these. Where no
// profiler runs they cost a look at a thread-local.
#ifndef GRADSYNC_CLIENT_TORCH_PROFILER_EVENTS_H_
#define GRADSYNC_CLIENT_TORCH_PROFILER_EVENTS_H_

#include <ATen/ATen.h>
#include <ATen/record_function.h>

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <utility>

namespace gradsync::torch {

// Whether a profiler (or another observer) would see an event of this thread.
inline bool IsProfiled() {
  return at::getStepCallbacksUnlessEmpty(at::RecordScope::USER_SCOPE).has_value();
}

// The buckets of one iteration: each an event "<backend>:all_reduce", from its hand-over until its
// averages have been waited for. The calls must not overlap, but may come from different threads.
class BucketEvents {
 public:
  explicit BucketEvents(const std::string& backend) : title_(backend + ":all_reduce") {}
  BucketEvents(const BucketEvents&) = delete;
  BucketEvents& operator=(const BucketEvents&) = delete;
  ~BucketEvents() { Reset(); }

  // `buffer`: for profilers that record shapes.
  void Begin(uint32_t bucket, const at::Tensor& buffer);
  // Nothing, if it has not begun.
  void End(uint32_t bucket);
  // Gives up those of an iteration that did not end.
  void Reset();

 private:
  const std::string title_;
  using Ends = std::map<uint32_t, std::function<void()>>;  // by bucket
  Ends ends_;
};

// As long as it lives, an event on this thread; none for an empty title.
class BlockingEvent {
 public:
  explicit BlockingEvent(const std::string& title) {
    if (!title.empty() && event_.isActive()) event_.before(title);
  }

 private:
  at::RecordFunction event_{at::RecordScope::USER_SCOPE};
};

}  // namespace gradsync::torch

#endif  // GRADSYNC_CLIENT_TORCH_PROFILER_EVENTS_H_
