// A daemon that answers questions.
#ifndef GRADSYNC_SERVER_CTL_INSPECTOR_H_
#define GRADSYNC_SERVER_CTL_INSPECTOR_H_

#include <memory>
#include <string>
#include <vector>

#include "client/core/starter.h"
#include "gradsync/v1/inspect.grpc.pb.h"
#include "server/ctl/command_line.h"
#include "shm/status.h"

namespace gradsync {

// Where the daemon may be asked, in the order in which to try: the daemon that the command line
// names, or else the one that a trainer would find.
std::vector<std::string> InspectSockets(const CommandLine& command, const Discovery& discovery);

class Inspector {
 public:
  // Connects to the first of `sockets` where somebody listens. kDaemonLost if there is none,
  // kPermissionDenied if it is somebody else's; the text names the sockets and says what to do.
  static Result<Inspector> Connect(const std::vector<std::string>& sockets);

  // Both give up after a few seconds. kDaemonLost if the daemon is going or has gone;
  // kFailedPrecondition with the daemon's own words for its other errors.
  Result<v1::ListJobsResponse> ListJobs();
  Result<v1::Job> GetJob(const v1::GetJobRequest& request);

 private:
  Inspector(std::string socket, std::unique_ptr<v1::Inspect::Stub> stub);
  Status ToStatus(const grpc::Status& status) const;

  std::string socket_;
  std::unique_ptr<v1::Inspect::Stub> stub_;
};

}  // namespace gradsync

#endif  // GRADSYNC_SERVER_CTL_INSPECTOR_H_
