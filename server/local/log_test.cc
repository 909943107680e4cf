#include "server/local/log.h"

#include <gtest/gtest.h>
#include <spdlog/sinks/ostream_sink.h>

#include <memory>
#include <sstream>
#include <string>

namespace gradsync {
namespace {

class LogTest : public ::testing::Test {
 protected:
  LogTest() : logger_("test", std::make_shared<spdlog::sinks::ostream_sink_mt>(stream_)) {
    logger_.set_pattern("%v");
  }

  std::ostringstream stream_;
  spdlog::logger logger_;
};

TEST_F(LogTest, FieldsBecomeKeysAndValues) {
  LogEvent(logger_, spdlog::level::info, "session_open", "job", "mnist", "rank", 3u);
  EXPECT_EQ(stream_.str(), "event=session_open job=mnist rank=3\n");
}

TEST_F(LogTest, ValuesThatWouldBlurTheFieldsAreQuoted) {
  LogEvent(logger_, spdlog::level::info, "e", "a", "x y", "b", "rank=9", "c", "say \"hi\"", "d", "",
           "f", "line\nevent=forged");
  EXPECT_EQ(
      stream_.str(),
      "event=e a=\"x y\" b=\"rank=9\" c=\"say \\\"hi\\\"\" d=\"\" f=\"line\\nevent=forged\"\n");
}

TEST_F(LogTest, NothingIsWrittenBelowTheLevel) {
  logger_.set_level(spdlog::level::warn);
  LogEvent(logger_, spdlog::level::info, "quiet");
  EXPECT_EQ(stream_.str(), "");
}

TEST(MakeLoggerTest, RefusesUnknownLevelsAndFilesThatCannotBeOpened) {
  EXPECT_EQ(MakeLogger("loud", "").error().code(), Code::kInvalidArgument);
  EXPECT_EQ(MakeLogger("info", "/nonexistent/directory/log").error().code(),
            Code::kInvalidArgument);
  EXPECT_TRUE(MakeLogger("off", "").has_value());
}

}  // namespace
}  // namespace gradsync
