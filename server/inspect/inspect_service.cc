#include "server/inspect/inspect_service.h"

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>

#include "absl/container/btree_map.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "server/inspect/to_proto.h"
#include "server/inspect/utf8.h"
#include "shm/protocol.h"

namespace gradsync {
namespace {

using std::chrono::steady_clock;
using std::chrono::system_clock;

constexpr size_t kMaxNameBytes = sizeof(Hello::job) - 1;

// When to give up on a call: gRPC's deadlines are of another clock.
steady_clock::time_point DeadlineOf(const grpc::ServerContext& context) {
  const auto left =
      std::min<system_clock::duration>(context.deadline() - system_clock::now(), kLongestCall);
  return steady_clock::now() + left;
}

grpc::Status ToGrpc(const Status& status) {
  grpc::StatusCode code = grpc::StatusCode::INTERNAL;
  if (status.code() == Code::kDeadlineExceeded) code = grpc::StatusCode::DEADLINE_EXCEEDED;
  if (status.code() == Code::kShuttingDown) code = grpc::StatusCode::UNAVAILABLE;
  return {code, ToUtf8(status.message())};
}

grpc::Status CheckRequest(const v1::GetJobRequest& request) {
  if (request.name().empty()) {
    return {grpc::StatusCode::INVALID_ARGUMENT,
            "name is empty; name a job that ListJobs (gradsyncctl jobs) shows"};
  }
  if (request.name().size() > kMaxNameBytes) {
    return {grpc::StatusCode::INVALID_ARGUMENT,
            absl::StrCat("name has ", request.name().size(), " bytes; a job's name has at most ",
                         kMaxNameBytes)};
  }
  return grpc::Status::OK;
}

bool Matches(const JobSnapshot& job, const v1::GetJobRequest& request) {
  return ToUtf8(job.job) == request.name() && (!request.has_uid() || request.uid() == job.uid) &&
         (!request.has_generation() || request.generation() == job.generation);
}

// The newest of the matching jobs under each (uid, generation).
using Candidates = absl::btree_map<std::pair<uint32_t, uint32_t>, const JobSnapshot*>;

Candidates FindCandidates(const std::vector<JobSnapshot>& jobs, const v1::GetJobRequest& request) {
  Candidates candidates;
  for (const JobSnapshot& job : jobs) {
    if (!Matches(job, request)) continue;
    const JobSnapshot*& candidate = candidates[{job.uid, job.generation}];
    if (candidate == nullptr || job.age <= candidate->age) candidate = &job;
  }
  return candidates;
}

std::string Describe(const v1::GetJobRequest& request) {
  std::string text = absl::StrCat("'", request.name(), "'");
  if (request.has_uid()) absl::StrAppend(&text, " of uid ", request.uid());
  if (request.has_generation()) absl::StrAppend(&text, " in generation ", request.generation());
  return text;
}

grpc::Status NotFound(const v1::GetJobRequest& request) {
  return {grpc::StatusCode::NOT_FOUND,
          absl::StrCat("this daemon has no job ", Describe(request),
                       ": it never was here, or all of its ranks have gone; ListJobs (gradsyncctl "
                       "jobs) shows those that it has")};
}

grpc::Status Ambiguous(const v1::GetJobRequest& request, const Candidates& candidates) {
  const auto describe = [](std::string* out, const Candidates::value_type& candidate) {
    absl::StrAppend(out, "uid ", candidate.first.first, " generation ", candidate.first.second);
  };
  return {grpc::StatusCode::FAILED_PRECONDITION,
          absl::StrCat(candidates.size(), " jobs are named ", Describe(request), ": ",
                       absl::StrJoin(candidates, ", ", describe),
                       "; say which one by uid or generation (gradsyncctl job --uid, "
                       "--generation)")};
}

}  // namespace

InspectService::InspectService(SnapshotSource source) : source_(std::move(source)) {}

void InspectService::Drain() { draining_.store(true, std::memory_order_relaxed); }

grpc::Status InspectService::ListJobs(grpc::ServerContext* context,
                                      const v1::ListJobsRequest* /*request*/,
                                      v1::ListJobsResponse* response) {
  std::vector<JobSnapshot> jobs;
  if (auto status = TakeSnapshot(*context, &jobs); !status.ok()) return status;
  for (const JobSnapshot& job : jobs) *response->add_jobs() = ToSummary(job);
  return grpc::Status::OK;
}

grpc::Status InspectService::GetJob(grpc::ServerContext* context, const v1::GetJobRequest* request,
                                    v1::Job* response) {
  if (auto status = CheckRequest(*request); !status.ok()) return status;
  std::vector<JobSnapshot> jobs;
  if (auto status = TakeSnapshot(*context, &jobs); !status.ok()) return status;
  const Candidates candidates = FindCandidates(jobs, *request);
  if (candidates.empty()) return NotFound(*request);
  if (candidates.size() > 1) return Ambiguous(*request, candidates);
  *response = ToJob(*candidates.begin()->second);
  return grpc::Status::OK;
}

grpc::Status InspectService::TakeSnapshot(const grpc::ServerContext& context,
                                          std::vector<JobSnapshot>* jobs) {
  if (draining_.load(std::memory_order_relaxed)) {
    return {grpc::StatusCode::UNAVAILABLE, "gradsyncd is shutting down and answers nothing more"};
  }
  auto snapshot = source_(DeadlineOf(context));
  if (!snapshot) return ToGrpc(snapshot.error());
  *jobs = std::move(*snapshot);
  return grpc::Status::OK;
}

}  // namespace gradsync
