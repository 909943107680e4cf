#include "server/local/flags.h"

#include <algorithm>
#include <fstream>
#include <optional>

#include "absl/flags/commandlineflag.h"
#include "absl/flags/reflection.h"
#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"

namespace gradsync {
namespace {

constexpr char kFlagFile[] = "flagfile";
constexpr int kMaxFlagFileDepth = 8;

std::string EnvironmentName(absl::string_view flag) {
  return absl::StrCat("GRADSYNC_", absl::AsciiStrToUpper(flag));
}

std::string OptionName(absl::string_view flag) {
  return absl::StrCat("--", absl::StrReplaceAll(flag, {{"_", "-"}}));
}

Status Bad(std::string text) { return {Code::kInvalidArgument, std::move(text)}; }

Status Set(absl::CommandLineFlag* flag, absl::string_view value, absl::string_view origin) {
  std::string error;
  if (flag->ParseFrom(value, &error)) return OkStatus();
  return Bad(absl::StrCat(origin, ": '", value, "' is not a value for it",
                          error.empty() ? "" : ": ", error));
}

class ArgumentParser {
 public:
  explicit ArgumentParser(std::span<const FlagName> flags) : flags_(flags) {}

  Status Parse(const std::vector<std::string>& arguments) {
    for (size_t i = 0; i < arguments.size(); ++i) {
      absl::string_view text = arguments[i];
      if (!absl::ConsumePrefix(&text, "--") || text.empty()) {
        return Bad(absl::StrCat("'", arguments[i], "' is not a flag; see --help"));
      }
      std::optional<absl::string_view> value;
      if (const size_t equals = text.find('='); equals != absl::string_view::npos) {
        value = text.substr(equals + 1);
        text = text.substr(0, equals);
      }
      const std::string name = absl::StrReplaceAll(text, {{"-", "_"}});
      if (!value && TakesValue(name) && i + 1 < arguments.size()) value = arguments[++i];
      GRADSYNC_RETURN_IF_ERROR(SetOne(name, value));
    }
    return OkStatus();
  }

 private:
  absl::CommandLineFlag* Find(absl::string_view name) const {
    const bool known = std::any_of(flags_.begin(), flags_.end(),
                                   [&](const FlagName& flag) { return name == flag.name; });
    return known ? absl::FindCommandLineFlag(name) : nullptr;
  }

  bool TakesValue(absl::string_view name) const {
    if (name == kFlagFile) return true;
    const absl::CommandLineFlag* flag = Find(name);
    return flag != nullptr && !flag->IsOfType<bool>();
  }

  Status SetOne(absl::string_view name, std::optional<absl::string_view> value) {
    if (name == kFlagFile) return ReadFlagFile(std::string(value.value_or("")));
    absl::CommandLineFlag* flag = Find(name);
    if (flag == nullptr && !value && absl::ConsumePrefix(&name, "no")) {
      flag = Find(name);
      if (flag != nullptr && flag->IsOfType<bool>()) return Set(flag, "false", OptionName(name));
      return Bad(
          absl::StrCat("no flag is named ", OptionName(absl::StrCat("no", name)), "; see --help"));
    }
    if (flag == nullptr) {
      return Bad(absl::StrCat("no flag is named ", OptionName(name), "; see --help"));
    }
    if (!value && !flag->IsOfType<bool>()) {
      return Bad(absl::StrCat(OptionName(name), " needs a value"));
    }
    return Set(flag, value.value_or("true"), OptionName(name));
  }

  Status ReadFlagFile(const std::string& path) {
    if (++depth_ > kMaxFlagFileDepth) {
      return Bad(absl::StrCat("--flagfile: '", path, "' is nested too deeply"));
    }
    std::ifstream file(path);
    if (!file) return Bad(absl::StrCat("--flagfile: cannot read '", path, "'"));
    std::vector<std::string> arguments;
    for (std::string line; std::getline(file, line);) {
      const absl::string_view stripped = absl::StripAsciiWhitespace(line);
      if (!stripped.empty() && stripped.front() != '#') arguments.emplace_back(stripped);
    }
    const Status status = Parse(arguments);
    --depth_;
    if (status.ok()) return status;
    return Bad(absl::StrCat("in '", path, "': ", status.message()));
  }

  const std::span<const FlagName> flags_;
  int depth_ = 0;
};

}  // namespace

Status SetFlags(std::span<const FlagName> flags, const std::vector<std::string>& environment,
                const std::vector<std::string>& arguments) {
  for (const FlagName& flag : flags) {
    if (!flag.in_environment) continue;
    const std::string name = EnvironmentName(flag.name);
    for (absl::string_view entry : environment) {
      if (!absl::ConsumePrefix(&entry, name) || !absl::ConsumePrefix(&entry, "=")) continue;
      GRADSYNC_RETURN_IF_ERROR(Set(absl::FindCommandLineFlag(flag.name), entry, name));
    }
  }
  return ArgumentParser(flags).Parse(arguments);
}

std::string DescribeFlags(std::span<const FlagName> flags) {
  std::string text;
  for (const FlagName& name : flags) {
    const absl::CommandLineFlag* flag = absl::FindCommandLineFlag(name.name);
    const std::string value = flag->IsOfType<bool>() ? "" : "=VALUE";
    absl::StrAppend(&text, "  ", OptionName(name.name), value, "\n      ", flag->Help(), "\n");
    if (!flag->IsOfType<bool>()) {
      absl::StrAppend(&text, "      Default: '", flag->DefaultValue(), "'.");
    }
    if (name.in_environment) absl::StrAppend(&text, " Environment: ", EnvironmentName(name.name));
    if (text.back() != '\n') text += '\n';
  }
  absl::StrAppend(&text, "  --flagfile=PATH\n      Reads flags from a file, one a line.\n");
  return text;
}

bool AbslParseFlag(absl::string_view text, Seconds* seconds, std::string* error) {
  double plain = 0;
  if (absl::SimpleAtod(text, &plain)) {
    seconds->value = absl::Seconds(plain);
  } else if (!absl::ParseDuration(text, &seconds->value)) {
    *error = "give seconds, or a duration as in 500ms or 1h30m";
    return false;
  }
  // Beyond a century no sum with a clock's time is safe; nobody waits that long.
  if (seconds->value < absl::ZeroDuration() || seconds->value > absl::Hours(24 * 36500)) {
    *error = "the duration is out of range";
    return false;
  }
  return true;
}

std::string AbslUnparseFlag(Seconds seconds) { return absl::FormatDuration(seconds.value); }

}  // namespace gradsync
