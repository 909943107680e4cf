// The order of one group: which operation may start, who is being waited for, what went wrong. The
// pure state machine at the heart of the daemon.
//
// Operations are numbered from 0, the same on every rank. Each rank submits each number once, in any
// order within a window (buckets become ready as backward reaches them). Operation s starts when
// every member has submitted s and operation s-1 has finished: so buckets start strictly in index
// order, whatever order they became ready in, and at most one operation of a group is in the engine.
// What a rank submits is compared with what the others submitted under the same number as soon as two
// are there; a difference fails the group on every rank.
#ifndef GRADSYNC_SERVER_JOB_GROUP_SCHEDULER_H_
#define GRADSYNC_SERVER_JOB_GROUP_SCHEDULER_H_

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "server/engine/engine.h"
#include "server/job/operation.h"
#include "server/job/snapshot.h"
#include "shm/status.h"

namespace gradsync {

// What a GroupScheduler decides in answer to one event; any of the parts may be absent.
struct Decision {
  std::optional<uint64_t> completed;   // operations below this are now complete
  std::shared_ptr<const Task> start;   // run it: operation `start_sequence`
  uint64_t start_sequence = 0;
  Status failure;                      // not OK: the group has failed now, on every member
  Status rejected;                     // not OK: the submitting member broke the rules
};

class GroupScheduler {
 public:
  // `job` and `tag` are for texts. `ranks[member]` is a member's rank in the job.
  GroupScheduler(std::string job, std::string tag, std::vector<uint32_t> ranks);

  Decision Submit(uint32_t member, const Operation& operation, MemberBuffers buffers, Time now);
  Decision Finished(uint64_t sequence, Time now);

  // The member will submit nothing more; `why` names its rank. If nothing is pending the group fails
  // at once all the same, unless `orderly`: then when somebody submits what it can no longer get.
  Decision MemberGone(uint32_t member, bool orderly, const Status& why, Time now);

  Decision CheckDeadline(Time now);
  std::optional<Time> NextDeadline() const;

  // No further starts: fails with `why` once the running operation has finished (at once if none is).
  Decision Stop(const Status& why, Time now);

  void DescribeBucket(BucketDescription description);
  bool running() const;
  const Status& failure() const;
  GroupSnapshot Snapshot(Time now) const;

 private:
  // (to be written)
};

}  // namespace gradsync

#endif  // GRADSYNC_SERVER_JOB_GROUP_SCHEDULER_H_
