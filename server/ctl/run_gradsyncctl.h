// Runs the real gradsyncctl, for tests.
#ifndef GRADSYNC_SERVER_CTL_RUN_GRADSYNCCTL_H_
#define GRADSYNC_SERVER_CTL_RUN_GRADSYNCCTL_H_

#include <sys/wait.h>

#include <array>
#include <cstdio>
#include <string>

namespace gradsync {

struct Outcome {
  int exit_code = -1;
  std::string output;  // stdout and stderr
};

// `arguments` are words for the shell. `before` are words in front of the program: a command that
// runs it, or settings of environment variables.
inline Outcome RunGradsyncctl(const std::string& arguments, const std::string& before = "") {
  const std::string command =
      "env -u GRADSYNC_SOCKET " + before + " " GRADSYNCCTL " " + arguments + " 2>&1 </dev/null";
  Outcome outcome;
  std::FILE* pipe = popen(command.c_str(), "re");
  if (pipe == nullptr) return outcome;
  std::array<char, 4096> buffer{};
  while (const size_t bytes = std::fread(buffer.data(), 1, buffer.size(), pipe)) {
    outcome.output.append(buffer.data(), bytes);
  }
  const int status = pclose(pipe);
  outcome.exit_code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  return outcome;
}

}  // namespace gradsync

#endif  // GRADSYNC_SERVER_CTL_RUN_GRADSYNCCTL_H_
