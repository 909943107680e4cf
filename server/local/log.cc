#include "server/local/log.h"

#include <fcntl.h>
#include <spdlog/sinks/basic_file_sink.h>
#include <spdlog/sinks/null_sink.h>
#include <spdlog/sinks/stdout_sinks.h>

#include <algorithm>
#include <cerrno>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "shm/unique_fd.h"

namespace gradsync {
namespace {

bool NeedsQuotes(absl::string_view value) {
  return value.empty() || std::any_of(value.begin(), value.end(), [](char c) {
           const auto byte = static_cast<unsigned char>(c);
           return c == '"' || c == '=' || c == '\\' || absl::ascii_isspace(byte) ||
                  absl::ascii_iscntrl(byte);
         });
}

// spdlog reports a file that it cannot open by an exception only, so that is found out before.
Status CheckWritable(const std::string& file) {
  const UniqueFd fd(open(file.c_str(), O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0644));
  if (fd.valid()) return OkStatus();
  return ErrnoStatus(Code::kInvalidArgument, errno, "cannot open the log file '" + file + "'");
}

}  // namespace

Result<std::shared_ptr<spdlog::logger>> MakeLogger(const std::string& level,
                                                   const std::string& file) {
  const spdlog::level::level_enum parsed = spdlog::level::from_str(level);
  if (parsed == spdlog::level::off && level != "off") {
    return Unexpected(
        Code::kInvalidArgument,
        "log level '" + level + "' is none of trace, debug, info, warning, error, critical, off");
  }
  std::shared_ptr<spdlog::sinks::sink> sink;
  if (file.empty()) {
    sink = std::make_shared<spdlog::sinks::stderr_sink_mt>();
  } else {
    GRADSYNC_RETURN_IF_ERROR(CheckWritable(file));
    sink = std::make_shared<spdlog::sinks::basic_file_sink_mt>(file);
  }
  auto logger = std::make_shared<spdlog::logger>("gradsyncd", std::move(sink));
  logger->set_pattern("ts=%Y-%m-%dT%H:%M:%S.%f%z level=%l %v");
  logger->set_level(parsed);
  logger->flush_on(spdlog::level::info);
  return logger;
}

std::shared_ptr<spdlog::logger> MakeSilentLogger() {
  auto logger = std::make_shared<spdlog::logger>("gradsyncd",
                                                 std::make_shared<spdlog::sinks::null_sink_mt>());
  logger->set_level(spdlog::level::off);
  return logger;
}

void AppendLogField(std::string* line, absl::string_view key, absl::string_view value) {
  absl::StrAppend(line, " ", key, "=");
  if (NeedsQuotes(value)) {
    absl::StrAppend(line, "\"", absl::Utf8SafeCEscape(value), "\"");
  } else {
    absl::StrAppend(line, value);
  }
}

}  // namespace gradsync
