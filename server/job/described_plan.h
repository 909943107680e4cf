// The registered buckets of one group: what each holds, how often and how fast it was reduced. For
// texts and inspection; nothing is decided by it.
#ifndef GRADSYNC_SERVER_JOB_DESCRIBED_PLAN_H_
#define GRADSYNC_SERVER_JOB_DESCRIBED_PLAN_H_

#include <cstdint>
#include <vector>

#include "server/job/operation.h"
#include "server/job/snapshot.h"
#include "shm/status.h"

namespace gradsync {

class DescribedPlan {
 public:
  // `ranks[member]` is a member's rank in the job.
  explicit DescribedPlan(const std::vector<uint32_t>& ranks);

  // A member describes the buckets of a plan in index order; index 0 begins its next plan. The
  // first member to begin a plan replaces the one before, with its statistics; what the others say
  // of it is compared. Errors: kInvalidArgument (out of order), kMismatch (naming ranks and field).
  Status Describe(uint32_t member, BucketDescription description);

  // Nullptr if the bucket has not been described.
  size_t size() const { return buckets_.size(); }
  const BucketDescription* Find(uint32_t bucket) const;

  // A bucket was reduced. Buckets that were not described are not counted.
  void Record(uint32_t bucket, const Timing& timing, uint32_t last_rank, HandOver hand_over);

  // Every bucket as if none were pending.
  std::vector<BucketSnapshot> Snapshot() const;

 private:
  struct Bucket {
    BucketDescription description;
    uint32_t described_by = 0;  // rank
    uint64_t reductions = 0;
    Timing last{};
    uint32_t last_rank = 0;
    HandOver hand_over = HandOver::kHostMemory;
  };
  struct Member {
    uint32_t rank = 0;
    uint64_t plan = 0;  // plans begun
    uint32_t next = 0;  // bucket that must be described next
    uint32_t bucket_count = 0;
  };

  std::vector<Member> members_;
  uint64_t plan_ = 0;  // the plan that `buckets_` is of
  std::vector<Bucket> buckets_;
};

}  // namespace gradsync

#endif  // GRADSYNC_SERVER_JOB_DESCRIBED_PLAN_H_
