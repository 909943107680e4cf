// What gradsyncctl was asked to do.
#ifndef GRADSYNC_SERVER_CTL_COMMAND_LINE_H_
#define GRADSYNC_SERVER_CTL_COMMAND_LINE_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "shm/status.h"

namespace gradsync {

struct CommandLine {
  enum class Action { kHelp, kVersion, kListJobs, kGetJob, kDoctor };
  Action action = Action::kHelp;
  std::string job;  // kGetJob
  std::optional<uint32_t> uid;
  std::optional<uint32_t> generation;
  std::string socket;          // of the trainers; empty: not given
  std::string inspect_socket;  // empty: not given
  std::string nccl;            // kDoctor: its library; empty: not given
  bool json = false;
};

// `arguments` without the program's name. kInvalidArgument says what is wrong with them.
Result<CommandLine> ParseCommandLine(const std::vector<std::string>& arguments);

extern const char kHelpText[];

}  // namespace gradsync

#endif  // GRADSYNC_SERVER_CTL_COMMAND_LINE_H_
