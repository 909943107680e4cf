#include "server/ctl/inspector.h"

#include <sys/socket.h>

#include <chrono>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "grpcpp/create_channel_posix.h"
#include "server/inspect/socket_path.h"
#include "shm/frame_socket.h"

namespace gradsync {
namespace {

// A little more than a daemon takes at most, so that its own words arrive.
constexpr std::chrono::seconds kPatience{6};

constexpr int kMaxAnswerBytes = 256 << 20;

void SetDeadline(grpc::ClientContext* context) {
  context->set_deadline(std::chrono::system_clock::now() + kPatience);
}

std::unique_ptr<v1::Inspect::Stub> StubOver(UniqueFd connection) {
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(kMaxAnswerBytes);
  return v1::Inspect::NewStub(
      grpc::CreateCustomInsecureChannelFromFd("gradsyncd", connection.Release(), arguments));
}

}  // namespace

std::vector<std::string> InspectSockets(const CommandLine& command, const Discovery& discovery) {
  if (!command.inspect_socket.empty()) return {command.inspect_socket};
  if (discovery.is_fixed()) return {DefaultInspectSocket(discovery.fixed_socket)};
  return {DefaultInspectSocket(discovery.system_socket),
          DefaultInspectSocket(discovery.private_socket())};
}

Result<Inspector> Inspector::Connect(const std::vector<std::string>& sockets) {
  for (const std::string& socket : sockets) {
    auto connection = ConnectTo(socket, SOCK_STREAM);
    if (connection) return Inspector(socket, StubOver(std::move(*connection)));
    if (connection.error().code() == Code::kPermissionDenied) {
      return Unexpected(Code::kPermissionDenied,
                        absl::StrCat(connection.error().message(),
                                     "; only the daemon's own user and root may look into it"));
    }
    if (connection.error().code() != Code::kDaemonLost) return Unexpected(connection.error());
  }
  return Unexpected(
      Code::kDaemonLost,
      absl::StrCat("no gradsyncd answers at ", absl::StrJoin(sockets, " or "),
                   "; it is started by systemd, by the first trainer, or by hand, and "
                   "--socket names one elsewhere"));
}

Inspector::Inspector(std::string socket, std::unique_ptr<v1::Inspect::Stub> stub)
    : socket_(std::move(socket)), stub_(std::move(stub)) {}

Result<v1::ListJobsResponse> Inspector::ListJobs() {
  grpc::ClientContext context;
  SetDeadline(&context);
  v1::ListJobsResponse response;
  GRADSYNC_RETURN_IF_ERROR(ToStatus(stub_->ListJobs(&context, {}, &response)));
  return response;
}

Result<v1::Job> Inspector::GetJob(const v1::GetJobRequest& request) {
  grpc::ClientContext context;
  SetDeadline(&context);
  v1::Job job;
  GRADSYNC_RETURN_IF_ERROR(ToStatus(stub_->GetJob(&context, request, &job)));
  return job;
}

Status Inspector::ToStatus(const grpc::Status& status) const {
  if (status.ok()) return OkStatus();
  if (status.error_code() == grpc::StatusCode::UNAVAILABLE) {
    return {Code::kDaemonLost, absl::StrCat("gradsyncd at ", socket_,
                                            " does not answer any more: ", status.error_message())};
  }
  if (status.error_code() == grpc::StatusCode::DEADLINE_EXCEEDED) {
    return {Code::kDeadlineExceeded,
            absl::StrCat("gradsyncd at ", socket_, " listens but did not answer within ",
                         kPatience.count(), " s; is its process stopped, or its node overloaded?")};
  }
  return {Code::kFailedPrecondition, status.error_message()};
}

}  // namespace gradsync
