// A Group for tests: the ranks are threads of one process, and the daemon is a table.
//
// Deterministic: operations run in the group's order, each when every rank has submitted it, with
// sums in rank order. Ranks that make different calls, or a rank that leaves while others wait for
// it, fail the group; so a faulty test ends with an error and not with its time limit.
#ifndef GRADSYNC_CLIENT_DDP_FAKE_GROUP_H_
#define GRADSYNC_CLIENT_DDP_FAKE_GROUP_H_

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "client/core/group.h"

namespace gradsync {

struct FakeOperation {
  OpKind kind = OpKind::kBarrier;
  uint64_t count = 0;
  DType dtype = DType::kUInt8;
  ReduceOp reduce_op = ReduceOp::kSum;
  uint32_t root = 0;
  uint32_t bucket = 0;

  bool operator==(const FakeOperation&) const = default;
};

// What one rank has done, for tests to look at after the ranks have ended.
struct FakeLog {
  std::vector<uint64_t> bucket_sequences;  // in the order of SubmitBucket
  std::vector<BucketInfo> described;
  std::vector<uint64_t> allocated;  // bytes
  uint32_t all_reduces = 0;         // submitted beside buckets
  uint32_t collectives = 0;
};

class FakeNetwork {
 public:
  explicit FakeNetwork(uint32_t size);
  // The ranks in the job of the group's members.
  explicit FakeNetwork(std::vector<uint32_t> job_ranks);

  // Runs `body` once for each member, each on a thread of its own, and returns when all have ended.
  void Run(const std::function<void(std::shared_ptr<Group>)>& body);

  // From now on the member's next Allocate answers kOutOfMemory.
  void FailNextAllocation(uint32_t member);

  const FakeLog& log(uint32_t member) const { return logs_[member]; }

 private:
  friend class FakeGroup;

  struct Share {
    const void* input;
    void* output;
  };
  struct Pending {
    FakeOperation operation;
    std::map<uint32_t, Share> shares;  // by member
  };

  void Submit(uint32_t member, uint64_t sequence, const FakeOperation& operation, Share share);
  Status WaitFor(uint64_t sequence);
  void Leave(uint32_t member);
  // Returns how often all members have rejoined before.
  uint64_t StandAside(uint32_t member, uint64_t next_sequence, AsidePolicy policy);
  // Waits until they have once more; where they go on, and who took part longest.
  Result<std::pair<uint64_t, uint32_t>> Rejoin(uint64_t before);
  void Fail(Status why);
  // The callers of these hold the lock.
  void FailLocked(Status why);
  void FailOrphans();
  void RunReady();
  Status Execute(const Pending& pending) const;

  const std::vector<uint32_t> job_ranks_;
  std::vector<FakeLog> logs_;  // each written by its member's thread only
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<uint64_t, Pending> pending_;
  uint64_t completed_ = 0;
  std::set<uint32_t> gone_;
  std::map<uint32_t, uint64_t> aside_;  // by member: its next sequence
  AsidePolicy aside_policy_ = AsidePolicy::kAverageOverAll;
  uint64_t rejoinings_ = 0;
  std::pair<uint64_t, uint32_t> rejoined_;
  std::set<uint32_t> failing_allocations_;
  Status failure_;
};

class FakeGroup : public Group {
 public:
  FakeGroup(FakeNetwork* network, uint32_t member) : network_(network), member_(member) {}

  uint32_t rank() const override { return member_; }
  uint32_t size() const override { return static_cast<uint32_t>(network_->job_ranks_.size()); }
  uint32_t job_rank(uint32_t member) const override { return network_->job_ranks_[member]; }
  const std::string& tag() const override { return tag_; }

  Status CheckUsable() const override { return Failure(); }
  Status Failure() const override;
  Status AllReduce(void* data, uint64_t count, DType dtype, ReduceOp op, Timeout timeout) override;
  Status Broadcast(void* data, uint64_t count, DType dtype, uint32_t root,
                   Timeout timeout) override;
  Status AllGather(const void* input, void* output, uint64_t count, DType dtype,
                   Timeout timeout) override;
  Status Barrier(Timeout timeout) override;
  Status Share(void* data, uint64_t count, DType dtype, Timeout timeout) override;
  Status StandAside(AsidePolicy policy, Timeout timeout) override;
  Result<uint32_t> Rejoin() override;
  // No device but the processor's.
  Result<std::shared_ptr<SharedBuffer>> Allocate(uint64_t bytes, const std::string& label,
                                                 uint32_t device) override;
  Status DescribeBucket(const BucketInfo& info) override;
  uint64_t ReserveSequences(uint32_t count) override;
  Status SubmitBucket(uint64_t sequence, const BucketInfo& info, const SharedBuffer& buffer,
                      uint64_t offset, ReduceOp op, Timeout timeout, Stream stream) override;
  Status SubmitAllReduce(uint64_t sequence, uint64_t count, DType dtype, const SharedBuffer& buffer,
                         uint64_t offset, ReduceOp op, Timeout timeout) override;
  Status Wait(uint64_t sequence, Timeout timeout) override;
  Status EnqueueWait(uint64_t sequence, uint32_t device, Stream stream) override;
  Status CopyOnDevice(uint32_t device, std::span<const DeviceCopy> copies, Stream stream) override;
  void Abort(const Status& why) override;

 private:
  Status Collective(const FakeOperation& operation, const void* input, void* output);

  FakeNetwork* const network_;
  const uint32_t member_;
  const std::string tag_ = "fake";
  uint64_t next_sequence_ = 0;
  uint64_t rejoinings_before_ = 0;
};

}  // namespace gradsync

#endif  // GRADSYNC_CLIENT_DDP_FAKE_GROUP_H_
