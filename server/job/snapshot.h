// What an operator can be told of the jobs at one moment: plain copies, safe to hand to any thread.
#ifndef GRADSYNC_SERVER_JOB_SNAPSHOT_H_
#define GRADSYNC_SERVER_JOB_SNAPSHOT_H_

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "shm/device.h"
#include "shm/types.h"

namespace gradsync {

// How long one finished operation took.
struct Timing {
  std::chrono::nanoseconds wait{};    // from the first rank's submission to the last's
  std::chrono::nanoseconds queue{};   // from then until the engine began
  std::chrono::nanoseconds reduce{};  // in the engine
  std::chrono::nanoseconds total() const { return wait + queue + reduce; }
};

enum class BucketState : uint8_t {
  kIdle,     // no rank has submitted it since it was last reduced
  kWaiting,  // some rank has not submitted it, or an earlier operation is not finished
  kRunning,  // in the engine
};

struct BucketSnapshot {
  uint32_t index = 0;
  uint32_t parameter_count = 0;
  uint64_t count = 0;
  DType dtype = DType::kFloat32;
  std::string parameters;
  BucketState state = BucketState::kIdle;
  std::vector<uint32_t> ready_ranks;  // that have submitted it, while kWaiting or kRunning
  uint64_t reductions = 0;
  Timing last;                                 // zero before the first
  uint32_t last_rank = 0;                      // that came last the last time
  HandOver hand_over = HandOver::kHostMemory;  // the last time
};

struct GroupSnapshot {
  uint64_t id = 0;
  std::string tag;
  std::vector<uint32_t> ranks;
  uint64_t completed = 0;  // operations
  uint64_t bytes = 0;      // reduced, gathered or broadcast, per rank
  Timing last;
  std::string failure;                // empty while it works
  std::vector<uint32_t> aside_ranks;  // that stand aside: nobody waits for them
  // The operation that the group waits for, if any rank has submitted it or a later one.
  std::optional<std::string> waiting_operation;
  std::vector<uint32_t> missing_ranks;
  std::chrono::nanoseconds waiting{};  // since the first submission
  std::vector<BucketSnapshot> buckets;
};

struct RankSnapshot {
  uint32_t rank = 0;
  uint32_t local_rank = 0;
  uint32_t pid = 0;  // as the trainer sees itself
  std::string program;
  bool connected = false;
  uint64_t segment_bytes = 0;
};

struct JobSnapshot {
  uint32_t uid = 0;
  std::string job;
  uint32_t generation = 0;
  uint32_t world_size = 0;
  std::string failure;  // empty while it works
  std::chrono::nanoseconds age{};
  std::vector<RankSnapshot> ranks;  // those that have joined, in rank order
  std::vector<GroupSnapshot> groups;
};

}  // namespace gradsync

#endif  // GRADSYNC_SERVER_JOB_SNAPSHOT_H_
