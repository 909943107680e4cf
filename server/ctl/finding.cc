#include "server/ctl/finding.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "server/ctl/format.h"
#include "server/inspect/utf8.h"

namespace gradsync {
namespace {

const char* LevelName(Finding::Level level) {
  switch (level) {
    case Finding::Level::kOk:
      return "ok";
    case Finding::Level::kNote:
      return "note";
    case Finding::Level::kProblem:
      break;
  }
  return "problem";
}

// A JSON string. Printable() leaves no control character to be escaped.
std::string Quoted(const std::string& text) {
  std::string quoted = "\"";
  for (const char byte : ToUtf8(Printable(text))) {
    if (byte == '"' || byte == '\\') quoted += '\\';
    quoted += byte;
  }
  return quoted + '"';
}

}  // namespace

bool HasProblem(const std::vector<Finding>& findings) {
  return std::any_of(findings.begin(), findings.end(), [](const Finding& finding) {
    return finding.level == Finding::Level::kProblem;
  });
}

std::string FormatFindings(const std::vector<Finding>& findings) {
  std::string text;
  for (const Finding& finding : findings) {
    absl::StrAppendFormat(&text, "%-7s  %-17s  %s", LevelName(finding.level), finding.check,
                          Printable(finding.found));
    if (!finding.advice.empty()) absl::StrAppend(&text, "; ", Printable(finding.advice));
    text += '\n';
  }
  return text;
}

std::string FindingsToJson(const std::vector<Finding>& findings) {
  std::string text = "{\n \"findings\": [";
  const char* separator = "\n";
  for (const Finding& finding : findings) {
    absl::StrAppend(&text, separator, "  {\n   \"level\": ", Quoted(LevelName(finding.level)),
                    ",\n   \"check\": ", Quoted(finding.check),
                    ",\n   \"found\": ", Quoted(finding.found),
                    ",\n   \"advice\": ", Quoted(finding.advice), "\n  }");
    separator = ",\n";
  }
  return text + "\n ]\n}\n";
}

}  // namespace gradsync
