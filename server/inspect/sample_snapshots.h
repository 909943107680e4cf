// Snapshots that tests of inspection and of gradsyncctl look at.
#ifndef GRADSYNC_SERVER_INSPECT_SAMPLE_SNAPSHOTS_H_
#define GRADSYNC_SERVER_INSPECT_SAMPLE_SNAPSHOTS_H_

#include <chrono>
#include <string>
#include <vector>

#include "server/job/snapshot.h"

namespace gradsync {

// Two ranks that train: bucket 0 is being reduced, bucket 1 waits for rank 1, bucket 2 has never
// been reduced. A second group has done nothing yet.
inline JobSnapshot TrainingJob() {
  using std::chrono::microseconds;
  using std::chrono::milliseconds;
  JobSnapshot job;
  job.uid = 1000;
  job.job = "lm-27m";
  job.generation = 2;
  job.world_size = 2;
  job.age = std::chrono::seconds(192);
  job.ranks = {{.rank = 0,
                .local_rank = 0,
                .pid = 4242,
                .program = "train.py",
                .connected = true,
                .segment_bytes = 109 << 20},
               {.rank = 1,
                .local_rank = 1,
                .pid = 4243,
                .program = "train.py",
                .connected = true,
                .segment_bytes = 109 << 20}};
  GroupSnapshot ddp;
  ddp.id = 7;
  ddp.tag = "ddp/0";
  ddp.ranks = {0, 1};
  ddp.completed = 1830;
  ddp.bytes = 48ULL << 30;
  ddp.last = {.wait = microseconds(90), .queue = microseconds(4), .reduce = microseconds(21)};
  ddp.waiting_operation =
      "bucket_reduce of 6553600 float32 (avg), bucket 1 of 3 (encoder.5.weight ... encoder.0.bias)";
  ddp.missing_ranks = {1};
  ddp.waiting = milliseconds(412);
  ddp.buckets = {
      {.index = 0,
       .parameter_count = 1,
       .count = 262144,
       .dtype = DType::kFloat32,
       .parameters = "lm_head.weight",
       .state = BucketState::kRunning,
       .ready_ranks = {1, 0},
       .reductions = 610,
       .last = {.wait = microseconds(120), .queue = microseconds(3), .reduce = microseconds(210)},
       .last_rank = 1},
      {.index = 1,
       .parameter_count = 24,
       .count = 6553600,
       .dtype = DType::kFloat32,
       .parameters = "encoder.5.weight ... encoder.0.bias",
       .state = BucketState::kWaiting,
       .ready_ranks = {0},
       .reductions = 610,
       .last = {.wait = microseconds(1850),
                .queue = microseconds(40),
                .reduce = microseconds(2470)},
       .last_rank = 0},
      {.index = 2,
       .parameter_count = 2,
       .count = 1000,
       .dtype = DType::kBFloat16,
       .parameters = "norm.weight norm.bias",
       .ready_ranks = {},
       .last = {}}};
  GroupSnapshot world;
  world.id = 8;
  world.tag = "world";
  world.ranks = {0, 1};
  job.groups = {ddp, world};
  return job;
}

// As TrainingJob, on GPUs: one bucket for each way of handing over, and one that has never been
// reduced.
inline JobSnapshot GpuJob() {
  JobSnapshot job = TrainingJob();
  std::vector<BucketSnapshot>& buckets = job.groups[0].buckets;
  buckets.insert(buckets.begin() + 1, buckets[1]);
  for (uint32_t i = 0; i < buckets.size(); ++i) buckets[i].index = i;
  buckets[0].hand_over = HandOver::kDaemonMemory;
  buckets[1].hand_over = HandOver::kExportedMemory;
  buckets[2].hand_over = HandOver::kLegacyHandle;
  return job;
}

// One of four ranks has joined.
inline JobSnapshot JoiningJob() {
  JobSnapshot job;
  job.uid = 1001;
  job.job = "vit";
  job.world_size = 4;
  job.age = std::chrono::milliseconds(2500);
  job.ranks = {{.rank = 2,
                .local_rank = 2,
                .pid = 77,
                .program = "python3",
                .connected = true,
                .segment_bytes = 0}};
  return job;
}

// Rank 1 of two has died.
inline JobSnapshot FailedJob() {
  JobSnapshot job = TrainingJob();
  job.job = "bert";
  job.failure = "job 'bert': rank 1 (pid 4243) died";
  job.ranks[1].connected = false;
  GroupSnapshot& group = job.groups[0];
  group.failure = job.failure;
  group.waiting_operation.reset();
  group.missing_ranks.clear();
  return job;
}

}  // namespace gradsync

#endif  // GRADSYNC_SERVER_INSPECT_SAMPLE_SNAPSHOTS_H_
