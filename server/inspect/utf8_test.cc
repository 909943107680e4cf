#include "server/inspect/utf8.h"

#include <gtest/gtest.h>

namespace gradsync {
namespace {

constexpr char kBad[] = "\xEF\xBF\xBD";

TEST(Utf8Test, LeavesWellFormedTextAlone) {
  for (const char* text : {"", "encoder.5.weight", "größe", "層", "\xF0\x9F\x98\x80"}) {
    EXPECT_EQ(ToUtf8(text), text);
  }
}

TEST(Utf8Test, ReplacesEachStrayByte) {
  EXPECT_EQ(ToUtf8("a\xFF\x80z"), std::string("a") + kBad + kBad + "z");
}

TEST(Utf8Test, ReplacesASequenceThatWasCutOff) {
  EXPECT_EQ(ToUtf8("layer.\xE5\xB1"), std::string("layer.") + kBad + kBad);
  EXPECT_EQ(ToUtf8("\xE5\xB1x"), std::string(kBad) + kBad + "x");
}

TEST(Utf8Test, RefusesOverlongFormsSurrogatesAndWhatLiesBeyondUnicode) {
  for (const char* text : {"\xC0\x80", "\xC1\xBF", "\xE0\x80\x80", "\xED\xA0\x80",
                           "\xF0\x80\x80\x80", "\xF4\x90\x80\x80", "\xF5\x80\x80\x80"}) {
    EXPECT_EQ(ToUtf8(text).find(text), std::string::npos);
    EXPECT_EQ(ToUtf8(text).rfind(kBad, 0), 0U);
  }
}

TEST(Utf8Test, KeepsTheLimitsOfEachLength) {
  for (const char* text : {"\x7F", "\xC2\x80", "\xDF\xBF", "\xE0\xA0\x80", "\xED\x9F\xBF",
                           "\xEF\xBF\xBF", "\xF0\x90\x80\x80", "\xF4\x8F\xBF\xBF"}) {
    EXPECT_EQ(ToUtf8(text), text);
  }
}

}  // namespace
}  // namespace gradsync
