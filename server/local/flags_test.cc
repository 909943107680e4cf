#include "server/local/flags.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <array>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <string>

#include "absl/flags/flag.h"
#include "absl/flags/reflection.h"

ABSL_FLAG(std::string, test_text, "default", "A text.");
ABSL_FLAG(uint32_t, test_number, 7, "A number.");
ABSL_FLAG(bool, test_switch, false, "A switch.");
ABSL_FLAG(gradsync::Seconds, test_wait, {absl::Seconds(1)}, "A duration.");
ABSL_FLAG(int, test_private, 0, "Not from the environment.");

namespace gradsync {
namespace {

using ::testing::HasSubstr;

constexpr std::array kFlags = {FlagName{"test_text"}, FlagName{"test_number"},
                               FlagName{"test_switch"}, FlagName{"test_wait"},
                               FlagName{"test_private", false}};

class FlagsTest : public ::testing::Test {
 protected:
  static Status Parse(const std::vector<std::string>& arguments,
                      const std::vector<std::string>& environment = {}) {
    return SetFlags(kFlags, environment, arguments);
  }

  std::string WriteFile(const std::string& text) {
    std::string path = ::testing::TempDir() + "flags_test_" + std::to_string(getpid());
    std::ofstream(path) << text;
    return path;
  }

  absl::FlagSaver saver_;
};

TEST_F(FlagsTest, EveryFormOfAnArgumentIsTaken) {
  ASSERT_TRUE(Parse({"--test-text=a=b", "--test_number", "9", "--test-switch"}).ok());
  EXPECT_EQ(absl::GetFlag(FLAGS_test_text), "a=b");
  EXPECT_EQ(absl::GetFlag(FLAGS_test_number), 9);
  EXPECT_TRUE(absl::GetFlag(FLAGS_test_switch));
  ASSERT_TRUE(Parse({"--notest_switch"}).ok());
  EXPECT_FALSE(absl::GetFlag(FLAGS_test_switch));
}

TEST_F(FlagsTest, TheCommandLineWinsOverTheEnvironment) {
  const std::vector<std::string> environment = {"GRADSYNC_TEST_TEXT=env", "GRADSYNC_TEST_NUMBER=2",
                                                "GRADSYNC_TEST_NUMBERS=x", "OTHER=y"};
  ASSERT_TRUE(Parse({"--test-text=line"}, environment).ok());
  EXPECT_EQ(absl::GetFlag(FLAGS_test_text), "line");
  EXPECT_EQ(absl::GetFlag(FLAGS_test_number), 2);
}

TEST_F(FlagsTest, SomeFlagsAreNotForTheEnvironment) {
  ASSERT_TRUE(Parse({}, {"GRADSYNC_TEST_PRIVATE=5"}).ok());
  EXPECT_EQ(absl::GetFlag(FLAGS_test_private), 0);
}

TEST_F(FlagsTest, AFlagFileIsReadWhereItIsNamed) {
  const std::string path = WriteFile("# comment\n\n  --test-text=file  \n--test-number=3\n");
  ASSERT_TRUE(Parse({"--test-text=before", "--flagfile=" + path, "--test-number=4"}).ok());
  EXPECT_EQ(absl::GetFlag(FLAGS_test_text), "file");
  EXPECT_EQ(absl::GetFlag(FLAGS_test_number), 4);
  std::remove(path.c_str());
}

TEST_F(FlagsTest, AFlagFileThatNamesItselfIsAnError) {
  const std::string path = WriteFile("");
  std::ofstream(path) << "--flagfile=" << path << "\n";
  EXPECT_THAT(Parse({"--flagfile=" + path}).message(), HasSubstr("nested too deeply"));
  std::remove(path.c_str());
}

TEST_F(FlagsTest, MistakesAreNamed) {
  EXPECT_THAT(Parse({"--test-txt=a"}).message(), HasSubstr("no flag is named --test-txt"));
  EXPECT_THAT(Parse({"--notest-txt"}).message(), HasSubstr("--notest-txt"));
  EXPECT_THAT(Parse({"--notest-number"}).message(), HasSubstr("--notest-number"));
  EXPECT_THAT(Parse({"stray"}).message(), HasSubstr("'stray' is not a flag"));
  EXPECT_THAT(Parse({"--test-number=many"}).message(), HasSubstr("--test-number: 'many'"));
  EXPECT_THAT(Parse({"--test-number"}).message(), HasSubstr("needs a value"));
  EXPECT_THAT(Parse({"--flagfile=/nonexistent"}).message(), HasSubstr("cannot read"));
  EXPECT_THAT(Parse({}, {"GRADSYNC_TEST_NUMBER=x"}).message(), HasSubstr("GRADSYNC_TEST_NUMBER"));
}

TEST_F(FlagsTest, DurationsAreSecondsUnlessTheySayOtherwise) {
  ASSERT_TRUE(Parse({"--test-wait=90"}).ok());
  EXPECT_EQ(absl::GetFlag(FLAGS_test_wait).value, absl::Seconds(90));
  ASSERT_TRUE(Parse({"--test-wait=500ms"}).ok());
  EXPECT_EQ(absl::GetFlag(FLAGS_test_wait).value, absl::Milliseconds(500));
  EXPECT_FALSE(Parse({"--test-wait=-1"}).ok());
  EXPECT_FALSE(Parse({"--test-wait=inf"}).ok());
  EXPECT_FALSE(Parse({"--test-wait=nan"}).ok());
  EXPECT_FALSE(Parse({"--test-wait=soon"}).ok());
}

TEST_F(FlagsTest, TheDescriptionNamesEveryFlagAndItsEnvironment) {
  const std::string text = DescribeFlags(kFlags);
  EXPECT_THAT(text, HasSubstr("--test-text=VALUE"));
  EXPECT_THAT(text, HasSubstr("Default: '7'. Environment: GRADSYNC_TEST_NUMBER"));
}

}  // namespace
}  // namespace gradsync
