// The order of one group: which operation may start, who is being waited for, what went wrong. The
// pure state machine at the heart of the daemon.
//
// Operations are numbered from 0, the same on every rank. Each rank submits each number once, in
// any order within a window (buckets become ready as backward reaches them). Operation s starts
// when every member has submitted s and operation s-1 has finished: so buckets start strictly in
// index order, whatever order they became ready in, and at most one operation of a group is in the
// engine; but operations on GPUs, which are in their engine long before their data is there, may be
// in it together, and finish in order. What a rank submits is compared with what the others
// submitted under the same number as soon as two are there; a difference fails the group on every
// rank.
//
// Failure: the first reason is kept, nothing starts after it, and what is pending is dropped. The
// members are told at once, or, if an operation is in the engine, when that has finished (and is
// complete): so a member that has been told of a failure knows that its memory is no longer
// written.
//
// Deadlines: an operation's is the earliest of its submissions' times plus their timeouts. One
// that every member has submitted, like all before it, waits for the engine and for nobody, and so
// has no deadline any more; any other is held up by a missing member, its own or an earlier
// operation's. The group's deadline is the earliest of theirs, and the text names who holds up the
// lowest of them.
//
// Standing aside: a member that has run out of input submits nothing more, and what the others
// submit goes on without it, if it is a sum, an average, a share or a barrier. When all members
// stand aside, they take part again, from one number on.
#ifndef GRADSYNC_SERVER_JOB_GROUP_SCHEDULER_H_
#define GRADSYNC_SERVER_JOB_GROUP_SCHEDULER_H_

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <queue>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/container/inlined_vector.h"
#include "server/engine/engine.h"
#include "server/job/asides.h"
#include "server/job/described_plan.h"
#include "server/job/operation.h"
#include "server/job/snapshot.h"
#include "shm/protocol.h"
#include "shm/status.h"

namespace gradsync {

// What a GroupScheduler decides in answer to one event; any of the parts may be absent. To be
// carried out in this order.
struct Decision {
  Status rejected;                    // not OK: the submitting member broke the rules; nothing else
  bool finished = false;              // an operation has left the engine
  std::optional<uint64_t> completed;  // operations below this are now complete
  Status failure;                     // not OK: the group has failed now, on every member
  std::vector<AsideAnswer> asides;    // to members that stood aside
  bool abandon =
      false;  // what is in the GPU engine of the group is to end soon, whatever comes out
  struct Start {
    uint64_t sequence = 0;
    std::shared_ptr<const Task> task;
    Duration timeout{};  // of a task on GPUs: for the trainers' streams to come to it
  };
  absl::InlinedVector<Start, 1> starts;  // run them, in order
};

class GroupScheduler {
 public:
  // `job` and `tag` are for texts. `id` is the daemon's number for the group: tasks on GPUs carry
  // it. `ranks[member]` is a member's rank in the job: 1 to kMaxLocalRanks of them.
  GroupScheduler(const std::string& job, const std::string& tag, std::vector<uint32_t> ranks,
                 uint64_t id = 0);

  // Operations of a group that has failed are ignored: their member has been told or will be.
  Decision Submit(uint32_t member, const Operation& operation, MemberBuffers buffers, Time now);

  // `rejected`: the member stands aside already, or has not submitted exactly what comes before.
  Decision StandAside(uint32_t member, const AsideRequest& request, Time now);

  // The engine has finished the operation, the first of those that it has; any other call is
  // ignored. `result`: why it could not carry it out, which fails the group.
  Decision Finished(uint64_t sequence, const Status& result, Time now);

  // The member will submit nothing more; `why` is a clause that names its rank ("job x: rank 1
  // died"). `orderly`: what it has submitted still counts, and the group fails when another member
  // has submitted, or submits, what cannot start without it. Otherwise it fails now.
  Decision MemberGone(uint32_t member, bool orderly, const Status& why);

  // Fails the group if its deadline is not after `now`.
  Decision CheckDeadline(Time now);
  std::optional<Time> NextDeadline() const;

  // No further starts: fails with `why` once the running operation has finished (at once if none
  // is).
  Decision Stop(const Status& why);

  // As DescribedPlan::Describe.
  Status DescribeBucket(uint32_t member, BucketDescription description);

  // What it remembers: operations that are not complete, and buckets of the plan.
  size_t operation_count() const { return pending_.size() + running_.size(); }
  size_t bucket_count() const { return plan_.size(); }

  bool running() const { return !running_.empty(); }
  // Whether any operation was on GPUs.
  bool used_devices() const { return used_devices_; }
  const Status& failure() const { return failure_; }  // also while its announcement waits
  GroupSnapshot Snapshot(Time now) const;

 private:
  // An operation that some member has submitted.
  struct Pending {
    Operation operation;         // as `first_member` submitted it
    std::shared_ptr<Task> task;  // filled in as members submit
    MemberSet arrived;
    uint32_t arrived_count = 0;
    uint32_t first_member = 0;
    uint32_t last_member = 0;
    Time first{};
    Time last{};
    Time started{};
    Time deadline{};                             // the earliest of those that have arrived
    Duration timeout{};                          // that makes it so
    HandOver hand_over = HandOver::kHostMemory;  // the furthest from the daemon's own
  };

  struct Member {
    uint32_t rank = 0;
    bool has_submitted = false;
    Operation last{};  // submitted last
    Time last_time{};
  };

  Status CheckSequence(uint32_t member, const Operation& operation) const;
  void Arrive(Pending* pending, uint32_t member, const Operation& operation, MemberBuffers buffers,
              Time now);
  void AdvanceReady(Decision* decision);
  Status CheckAside(uint32_t member, const AsideRequest& request) const;
  // Nothing more will come for it: some members stand aside.
  Status LeaveOutMissing(Pending* pending) const;
  MemberSet MissingFrom(const Pending* pending) const;
  bool MayStart(const Pending& next) const;
  void StartReady(Time now, Decision* decision);
  void Fail(Status why, Decision* decision);
  void FailIfUnreachable(Decision* decision);
  void FailIfDeserted(Decision* decision);
  const Pending* Find(uint64_t sequence) const;
  uint64_t FirstNotSubmittedBy(uint32_t member) const;
  void Record(const Pending& finished, Time now);

  // In ascending order.
  std::vector<uint32_t> RanksIn(const MemberSet& members) const;
  std::string OperationText(const Operation& operation) const;
  std::string LastSubmissionsText(const MemberSet& missing, Time now) const;
  Status MismatchStatus(const Pending& pending, uint32_t member, const Operation& operation) const;
  Status DeadlineStatus(const Pending& expired, Time now) const;
  Status LostStatus(uint32_t member, const Status& why) const;
  Status EngineStatus(const Pending& failed, const Status& why) const;
  Status UnreachableStatus(const Pending& pending) const;
  Status ExhaustedStatus(const Pending& pending) const;
  Status NeedsEveryRankStatus(const Pending& pending) const;
  Status PoliciesDifferStatus(uint32_t member) const;
  Status DesertedStatus(Time now) const;
  void AddDeserters(GroupSnapshot* snapshot, Time now) const;
  void AddBucketStates(std::vector<BucketSnapshot>* buckets) const;
  static void AddBucketState(const Pending& pending, BucketState state,
                             std::vector<uint32_t> ready_ranks,
                             std::vector<BucketSnapshot>* buckets);

  const uint64_t id_;
  const std::string tag_;
  const std::string where_;  // "job x, group y"
  const std::vector<uint32_t> ranks_;
  std::vector<Member> members_;
  Asides asides_;
  DescribedPlan plan_;

  uint64_t completed_ = 0;       // operations below this have finished
  uint64_t ready_ = 0;           // operations below this have been submitted by every member
  std::deque<Pending> running_;  // operations from `completed_` on, in the engine
  bool used_devices_ = false;
  absl::flat_hash_map<uint64_t, Pending> pending_;  // by sequence; all others
  // Deadlines of pending operations from `ready_` on; those below may linger, but not at the top.
  using Expiry = std::pair<Time, uint64_t>;
  std::priority_queue<Expiry, std::vector<Expiry>, std::greater<>> expiries_;

  MemberSet everybody_;
  MemberSet gone_;
  // The lowest sequence that can never start because a member that left has not submitted it.
  std::optional<uint64_t> unreachable_;
  Status unreachable_why_;
  Status failure_;

  uint64_t bytes_ = 0;
  Timing last_timing_;
};

}  // namespace gradsync

#endif  // GRADSYNC_SERVER_JOB_GROUP_SCHEDULER_H_
