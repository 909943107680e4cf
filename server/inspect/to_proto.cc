#include "server/inspect/to_proto.h"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <vector>

#include "google/protobuf/util/time_util.h"
#include "server/inspect/utf8.h"

namespace gradsync {
namespace {

using google::protobuf::util::TimeUtil;

google::protobuf::Duration ToDuration(std::chrono::nanoseconds time) {
  return TimeUtil::NanosecondsToDuration(time.count());
}

v1::Timing ToTiming(const Timing& timing) {
  v1::Timing result;
  *result.mutable_wait() = ToDuration(timing.wait);
  *result.mutable_queue() = ToDuration(timing.queue);
  *result.mutable_reduce() = ToDuration(timing.reduce);
  *result.mutable_total() = ToDuration(timing.total());
  return result;
}

bool WaitsForARank(const GroupSnapshot& group) {
  return group.waiting_operation.has_value() && !group.missing_ranks.empty();
}

v1::Wait ToWait(const GroupSnapshot& group) {
  v1::Wait result;
  result.set_operation(ToUtf8(*group.waiting_operation));
  result.set_group(ToUtf8(group.tag));
  result.mutable_missing_ranks()->Add(group.missing_ranks.begin(), group.missing_ranks.end());
  std::sort(result.mutable_missing_ranks()->begin(), result.mutable_missing_ranks()->end());
  *result.mutable_duration() = ToDuration(group.waiting);
  return result;
}

v1::BucketState ToBucketState(BucketState state) {
  switch (state) {
    case BucketState::kIdle:
      return v1::BUCKET_STATE_IDLE;
    case BucketState::kWaiting:
      return v1::BUCKET_STATE_WAITING;
    case BucketState::kRunning:
      return v1::BUCKET_STATE_RUNNING;
  }
  return v1::BUCKET_STATE_UNSPECIFIED;
}

v1::HandOver ToHandOver(HandOver hand_over) {
  switch (hand_over) {
    case HandOver::kHostMemory:
      return v1::HAND_OVER_HOST_MEMORY;
    case HandOver::kDaemonMemory:
      return v1::HAND_OVER_DAEMON_MEMORY;
    case HandOver::kExportedMemory:
      return v1::HAND_OVER_EXPORTED_MEMORY;
    case HandOver::kLegacyHandle:
      return v1::HAND_OVER_LEGACY_HANDLE;
  }
  return v1::HAND_OVER_UNSPECIFIED;
}

v1::Bucket ToBucket(const BucketSnapshot& bucket) {
  v1::Bucket result;
  result.set_index(bucket.index);
  result.set_parameter_count(bucket.parameter_count);
  result.set_parameters(ToUtf8(bucket.parameters));
  result.set_dtype(DTypeName(bucket.dtype));
  result.set_count(bucket.count);
  result.set_bytes(bucket.count * DTypeSize(bucket.dtype));
  result.set_state(ToBucketState(bucket.state));
  result.mutable_ready_ranks()->Add(bucket.ready_ranks.begin(), bucket.ready_ranks.end());
  std::sort(result.mutable_ready_ranks()->begin(), result.mutable_ready_ranks()->end());
  result.set_reductions(bucket.reductions);
  if (bucket.reductions > 0) {
    *result.mutable_last() = ToTiming(bucket.last);
    result.set_last_rank(bucket.last_rank);
    result.set_hand_over(ToHandOver(bucket.hand_over));
  }
  return result;
}

v1::Group ToGroup(const GroupSnapshot& group) {
  v1::Group result;
  result.set_id(group.id);
  result.set_tag(ToUtf8(group.tag));
  result.mutable_ranks()->Add(group.ranks.begin(), group.ranks.end());
  result.set_completed_operations(group.completed);
  result.set_bytes(group.bytes);
  if (group.completed > 0) *result.mutable_last() = ToTiming(group.last);
  result.set_failure(ToUtf8(group.failure));
  result.mutable_aside_ranks()->Add(group.aside_ranks.begin(), group.aside_ranks.end());
  if (WaitsForARank(group)) *result.mutable_wait() = ToWait(group);
  for (const BucketSnapshot& bucket : group.buckets) *result.add_buckets() = ToBucket(bucket);
  return result;
}

v1::Rank ToRank(const RankSnapshot& rank) {
  v1::Rank result;
  result.set_rank(rank.rank);
  result.set_local_rank(rank.local_rank);
  result.set_pid(rank.pid);
  result.set_program(ToUtf8(rank.program));
  result.set_connected(rank.connected);
  result.set_segment_bytes(rank.segment_bytes);
  return result;
}

std::string FailureOf(const JobSnapshot& job) {
  if (!job.failure.empty()) return job.failure;
  for (const GroupSnapshot& group : job.groups) {
    if (!group.failure.empty()) return group.failure;
  }
  return {};
}

uint32_t ConnectedRanks(const JobSnapshot& job) {
  return static_cast<uint32_t>(std::count_if(
      job.ranks.begin(), job.ranks.end(), [](const RankSnapshot& rank) { return rank.connected; }));
}

v1::JobState StateOf(const JobSnapshot& job) {
  if (!FailureOf(job).empty()) return v1::JOB_STATE_FAILED;
  if (job.ranks.size() < job.world_size) return v1::JOB_STATE_JOINING;
  return ConnectedRanks(job) < job.world_size ? v1::JOB_STATE_LEAVING : v1::JOB_STATE_ACTIVE;
}

// The group that waits longest for a rank; null if none does.
const GroupSnapshot* LongestWaiting(const JobSnapshot& job) {
  const GroupSnapshot* longest = nullptr;
  for (const GroupSnapshot& group : job.groups) {
    if (!WaitsForARank(group)) continue;
    if (longest == nullptr || group.waiting > longest->waiting) longest = &group;
  }
  return longest;
}

}  // namespace

v1::JobSummary ToSummary(const JobSnapshot& job) {
  v1::JobSummary result;
  result.set_name(ToUtf8(job.job));
  result.set_uid(job.uid);
  result.set_generation(job.generation);
  result.set_state(StateOf(job));
  result.set_world_size(job.world_size);
  result.set_connected_ranks(ConnectedRanks(job));
  *result.mutable_age() = ToDuration(job.age);
  result.set_failure(ToUtf8(FailureOf(job)));
  if (const GroupSnapshot* group = LongestWaiting(job)) *result.mutable_wait() = ToWait(*group);
  return result;
}

v1::Job ToJob(const JobSnapshot& job) {
  v1::Job result;
  *result.mutable_summary() = ToSummary(job);
  for (const RankSnapshot& rank : job.ranks) *result.add_ranks() = ToRank(rank);
  for (const GroupSnapshot& group : job.groups) *result.add_groups() = ToGroup(group);
  return result;
}

}  // namespace gradsync
