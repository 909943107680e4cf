// gradsyncctl: shows operators what the gradsyncd of this node is doing, and what it would need.
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <string>
#include <vector>

#include "client/core/environment.h"
#include "client/core/starter.h"
#include "google/protobuf/util/json_util.h"
#include "server/ctl/command_line.h"
#include "server/ctl/doctor.h"
#include "server/ctl/doctor_facts.h"
#include "server/ctl/format.h"
#include "server/ctl/inspector.h"

namespace gradsync {
namespace {

// As kHelpText says.
enum ExitCode : int { kShown = 0, kError = 1, kUsage = 2, kNoDaemon = 3 };

ExitCode Complain(const Status& status, ExitCode code) {
  std::fprintf(stderr, "gradsyncctl: %s\n", Printable(status.message()).c_str());
  return code;
}

ExitCode ComplainOf(const Status& status) {
  const bool no_daemon =
      status.code() == Code::kDaemonLost || status.code() == Code::kPermissionDenied;
  return Complain(status, no_daemon ? kNoDaemon : kError);
}

ExitCode Print(const std::string& text) {
  const bool written = std::fwrite(text.data(), 1, text.size(), stdout) == text.size();
  if (std::fflush(stdout) == 0 && written) return kShown;
  return Complain(ErrnoStatus(Code::kInternal, errno, "cannot write the answer"), kError);
}

std::string ToJson(const google::protobuf::Message& message) {
  google::protobuf::util::JsonPrintOptions options;
  options.add_whitespace = true;
  options.always_print_primitive_fields = true;
  options.preserve_proto_field_names = true;
  std::string text;
  // Fails only for well-known types with values out of range, which the daemon does not send.
  if (!google::protobuf::util::MessageToJsonString(message, &text, options).ok()) text.clear();
  return text;
}

ExitCode ShowJobs(const CommandLine& command, Inspector* inspector) {
  const auto jobs = inspector->ListJobs();
  if (!jobs) return ComplainOf(jobs.error());
  return Print(command.json ? ToJson(*jobs) : FormatJobs(*jobs));
}

ExitCode ShowJob(const CommandLine& command, Inspector* inspector) {
  v1::GetJobRequest request;
  request.set_name(command.job);
  if (command.uid) request.set_uid(*command.uid);
  if (command.generation) request.set_generation(*command.generation);
  const auto job = inspector->GetJob(request);
  if (!job) return ComplainOf(job.error());
  return Print(command.json ? ToJson(*job) : FormatJob(*job));
}

ExitCode ShowFindings(const CommandLine& command, const Discovery& discovery) {
  const std::vector<Finding> findings = Judge(CollectFacts(command, discovery));
  const ExitCode printed =
      Print(command.json ? FindingsToJson(findings) : FormatFindings(findings));
  return printed == kShown && HasProblem(findings) ? kError : printed;
}

ExitCode Run(const std::vector<std::string>& arguments) {
  const auto command = ParseCommandLine(arguments);
  if (!command) {
    Complain(command.error(), kUsage);
    std::fputs("Try 'gradsyncctl --help'.\n", stderr);
    return kUsage;
  }
  if (command->action == CommandLine::Action::kHelp) return Print(kHelpText);
  if (command->action == CommandLine::Action::kVersion) {
    return Print("gradsyncctl " GRADSYNC_VERSION "\n");
  }
  const Discovery discovery = DiscoveryFrom(command->socket, ReadEnvironment(environ));
  if (command->action == CommandLine::Action::kDoctor) return ShowFindings(*command, discovery);
  auto inspector = Inspector::Connect(InspectSockets(*command, discovery));
  if (!inspector) return ComplainOf(inspector.error());
  return command->action == CommandLine::Action::kListJobs ? ShowJobs(*command, &*inspector)
                                                           : ShowJob(*command, &*inspector);
}

}  // namespace
}  // namespace gradsync

int main(int argc, char** argv) { return gradsync::Run({argv + 1, argv + argc}); }
