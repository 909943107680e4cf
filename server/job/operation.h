// What the ranks of a group submit, as the scheduler sees it: already copied and checked by
// server/local, so that every field is in range and every pointer is good.
#ifndef GRADSYNC_SERVER_JOB_OPERATION_H_
#define GRADSYNC_SERVER_JOB_OPERATION_H_

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "server/engine/device_engine.h"
#include "shm/device.h"
#include "shm/types.h"
#include "shm/unique_fd.h"

namespace gradsync {

// Time is passed in: nothing in server/job reads a clock.
using Time = std::chrono::steady_clock::time_point;
using Duration = std::chrono::steady_clock::duration;

// The part of an operation that must be the same on every rank.
struct Operation {
  uint64_t sequence = 0;
  OpKind kind = OpKind::kBarrier;
  DType dtype = DType::kFloat32;
  ReduceOp reduce_op = ReduceOp::kSum;
  uint32_t root = 0;
  uint32_t bucket = 0;
  uint64_t count = 0;
  bool on_device = false;  // its memory is a GPU's
};

// The part that each rank has for itself.
struct MemberBuffers {
  const std::byte* input = nullptr;
  std::byte* output = nullptr;
  std::shared_ptr<const void> keep_alive;  // the mapping(s) behind both
  Duration timeout = Duration::zero();
  // Of an operation on GPUs, whose addresses the two above then are.
  uint32_t device = 0;
  std::shared_ptr<DeviceFlags> flags{};
  HandOver hand_over = HandOver::kHostMemory;
};

// A member stands aside (AsidePolicy).
struct AsideRequest {
  uint32_t request_id = 0;
  uint64_t next_sequence = 0;  // that it does not submit; it has submitted all before
  AsidePolicy policy = AsidePolicy::kAverageOverAll;
  Duration timeout = Duration::zero();  // for the others to submit anything
};

// What one member of a group sends to another. The daemon only passes it on.
struct Message {
  uint32_t from = 0;  // index in the group
  uint64_t tag = 0;
  uint64_t bytes = 0;
  std::vector<std::byte> data;  // all of it, if it is short
  UniqueFd memory;              // else a memfd of its size
  std::shared_ptr<const void>
      charge;  // what its sender's user is charged with, as long as it is there
};

// How far a rank may submit ahead of what its group has completed; also the most buckets of a plan.
inline constexpr uint64_t kSequenceWindow = 65536;

// What the groups of one session, together, may make the daemon remember.
inline constexpr uint64_t kMaxSessionOperations = 65536;  // submitted by some rank, not complete
inline constexpr uint64_t kMaxSessionBuckets = 65536;     // described
inline constexpr uint64_t kMaxSessionMessages = 4096;  // sent or waited for, and not yet received

// What a bucket of a registered plan holds, for texts and inspection.
struct BucketDescription {
  uint32_t bucket = 0;
  uint32_t bucket_count = 0;
  uint32_t parameter_count = 0;
  uint64_t count = 0;
  DType dtype = DType::kFloat32;
  std::string parameters;
};

}  // namespace gradsync

#endif  // GRADSYNC_SERVER_JOB_OPERATION_H_
