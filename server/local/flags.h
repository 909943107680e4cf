// Sets Abseil flags from the environment, flag files and the command line, with errors as values.
//
// (Abseil's own parser ends the process where it finds a mistake, and knows neither our exit status
// nor our environment's names.)
#ifndef GRADSYNC_SERVER_LOCAL_FLAGS_H_
#define GRADSYNC_SERVER_LOCAL_FLAGS_H_

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/time/time.h"
#include "shm/status.h"

namespace gradsync {

// A flag that a program offers: the name of an ABSL_FLAG. On the command line a '-' is as good as a
// '_'. `in_environment`: GRADSYNC_<NAME> sets it too.
struct FlagName {
  const char* name;
  bool in_environment = true;
};

// Sets flags from `environment` ("NAME=value"), and then from `arguments` (without the program's
// name) in their order: --name=value, --name value, --name and --noname for booleans,
// --flagfile=PATH for a file with one argument a line (empty lines and lines that begin with '#'
// are skipped). Later ones win. kInvalidArgument says what was wrong, and where.
Status SetFlags(std::span<const FlagName> flags, const std::vector<std::string>& environment,
                const std::vector<std::string>& arguments);

// For --help: each flag with its help text, default, and name in the environment.
std::string DescribeFlags(std::span<const FlagName> flags);

// A flag's value in seconds: "90", or with a unit as in "500ms" or "1h30m".
struct Seconds {
  absl::Duration value;
};
bool AbslParseFlag(absl::string_view text, Seconds* seconds, std::string* error);
std::string AbslUnparseFlag(Seconds seconds);

}  // namespace gradsync

#endif  // GRADSYNC_SERVER_LOCAL_FLAGS_H_
