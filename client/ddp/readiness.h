// What has become ready in one iteration. Pure, and cheap enough for every gradient of every
// backward.
#ifndef GRADSYNC_CLIENT_DDP_READINESS_H_
#define GRADSYNC_CLIENT_DDP_READINESS_H_

#include <cstdint>
#include <span>
#include <vector>

#include "client/ddp/bucket_plan.h"

namespace gradsync {

class Readiness {
 public:
  enum class Event {
    kCounted,         // the bucket misses others still
    kBucketComplete,  // it was the bucket's last
    kAlreadyReady,    // the second time: nothing has changed
  };

  Readiness() = default;
  explicit Readiness(const BucketPlan& plan);

  // Forgets the iteration.
  void Reset();

  // `parameter` must be in range.
  Event MarkReady(uint32_t parameter);

  bool IsReady(uint32_t parameter) const { return ready_[parameter] != 0; }
  uint32_t BucketOf(uint32_t parameter) const { return bucket_of_[parameter]; }
  bool IsBucketComplete(uint32_t bucket) const { return pending_[bucket] == 0; }
  bool any_ready() const { return ready_count_ > 0; }
  bool all_ready() const { return ready_count_ == ready_.size(); }

  // The parameters that are ready, in the order in which they became so.
  std::span<const uint32_t> order() const { return {order_.data(), ready_count_}; }
  // The others, in order of index.
  std::vector<uint32_t> Unready() const;

 private:
  std::vector<uint32_t> bucket_of_;     // by parameter
  std::vector<uint32_t> bucket_sizes_;  // by bucket: parameters
  std::vector<uint32_t> pending_;       // by bucket: parameters that are not ready
  std::vector<uint8_t> ready_;          // by parameter
  std::vector<uint32_t> order_;         // the first ready_count_ are set
  uint32_t ready_count_ = 0;
};

}  // namespace gradsync

#endif  // GRADSYNC_CLIENT_DDP_READINESS_H_
