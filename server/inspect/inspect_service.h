// The Inspect service of inspect.proto, answered from snapshots of the jobs.
#ifndef GRADSYNC_SERVER_INSPECT_INSPECT_SERVICE_H_
#define GRADSYNC_SERVER_INSPECT_INSPECT_SERVICE_H_

#include <atomic>
#include <chrono>
#include <functional>
#include <vector>

#include "gradsync/v1/inspect.grpc.pb.h"
#include "server/job/snapshot.h"
#include "shm/status.h"

namespace gradsync {

// Takes a snapshot of all jobs, oldest first, by the deadline. Called on any thread, on several at
// a time. kDeadlineExceeded and kShuttingDown reach the operator as such, other errors as INTERNAL.
using SnapshotSource =
    std::function<Result<std::vector<JobSnapshot>>(std::chrono::steady_clock::time_point deadline)>;

// For a call that has no deadline, or a later one: nobody's question occupies a thread for longer.
inline constexpr std::chrono::seconds kLongestCall{5};

class InspectService final : public v1::Inspect::Service {
 public:
  explicit InspectService(SnapshotSource source);

  // Calls are answered with UNAVAILABLE from now on.
  void Drain();

  grpc::Status ListJobs(grpc::ServerContext* context, const v1::ListJobsRequest* request,
                        v1::ListJobsResponse* response) override;
  grpc::Status GetJob(grpc::ServerContext* context, const v1::GetJobRequest* request,
                      v1::Job* response) override;

 private:
  grpc::Status TakeSnapshot(const grpc::ServerContext& context, std::vector<JobSnapshot>* jobs);

  const SnapshotSource source_;
  std::atomic<bool> draining_{false};
};

}  // namespace gradsync

#endif  // GRADSYNC_SERVER_INSPECT_INSPECT_SERVICE_H_
