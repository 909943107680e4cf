// Which gradient lies where: the division of parameters into buckets, and of one block of memory
// among the buckets. Pure: the same input gives the same plan on every rank.
#ifndef GRADSYNC_CLIENT_DDP_BUCKET_PLAN_H_
#define GRADSYNC_CLIENT_DDP_BUCKET_PLAN_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "client/ddp/digest.h"
#include "client/ddp/parameter.h"
#include "shm/types.h"

namespace gradsync {

// Where a bucket begins in memory, so that no two buckets share a cache line.
inline constexpr uint64_t kBucketAlignment = 64;

struct PlannedBucket {
  uint64_t offset = 0;  // bytes from the start of the memory
  // Elements. At least 1: a bucket of nothing but empty parameters carries one element of padding,
  // so that every bucket is an operation.
  uint64_t count = 0;
  DType dtype = DType::kFloat32;
  std::vector<uint32_t> parameters{};  // in the order of their memory, packed without gaps

  bool operator==(const PlannedBucket&) const = default;
};

struct PlannedSlot {
  uint64_t offset = 0;  // bytes from the start of the memory
  uint64_t bytes = 0;
  uint32_t bucket = 0;

  bool operator==(const PlannedSlot&) const = default;
};

struct BucketPlan {
  std::vector<PlannedBucket> buckets;
  std::vector<PlannedSlot> slots;  // by parameter
  uint64_t bytes = 0;              // of the memory

  bool operator==(const BucketPlan&) const = default;
};

// Plans buckets for the parameters (as CheckParameters accepts them), taken in `order`, a
// permutation of their indices. Parameters of one dtype and device fill a bucket until it has
// reached its cap in bytes; the parameter that reaches it is the last. For each such kind the first
// bucket has caps[0], the next caps[1] and so on; the last cap holds for all that follow. Buckets
// are numbered by their first parameter's place in the order. `caps` must not be empty.
BucketPlan PlanBuckets(std::span<const ParameterSpec> parameters, std::span<const uint32_t> order,
                       std::span<const uint64_t> caps);

// As above, but filled in the order of registration, from the first parameter on, and numbered the
// other way round: what backward reaches last is reduced last. The caps hold from the last bucket
// on.
BucketPlan PlanBucketsFromFront(std::span<const ParameterSpec> parameters,
                                std::span<const uint64_t> caps);

// The order to begin with, n-1 ... 0: backward reaches parameters roughly in reverse.
std::vector<uint32_t> ReversedOrder(uint32_t parameter_count);

bool IsPermutation(std::span<const uint32_t> order, uint32_t parameter_count);

// Equal on two ranks if their memory is laid out alike.
Digest PlanDigest(const BucketPlan& plan);

}  // namespace gradsync

#endif  // GRADSYNC_CLIENT_DDP_BUCKET_PLAN_H_
