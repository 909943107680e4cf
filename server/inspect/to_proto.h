// Snapshots of the jobs in the words of inspect.proto. Pure functions.
#ifndef GRADSYNC_SERVER_INSPECT_TO_PROTO_H_
#define GRADSYNC_SERVER_INSPECT_TO_PROTO_H_

#include "gradsync/v1/inspect.pb.h"
#include "server/job/snapshot.h"

namespace gradsync {

v1::JobSummary ToSummary(const JobSnapshot& job);
v1::Job ToJob(const JobSnapshot& job);

}  // namespace gradsync

#endif  // GRADSYNC_SERVER_INSPECT_TO_PROTO_H_
