// One line of gradsyncctl doctor.
#ifndef GRADSYNC_SERVER_CTL_FINDING_H_
#define GRADSYNC_SERVER_CTL_FINDING_H_

#include <string>
#include <vector>

namespace gradsync {

struct Finding {
  enum class Level {
    kOk,
    kNote,     // something is slower, or missing, that one may do without
    kProblem,  // something will fail
  };
  Level level = Level::kOk;
  std::string check;   // what was looked at: "kernel"
  std::string found;   // "Linux 6.1.0"
  std::string advice;  // what to do, or what follows; empty if it is fine
};

bool HasProblem(const std::vector<Finding>& findings);

// A line for each: level, check, what was found and what to do.
std::string FormatFindings(const std::vector<Finding>& findings);

// {"findings": [{"level": "ok", "check": ..., "found": ..., "advice": ...}, ...]}
std::string FindingsToJson(const std::vector<Finding>& findings);

}  // namespace gradsync

#endif  // GRADSYNC_SERVER_CTL_FINDING_H_
