// All jobs of a daemon: who has joined, which groups they form, which operation may start. A pure
// state machine: events in, actions out; no I/O, no clock, no thread of its own. Not thread-safe.
//
// A job is (uid, name, generation). Ranks that end and open a session again under the same name (a
// second init_process_group, say) meet in a new incarnation of it: a rank's session goes to the
// oldest incarnation that has not failed and that the rank has not been in.
#ifndef GRADSYNC_SERVER_JOB_JOB_TABLE_H_
#define GRADSYNC_SERVER_JOB_JOB_TABLE_H_

#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "server/job/actions.h"
#include "server/job/operation.h"
#include "server/job/snapshot.h"
#include "shm/status.h"

namespace gradsync {

struct JoinRequest {
  uid_t uid = 0;
  std::string job;
  uint32_t generation = 0;
  uint32_t world_size = 0;
  uint32_t rank = 0;
  uint32_t local_rank = 0;
  uint32_t local_world_size = 0;
  uint32_t pid = 0;
  std::string program;
};

struct GroupRequest {
  uint32_t request_id = 0;
  std::string tag;
  std::vector<uint32_t> ranks;
  Duration timeout = Duration::zero();
};

enum class Departure : uint8_t {
  kGoodbye,  // the trainer said so
  kLost,     // it died, or the connection broke
};

class JobTable {
 public:
  JobTable();
  ~JobTable();

  // A session claims a rank. Errors: kInvalidArgument (rank not below world size, empty name),
  // kUnsupported (ranks on other nodes), kAlreadyExists (the rank is taken: the newcomer alone is
  // refused), kMismatch (another world size than the ranks before it: `actions` then ends the job
  // for them too, unless all of its ranks had joined), kShuttingDown.
  Status Join(SessionId session, const JoinRequest& request, Time now, Actions* actions);

  // A session asks for a group; it is answered (ReplyCreateGroup) when every rank of it has asked,
  // or at the earliest deadline of those that asked, naming who is missing. Different ranks, order,
  // or a tag that the session already has: kMismatch / kInvalidArgument for all who asked.
  Actions CreateGroup(SessionId session, const GroupRequest& request, Time now);

  // The session is done with its group `number`; the group ends when the last member says so. What
  // others then submit fails with kRankLost.
  Actions DestroyGroup(SessionId session, uint32_t number, Time now);

  // The session will not keep its side of what its group `number` waits for (it is not OK: `why`):
  // the group fails with that on every member, on this one too, once its running operation has
  // finished.
  Actions AbortGroup(SessionId session, uint32_t number, const Status& why, Time now);

  // Error if the session has no such group, the description does not fit the ones before it, or
  // the session's groups have more than kMaxSessionBuckets (kOutOfMemory).
  Status DescribeBucket(SessionId session, uint32_t number, BucketDescription description);

  // Size of the session's group `number`, and the session's index in it; nullopt if there is none.
  struct Membership {
    uint32_t size = 0;
    uint32_t member = 0;
  };
  std::optional<Membership> FindGroup(SessionId session, uint32_t number) const;

  // One validated operation. A sequence number that was submitted already, or lies kSequenceWindow
  // or more beyond the completed ones, closes the session (kProtocol); so does one that makes more
  // than kMaxSessionOperations in the session's groups (kOutOfMemory).
  Actions Submit(SessionId session, uint32_t number, const Operation& operation,
                 MemberBuffers buffers, Time now);
  static constexpr uint64_t kSequenceWindow = gradsync::kSequenceWindow;

  // From now on the session's group `number` goes on without it (AsidePolicy), until every member
  // stands aside: then AnswerAside tells all of them, and they take part again. Answered with the
  // group's failure instead; so is the group failed (kDeadlineExceeded) when nothing was submitted
  // for `request.timeout`. Standing aside twice, or with operations missing before
  // `next_sequence`, closes the session (kProtocol).
  Actions StandAside(SessionId session, uint32_t number, const AsideRequest& request, Time now);

  // Messages within the session's group `number`; `to` and `from` are below its size. Answered by
  // AnswerMessage, now or later: kDeadlineExceeded after `timeout`; kRankLost when the other rank
  // has left or died; kOutOfMemory beyond kMaxSessionMessages; the group's failure.
  Actions Send(SessionId session, uint32_t number, uint32_t request_id, uint32_t to,
               std::shared_ptr<Message> message, Duration timeout, Time now);
  Actions Receive(SessionId session, uint32_t number, uint32_t request_id,
                  std::optional<uint32_t> from, uint64_t tag, Duration timeout, Time now);

  // Ends one of those that has no answer yet.
  Actions CancelMessage(SessionId session, uint32_t number, uint32_t request_id);

  // The engine has finished a StartTask, or could not (`result`). Also for groups that have failed
  // meanwhile.
  Actions Finished(GroupId group, uint64_t sequence, const Status& result, Time now);

  // A session is gone; nothing more is sent to it. Every group that it was in and that still has
  // work or may get some fails on the others with kRankLost, naming the rank; an operation that is
  // in the engine finishes first.
  Actions Leave(SessionId session, Departure departure, Time now);

  // Fails what has passed its deadline at `now`, naming the ranks that are missing.
  Actions CheckDeadlines(Time now);
  std::optional<Time> NextDeadline() const;

  // No further joins, groups or starts; groups fail with kShuttingDown once their running operation
  // has finished.
  Actions Drain(Time now);

  size_t session_count() const;
  size_t running_count() const;  // operations in the engine

  void SetSegmentBytes(SessionId session, uint64_t bytes);  // for inspection
  std::vector<JobSnapshot> Snapshot(Time now) const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace gradsync

#endif  // GRADSYNC_SERVER_JOB_JOB_TABLE_H_
