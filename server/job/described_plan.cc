#include "server/job/described_plan.h"

#include <string>
#include <utility>

#include "absl/strings/str_cat.h"

namespace gradsync {
namespace {

std::string Text(const BucketDescription& description) {
  return absl::StrCat(description.count, " ", DTypeName(description.dtype), " of ",
                      description.parameter_count, " parameters (", description.parameters, "), ",
                      description.bucket_count, " buckets in all");
}

const char* DifferingField(const BucketDescription& a, const BucketDescription& b) {
  if (a.bucket_count != b.bucket_count) return "number of buckets";
  if (a.count != b.count) return "count";
  if (a.dtype != b.dtype) return "dtype";
  if (a.parameter_count != b.parameter_count) return "number of parameters";
  return nullptr;  // names are for people: a rank may know the same parameter by another one
}

}  // namespace

DescribedPlan::DescribedPlan(const std::vector<uint32_t>& ranks) {
  members_.reserve(ranks.size());
  for (const uint32_t rank : ranks) members_.push_back({.rank = rank});
}

Status DescribedPlan::Describe(uint32_t member, BucketDescription description) {
  Member& describer = members_[member];
  if (description.bucket_count == 0 || description.bucket_count > kSequenceWindow) {
    return {Code::kInvalidArgument, absl::StrCat("a plan has 1 to ", kSequenceWindow,
                                                 " buckets, not ", description.bucket_count)};
  }
  if (description.bucket == 0) {
    ++describer.plan;
    describer.next = 0;
    describer.bucket_count = description.bucket_count;
  }
  if (description.bucket != describer.next || describer.next == describer.bucket_count ||
      description.bucket_count != describer.bucket_count) {
    return {Code::kInvalidArgument,
            absl::StrCat("rank ", describer.rank, " described bucket ", description.bucket, " of ",
                         description.bucket_count, " after ", describer.next, " of ",
                         describer.bucket_count,
                         "; the buckets of a plan are described in index order, each once")};
  }
  ++describer.next;
  if (describer.plan > plan_) {
    plan_ = describer.plan;
    buckets_.clear();
  }
  // A member that still describes a plan that others have replaced has nothing to compare with.
  if (describer.plan < plan_) return OkStatus();
  if (description.bucket == buckets_.size()) {
    buckets_.push_back({.description = std::move(description), .described_by = describer.rank});
    return OkStatus();
  }
  const Bucket& known = buckets_[description.bucket];
  const char* field = DifferingField(known.description, description);
  if (field == nullptr) return OkStatus();
  return {Code::kMismatch,
          absl::StrCat("bucket ", description.bucket, " differs: rank ", known.described_by,
                       " has ", Text(known.description), "; rank ", describer.rank, " has ",
                       Text(description), "; they differ in ", field)};
}

const BucketDescription* DescribedPlan::Find(uint32_t bucket) const {
  return bucket < buckets_.size() ? &buckets_[bucket].description : nullptr;
}

void DescribedPlan::Record(uint32_t bucket, const Timing& timing, uint32_t last_rank,
                           HandOver hand_over) {
  if (bucket >= buckets_.size()) return;
  ++buckets_[bucket].reductions;
  buckets_[bucket].last = timing;
  buckets_[bucket].last_rank = last_rank;
  buckets_[bucket].hand_over = hand_over;
}

std::vector<BucketSnapshot> DescribedPlan::Snapshot() const {
  std::vector<BucketSnapshot> snapshots;
  snapshots.reserve(buckets_.size());
  for (const Bucket& bucket : buckets_) {
    BucketSnapshot& snapshot = snapshots.emplace_back();
    snapshot.index = bucket.description.bucket;
    snapshot.parameter_count = bucket.description.parameter_count;
    snapshot.count = bucket.description.count;
    snapshot.dtype = bucket.description.dtype;
    snapshot.parameters = bucket.description.parameters;
    snapshot.reductions = bucket.reductions;
    snapshot.last = bucket.last;
    snapshot.last_rank = bucket.last_rank;
    snapshot.hand_over = bucket.hand_over;
  }
  return snapshots;
}

}  // namespace gradsync
