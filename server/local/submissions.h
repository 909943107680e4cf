// From a copied ring entry to an operation that can be trusted. Pure.
#ifndef GRADSYNC_SERVER_LOCAL_SUBMISSIONS_H_
#define GRADSYNC_SERVER_LOCAL_SUBMISSIONS_H_

#include <cstdint>
#include <memory>
#include <optional>

#include "server/engine/device_engine.h"
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

// The GPU that a session uses for a group's operations, and its flag page (UseDevice).
struct DeviceUse {
  uint32_t device = 0;
  std::shared_ptr<DeviceFlags> flags;
};

// Checks every field of `entry`, which must be a copy that the trainer cannot change any more.
// `membership` is the session's place in group `entry.group`, if it is in one, and `device_use`
// what it uses for that group, if anything. An error is the end of the session: only a broken or
// hostile client sends such an entry.
Result<CheckedSubmission> CheckSubmission(const Submission& entry,
                                          const std::optional<JobTable::Membership>& membership,
                                          const SegmentTable& segments,
                                          const DeviceUse* device_use = nullptr);

}  // namespace gradsync

#endif  // GRADSYNC_SERVER_LOCAL_SUBMISSIONS_H_
