// The one home of what a log line looks like: event=NAME key=value ...
//
// Values are quoted when they need it, so that a line always splits into the fields that were put
// in, whatever a trainer chose as its job's name.
#ifndef GRADSYNC_SERVER_LOCAL_LOG_H_
#define GRADSYNC_SERVER_LOCAL_LOG_H_

#include <spdlog/logger.h>

#include <memory>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "shm/status.h"

namespace gradsync {

// A logger that writes to `file`, or to stderr if that is empty. Levels: trace, debug, info,
// warning, error, critical, off.
Result<std::shared_ptr<spdlog::logger>> MakeLogger(const std::string& level,
                                                   const std::string& file);

// A logger that writes nothing.
std::shared_ptr<spdlog::logger> MakeSilentLogger();

// Appends " key=value".
void AppendLogField(std::string* line, absl::string_view key, absl::string_view value);

namespace log_internal {

inline void AppendFields(std::string*) {}

template <typename Value, typename... Rest>
void AppendFields(std::string* line, absl::string_view key, const Value& value,
                  const Rest&... rest) {
  AppendLogField(line, key, absl::AlphaNum(value).Piece());
  AppendFields(line, rest...);
}

}  // namespace log_internal

// LogEvent(logger, level, "session_open", "job", job, "rank", rank): keys and values in turn.
// Formats nothing below the logger's level.
template <typename... Fields>
void LogEvent(spdlog::logger& logger, spdlog::level::level_enum level, absl::string_view event,
              const Fields&... fields) {
  static_assert(sizeof...(fields) % 2 == 0, "every key needs a value");
  if (!logger.should_log(level)) return;
  std::string line = absl::StrCat("event=", event);
  log_internal::AppendFields(&line, fields...);
  logger.log(level, spdlog::string_view_t(line.data(), line.size()));
}

}  // namespace gradsync

#endif  // GRADSYNC_SERVER_LOCAL_LOG_H_
