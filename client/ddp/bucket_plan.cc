#include "client/ddp/bucket_plan.h"

#include <algorithm>
#include <numeric>

namespace gradsync {
namespace {

// The parameters that may share a bucket: the one that is being filled, if any.
struct Kind {
  DType dtype;
  uint32_t device;
  size_t closed = 0;  // buckets
  bool filling = false;
  uint32_t bucket = 0;  // the one being filled
  uint64_t bytes = 0;   // in it
};

// Kinds are few: a model has one or two dtypes and devices.
Kind& FindKind(std::vector<Kind>& kinds, const ParameterSpec& parameter) {
  const auto found = std::find_if(kinds.begin(), kinds.end(), [&](const Kind& kind) {
    return kind.dtype == parameter.dtype && kind.device == parameter.device;
  });
  if (found != kinds.end()) return *found;
  return kinds.emplace_back(Kind{.dtype = parameter.dtype, .device = parameter.device});
}

void OpenBucket(BucketPlan& plan, Kind& kind) {
  kind.bucket = static_cast<uint32_t>(plan.buckets.size());
  kind.bytes = 0;
  kind.filling = true;
  plan.buckets.push_back({.dtype = kind.dtype});
}

// Puts the buckets one after another. The slots' offsets were relative to their bucket's.
void PlaceBuckets(BucketPlan& plan) {
  for (PlannedBucket& bucket : plan.buckets) {
    bucket.offset = plan.bytes;
    bucket.count = std::max<uint64_t>(bucket.count, 1);
    const uint64_t end = bucket.offset + bucket.count * DTypeSize(bucket.dtype);
    plan.bytes = (end + kBucketAlignment - 1) / kBucketAlignment * kBucketAlignment;
  }
  for (PlannedSlot& slot : plan.slots) slot.offset += plan.buckets[slot.bucket].offset;
}

// All but the places.
BucketPlan FillBuckets(std::span<const ParameterSpec> parameters, std::span<const uint32_t> order,
                       std::span<const uint64_t> caps) {
  BucketPlan plan;
  plan.slots.resize(parameters.size());
  std::vector<Kind> kinds;
  for (const uint32_t index : order) {
    Kind& kind = FindKind(kinds, parameters[index]);
    // Opened by its first parameter: that numbers the buckets as promised.
    if (!kind.filling) OpenBucket(plan, kind);
    PlannedBucket& bucket = plan.buckets[kind.bucket];
    const uint64_t bytes = GradientBytes(parameters[index]);
    plan.slots[index] = {.offset = kind.bytes, .bytes = bytes, .bucket = kind.bucket};
    bucket.parameters.push_back(index);
    bucket.count += ElementCount(parameters[index]);
    kind.bytes += bytes;
    if (kind.bytes >= caps[std::min(kind.closed, caps.size() - 1)]) {
      kind.filling = false;
      ++kind.closed;
    }
  }
  return plan;
}

}  // namespace

BucketPlan PlanBuckets(std::span<const ParameterSpec> parameters, std::span<const uint32_t> order,
                       std::span<const uint64_t> caps) {
  BucketPlan plan = FillBuckets(parameters, order, caps);
  PlaceBuckets(plan);
  return plan;
}

BucketPlan PlanBucketsFromFront(std::span<const ParameterSpec> parameters,
                                std::span<const uint64_t> caps) {
  std::vector<uint32_t> order(parameters.size());
  std::iota(order.begin(), order.end(), 0U);
  BucketPlan plan = FillBuckets(parameters, order, caps);
  std::reverse(plan.buckets.begin(), plan.buckets.end());
  for (PlannedSlot& slot : plan.slots) {
    slot.bucket = static_cast<uint32_t>(plan.buckets.size()) - 1 - slot.bucket;
  }
  PlaceBuckets(plan);
  return plan;
}

std::vector<uint32_t> ReversedOrder(uint32_t parameter_count) {
  std::vector<uint32_t> order(parameter_count);
  for (uint32_t i = 0; i < parameter_count; ++i) order[i] = parameter_count - 1 - i;
  return order;
}

bool IsPermutation(std::span<const uint32_t> order, uint32_t parameter_count) {
  if (order.size() != parameter_count) return false;
  std::vector<bool> seen(parameter_count, false);
  for (const uint32_t index : order) {
    if (index >= parameter_count || seen[index]) return false;
    seen[index] = true;
  }
  return true;
}

Digest PlanDigest(const BucketPlan& plan) {
  DigestBuilder digest;
  digest.Add(plan.bytes);
  for (const PlannedBucket& bucket : plan.buckets) {
    digest.Add(bucket.offset);
    digest.Add(bucket.count);
    digest.Add(static_cast<uint64_t>(bucket.dtype));
    digest.Add(bucket.parameters.size());
    for (const uint32_t parameter : bucket.parameters) digest.Add(parameter);
  }
  return digest.Finish();
}

}  // namespace gradsync
