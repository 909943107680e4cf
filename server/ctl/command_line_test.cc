#include "server/ctl/command_line.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace gradsync {
namespace {

using Action = CommandLine::Action;
using ::testing::HasSubstr;

std::string ErrorOf(const std::vector<std::string>& arguments) {
  const auto command = ParseCommandLine(arguments);
  if (command) return "no error";
  EXPECT_EQ(command.error().code(), Code::kInvalidArgument);
  return command.error().message();
}

TEST(CommandLineTest, ListsJobs) {
  const auto command = ParseCommandLine({"jobs"});
  ASSERT_TRUE(command);
  EXPECT_EQ(command->action, Action::kListJobs);
  EXPECT_FALSE(command->json);
  EXPECT_EQ(command->socket, "");
  EXPECT_EQ(command->inspect_socket, "");
}

TEST(CommandLineTest, TakesOptionsBeforeAndAfterTheCommand) {
  const auto command =
      ParseCommandLine({"--socket", "/run/a", "job", "--json", "lm-27m", "--inspect-socket=/run/b",
                        "--uid", "1000", "--generation=2"});
  ASSERT_TRUE(command) << command.error().message();
  EXPECT_EQ(command->action, Action::kGetJob);
  EXPECT_EQ(command->job, "lm-27m");
  EXPECT_EQ(command->socket, "/run/a");
  EXPECT_EQ(command->inspect_socket, "/run/b");
  EXPECT_TRUE(command->json);
  EXPECT_EQ(command->uid, 1000U);
  EXPECT_EQ(command->generation, 2U);
}

TEST(CommandLineTest, CallsTheDoctor) {
  const auto command = ParseCommandLine({"doctor", "--nccl", "/opt/libnccl.so", "--json"});
  ASSERT_TRUE(command) << command.error().message();
  EXPECT_EQ(command->action, Action::kDoctor);
  EXPECT_EQ(command->nccl, "/opt/libnccl.so");
  EXPECT_TRUE(command->json);
}

TEST(CommandLineTest, AJobsNameMayLookLikeAnOptionAfterTwoDashes) {
  const auto command = ParseCommandLine({"job", "--", "--json"});
  ASSERT_TRUE(command);
  EXPECT_EQ(command->job, "--json");
  EXPECT_FALSE(command->json);
}

TEST(CommandLineTest, HelpAndVersionNeedNoCommand) {
  EXPECT_EQ(ParseCommandLine({"--help"})->action, Action::kHelp);
  EXPECT_EQ(ParseCommandLine({"-h", "nonsense"})->action, Action::kHelp);
  EXPECT_EQ(ParseCommandLine({"--version"})->action, Action::kVersion);
}

TEST(CommandLineTest, SaysWhatIsWrong) {
  EXPECT_THAT(ErrorOf({}), HasSubstr("say what to show"));
  EXPECT_THAT(ErrorOf({"jbos"}), HasSubstr("unknown command 'jbos'"));
  EXPECT_THAT(ErrorOf({"job"}), HasSubstr("job needs the job's ID"));
  EXPECT_THAT(ErrorOf({"job", "a", "b"}), HasSubstr("job takes one ID"));
  EXPECT_THAT(ErrorOf({"jobs", "a"}), HasSubstr("jobs takes no argument"));
  EXPECT_THAT(ErrorOf({"jobs", "--uid", "1"}), HasSubstr("belong to job"));
  EXPECT_THAT(ErrorOf({"jobs", "--nccl", "x"}), HasSubstr("belongs to doctor"));
  EXPECT_THAT(ErrorOf({"doctor", "me"}), HasSubstr("doctor takes no argument"));
  EXPECT_THAT(ErrorOf({"doctor", "--generation", "1"}), HasSubstr("belong to job"));
  EXPECT_THAT(ErrorOf({"doctor", "--inspect-socket", "/s"}), HasSubstr("--socket"));
  EXPECT_THAT(ErrorOf({"jobs", "--frob"}), HasSubstr("unknown option in '--frob'"));
  EXPECT_THAT(ErrorOf({"jobs", "-xh"}), HasSubstr("unknown option"));
  EXPECT_THAT(ErrorOf({"jobs", "--json=yes"}), HasSubstr("--json=yes"));
  EXPECT_THAT(ErrorOf({"jobs", "--socket"}), HasSubstr("--socket needs a value"));
  EXPECT_THAT(ErrorOf({"job", "a", "--uid", "root"}), HasSubstr("--uid 'root' is not a number"));
  EXPECT_THAT(ErrorOf({"job", "a", "--generation", "-1"}), HasSubstr("not a number"));
}

}  // namespace
}  // namespace gradsync
