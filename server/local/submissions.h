// From a copied ring entry to an operation that can be trusted. Pure.
#ifndef GRADSYNC_SERVER_LOCAL_SUBMISSIONS_H_
#define GRADSYNC_SERVER_LOCAL_SUBMISSIONS_H_

#include <optional>

#include "server/job/job_table.h"
#include "server/job/operation.h"
#include "server/local/segments.h"
#include "shm/session_layout.h"
#include "shm/status.h"

namespace gradsync {

struct CheckedSubmission {
  Operation operation;
  MemberBuffers buffers;
};

// Checks every field of `entry`, which must be a copy that the trainer cannot change any more.
// `membership` is the session's place in group `entry.group`, if it is in one. An error is the end
// of the session: only a broken or hostile client sends such an entry.
Result<CheckedSubmission> CheckSubmission(const Submission& entry,
                                          const std::optional<JobTable::Membership>& membership,
                                          const SegmentTable& segments);

}  // namespace gradsync

#endif  // GRADSYNC_SERVER_LOCAL_SUBMISSIONS_H_
