#include "server/ctl/command_line.h"

#include <getopt.h>

#include <array>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

namespace gradsync {
namespace {

// Not Abseil's flags, which the daemon uses: those end the process by themselves, with a code that
// says nothing, and their help is for developers.
enum Option : int {
  kSocket = 256,
  kInspectSocket,
  kJson,
  kUid,
  kGeneration,
  kNccl,
  kHelp,
  kVersion
};

const std::array<option, 9> kOptions = {
    {{"socket", required_argument, nullptr, kSocket},
     {"inspect-socket", required_argument, nullptr, kInspectSocket},
     {"json", no_argument, nullptr, kJson},
     {"uid", required_argument, nullptr, kUid},
     {"generation", required_argument, nullptr, kGeneration},
     {"nccl", required_argument, nullptr, kNccl},
     {"help", no_argument, nullptr, kHelp},
     {"version", no_argument, nullptr, kVersion},
     {nullptr, 0, nullptr, 0}}};

Status UsageError(std::string text) { return {Code::kInvalidArgument, std::move(text)}; }

Status ParseNumber(const char* name, const char* text, std::optional<uint32_t>* out) {
  uint32_t value = 0;
  if (!absl::SimpleAtoi(text, &value)) {
    return UsageError(absl::StrCat("--", name, " '", text, "' is not a number"));
  }
  *out = value;
  return OkStatus();
}

struct Parsed {
  CommandLine command;
  bool help = false;
  bool version = false;
};

// `word` is the argument that getopt looked at.
Status TakeOption(int option, const char* word, Parsed* parsed) {
  switch (option) {
    case kSocket:
      parsed->command.socket = optarg;
      return OkStatus();
    case kInspectSocket:
      parsed->command.inspect_socket = optarg;
      return OkStatus();
    case kJson:
      parsed->command.json = true;
      return OkStatus();
    case kUid:
      return ParseNumber("uid", optarg, &parsed->command.uid);
    case kGeneration:
      return ParseNumber("generation", optarg, &parsed->command.generation);
    case kNccl:
      parsed->command.nccl = optarg;
      return OkStatus();
    case 'h':
    case kHelp:
      parsed->help = true;
      return OkStatus();
    case kVersion:
      parsed->version = true;
      return OkStatus();
    case ':':
      return UsageError(absl::StrCat(word, " needs a value"));
    default:
      return UsageError(absl::StrCat("unknown option in '", word, "'"));
  }
}

// Which command the words that are no options make.
Status TakeCommand(const std::vector<std::string>& words, CommandLine* command) {
  if (words.empty()) return UsageError("say what to show: jobs, job ID, or doctor");
  if (words[0] == "jobs") {
    command->action = CommandLine::Action::kListJobs;
    if (words.size() > 1) return UsageError("jobs takes no argument; job ID shows one job");
    return OkStatus();
  }
  if (words[0] == "job") {
    command->action = CommandLine::Action::kGetJob;
    if (words.size() < 2) return UsageError("job needs the job's ID; jobs shows them");
    if (words.size() > 2) return UsageError("job takes one ID");
    command->job = words[1];
    return OkStatus();
  }
  if (words[0] == "doctor") {
    command->action = CommandLine::Action::kDoctor;
    if (words.size() > 1) return UsageError("doctor takes no argument");
    return OkStatus();
  }
  return UsageError(absl::StrCat("unknown command '", words[0], "'"));
}

// Options that would have no effect are taken for mistakes.
Status CheckOptions(const CommandLine& command) {
  using Action = CommandLine::Action;
  if (command.action != Action::kGetJob && (command.uid || command.generation)) {
    return UsageError("--uid and --generation belong to job ID");
  }
  if (command.action != Action::kDoctor && !command.nccl.empty()) {
    return UsageError("--nccl belongs to doctor");
  }
  if (command.action == Action::kDoctor && !command.inspect_socket.empty()) {
    return UsageError("doctor looks at the trainers' socket: --socket, not --inspect-socket");
  }
  return OkStatus();
}

}  // namespace

const char kHelpText[] = R"(usage: gradsyncctl [options] COMMAND

Shows what the gradsyncd of this node is doing.

commands:
  jobs      all jobs, and whom they wait for
  job ID    one job: its ranks, groups and buckets
  doctor    whether this machine has what gradsync needs: a line for each check, "ok", "note" (it
            works, but ...) or "problem", and what to do about it

options:
  --json                 JSON instead of tables: messages of gradsync/v1/inspect.proto, or the
                         doctor's findings
  --socket PATH          the daemon's socket for trainers; by default the daemon that a trainer
                         would use: GRADSYNC_SOCKET, else the system's, else this user's own
  --inspect-socket PATH  its inspection socket; by default that of --socket with ".inspect" added
  --uid N                of several jobs named ID, that of this user
  --generation N         of several jobs named ID, the one after N restarts
  --nccl FILE            for doctor: NCCL's library, as gradsyncd has it; by default what
                         GRADSYNC_NCCL names, else libnccl.so.2
  -h, --help             this text
  --version              the version of gradsyncctl

exit status:
  0  shown; doctor: there is no problem
  1  the daemon reports an error, such as an unknown job; doctor: there is a problem
  2  the command line makes no sense
  3  no daemon: none is running there, it is shutting down, or it belongs to somebody else
)";

Result<CommandLine> ParseCommandLine(const std::vector<std::string>& arguments) {
  std::vector<std::string> copies = {"gradsyncctl"};
  copies.insert(copies.end(), arguments.begin(), arguments.end());
  std::vector<char*> argv;
  argv.reserve(copies.size() + 1);
  for (std::string& copy : copies) argv.push_back(copy.data());
  argv.push_back(nullptr);
  const int argc = static_cast<int>(copies.size());

  Parsed parsed;
  optind = 0;  // starts over
  opterr = 0;
  for (;;) {
    const int option = getopt_long(argc, argv.data(), ":h", kOptions.data(), nullptr);
    if (option == -1) break;
    GRADSYNC_RETURN_IF_ERROR(TakeOption(option, argv[optind - 1], &parsed));
  }
  if (parsed.help) return parsed.command;
  if (parsed.version) {
    parsed.command.action = CommandLine::Action::kVersion;
    return parsed.command;
  }
  GRADSYNC_RETURN_IF_ERROR(TakeCommand({argv.begin() + optind, argv.end() - 1}, &parsed.command));
  GRADSYNC_RETURN_IF_ERROR(CheckOptions(parsed.command));
  return parsed.command;
}

}  // namespace gradsync
