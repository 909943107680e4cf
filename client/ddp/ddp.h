// The core of a DDP wrapper: buckets of gradients, averaged over the ranks of a group while
// backward goes on. Knows no framework and no transport. gradsync/gradsync.h's gradsync_ddp_* are
// these calls.
//
// One iteration:
//
//   Begin()                      at the end of forward
//   Ready(p) for each parameter  once each, in any order, as backward makes the gradients
//   Wait(b) for each bucket      then bucket b holds the averages
//   End()
//
// Between iterations gradients may be accumulated in the slots freely (no_sync): that takes no
// call.
//
// The calls on one Ddp must not overlap, but each may come from another thread: Ready from the
// threads of autograd one at a time, Wait and End from the one that finishes backward. Ready
// neither locks, allocates nor searches.
//
// Where parameters may go unused, ReadyUnused stands for Ready; which parameters were used on any
// rank is combined as one more operation behind the last bucket, and waited for together with it.
//
// A failure of the group, or an iteration that can never finish, is final: every later call returns
// it. The other ranks then fail too; a new group and a new Ddp are the way on. But where it was
// another rank that gave up an unfinished iteration, Begin and Ready say nothing of it, and Wait
// does: a rank that comes later may be about to give up as well, for the same reason, and then has
// to name what it lacks itself.
#ifndef GRADSYNC_CLIENT_DDP_DDP_H_
#define GRADSYNC_CLIENT_DDP_DDP_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "client/core/group.h"
#include "client/ddp/agreement.h"
#include "client/ddp/bucket_plan.h"
#include "client/ddp/parameter.h"
#include "client/ddp/readiness.h"
#include "client/ddp/unused_policy.h"
#include "shm/status.h"

namespace gradsync {

struct DdpOptions {
  uint64_t bucket_bytes = 0;  // a bucket is closed by the parameter that reaches this; 0: 25 MiB
  uint64_t first_bucket_bytes = 0;  // for the first bucket; 0: 1 MiB, or bucket_bytes if given
  Timeout timeout{0};               // for each bucket and each agreement; zero: the session's
  bool fixed_plan = false;          // never replan
  // Instead of the two above: the sizes of the first bucket, the second and so on; the last one
  // holds for all that follow.
  std::vector<uint64_t> bucket_bytes_list{};
  // The buckets of the first plan are filled from the first parameter on, not from the last.
  bool fill_from_front = false;
};

// Where the gradient of a parameter lies, row-major, inside Ddp::buffer().
struct Slot {
  std::byte* data = nullptr;
  uint64_t count = 0;
  uint32_t bucket = 0;
};

// A bucket's memory, and its parameters in the order in which they lie there. Valid until a replan.
struct Bucket {
  std::byte* data = nullptr;
  uint64_t count = 0;
  DType dtype = DType::kFloat32;
  std::span<const uint32_t> parameters;
};

class Ddp {
 public:
  // Agrees with every rank of the group on the parameters and the options, plans the buckets
  // (numbered in the reverse order of registration) and allocates them, zeroed. What one rank
  // cannot do (a difference is kMismatch, a shortage kOutOfMemory) fails on every rank with the
  // same sentence. The group must be used for nothing else while an iteration is under way.
  static Result<std::unique_ptr<Ddp>> Create(std::shared_ptr<Group> group,
                                             std::vector<ParameterSpec> parameters,
                                             const DdpOptions& options);

  // In the middle of an iteration it fails the group, whose other ranks wait for what is missing.
  ~Ddp();
  Ddp(const Ddp&) = delete;
  Ddp& operator=(const Ddp&) = delete;

  uint32_t parameter_count() const { return static_cast<uint32_t>(parameters_.size()); }
  uint32_t bucket_count() const { return static_cast<uint32_t>(layout_.plan.buckets.size()); }

  // kInvalidArgument for an index out of range.
  Result<Slot> GetSlot(uint32_t parameter) const;
  Result<Bucket> GetBucket(uint32_t index) const;

  // The memory in which all slots lie. Another one after a replan or Renew; who still needs the old
  // slots keeps the old buffer.
  const std::shared_ptr<SharedBuffer>& buffer() const { return layout_.buffer; }

  // Where the gradients are: kCpu, or a GPU. There no call waits for the GPU, but as said.
  uint32_t device() const { return device_; }

  // On a GPU: the stream on which the gradients that become ready next are made, and which Wait
  // lets wait. To be called before either, whenever it is another one; null, the default stream, to
  // begin with.
  void UseStream(Stream stream) { stream_ = stream; }

  // Begins an iteration, giving up one in which nothing became ready (a forward without a
  // backward). kFailedPrecondition, with PyTorch's "Expected to have finished reduction in the
  // prior iteration before starting a new one." and the parameters without a gradient, if the last
  // one is unfinished. As this rank's buckets will never come, the group is then failed with that
  // sentence, so that the other ranks learn at once what they are waiting for.
  Status Begin();

  // What becomes of unused parameters (kError to begin with). Before the first iteration, with the
  // same policy on every rank. With kFind the plan stays as it is: no order is typical.
  Status SetUnusedPolicy(UnusedPolicy policy);

  // From now on the caller reduces the buckets by means of its own: Ready hands none over, Wait
  // waits for none. Before the first iteration, on every rank.
  Status ReduceElsewhere();

  // In the current iteration no rank uses any parameter of the bucket: nothing is done for it. On
  // every rank that begins the iteration, before the first parameter is ready.
  Status Skip(uint32_t bucket);

  // The gradient lies in its slot, complete. Hands the bucket over when it is the bucket's last;
  // does not block. True with the iteration's last parameter. kFailedPrecondition outside an
  // iteration, or the second time for a parameter. Says nothing of another rank that has given up.
  Result<bool> Ready(uint32_t parameter);

  // As Ready, for a parameter that this rank has not used: its slot holds what the rank contributes
  // all the same, zeros in most cases.
  Result<bool> ReadyUnused(uint32_t parameter);

  bool IsBucketReady(uint32_t bucket) const {
    return bucket < bucket_count() && readiness_.IsBucketComplete(bucket);
  }

  // How many ranks used the parameter. Known from the Wait for the iteration's last bucket until
  // the next iteration's, and with kStatic for good. The group's size where nothing is told apart.
  uint32_t UsedBy(uint32_t parameter) const;

  // Blocks until the bucket holds the averages. kFailedPrecondition if it has not been handed over.
  // On a GPU: makes the stream wait for them, and returns at once; but it blocks for the last
  // bucket of an iteration that also says which parameters were used. A failure that comes later
  // lets the stream go, and is returned by the next call.
  Status Wait(uint32_t bucket);

  // Ends an iteration whose buckets have all been waited for.
  Status End();

  // After the first whole iteration, once, unless the plan is fixed or some rank stands aside:
  // plans anew in the order in which rank 0's gradients became ready, and moves what lies in the
  // slots along. True if slots moved; they stay if the plan is the same, or if a rank lacks the
  // memory to hold both for the move. Every rank must call it at the same point between iterations.
  // Refuses an unfinished iteration as Begin does.
  Result<bool> Replan();

  // As Group::StandAside, between iterations: the others' buckets are averaged without this rank,
  // and nothing is replanned any more. Go on with Group::Rejoin. kUnsupported where the buckets are
  // reduced elsewhere, and with UnusedPolicy::kStatic. Refuses an unfinished iteration as Begin
  // does.
  Status StandAside(AsidePolicy policy);

  // Other memory for the slots, zeroed; who still needs the old keeps the old buffer. This rank may
  // do it alone, before anything has become ready in an iteration.
  Status Renew();

  // The parameters of the current iteration that have not become ready, in order of index.
  std::vector<uint32_t> Unready() const;

 private:
  // A plan with its memory.
  struct Layout {
    BucketPlan plan{};
    std::vector<BucketInfo> infos{};  // by bucket: as the group wants them, made once
    std::shared_ptr<SharedBuffer> buffer{};
  };

  enum class Phase { kIdle, kIterating };

  Ddp(std::shared_ptr<Group> group, std::vector<ParameterSpec> parameters,
      const DdpOptions& options);

  PlanSettings Settings() const;
  Status CheckBeforeFirstIteration(const char* call) const;
  Result<bool> MarkReady(uint32_t parameter, bool used);
  std::vector<uint64_t> Caps() const;
  BucketPlan FirstPlan() const;
  // Allocates a plan's memory, and compares across ranks the plan and whether there was memory.
  Result<Layout> Prepare(BucketPlan plan);
  // Describes the buckets to the group and uses the layout from now on.
  Status Adopt(Layout layout);
  Result<bool> MoveTo(BucketPlan plan);
  Status MoveGradients(const Layout& target) const;
  Status AwaitBucket(uint32_t bucket);

  Status LeaveIteration();
  void ReserveSequences();
  Status SubmitBucket(uint32_t bucket);
  // Whether the current iteration also says which parameters were used.
  bool combines_use() const {
    return policy_ == UnusedPolicy::kFind || (policy_ == UnusedPolicy::kStatic && iterations_ == 0);
  }
  Status SubmitUse();
  Status WaitForUse();
  Status Fail(Status status);
  Status FailEverywhere(Status status);
  // `status`, unless it is that another rank has given up: that is only remembered.
  Status PutOff(Status status);
  Result<std::vector<uint32_t>> FirstRanksOrder();
  Result<bool> IsEverybodyHere();

  uint32_t rank() const { return group_->job_rank(group_->rank()); }

  const std::shared_ptr<Group> group_;
  const std::vector<ParameterSpec> parameters_;
  const DdpOptions options_;  // the defaults filled in

  uint32_t device_ = kCpu;
  Stream stream_ = nullptr;
  Layout layout_;
  Phase phase_ = Phase::kIdle;
  Readiness readiness_;
  // Of the iteration's buckets, and then of the use of parameters; once a bucket is handed over.
  std::vector<uint64_t> sequences_;
  uint64_t use_sequence_ = 0;
  bool has_sequences_ = false;
  std::vector<uint8_t> skipped_;  // by bucket
  std::vector<uint8_t> waited_;   // by bucket
  uint32_t waited_count_ = 0;

  uint64_t iterations_ = 0;  // that have ended

  UnusedPolicy policy_ = UnusedPolicy::kError;
  bool reduces_elsewhere_ = false;
  // By parameter. What this rank used in the iteration; where the counts are made; the counts.
  std::vector<uint8_t> used_here_;
  std::shared_ptr<SharedBuffer> use_;
  std::vector<int32_t> used_by_;

  // Of the first whole iteration, kept for the one replan.
  std::vector<uint32_t> first_order_;
  bool may_replan_;
  Status put_off_;  // a failure of the group that nobody has been told of yet
  Status failure_;  // final
};

}  // namespace gradsync

#endif  // GRADSYNC_CLIENT_DDP_DDP_H_
