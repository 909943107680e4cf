#include "client/ddp/readiness.h"

#include <algorithm>

namespace gradsync {

Readiness::Readiness(const BucketPlan& plan)
    : bucket_of_(plan.slots.size()),
      bucket_sizes_(plan.buckets.size()),
      pending_(plan.buckets.size()),
      ready_(plan.slots.size()),
      order_(plan.slots.size()) {
  for (size_t i = 0; i < plan.slots.size(); ++i) bucket_of_[i] = plan.slots[i].bucket;
  for (size_t i = 0; i < plan.buckets.size(); ++i) {
    bucket_sizes_[i] = static_cast<uint32_t>(plan.buckets[i].parameters.size());
  }
  Reset();
}

void Readiness::Reset() {
  std::fill(ready_.begin(), ready_.end(), uint8_t{0});
  std::copy(bucket_sizes_.begin(), bucket_sizes_.end(), pending_.begin());
  ready_count_ = 0;
}

Readiness::Event Readiness::MarkReady(uint32_t parameter) {
  if (ready_[parameter] != 0) return Event::kAlreadyReady;
  ready_[parameter] = 1;
  order_[ready_count_++] = parameter;
  return --pending_[bucket_of_[parameter]] == 0 ? Event::kBucketComplete : Event::kCounted;
}

std::vector<uint32_t> Readiness::Unready() const {
  std::vector<uint32_t> unready;
  unready.reserve(ready_.size() - ready_count_);
  for (uint32_t i = 0; i < ready_.size(); ++i) {
    if (ready_[i] == 0) unready.push_back(i);
  }
  return unready;
}

}  // namespace gradsync
